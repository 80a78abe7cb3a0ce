"""Makes a process look to SGLang's MXFP4 layers like a fresh one on ROCm, again for each cell.

SGLang decides by constants of its modules, read from the environment when they are imported. A cell gets what a
process of its own would have: its environment alone, AITER of its release and architecture in ``sys.modules``,
SGLang's own statements for those constants executed once more, and the caches of these modules empty.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import os
import types
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.matrix.cells import CHANGES, Cell
from sglang_aiter_moe.portable.registry import PortableAiter

_LAYERS = "sglang.srt.layers"
MODULES = (
    f"{_LAYERS}.quantization.mxfp4",
    f"{_LAYERS}.moe.fused_moe_triton.layer",
    f"{_LAYERS}.moe.token_dispatcher.standard",
    f"{_LAYERS}.moe.moe_runner.aiter",
    f"{_LAYERS}.moe.topk",
)
#: Constants of these modules that a ROCm process has otherwise, or that depend on the environment.
CONSTANTS = frozenset(
    {
        "_is_hip",
        "_is_cpu",
        "_use_aiter",
        "_aiter_k3_opt",
        "_is_shuffle_moe_mxfp4",
        "_MOE_SORTING_DISPATCH_POLICY",
        "_SMALLM_MOE_ON",
    }
)
#: What AITER and SGLang read; none of it is left over from the cell before.
PREFIXES = ("AITER_", "GPTOSS_", "SGLANG_AITER", "SGLANG_USE_AITER")
#: What the worker itself is told, and ``SGLANG_USE_AITER``, without which there is no AITER path.
KEPT = ("SGLANG_AITER_MOE_BACKEND", "SGLANG_AITER_MOE_ENABLE")


def start(cell: Cell) -> PortableAiter:
    """The cell's environment and its AITER, which is returned.

    Raises:
        ValueError: a variable that AITER reads at import is junk.
    """
    for name in [n for n in os.environ if n.startswith(PREFIXES) and n not in KEPT]:
        del os.environ[name]
    os.environ["SGLANG_USE_AITER"] = "1"
    os.environ.update(cell.environment)
    torch.cuda.get_device_properties = lambda device=0: SimpleNamespace(
        gcnArchName=cell.arch, multi_processor_count=256
    )
    kernel = os.environ.get("SGLANG_AITER_MOE_A16W4_KERNEL", "separated")
    return portable.install(arch=cell.arch, aiter=cell.aiter, a16w4_kernel=kernel)


def read_modules(cell: Cell) -> None:
    """SGLang's modules as their import leaves them under the environment as it is.

    Raises:
        Whatever SGLang's import raises.
    """
    for name in MODULES:
        module = importlib.import_module(name)
        _forget_caches(module)
        _pretend(module, cell.arch)
        for statement in _statements(module):
            exec(statement, vars(module))


def change_environment(cell: Cell) -> None:
    """The cell's change of a variable, after the load."""
    change = CHANGES[cell.change]
    if change is None:
        return
    name, value = change
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def _pretend(module: types.ModuleType, arch: str) -> None:
    answers = {
        "is_hip": lambda: True,
        "is_cpu": lambda: False,
        "is_gfx95_supported": lambda: arch == "gfx950",
        "mxfp_supported": lambda: arch == "gfx950",  # the same in 0.5.17
    }
    for name, answer in answers.items():
        if hasattr(module, name):
            setattr(module, name, answer)


def _forget_caches(module: types.ModuleType) -> None:
    for value in list(vars(module).values()):
        if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == module.__name__:
            value.cache_clear()


@functools.cache
def _statements(module: types.ModuleType) -> tuple[types.CodeType, ...]:
    """The module's own statements that give CONSTANTS their values, what these choose, and its imports of AITER."""
    source = inspect.getsource(module)
    found = []
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        constant = any(isinstance(t, ast.Name) and t.id in CONSTANTS for t in targets)
        guarded = isinstance(node, ast.If) and (_imports_aiter(node) or _chooses(node))
        if constant or guarded:
            tree = ast.Module([node], [])
            found.append(compile(tree, inspect.getfile(module), "exec"))
    return tuple(found)


def _imports_aiter(node: ast.If) -> bool:
    return any(
        isinstance(part, ast.ImportFrom) and (part.module or "").split(".")[0] == "aiter"
        for part in ast.walk(node)
    )


def _chooses(node: ast.If) -> bool:
    """Whether one of CONSTANTS decides which functions some names stand for."""
    names = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
    plain = all(isinstance(part, ast.Assign) for part in (*node.body, *node.orelse))
    return plain and bool(names & CONSTANTS)


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Tensors that SGLang sends to "cuda", ROCm's name for its GPUs as well, stay where they are."""
    real = torch.Tensor.to

    def to(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(a, str) and a == "cuda" else a for a in args)
        return real(tensor, *args, **kwargs)

    torch.Tensor.to = to
    try:
        yield
    finally:
        torch.Tensor.to = real
