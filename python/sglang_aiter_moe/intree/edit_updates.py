"""Weight updates: the model's updater, the scheduler's, and the loader's way back to raw weights."""

from __future__ import annotations

from sglang_aiter_moe.intree.anchors import with_decorator, with_last
from sglang_aiter_moe.intree.edits import PACKAGE, PATCH, Editor

# Method of WeightUpdater -> the parameters that our function takes by name or position.
_UPDATER = {
    "update_weights_from_disk": ["self", "model_path"],
    "update_weights_from_tensor": ["self", "named_tensors", "load_format="],
    "update_weights_from_ipc": ["self", "recv_req"],
    "update_weights_from_distributed": ["self", "names", "dtypes", "shapes"],
    "receive_weights_from_distributed": ["self", "*"],
    "load_weights_from_distributed": ["self", "named_tensors"],
    "begin_weight_update": ["self"],
    "end_weight_update": ["self"],
}
_RESTORE = {"8a0a6f493ea5e1f9", "921493f25bfd1e35"}  # 0.5.21; from 0.5.22


def edit_updater(editor: Editor) -> None:
    """``model_runner_components/weight_updater.py``: an update is checked first, and whole or not at all.

    Raises:
        ChangedCode: a method is missing, or takes something else.
    """
    source = editor.source
    for method, parameters in _UPDATER.items():
        name = f"MXFP4 weights in {method}"
        if not editor.needs(name):
            continue
        source.function(f"WeightUpdater.{method}", parameters, exact=False)
        ours = PATCH[name].function.rpartition(":")[2]
        _around(editor, f"WeightUpdater.{method}", f"aiter_updates.{ours}")
        editor.made(name)
    source.add_import(f"{PACKAGE}.srt", "switch", "aiter_switch")
    source.add_import(
        f"{PACKAGE}.srt.model_executor.model_runner_components", "weight_updater", "aiter_updates"
    )


def edit_manager(editor: Editor) -> None:
    """``scheduler_components/weight_updater.py``: after an update, captured graphs read the new bias.

    Raises:
        ChangedCode: a method is missing, or takes something else.
    """
    source, cls = editor.source, "SchedulerWeightUpdaterManager"
    for name, patch in PATCH.items():
        module, _, target = patch.target.partition(":")
        if module != "sglang.srt.managers.scheduler_components.weight_updater":
            continue
        if not editor.needs(name):
            continue
        source.function(target, ["self", "recv_req"])
        _around(editor, f"{cls}.{target.rpartition('.')[2]}", "aiter_bias.refresh_biases_after")
        editor.made(name)
    source.add_import(f"{PACKAGE}.srt", "switch", "aiter_switch")
    source.add_import(f"{PACKAGE}.srt.layers.moe", "topk", "aiter_bias")


def edit_rebalancing(editor: Editor) -> None:
    """``eplb/eplb_manager.py``: moving experts writes weights, too.

    Raises:
        ChangedCode: the function is missing, or takes positional arguments.
    """
    source, target = editor.source, "update_expert_location_with_recovery"
    name = f"correction bias after {target}"
    if not editor.needs(name):
        return
    source.function(target, ["*"], exact=False)
    _around(editor, target, "aiter_bias.refresh_biases_after")
    source.add_import(f"{PACKAGE}.srt", "switch", "aiter_switch")
    source.add_import(f"{PACKAGE}.srt.layers.moe", "topk", "aiter_bias")
    editor.made(name)


def edit_loader(editor: Editor) -> None:
    """``model_loader/loader.py``: layers that are laid out get their raw form back before a load.

    Raises:
        ChangedCode: the function is missing, or takes or does something else.
    """
    source, name = editor.source, "raw form before a weight update"
    if not editor.needs(name):
        return
    target = "DefaultModelLoader.restore_weights_before_loading"
    function = source.function(target, ["model", "target_device"])
    source.known(function, target, _RESTORE)
    new = source.statements("aiter_updates.restore_raw_in(model)")
    source.replace(target, lambda node: with_last(node, new))
    source.add_import(
        f"{PACKAGE}.srt.model_executor.model_runner_components", "weight_updater", "aiter_updates"
    )
    editor.made(name)


def _around(editor: Editor, qualname: str, function: str) -> None:
    source = editor.source
    source.replace(
        qualname,
        lambda node: with_decorator(node, source, f"aiter_switch.around({function})"),
    )
