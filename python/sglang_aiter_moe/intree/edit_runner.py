"""``moe_runner/aiter.py``: fields that say what the bytes are, and the call by the layer's plan."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from sglang_aiter_moe.intree.anchors import dotted, with_first, with_last
from sglang_aiter_moe.intree.edits import PACKAGE, Editor, Outcome

_RUN = {
    "66f6750036d31de4": "0.5.17 to 0.5.20",
    "6d69c3b93709ffe6": "0.5.21",
    "136f8c83c1271386": "0.5.22",
    "cc148593bfd45a04": "0.5.23",
}
_POLICY = "_MOE_SORTING_DISPATCH_POLICY"
_INFO_FIELDS = (
    *("w13_weight", "w2_weight", "quant_type", "w13_scale", "w2_scale", "a13_scale", "a2_scale"),
    *("b13", "b2", "expert_mask", "doweight_stage1", "hidden_pad", "intermediate_pad"),
    *("swiglu_limit", "fp8_activations", "fused_moe_kwargs"),
)
_INPUT_FIELDS = (
    *("hidden_states", "topk_ids", "topk_weights", "quant_type", "a1_scale"),
    *("num_local_tokens", "output_dtype", "output"),
)


def edit(editor: Editor) -> None:
    """Makes this file's edits.

    Raises:
        ChangedCode: a field that the call would not pass on, or another ``run``.
    """
    _fields(
        editor,
        "gate_mode and plan of a call",
        "AiterMoeQuantInfo",
        _INFO_FIELDS,
        {
            "gate_mode": "# What the packed w13 rows are; a plan says it for the layers that have one.\n"
            'gate_mode: str = "separated"',
            "plan": "plan: Any = None",
        },
    )
    _fields(
        editor,
        "output buffer of a call",
        "AiterRunnerInput",
        _INPUT_FIELDS,
        {"output": "output: Optional[torch.Tensor] = None"},
    )
    name, source = "AITER runner", editor.source
    if not editor.needs(name):
        return
    method = "AiterRunnerCore.run"
    run = source.function(method, ["self", "runner_input", "quant_info", "running_state", "hooks="])
    source.known(run, method, _RUN)
    extras = (
        f'            extras={{\n                "moe_sorting_dispatch_policy": {_POLICY}\n            }},\n'
        if _has_policy(source.module)
        else ""
    )
    new = source.statements(
        "if aiter_runner.is_stated(quant_info):\n"
        "    return AiterRunnerOutput(\n"
        "        hidden_states=aiter_runner.compute(\n"
        "            self.config,\n"
        "            runner_input,\n"
        "            quant_info,\n"
        "            running_state,\n"
        f"{extras}"
        "        )\n"
        "    )"
    )

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        return with_first(node.visit(_Deliver()), new)

    source.replace(method, change)
    source.add_import(f"{PACKAGE}.srt.layers.moe.moe_runner", "aiter", "aiter_runner")
    editor.made(name)


def _fields(
    editor: Editor, patch: str, name: str, known: Sequence[str], new: dict[str, str]
) -> None:
    source = editor.source
    node = source.find(name)
    if not isinstance(node, cst.ClassDef):
        raise source.changed(
            None, f"there is no class {name}", "the dataclass of the tested releases"
        )
    fields = {
        item.body[0].target.value: item
        for item in node.body.body
        if isinstance(item, cst.SimpleStatementLine) and isinstance(item.body[0], cst.AnnAssign)
    }
    if set(new) <= set(fields):
        editor.note(patch, Outcome.UPSTREAM, f"{name} has {', '.join(new)}")
        return
    unknown = sorted(set(new) & set(fields)) or sorted(set(fields) - set(known))
    if unknown:
        raise source.changed(
            fields[unknown[0]],
            f"{name} has the field {unknown[0]}, which the patch set's call would not pass on",
            f"the fields {', '.join(known)}",
        )
    if not editor.needs(patch):
        return
    statements = source.statements("\n".join(new.values()))

    def change(cls: cst.ClassDef) -> cst.ClassDef:
        body = list(cls.body.body)
        methods = [i for i, item in enumerate(body) if isinstance(item, cst.FunctionDef)]
        if not methods:
            return with_last(cls, statements)
        body[methods[0] : methods[0]] = statements
        return cls.with_changes(body=cls.body.with_changes(body=body))

    source.replace(name, change)
    editor.made(patch)


class _Deliver(cst.CSTTransformer):
    """``return AiterRunnerOutput(...)`` -> ``return aiter_runner.delivered(AiterRunnerOutput(...), ...)``."""

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return node.name.value == "run"

    def leave_Return(self, original_node: cst.Return, updated_node: cst.Return) -> cst.Return:
        value = updated_node.value
        if not (isinstance(value, cst.Call) and dotted(value.func) == "AiterRunnerOutput"):
            return updated_node
        # One argument a line where the result goes over several, as formatters have it.
        code = cst.Module([]).code_for_node(value)
        long = "\n" in code or len(code) > 50
        template = "x,\n    runner_input," if long else "x, runner_input"
        call = cst.parse_expression(f"aiter_runner.delivered(\n    {template}\n)")
        if long:
            value = value.visit(_Deeper())
        first = call.args[0].with_changes(value=value)
        return updated_node.with_changes(value=call.with_changes(args=[first, *call.args[1:]]))


class _Deeper(cst.CSTTransformer):
    """Moves the further lines of an expression to the right by one level."""

    def leave_ParenthesizedWhitespace(self, original_node, updated_node):
        line = updated_node.last_line
        return updated_node.with_changes(last_line=line.with_changes(value=line.value + "    "))


def _has_policy(module: cst.Module) -> bool:
    return any(
        isinstance(item, cst.SimpleStatementLine)
        and isinstance(item.body[0], cst.Assign)
        and any(dotted(target.target) == _POLICY for target in item.body[0].targets)
        for item in module.body
    )
