"""A fake AITER that records what ``fused_moe`` was called with. It computes nothing.

For tests of which keywords are forwarded; values are checked through ``portable``.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import torch

_MODULES = (
    "aiter",
    "aiter.fused_moe",
    "aiter.ops",
    "aiter.ops.flydsl",
    "aiter.ops.flydsl.moe_common",
)


class ActivationType(IntEnum):
    """AITER's numbers (docs/contract.md section b)."""

    Silu = 0
    Gelu = 1
    Swiglu = 2
    Situv2 = 3


class QuantType(IntEnum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class GateMode(str, Enum):  # noqa: UP042, as in AITER
    SEPARATED = "separated"
    INTERLEAVE = "interleave"


class FakeFusedMoe:
    """Records each call as ``self.calls[i]`` and returns twice the input.

    Args:
        optional: keywords that this AITER's signature names besides those of v0.1.20.
        without: keywords of v0.1.20 that it lacks.
        result: computes the result from the call's keywords, in place of doubling the input.
    """

    def __init__(
        self,
        optional: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
        result: Callable[..., torch.Tensor | None] | None = None,
    ) -> None:
        self.calls: list[dict[str, Any]] = []
        self.result = result
        names = [name for name in (*_KEYWORDS, *optional) if name not in without]
        parameters = [
            *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in _OPERANDS),
            *(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
                for name in names
            ),
        ]
        signature = inspect.Signature(parameters)

        def fused_moe(**call: Any) -> torch.Tensor | None:
            signature.bind(
                **call
            )  # a keyword that this AITER lacks is a TypeError, as in the real one
            return self._record(**call)

        fused_moe.__signature__ = signature
        self.fused_moe = fused_moe

    def _record(self, **call: Any) -> torch.Tensor | None:
        self.calls.append(call)
        return self.result(**call) if self.result else call["hidden_states"] * 2

    @property
    def call(self) -> dict[str, Any]:
        """The keywords of the last call."""
        return self.calls[-1]


_OPERANDS = ("hidden_states", "w1", "w2", "topk_weight", "topk_ids")
_KEYWORDS = (
    "expert_mask",
    "activation",
    "quant_type",
    "doweight_stage1",
    "w1_scale",
    "w2_scale",
    "a1_scale",
    "a2_scale",
    "block_size_M",
    "num_local_tokens",
    "moe_sorting_dispatch_policy",
    "dtype",
    "hidden_pad",
    "intermediate_pad",
    "bias1",
    "bias2",
    "gate_mode",
    "swiglu_limit",
    "beta",
    "linear_beta",
)


@contextlib.contextmanager
def installed(fake: FakeFusedMoe | None = None, **kwargs: Any) -> Iterator[FakeFusedMoe]:
    """Puts a fake AITER into ``sys.modules`` for the block.

    Args:
        fake: the kernel; by default ``FakeFusedMoe(**kwargs)``.
    """
    fake = fake or FakeFusedMoe(**kwargs)
    before = {name: sys.modules.get(name) for name in _MODULES}
    for name in _MODULES:
        sys.modules[name] = types.ModuleType(name)
    sys.modules["aiter"].__dict__.update(
        ActivationType=ActivationType,
        QuantType=QuantType,
        dtypes=SimpleNamespace(fp8=torch.float8_e4m3fn),
    )
    sys.modules["aiter.fused_moe"].fused_moe = fake.fused_moe
    sys.modules["aiter.ops.flydsl.moe_common"].GateMode = GateMode
    try:
        yield fake
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
