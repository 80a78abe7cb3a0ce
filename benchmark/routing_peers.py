"""SGLang's own CUDA routers, loaded from an unpacked release without importing SGLang.

``pip download --no-deps sglang==0.5.23`` and unzip; the folder that holds ``sglang/`` is the source. SGLang's
kernels need ``apache-tvm-ffi``. Two of them are CUDA C++:

- K3's radix select is built by SGLang's own loader at the first call, or taken from ``BUILD/route_radix.so``;
- the DeepSeek router that SGLang takes from FlashInfer is taken from ``BUILD/dsv3_routing.so``, which
  docs/performance.md says how to build from FlashInfer's sources.
"""

from __future__ import annotations

import ast
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch

Router = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def load(source: Path | None, build: Path | None) -> tuple[dict[str, Router], dict[str, str]]:
    """``({name: router}, {name: why it is missing})``.

    A router takes ``(logits, bias, topk, groups, kept, scale)``, renormalises and returns weights and ids.
    """
    routers: dict[str, Router] = {}
    missing: dict[str, str] = {}
    for name, loader in _LOADERS.items():
        try:
            routers[name] = loader(source, build)
        except Exception as error:  # a peer that does not load is reported, never silently left out
            missing[name] = f"{type(error).__name__}: {error}"
    return routers, missing


def _package(name: str, path: Path | None = None, **names) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = [str(path)] if path else []
    vars(module).update(names)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _stand_in(source: Path | None) -> None:
    """Packages whose own ``__init__`` would import the whole of SGLang are replaced by empty ones."""
    if source is None:
        raise FileNotFoundError("no --sglang-source")
    if "sglang" in sys.modules:
        return
    root = source / "sglang"
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder")
    for name in ("", ".kernels", ".kernels.ops", ".kernels.ops.moe", ".srt"):
        _package("sglang" + name, root / name.strip(".").replace(".", "/"))
    _package("sglang.srt.utils")
    _package("sglang.srt.utils.common", is_cuda=torch.cuda.is_available)


def _fused_gate(source: Path | None, build: Path | None) -> types.ModuleType:
    _stand_in(source)
    radix = importlib.import_module("sglang.kernels.ops.moe.moe_route_radix")
    if build and (build / "route_radix.so").exists():
        import tvm_ffi

        module = tvm_ffi.load_module(str(build / "route_radix.so"))
        radix._jit_route_radix_module = lambda: module
    return importlib.import_module("sglang.kernels.ops.moe.moe_fused_gate")


def _sglang_fused(source: Path | None, build: Path | None) -> Router:
    gate = _fused_gate(source, build)

    def route(logits, bias, topk, groups, kept, scale):
        # As biased_grouped_topk_gpu calls it on CUDA: bf16 logits as they are for K3, else float32.
        if groups > 1 or logits.dtype != torch.bfloat16:
            logits = logits.to(torch.float32)
        return gate.moe_fused_gate(
            logits,
            bias.to(torch.float32),
            topk,
            scoring_func="sigmoid",
            renormalize=True,
            routed_scaling_factor=scale,
            apply_routed_scaling_factor_on_output=True,
            num_expert_group=groups,
            topk_group=kept,
        )

    return route


def _sglang_fused_triton(source: Path | None, build: Path | None) -> Router:
    """The Triton form also where SGLang takes the radix select."""
    route = _sglang_fused(source, build)

    def triton_route(logits, bias, topk, groups, kept, scale):
        gate = sys.modules["sglang.kernels.ops.moe.moe_fused_gate"]
        covered = gate.moe_route_radix.covered
        gate.moe_route_radix.covered = lambda *args: False
        try:
            return route(logits, bias, topk, groups, kept, scale)
        finally:
            gate.moe_route_radix.covered = covered

    return triton_route


def _sglang_compiled(source: Path | None, build: Path | None) -> Router:
    """``biased_grouped_topk_impl``, the torch function that SGLang compiles, taken out of its file."""
    _stand_in(source)
    path = source / "sglang/srt/layers/moe/topk.py"
    wanted = {"biased_grouped_topk_impl", "fused_shared_expert_weight", "_RENORMALIZE_SUM_EPSILON"}
    body: list[ast.stmt] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            node.decorator_list = []
            body.append(node)
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in wanted:
            body.append(node)
    scope: dict = {"torch": torch}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(future + body, []), str(path), "exec"), scope)
    compiled = torch.compile(scope["biased_grouped_topk_impl"], dynamic=True)

    def route(logits, bias, topk, groups, kept, scale):
        logits = logits.to(torch.float32)
        return compiled(
            logits,  # hidden_states: only its length is read
            logits,
            bias.to(torch.float32),
            topk,
            True,
            groups,
            kept,
            routed_scaling_factor=scale,
            apply_routed_scaling_factor_on_output=True,
        )

    return route


def _flashinfer(source: Path | None, build: Path | None) -> Router:
    if build is None or not (build / "dsv3_routing.so").exists():
        raise FileNotFoundError("no dsv3_routing.so in --peer-build")
    import tvm_ffi

    module = tvm_ffi.load_module(str(build / "dsv3_routing.so"))

    def route(logits, bias, topk, groups, kept, scale):
        weights = torch.empty(logits.shape[0], topk, device=logits.device)
        ids = torch.empty(logits.shape[0], topk, dtype=torch.int32, device=logits.device)
        logits = logits.to(torch.float32)
        module.NoAuxTc(logits, bias, groups, kept, topk, scale, weights, ids, True, None)
        return weights, ids

    return route


_LOADERS = {
    "sglang": _sglang_fused,
    "sglang-triton": _sglang_fused_triton,
    "sglang-compiled": _sglang_compiled,
    "flashinfer": _flashinfer,
}
