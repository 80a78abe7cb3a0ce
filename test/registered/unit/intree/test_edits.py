"""Each edited file, on a miniature SGLang: what is inserted, and every change of meaning that is refused."""

import ast
import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

pytest.importorskip("libcst", reason="the extra `apply` is not installed")

from packaging.version import Version

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.intree import run
from sglang_aiter_moe.intree.anchors import ChangedCode
from sglang_aiter_moe.intree.edits import PATCH, PLUGIN_ONLY, Outcome
from sglang_aiter_moe.intree.tree import find_tree
from sglang_aiter_moe.patches.table import PATCHES
from sglang_aiter_moe.testing import stand_in_tree

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

MXFP4 = "sglang/srt/layers/quantization/mxfp4.py"
TOPK = "sglang/srt/layers/moe/topk.py"
RUNNER = "sglang/srt/layers/moe/moe_runner/aiter.py"
FLASHINFER = "sglang/srt/layers/moe/moe_runner/flashinfer_trtllm.py"
UPDATER = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
MANAGER = "sglang/srt/managers/scheduler_components/weight_updater.py"
EPLB = "sglang/srt/eplb/eplb_manager.py"
LOADER = "sglang/srt/model_loader/loader.py"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    stand_in_tree.accept(monkeypatch.setattr)
    return stand_in_tree.write(tmp_path)


def change(tree, file, old, new):
    path = tree / file
    text = path.read_text()
    assert text.count(old) == 1, (file, old)
    path.write_text(text.replace(old, new))


def test_every_patch_that_a_release_needs_has_an_edit(tree):
    for release in ("0.5.20", "0.5.21", "0.5.23"):
        if release == "0.5.20":  # what later releases do not have
            change(
                tree,
                UPDATER,
                "class WeightUpdater:\n",
                "class WeightUpdater:\n    def update_weights_from_distributed(self, names, dtypes, shapes):\n"
                "        pass\n\n",
            )
        report = run.check(find_tree(tree, release))
        needed = {
            patch.name
            for patch in PATCHES
            if patch.name not in PLUGIN_ONLY and patch.not_needed_in(Version(release)) is None
        }
        made = {edit.patch for edit in report.edits if edit.outcome is Outcome.MADE}
        assert made == needed
        assert {edit.patch for edit in report.edits} == set(PATCH)


def test_the_methods_hand_over_and_the_rest_stays(tree):
    changes = {c.path: c for c in run.check(find_tree(tree)).changes if c.before}
    for path, made in changes.items():
        ast.parse(made.after)
        before, after = (data.decode().splitlines() for data in (made.before, made.after))
        if path == tree / MXFP4:
            before.remove('    return bool(os.environ.get("A"))')  # the selector asks ours
        if path == tree / RUNNER:  # results go through `delivered`, and move to the right
            start = next(i for i, line in enumerate(before) if "return AiterRunnerOutput(" in line)
            assert len(before[start:]) == 6
            before = before[:start]
        rest = iter(after)
        assert all(line in rest for line in before), path
    after = changes[tree / MXFP4].after.decode()
    assert "        if aiter_method.takes_aiter_path(self):\n" in after
    assert after.count("if aiter_method.is_planned(layer):\n") == 3
    assert "            return aiter_method.apply(self, layer, dispatch_output)\n" in after


def test_the_call_of_each_release(tree):
    after = {c.path: c.after.decode() for c in run.check(find_tree(tree)).changes if c.before}
    runner = after[tree / RUNNER]
    assert '"moe_sorting_dispatch_policy": _MOE_SORTING_DISPATCH_POLICY' in runner
    assert "AiterRunnerOutput(hidden_states=runner_input.hidden_states),\n" in runner
    assert "dynamic_expert_bias=dynamic_expert_bias,\n" in after[tree / TOPK]
    assert "router_logits_partials" not in after[tree / TOPK]
    change(tree, RUNNER, "_MOE_SORTING_DISPATCH_POLICY = 0\n", "")
    after = {c.path: c.after.decode() for c in run.check(find_tree(tree)).changes if c.before}
    assert "extras" not in after[tree / RUNNER]


def test_moved_lines_do_not_matter(tree):
    released = {c.path: c.after for c in run.check(find_tree(tree)).changes if c.before}
    filler = "\n" * 30 + "# a comment\n" * 20
    for path in released:
        text = path.read_text()
        at = text.index("\n\n\n")
        path.write_text(text[:at] + "\n" + filler + text[at:])
    moved = {c.path: c.after for c in run.check(find_tree(tree)).changes if c.before}
    assert released.keys() == moved.keys()
    for path, text in moved.items():
        assert text.decode().replace("\n" + filler, "") == released[path].decode()


@pytest.mark.parametrize(
    "file, old, new, named",
    [
        (MXFP4, "num_experts: int", "experts: int", "`experts` for `num_experts`"),
        (MXFP4, "params_dtype,", "params_dtype, extra,", "create_weights takes"),
        (
            MXFP4,
            "self.hidden_pad = 1",
            "self.hidden_pad = 2",
            "`if _use_aiter:` of Mxfp4MoEMethod.create",
        ),
        (MXFP4, "elif _use_aiter:", "elif not _use_aiter:", "create_weights has 0 branches"),
        (MXFP4, "layer.packed = True", "layer.packed = 1", "process_weights_after_loading"),
        (MXFP4, 'self.runner = "aiter"', "self.runner = None", "create_moe_runner"),
        (MXFP4, "        return dispatch_output", "        return None", "_apply_aiter"),
        (
            MXFP4,
            "(self, layer, moe_runner_config)",
            "(self, layer, config)",
            "create_moe_runner takes",
        ),
        (MXFP4, 'bool(os.environ.get("A"))', "True", "_aiter_situ_uses_gu_interleaved_weights"),
        (
            MXFP4,
            "class Mxfp4MoEMethod",
            "class Mxfp4Method",
            "no function Mxfp4MoEMethod.create_weights",
        ),
        (TOPK, "return self.correction_bias", "return None", "correction_bias_for_dtype"),
        (
            TOPK,
            "(router_logits.dtype)",
            "(hidden_states.dtype)",
            "select_experts takes the bias by",
        ),
        (
            TOPK,
            "router_logits, topk_config, *",
            "logits, topk_config, *",
            "`logits` for `router_logits`",
        ),
        (TOPK, "_use_aiter = is_hip()", "_aiter = is_hip()", "_use_aiter is not set"),
        (RUNNER, "swiglu_limit: float = 0.0", "limit: float = 0.0", "the field limit"),
        (RUNNER, "class AiterMoeQuantInfo", "class QuantInfo", "no class AiterMoeQuantInfo"),
        (RUNNER, "hooks=None", "hook=None", "`hook=` for `hooks=`"),
        (RUNNER, "(0, 4)", "(0, 5)", "AiterRunnerCore.run is not the code"),
        (FLASHINFER, "runner_config)", "config)", "`config` for `runner_config`"),
        (UPDATER, "model_path, load_format", "path, load_format", "update_weights_from_disk"),
        (
            UPDATER,
            "def begin_weight_update",
            "def begin",
            "no function WeightUpdater.begin_weight_update",
        ),
        (
            MANAGER,
            "def resume_memory_occupation(self, recv_req)",
            "def resume(self)",
            "resume_memory",
        ),
        (
            EPLB,
            "(*, model, nnodes)",
            "(model, nnodes)",
            "update_expert_location_with_recovery takes",
        ),
        (TOPK, "correction_bias: object = None", "def __post_init__(self): pass", "__post_init__"),
        (LOADER, "module.restore()", "module.reset()", "restore_weights_before_loading"),
        (LOADER, "(model, target_device)", "(model, device)", "`device` for `target_device`"),
    ],
)
def test_a_changed_meaning_is_refused_with_place_and_reason(tree, file, old, new, named):
    change(tree, file, old, new)
    before = stand_in_tree.content(tree)
    with pytest.raises(ChangedCode) as error:
        run.apply(find_tree(tree))
    assert error.value.what.startswith(file) and named in error.value.what
    assert stand_in_tree.content(tree) == before


def test_fields_that_are_there_are_upstream(tree):
    change(tree, RUNNER, "output_dtype: Optional[torch.dtype] = None", "output: object = None")
    change(
        tree, RUNNER, "float = 0.0", "float = 0.0\n    gate_mode: str = ''\n    plan: Any = None"
    )
    edits = {edit.patch: edit for edit in run.check(find_tree(tree, "0.5.21")).edits}
    for name in ("output buffer of a call", "gate_mode and plan of a call"):
        assert edits[name].outcome is Outcome.UPSTREAM


def test_a_half_upstream_field_is_refused(tree):
    change(tree, RUNNER, "float = 0.0", "float = 0.0\n    gate_mode: str = ''")
    with pytest.raises(ContractError, match="gate_mode"):
        run.check(find_tree(tree))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
