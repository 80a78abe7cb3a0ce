"""``moe_runner/flashinfer_trtllm.py``: the buffer that FlashInfer's MXFP4 kernel writes is what comes back."""

from __future__ import annotations

from sglang_aiter_moe.intree.anchors import with_decorator
from sglang_aiter_moe.intree.edits import PACKAGE, Editor

_FUNCTION = "_fused_experts_flashinfer_mxfp4_sm100_trtllm_gen"


def edit(editor: Editor) -> None:
    """Makes this file's edit.

    Raises:
        ChangedCode: the function is missing, or takes something else.
    """
    source, name = editor.source, "published output of FlashInfer's MXFP4 runner"
    if not editor.needs(name):
        return
    source.function(_FUNCTION, ["dispatch_output", "quant_info", "runner_config"])
    source.replace(
        _FUNCTION,
        lambda node: with_decorator(
            node, source, "aiter_switch.around(aiter_flashinfer.fused_experts)"
        ),
    )
    source.add_import(f"{PACKAGE}.srt", "switch", "aiter_switch")
    source.add_import(
        f"{PACKAGE}.srt.layers.moe.moe_runner", "flashinfer_trtllm", "aiter_flashinfer"
    )
    editor.made(name)
