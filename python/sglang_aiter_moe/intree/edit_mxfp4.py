"""``quantization/mxfp4.py``: the four methods hand planned layers over, the selector asks ours."""

from __future__ import annotations

import libcst as cst

from sglang_aiter_moe.intree.anchors import with_decorator, with_first, with_only
from sglang_aiter_moe.intree.edits import PACKAGE, Editor

_CLASS = "Mxfp4MoEMethod"
_BIAS = "SiTUv2 routing bias of FlashInfer's MXFP4"
_SELECTOR = "_aiter_situ_uses_gu_interleaved_weights"

# What the tested releases have where our code takes over: the branches for AITER, and who calls them.
_CREATE = {"f63b546073011e00"}  # 0.5.17 to 0.5.23
_PROCESS = {"b013d9c85f8e0356", "d74550ed97e108b0"}  # to 0.5.19; from 0.5.20, with the selector
_RUNNER = {"545d9c9b274024e8"}
_APPLY = {"ef620aeba4e2b65e", "e9987f00b05eaf73"}  # to 0.5.18 in place; then a call of _apply_aiter
_APPLY_AITER = {"fd1bc5b4fe5be977"}
_SELECT = {"7fc3bb79624e969c"}


def edit(editor: Editor) -> None:
    """Makes this file's edits.

    Raises:
        ChangedCode: a signature or an AITER branch is not one of the tested releases'.
    """
    source = editor.source
    _selector(editor)
    hand_over = (
        (
            "MXFP4 plan and sizes",
            "create_weights",
            ["num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"],
            ["with_bias=", "**extra_weight_attrs"],
            "takes_aiter_path(self)",
        ),
        ("MXFP4 weight layout", "process_weights_after_loading", [], [], "is_planned(layer)"),
        ("MXFP4 activation", "create_moe_runner", ["moe_runner_config"], [], "is_planned(layer)"),
        ("MXFP4 call", "apply", ["dispatch_output"], [], "is_planned(layer)"),
    )
    for patch, name, arguments, options, condition in hand_over:
        if not editor.needs(patch):
            continue
        function = source.function(f"{_CLASS}.{name}", ["self", "layer", *arguments, *options])
        _check_branches(editor, name, function)
        given = ["self", "layer", *arguments]
        given += ["with_bias=with_bias", "**extra_weight_attrs"] if options else []
        new = source.statements(_call(name, condition, given))
        source.replace(f"{_CLASS}.{name}", lambda node, new=new: with_first(node, new))
        editor.made(patch)
    source.add_import(f"{PACKAGE}.srt.layers.quantization", "mxfp4_method", "aiter_method")
    around = (
        ("published output of FlashInfer's MXFP4 kernel", "apply", "apply"),
        (f"{_BIAS} kernel in the wider dtype", "apply", "situ_routing_bias"),
        (f"{_BIAS} runner in the wider dtype", "_apply_sm100_trtllm_gen", "situ_routing_bias"),
    )
    needed = [item for item in around if editor.needs(item[0])]
    for patch, method, function in needed:
        source.function(f"{_CLASS}.{method}", ["self", "layer", "dispatch_output"])
        text = f"aiter_switch.around(aiter_flashinfer.{function})"
        source.replace(
            f"{_CLASS}.{method}", lambda node, text=text: with_decorator(node, source, text)
        )
        editor.made(patch)
    if needed:
        source.add_import(f"{PACKAGE}.srt", "switch", "aiter_switch")
        source.add_import(
            f"{PACKAGE}.srt.layers.moe.moe_runner", "flashinfer_trtllm", "aiter_flashinfer"
        )


def _call(name: str, condition: str, given: list[str]) -> str:
    call = f"    return aiter_method.{name}({', '.join(given)})"
    if len(call) > 80:
        call = f"    return aiter_method.{name}(\n"
        call += "".join(f"        {argument},\n" for argument in given) + "    )"
    return f"if aiter_method.{condition}:\n{call}"


def _selector(editor: Editor) -> None:
    source, name = editor.source, "w13 layout selector"
    if not editor.needs(name):
        return
    function = source.function(_SELECTOR, [])
    source.known(function, _SELECTOR, _SELECT)
    new = source.statements(f"return aiter_layout.{_SELECTOR}()")
    source.replace(_SELECTOR, lambda node: with_only(node, new))
    source.add_import(f"{PACKAGE}.srt.layers.quantization", "mxfp4", "aiter_layout")
    editor.made(name)


def _check_branches(editor: Editor, name: str, function: cst.FunctionDef) -> None:
    """The AITER branch of a method is what our code takes the place of."""
    source = editor.source
    tests = {
        "create_weights": ("_use_aiter", _CREATE),
        "process_weights_after_loading": ("_use_aiter", _PROCESS),
        "create_moe_runner": ("moe_runner_backend.is_aiter()", _RUNNER),
        "apply": ("_use_aiter", _APPLY),
    }
    test, digests = tests[name]
    branches = branches_of(function, test)
    if len(branches) != 1:
        raise source.changed(
            function,
            f"{_CLASS}.{name} has {len(branches)} branches `if {test}:`",
            "one, as in the tested releases",
        )
    source.known(branches[0].body.body, f"the branch `if {test}:` of {_CLASS}.{name}", digests)
    if name == "apply" and source.find(f"{_CLASS}._apply_aiter") is not None:
        apply_aiter = source.function(
            f"{_CLASS}._apply_aiter", ["self", "layer", "dispatch_output"]
        )
        source.known(apply_aiter, f"{_CLASS}._apply_aiter", _APPLY_AITER)


def branches_of(function: cst.FunctionDef, test: str) -> list[cst.If]:
    """Every ``if`` and ``elif`` of a function with this condition."""
    found: list[cst.If] = []

    class Find(cst.CSTVisitor):
        def visit_If(self, node: cst.If) -> None:
            if cst.Module([]).code_for_node(node.test) == test:
                found.append(node)

    function.visit(Find())
    return found
