"""Every patch, in the order in which it is applied.

``sglang`` paths are as the released sources 0.5.13 to 0.5.23 have them; ``since`` and ``until`` were read
there.
"""

from __future__ import annotations

import re

from sglang_aiter_moe.patches.model import How, Patch
from sglang_aiter_moe.srt.layers.moe.topk import UPDATE_ENTRY_POINTS
from sglang_aiter_moe.srt.releases import FIRST_WITH_GPT_OSS

_OURS = "sglang_aiter_moe"
_MXFP4 = "sglang.srt.layers.quantization.mxfp4"
_RUNNER = "sglang.srt.layers.moe.moe_runner.aiter"
_TOPK = "sglang.srt.layers.moe.topk"
_GLUE = f"{_OURS}.patches.glue"
_BIAS = f"{_OURS}.srt.layers.moe.topk"
_FLASHINFER = f"{_OURS}.srt.layers.moe.moe_runner.flashinfer_trtllm"
_UPDATES = f"{_OURS}.srt.model_executor.model_runner_components.weight_updater"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
_MODEL_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_MIXTURE = "an update that does not fit, or fails half-way, leaves a mixture of weights"
_EVERYWHERE = frozenset({"aiter", "portable", "inert"})


GUARD = Patch(
    name="self-check before the first MoE layer",
    target="sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE.__init__",
    function=f"{_OURS}.plugin:guard_first_moe_layer",
    since=FIRST_WITH_GPT_OSS,
    backends=_EVERYWHERE,
    why="a process would serve with some patches missing",
)

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="w13 layout selector",
        target=f"{_MXFP4}:_aiter_situ_uses_gu_interleaved_weights",
        function=f"{_OURS}.srt.layers.quantization.mxfp4:_aiter_situ_uses_gu_interleaved_weights",
        how=How.REPLACE,
        since="0.5.20",
        why="SiTUv2 in A16W4 gets interleaved bytes that AITER's kernel reads as separated; flags are "
        "parsed differently from AITER",
    ),
    Patch(
        name="MXFP4 plan and sizes",
        target=f"{_MXFP4}:Mxfp4MoEMethod.create_weights",
        function=f"{_GLUE}:create_weights",
        since=FIRST_WITH_GPT_OSS,
        why="what AITER refuses shows at the first request instead of at load; pads are not what its "
        "kernels take",
    ),
    Patch(
        name="MXFP4 weight layout",
        target=f"{_MXFP4}:Mxfp4MoEMethod.process_weights_after_loading",
        function=f"{_GLUE}:process_weights_after_loading",
        since=FIRST_WITH_GPT_OSS,
        why="layout and gate_mode are decided apart from each other",
    ),
    Patch(
        name="raw form before a weight update",
        target="sglang.srt.model_loader.loader:DefaultModelLoader.restore_weights_before_loading",
        function=f"{_GLUE}:restore_before_loading",
        since="0.5.21",
        when_used=True,
        why="loaders write raw bytes into packed parameters",
    ),
    *(
        Patch(
            name=f"MXFP4 weights in {method}",
            target=f"{_UPDATER}.{method}",
            function=f"{_UPDATES}:{function}",
            since=since,
            until=until,
            upstream=upstream,
            when_used=True,
            why=_MIXTURE,
        )
        for method, function, since, until, upstream in (
            ("update_weights_from_disk", "from_disk", "0.5.16", None, ""),
            ("update_weights_from_tensor", "from_tensor", "0.5.16", None, ""),
            ("update_weights_from_ipc", "from_ipc", "0.5.16", None, ""),
            (
                "update_weights_from_distributed",
                "from_distributed",
                "0.5.16",
                "0.5.20",
                "received and loaded in two steps",
            ),
            ("receive_weights_from_distributed", "receiving", "0.5.21", None, ""),
            ("load_weights_from_distributed", "from_received", "0.5.21", None, ""),
            ("begin_weight_update", "begin_session", "0.5.21", None, ""),
            ("end_weight_update", "end_session", "0.5.21", None, ""),
        )
    ),
    # The same four before they had a class of their own.
    *(
        Patch(
            name=f"MXFP4 weights in ModelRunner.{method}",
            target=f"{_MODEL_RUNNER}.{method}",
            function=f"{_UPDATES}:{function}",
            since=FIRST_WITH_GPT_OSS,
            until="0.5.15",
            upstream="the method moved to model_runner_components/weight_updater.py",
            when_used=True,
            plugin_only=True,
            why=_MIXTURE,
        )
        for method, function in (
            ("update_weights_from_disk", "from_disk"),
            ("update_weights_from_tensor", "from_tensor"),
            ("update_weights_from_ipc", "from_ipc"),
            ("update_weights_from_distributed", "from_distributed"),
        )
    ),
    Patch(
        name="MXFP4 activation",
        target=f"{_MXFP4}:Mxfp4MoEMethod.create_moe_runner",
        function=f"{_GLUE}:create_moe_runner",
        since=FIRST_WITH_GPT_OSS,
        why="a checkpoint with plain SiLU runs as SwiGLU-OAI",
    ),
    Patch(
        name="MXFP4 call",
        target=f"{_MXFP4}:Mxfp4MoEMethod.apply",
        function=f"{_GLUE}:apply",
        since=FIRST_WITH_GPT_OSS,
        why="the call does not carry the layer's plan",
    ),
    Patch(
        name="gate_mode and plan of a call",
        target=f"{_RUNNER}:AiterMoeQuantInfo",
        function=f"{_GLUE}:quant_info_with_plan",
        since=FIRST_WITH_GPT_OSS,
        how=How.VALUE,
        why="gate_mode has no field of its own and is sent for some layers only",
    ),
    Patch(
        name="output buffer of a call",
        target=f"{_RUNNER}:AiterRunnerInput",
        function=f"{_GLUE}:runner_input_with_output",
        how=How.VALUE,
        until="0.5.21",
        upstream="AiterRunnerInput has the field output",
        why="a dispatcher cannot name the buffer that the result has to be in",
    ),
    Patch(
        name="AITER runner",
        target=f"{_RUNNER}:AiterRunnerCore.run",
        function=f"{_GLUE}:run",
        how=How.VALUE,
        since=FIRST_WITH_GPT_OSS,
        why="gate_mode and SiTUv2's betas are missing from some calls, the published output is not "
        "used, and kernels that bypass fused_moe read another layout",
    ),
    Patch(
        name="AITER quant type",
        target=f"{_RUNNER}:_aiter_quant_type",
        function=f"{_GLUE}:quant_type",
        how=How.VALUE,
        plugin_only=True,
        why="layers without a plan would pay for the look at it: with this they are called faster than "
        "by SGLang alone",
    ),
    Patch(
        name="correction bias in the wider dtype",
        target=f"{_TOPK}:select_experts",
        function=f"{_GLUE}:select_experts",
        why="a float32 correction bias is rounded to the bf16 of the logits",
    ),
    Patch(
        name="correction bias cache",
        target=f"{_TOPK}:TopKConfig.correction_bias_for_dtype",
        function=f"{_BIAS}:correction_bias_for_dtype",
        how=How.REPLACE,
        since="0.5.20",
        why="the cached bias stays old after a weight update, and moves under captured graphs",
    ),
    Patch(
        name="owner of a correction bias's copies",
        target=f"{_TOPK}:TopKConfig.__init__",
        function=f"{_GLUE}:topk_config_init",
        why="a graph captured around compiled code keeps the address of the parameter",
    ),
    *(
        Patch(
            name=f"correction bias after {re.split('[.:]', target)[-1]}",
            target=target,
            function=f"{_BIAS}:refresh_biases_after",
            since=since,
            when_used=True,
            why="graphs captured before a weight update replay the old bias",
        )
        for target, since in UPDATE_ENTRY_POINTS.items()
    ),
    Patch(
        name="published output of FlashInfer's MXFP4 kernel",
        target=f"{_MXFP4}:Mxfp4MoEMethod.apply",
        function=f"{_FLASHINFER}:apply",
        backends=frozenset({"inert", "portable"}),
        until="0.5.19",
        upstream="the kernel moved to moe_runner/flashinfer_trtllm.py",
        why="the buffer that the model published is written but another tensor is returned",
    ),
    Patch(
        name="published output of FlashInfer's MXFP4 runner",
        target="sglang.srt.layers.moe.moe_runner.flashinfer_trtllm"
        ":_fused_experts_flashinfer_mxfp4_sm100_trtllm_gen",
        function=f"{_FLASHINFER}:fused_experts",
        backends=frozenset({"inert", "portable"}),
        since="0.5.20",
        when_used=True,
        why="the buffer that the model published is written but another tensor is returned",
    ),
    *(
        Patch(
            name=f"fused routing: {name}",
            target=f"{_TOPK}:{name}",
            function=f"{_OURS}.patches.routing_glue:{function}",
            backends=frozenset({"portable"}),
            why="a GPU routes with SGLang's kernels, not with the one that the portable backend brings",
        )
        for name, function in (
            ("biased_grouped_topk_gpu", "biased_grouped_topk"),
            ("biased_topk_jit_kernel_impl", "biased_topk_sigmoid"),
        )
    ),
    Patch(
        name="SiTUv2 routing bias of FlashInfer's MXFP4 kernel in the wider dtype",
        target=f"{_MXFP4}:Mxfp4MoEMethod.apply",
        function=f"{_FLASHINFER}:situ_routing_bias",
        backends=frozenset({"inert", "portable"}),
        until="0.5.19",
        upstream="the kernel's call moved to _apply_sm100_trtllm_gen",
        why="the bias is rounded to bf16 once and kept on the layer",
    ),
    Patch(
        name="SiTUv2 routing bias of FlashInfer's MXFP4 runner in the wider dtype",
        target=f"{_MXFP4}:Mxfp4MoEMethod._apply_sm100_trtllm_gen",
        function=f"{_FLASHINFER}:situ_routing_bias",
        backends=frozenset({"inert", "portable"}),
        since="0.5.20",
        why="the bias is rounded to bf16 once and kept on the layer",
    ),
    # On a CPU SGLang routes with torch or with kernels of another vendor. The portable backend is to
    # see what AITER sees. Nothing else in SGLang reads these three names of the module.
    *(
        Patch(
            name=f"portable routing: {name}",
            target=f"{_TOPK}:{name}",
            function=f"{_GLUE}:{function}",
            how=How.VALUE,
            backends=frozenset({"portable"}),
            cpu_only=True,
            adds=True,
            why="routing would not take the AITER path on a CPU",
        )
        for name, function in (
            ("_use_aiter", "switched_on"),
            ("aiter_biased_grouped_topk", "aiter_biased_grouped_topk"),
            ("aiter_fused_topk", "aiter_fused_topk"),
        )
    ),
)
