"""``moe/topk.py``: routing computes in the wider dtype, and no copy of the bias goes stale."""

from __future__ import annotations

import libcst as cst

from sglang_aiter_moe.intree.anchors import signature, with_first, with_last
from sglang_aiter_moe.intree.edits import PACKAGE, Editor

_CACHE = {"69aeb1112bc76178"}  # correction_bias_for_dtype, 0.5.20 to 0.5.23
#: Parameters that decide which bias and which logits the later code takes.
_PASSED_ON = ("dynamic_expert_bias", "router_logits_partials")


def edit(editor: Editor) -> None:
    """Makes this file's edits.

    Raises:
        ChangedCode: a signature, or what is done with the bias, is not as in the tested releases.
    """
    source = editor.source
    name = "correction bias in the wider dtype"
    if editor.needs(name):
        function = source.function(
            "select_experts", ["hidden_states", "router_logits", "topk_config"], exact=False
        )
        _check(editor, function)
        given = ["router_logits", "topk_config"]
        known = signature(function.params)
        given += [f"{option}={option}" for option in _PASSED_ON if f"{option}=" in known]
        lines = "".join(f"        {argument},\n" for argument in given)
        new = source.statements(
            "if aiter_switch.acts(_use_aiter):\n"
            f"    router_logits = aiter_bias.select_experts_inputs(\n{lines}    )"
        )
        source.replace("select_experts", lambda node: with_first(node, new))
        editor.made(name)
    name, method = "correction bias cache", "TopKConfig.correction_bias_for_dtype"
    if editor.needs(name):
        function = source.function(method, ["self", "dtype"])
        source.known(function, method, _CACHE)
        hand_over = source.statements(
            "if aiter_switch.acts(_use_aiter):\n"
            "    return aiter_bias.correction_bias_for_dtype(self, dtype)"
        )
        source.replace(method, lambda node: with_first(node, hand_over))
        editor.made(name)
    name = "owner of a correction bias's copies"
    if editor.needs(name):
        _after_init(editor)
        editor.made(name)
    source.add_import(f"{PACKAGE}.srt", "switch", "aiter_switch")
    source.add_import(f"{PACKAGE}.srt.layers.moe", "topk", "aiter_bias")


def _after_init(editor: Editor) -> None:
    """``TopKConfig`` is a dataclass: what happens after its ``__init__`` has a method of its own."""
    source, cls = editor.source, "TopKConfig"
    for method in ("__init__", "__post_init__"):
        if source.find(f"{cls}.{method}") is not None:
            raise source.changed(
                source.find(f"{cls}.{method}"), f"{cls} has its own {method}", "the dataclass's"
            )
    (new,) = source.statements(
        "def __post_init__(self) -> None:\n"
        "    if aiter_switch.acts(_use_aiter):\n"
        "        aiter_bias.correction_bias_of(self)"
    )
    new = new.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    source.replace(cls, lambda node: with_last(node, [new]))


def _check(editor: Editor, function: cst.FunctionDef) -> None:
    """``_use_aiter`` is this module's, and the bias is still asked for in the dtype of the logits."""
    source = editor.source
    if not _assigns(source.module, "_use_aiter"):
        raise source.changed(None, "_use_aiter is not set here", "the module's own switch")
    wanted = {"topk_config.correction_bias_for_dtype(router_logits.dtype)"}
    calls = _calls(function, "correction_bias_for_dtype")
    if source.find("TopKConfig.correction_bias_for_dtype") is not None and calls != wanted:
        raise source.changed(
            function,
            f"select_experts takes the bias by {sorted(calls) or 'no call of correction_bias_for_dtype'}",
            f"{min(wanted)}: widened logits give a wide bias",
        )


def _assigns(module: cst.Module, name: str) -> bool:
    class Find(cst.CSTVisitor):
        found = False

        def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
            return False

        def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
            self.found |= isinstance(node.target, cst.Name) and node.target.value == name

    visitor = Find()
    module.visit(visitor)
    return visitor.found


def _calls(function: cst.FunctionDef, method: str) -> set[str]:
    found = set()

    class Find(cst.CSTVisitor):
        def visit_Call(self, node: cst.Call) -> None:
            if isinstance(node.func, cst.Attribute) and node.func.attr.value == method:
                found.add(cst.Module([]).code_for_node(node))

    function.visit(Find())
    return found
