"""Who executes a ``KernelRequest``: torch on CPU, Triton on a GPU.

A backend is a module with one function::

    run(request, hidden_states, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out) -> None

``hidden_states`` bf16 or fp16 ``[M, H]``, ``topk_weights`` fp32 ``[M, K]``, ``topk_ids`` int32
``[M, K]`` (global ids when there is an ``expert_mask``), ``out`` ``[M, H]``, which it overwrites
completely.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch

_MODULES = {
    "cpu": "sglang_aiter_moe.portable.backends.cpu",
    "triton": "sglang_aiter_moe.portable.triton",
}
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "portable_backend", default=None
)


def select(device: torch.device) -> ModuleType:
    """The backend for tensors on ``device``: CPU tensors run in torch, all others in Triton."""
    name = _forced.get() or ("cpu" if device.type == "cpu" else "triton")
    return importlib.import_module(_MODULES[name])


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Runs everything inside on the backend ``name`` ("cpu" or "triton"), whatever the device.

    Raises:
        ValueError: no backend has that name.
    """
    if name not in _MODULES:
        raise ValueError(f"unknown backend {name!r}; one of {sorted(_MODULES)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
