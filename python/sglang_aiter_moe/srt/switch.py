"""Whether the patch set acts in this process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter_api

ENABLE = "SGLANG_AITER_MOE_ENABLE"


def enabled(env: Mapping[str, str] | None = None) -> bool:
    """Whether the kill switch SGLANG_AITER_MOE_ENABLE is not ``0``."""
    return (os.environ if env is None else env).get(ENABLE, "1") != "0"


@torch.compiler.assume_constant_result
def acts(sglang_uses_aiter: bool) -> bool:
    """Whether SGLang's AITER path is ours to change.

    Args:
        sglang_uses_aiter: SGLang's own ``_use_aiter``; the portable AITER counts as well.
    """
    return enabled() and (bool(sglang_uses_aiter) or aiter_api.is_stand_in())


def around(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: calls ``function(original, *args, **kwargs)``, or the original while switched off."""

    def decorate(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if not enabled():
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        return patched

    return decorate
