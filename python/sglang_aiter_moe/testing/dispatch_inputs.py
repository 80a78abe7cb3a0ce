"""What tests of portable's dispatch call it with: shapes, flags, and the results that come up most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_aiter_moe.portable import explain
from sglang_aiter_moe.portable.resolution import Resolution

K3 = {"num_experts": 896, "topk": 16, "hidden_size": 3584, "intermediate_size": 384}
SMALL = {"num_experts": 8, "topk": 2, "hidden_size": 512, "intermediate_size": 256}
#: Few enough tokens per expert for split-k.
WIDE = {"num_experts": 256, "topk": 2, "hidden_size": 3072, "intermediate_size": 256}
GPT_OSS = {"num_experts": 128, "topk": 4, "hidden_size": 3072, "intermediate_size": 512}

A8W4, A4W4 = {"AITER_SITUV2_A8W4": "1"}, {"AITER_SITUV2_A4W4": "1"}
#: What :func:`summary` gives for FlyDSL's kernels.
FLY16 = ("flydsl_a16w4", "A16W4", "separated")
FLY8 = ("flydsl_a8w4", "A8W4", "gu_interleaved")
FLY4 = ("flydsl_a4w4", "A4W4", "separated")


def resolve(
    activation: str,
    env: Mapping[str, str] | None = None,
    tokens: int = 64,
    shape: Mapping[str, int] = SMALL,
    **kwargs: Any,
) -> Resolution:
    """What AITER would run: on gfx950, without any variable but those of ``env``."""
    return explain(activation=activation, tokens=tokens, env=env or {}, **{**shape, **kwargs})


def summary(found: Resolution) -> tuple[str, str, str]:
    """Its family, mode and w13 layout."""
    return found.family, found.mode, found.w13_layout
