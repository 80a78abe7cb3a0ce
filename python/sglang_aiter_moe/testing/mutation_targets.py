"""Which modules are mutated, and against which unit tests each is run."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
UNIT = "test/registered/unit/"
_PLAN = ("contract/test_plan.py", "contract/test_refusals.py", "contract/test_moe_plan.py")
_TOTAL = "contract/test_plan_total.py"
_MX = "layers/quantization/test_mxfp4_"
_UPDATES = (
    "model_executor/test_weight_updater.py",
    "model_executor/test_weight_updater_methods.py",
    "model_executor/test_weight_updater_target_and_draft.py",
)
_OF_RUNNER = "layers/moe/moe_runner/test_"
_CONTEXT = "layers/test_zero_copy_context.py"
_RUNNER = (
    "patches/test_glue.py",
    f"{_OF_RUNNER}output.py",
    f"{_OF_RUNNER}call_arguments.py",
    *(
        f"layers/moe/test_aiter_runner_{part}.py"
        for part in ("upstream", "gate_mode", "routing", "output", "keywords", "tracing")
    ),
    f"{_MX}situ_output.py",
)
_BIAS = (
    "layers/moe/test_correction_bias.py",
    "patches/test_glue.py",
    "patches/test_routing_glue.py",
    "patches/test_select_experts.py",
    "layers/moe/test_topk_routing_dtype.py",
    "layers/moe/test_topk_correction_bias_tensors.py",
    "layers/moe/test_topk_correction_bias_cache.py",
)
_RELOAD = (
    f"{_MX}reload.py",
    f"{_MX}failed_update.py",
    f"{_MX}raw_form.py",
    f"{_MX}raw_form_random.py",
)
_LAYOUT = (f"{_MX}prepare_weights.py", f"{_MX}situ_weight_layout.py", *_RELOAD)
_WATCH = (f"{_MX}watch.py", f"{_MX}watch_random.py")
_STATES = (f"{_MX}layer_weights.py", f"{_MX}update_sessions.py")
#: Module -> its tests, the quickest first.
TESTS: dict[str, tuple[str, ...]] = {
    "contract/_bytes.py": ("contract/test_weight_layouts.py", "contract/test_scale_layouts.py"),
    "contract/capabilities.py": ("contract/test_capabilities.py", *_PLAN),
    "contract/families.py": (
        "contract/test_families.py",
        *_PLAN,
        "contract/test_routes.py",
        _TOTAL,
    ),
    "contract/identity.py": ("contract/test_identity.py", f"{_MX}packed.py"),
    "contract/layouts.py": ("contract/test_weight_layouts.py",),
    "contract/modes.py": ("contract/test_modes.py", "contract/test_routes.py"),
    "contract/moe_plan.py": ("contract/test_moe_plan.py", "contract/test_plan.py"),
    "contract/padding.py": ("contract/test_padding.py", "contract/test_plan.py"),
    "contract/plan.py": (*_PLAN, "contract/test_routes.py", _TOTAL),
    "contract/refusals.py": ("contract/test_refusals.py", "contract/test_plan.py", _TOTAL),
    "contract/routes.py": ("contract/test_routes.py", *_PLAN, _TOTAL),
    "contract/scale_layouts.py": ("contract/test_scale_layouts.py",),
    "contract/spec.py": ("contract/test_spec.py", *_PLAN),
    "contract/tuned.py": ("contract/test_tuned.py", *_PLAN),
    "srt/layers/moe/moe_runner/aiter.py": _RUNNER,
    "srt/layers/moe/moe_runner/aiter_api.py": (
        f"{_OF_RUNNER}aiter_api.py",
        "srt/test_switch.py",
        *_RUNNER,
    ),
    "srt/layers/moe/moe_runner/base.py": _RUNNER,
    "srt/layers/moe/moe_runner/call_arguments.py": _RUNNER,
    "srt/layers/moe/moe_runner/dispatch.py": (f"{_OF_RUNNER}dispatch.py", *_RUNNER),
    "srt/layers/moe/moe_runner/expert_ids.py": (f"{_OF_RUNNER}expert_ids.py", *_RUNNER),
    "srt/layers/moe/moe_runner/flashinfer_trtllm.py": (
        f"{_OF_RUNNER}flashinfer_trtllm.py",
        "patches/test_glue.py",
        "patches/test_routing_glue.py",
    ),
    "srt/layers/moe/correction_bias.py": _BIAS,
    "srt/layers/moe/topk.py": _BIAS,
    "srt/layers/quantization/mxfp4.py": (
        f"{_MX}quant_info.py",
        *_LAYOUT,
        f"{_MX}situ_output.py",
        *_WATCH,
    ),
    "srt/layers/quantization/mxfp4_checkpoint.py": (f"{_MX}checkpoint.py", *_LAYOUT),
    "srt/layers/quantization/mxfp4_layer_weights.py": (
        *_STATES,
        *_RELOAD,
        *_WATCH,
        *_UPDATES,
    ),
    "srt/layers/quantization/mxfp4_method.py": ("srt/test_mxfp4_method.py",),
    "srt/layers/quantization/mxfp4_others.py": (
        f"{_MX}others.py",
        *_UPDATES,
    ),
    "srt/layers/quantization/mxfp4_packed.py": (f"{_MX}packed.py",),
    "srt/layers/quantization/mxfp4_progress.py": (f"{_MX}progress.py",),
    "srt/layers/quantization/mxfp4_raw_form.py": (
        f"{_MX}quant_info.py",
        *_RELOAD,
        f"{_MX}packed.py",
    ),
    "srt/layers/quantization/mxfp4_reload.py": (
        *_STATES,
        *_RELOAD,
        *_UPDATES,
    ),
    "srt/layers/quantization/mxfp4_update_check.py": (
        f"{_MX}update_check.py",
        *_RELOAD,
        *_UPDATES,
    ),
    "srt/layers/quantization/mxfp4_watch.py": (
        *_WATCH,
        *_RELOAD,
        *_UPDATES,
    ),
    "srt/layers/zero_copy_context.py": (_CONTEXT, *_RUNNER),
    "srt/model_executor/model_runner_components/ranks.py": (
        *_UPDATES,
        "model_executor/test_ranks.py",
    ),
    "srt/model_executor/model_runner_components/weight_updater.py": (
        *_UPDATES,
        "model_executor/test_ranks.py",
    ),
    "srt/switch.py": ("srt/test_switch.py", "test_plugin.py"),
}
#: Modules without tests here, and why.
ELSEWHERE = {
    "contract/_device_kernels.py": "GPU kernels, which are off until executed on one",
    "contract/_device_scale_kernels.py": "the same",
    "contract/device_moves.py": "their host side",
}
