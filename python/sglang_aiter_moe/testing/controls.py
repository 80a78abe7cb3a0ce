"""Breaks one thing on purpose, so that tests can show they notice.

A second SGLang plugin, found only when ``testing/controls_dist`` is on PYTHONPATH. The variable
CARRIER_CONTROL says what it does:

- ``released``: SGLang's own AITER branch, without our patches, over the portable AITER. What a user of the
  released SGLang gets on an MI350 (to be used with SGLANG_AITER_MOE_ENABLE=0).
- ``in_tree``: what a machine with AITER brings to an SGLang that has the patch set in its source: AITER
  (the portable one), and routing that takes its path. For processes without our plugin.
- ``wrong_layout``: w13 is packed in the layout that the plan did not choose.
- ``wrong_target``: the patch table names a function that SGLang does not have.
- ``undone``: after everything was patched, one patch is taken back.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from sglang_aiter_moe.patches.when_imported import when_imported

CONTROL = "CARRIER_CONTROL"
_MXFP4 = "sglang.srt.layers.quantization.mxfp4"
_TOPK = "sglang.srt.layers.moe.topk"
_RUNNER = "sglang.srt.layers.moe.moe_runner.aiter"


def register() -> None:
    """The entry point."""
    control = os.environ.get(CONTROL)
    if control is not None:
        {
            "released": use_released_aiter_branch,
            "in_tree": provide_aiter,
            "wrong_layout": pack_the_other_layout,
            "wrong_target": name_a_missing_target,
            "undone": undo_a_patch,
        }[control]()


def provide_aiter() -> None:
    """Registers the portable AITER, and lets routing on a CPU take the path that it takes on ROCm."""
    from sglang_aiter_moe import portable

    if not portable.is_portable(_aiter()):
        portable.install()
    when_imported(_TOPK, _open_topk)


def use_released_aiter_branch() -> None:
    """Sets the module constants that keep SGLang off its AITER branch without ROCm."""
    provide_aiter()
    when_imported(_MXFP4, _open_mxfp4)
    when_imported(_RUNNER, _open_runner)


def _aiter() -> Any:
    import sys

    return sys.modules.get("aiter")


def _open_mxfp4() -> None:
    import aiter.ops.shuffle as shuffle
    from aiter.utility.fp4_utils import e8m0_shuffle
    from sglang.srt.layers.quantization import mxfp4

    mxfp4._use_aiter = mxfp4._is_hip = mxfp4._is_shuffle_moe_mxfp4 = True
    mxfp4._is_cpu = False
    # mxfp_supported is its name up to 0.5.16.
    mxfp4.is_gfx95_supported = mxfp4.mxfp_supported = lambda: True
    mxfp4.e8m0_shuffle = e8m0_shuffle
    for name in ("shuffle_weight", "shuffle_weight_a16w4", "shuffle_scale", "shuffle_scale_a16w4"):
        setattr(mxfp4, name, getattr(shuffle, name))


def _open_topk() -> None:
    from aiter import biased_grouped_topk
    from aiter.fused_moe import fused_topk
    from sglang.srt.layers.moe import topk

    topk._use_aiter = True
    topk.aiter_biased_grouped_topk = biased_grouped_topk
    topk.aiter_fused_topk = fused_topk


def _open_runner() -> None:
    from sglang.srt.layers.moe.moe_runner import aiter

    if hasattr(aiter, "is_gfx95_supported"):
        aiter.is_gfx95_supported = lambda: True


def pack_the_other_layout() -> None:
    """Weights in the other layout than the plan says; everything else follows the plan."""
    from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_method

    prepare = mxfp4.prepare_weights
    other = {
        "separated": ("gu_interleaved", "a16w4_gate_up"),
        "gu_interleaved": ("separated", "separated"),
    }

    def prepare_wrongly(layer: Any, plan: Any) -> None:
        weight, scale = other[plan.w13_layout]
        prepare(layer, replace(plan, w13_layout=weight, w13_scale_layout=scale))
        mxfp4.mark_prepared(layer, plan)

    mxfp4_method.prepare_weights = prepare_wrongly


def name_a_missing_target() -> None:
    """As if a release had renamed a function that we patch."""
    from sglang_aiter_moe import plugin
    from sglang_aiter_moe.patches.table import PATCHES

    first = PATCHES[0]
    missing = replace(first, target=first.target + "_renamed", since="0.5.17")
    plugin.PATCHES = (missing, *PATCHES[1:])
    if plugin.states():  # our plugin was registered first
        plugin.unregister()
        plugin.register()


def undo_a_patch() -> None:
    """As if another plugin had put its own function in place of ours."""
    from sglang_aiter_moe import plugin

    plugin.register()

    def undo() -> None:
        from sglang.srt.layers.moe import topk

        patched = topk.select_experts
        topk.select_experts = lambda *args, **kwargs: patched.__wrapped__(*args, **kwargs)

    when_imported(_TOPK, undo)
