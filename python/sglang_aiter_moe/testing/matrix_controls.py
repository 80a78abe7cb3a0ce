"""Which cells of the matrix each patch is for: what has to show when it alone is left out.

Every patch of the table is either in :data:`CONTROLS` or, with what tests it, in :data:`OUTSIDE`.

``python -m sglang_aiter_moe.testing.matrix_controls docs/matrix_controls.json`` runs the controls and keeps how many
cells each patch shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_aiter_moe.matrix.cells import BIAS_UPDATE, Cell
from sglang_aiter_moe.matrix.classes import Class
from sglang_aiter_moe.matrix.run import Results, Side, run_without, sglang_of


def control_cells() -> tuple[Cell, ...]:
    """A few cells of each sort, on SGLang 0.5.23."""
    mixed = {"rows": "interleaved"}
    swiglu = {"activation": "swiglu", **mixed}
    unclamped = {"activation": "swiglu_unclamped", **mixed}
    a8w4_silu = {"gu_itlv": "1", "setting": "FP8_BOUND=0", **mixed}
    return (
        # SiTUv2 in its three modes, and flags that nobody reads alike.
        Cell(),
        Cell(a8w4="1"),
        Cell(a4w4="1"),
        Cell(a8w4="true"),
        Cell(a4w4="yes"),
        Cell(change="set A8W4=1"),
        Cell(a8w4="1", change="unset A8W4"),
        Cell(a4w4="1", change="set GU_ITLV=0"),
        # Ranks.
        Cell(parallel="tp8r0"),
        Cell(parallel="tp8r7", setting="K3_OPT=1", a4w4="1"),
        Cell(parallel="ep2r1"),
        Cell(parallel="ep2r1", a8w4="1"),
        Cell(**swiglu, parallel="tp4r0", bias=True, tokens=255),
        Cell(**swiglu, parallel="tp8r0", bias=True, tokens=257),
        Cell(**unclamped, parallel="tp8r0", gu_itlv="0"),
        # SwiGLU, with and without a limit, on both sides of the bound.
        Cell(**swiglu, tokens=255),
        Cell(**swiglu),
        Cell(**unclamped, tokens=255),
        Cell(**unclamped),
        Cell(**unclamped, gu_itlv="0"),
        Cell(**swiglu, change="set GU_ITLV=0", tokens=255),
        Cell(activation="swiglu_limit3", **mixed, tokens=255),
        # Other activations.
        Cell(activation="silu"),
        Cell(activation="silu", **a8w4_silu),
        Cell(activation="silu_limit2", **a8w4_silu),
        Cell(activation="gelu", gu_itlv="0", setting="FLYDSL_FORCE=0,KSPLIT=1"),
        # Other machines.
        Cell(arch="gfx942"),
        Cell(arch="gfx1250"),
        Cell(arch="gfx1250", activation="silu", setting="FORCE_A8W4=1"),
        Cell(aiter="0.1.14"),
        Cell(**swiglu, aiter="0.1.12", tokens=255),
        # Weights that come again.
        Cell(change="process again"),
        Cell(a8w4="1", change="update from disk"),
        Cell(a8w4="1", change="update from tensors"),
        Cell(**swiglu, change="process again", tokens=255),
        Cell(**swiglu, change="update from disk", tokens=255),
        Cell(**swiglu, change="update from tensors", tokens=255),
        Cell(change="broken update from disk"),
        Cell(**swiglu, change="broken update from disk", tokens=255),
        Cell(a8w4="1", change="broken update from tensors"),
        Cell(**swiglu, change="broken update from tensors", tokens=255),
        Cell(a8w4="1", change="update from tensors in two steps"),
        Cell(**swiglu, change="update from tensors in two steps", tokens=255),
        Cell(a8w4="1", change="broken update from tensors in two steps"),
        Cell(**swiglu, change="broken update from tensors in two steps", tokens=255),
        Cell(a8w4="1", change="update from tensors after a broken one"),
        Cell(**swiglu, change="update from tensors after a broken one", tokens=255),
        # Weights that come again after a flag has changed.
        Cell(change="set A8W4=1", then="update from disk"),
        Cell(a8w4="1", change="set A4W4=1", then="update from tensors"),
        Cell(**swiglu, change="set GU_ITLV=0", then="update from tensors", tokens=255),
        Cell(**swiglu, change="set A8W4=1", then="update from disk", tokens=255),
        # SGLang's routing.
        Cell(a8w4="1", routing="softmax"),
        Cell(a8w4="1", routing="fp32 bias"),
        Cell(a8w4="1", routing="fp32 bias and logits"),
        Cell(a8w4="1", routing="bf16 bias, fp32 logits"),
        Cell(a8w4="1", routing="bf16 bias, fp32 logits", change=BIAS_UPDATE),
    )


@dataclass(frozen=True)
class Control:
    """One patch.

    Attributes:
        breaks: whether a cell, whose class with every patch is given, has another one without this patch.
        becomes: the classes that such cells may have.
    """

    breaks: Callable[[Cell, Class], bool]
    becomes: frozenset[Class]


def _none(cell: Cell, whole: Class) -> bool:
    return False


_HALF_WAY = "broken update from tensors in two steps"


def _changed_mode(cell: Cell) -> bool:
    """SiTUv2 layers whose mode is another one since the load."""
    return cell.activation == "situv2" and cell.change in ("set A8W4=1", "unset A8W4")


def _called_without_a_look(cell: Cell, whole: Class) -> bool:
    """What is right, what has to refuse since its update was broken off, and what is refused before its change is."""
    return whole is Class.RIGHT or cell.change == _HALF_WAY or _changed_mode(cell)


def _decided_by_the_plan(cell: Cell, whole: Class) -> bool:
    """Everything but what SGLang's own branch gets right once the w13 selector is patched."""
    unclean = bool({cell.a8w4, cell.a4w4} - {None, "0", "1"})
    changed = cell.change not in ("nothing",) and cell != Cell(a4w4="1", change="set GU_ITLV=0")
    masked = cell.parallel.startswith("ep") and cell.a8w4 != "1"
    unclamped = cell.activation == "swiglu_unclamped"
    unclamped = unclamped and not (cell.gu_itlv == "0" and cell.parallel == "tp1")
    other = cell.activation in ("silu", "silu_limit2", "gelu", "swiglu_limit3")
    machine = cell.arch == "gfx1250" or cell.aiter in ("0.1.12", "0.1.14")
    return unclean or changed or masked or unclamped or other or machine


def _decided_at_the_call(cell: Cell, whole: Class) -> bool:
    """What needs the plan in the call: gate_mode without a limit, gfx1250, and what changed after the load."""
    return _sent_by_the_plan(cell, whole) or cell.change == _HALF_WAY


def _sent_by_the_plan(cell: Cell, whole: Class) -> bool:
    """The same without a look at whether the weights are valid."""
    unlimited = cell.activation == "swiglu_unclamped" or (
        cell.activation == "silu" and cell.setting == "FP8_BOUND=0"
    )
    changed = _changed_mode(cell) or (
        cell.activation == "swiglu" and cell.change == "set GU_ITLV=0"
    )
    return unlimited or changed or cell.arch == "gfx1250"


def _changed_by(*changes: str) -> Callable[[Cell, Class], bool]:
    return lambda cell, whole: cell.change in changes


_NOTHING = Control(_none, frozenset())
_ANY = frozenset(Class)
CONTROLS: dict[str, Control] = {
    "MXFP4 plan and sizes": Control(_decided_by_the_plan, _ANY - {Class.REFUSED}),
    "MXFP4 weight layout": Control(
        _called_without_a_look, frozenset({Class.REFUSED_LATE, Class.REFUSED, Class.CRASHED})
    ),
    "MXFP4 call": Control(_decided_at_the_call, frozenset({Class.SILENT_WRONG, Class.CRASHED})),
    "AITER runner": Control(
        _sent_by_the_plan, frozenset({Class.SILENT_WRONG, Class.CRASHED, Class.REFUSED_LATE})
    ),
    "MXFP4 weights in update_weights_from_disk": Control(
        _changed_by("broken update from disk"), frozenset({Class.SILENT_WRONG})
    ),
    "MXFP4 weights in update_weights_from_tensor": Control(
        _changed_by("broken update from tensors", _HALF_WAY), frozenset({Class.SILENT_WRONG})
    ),
    "MXFP4 weights in begin_weight_update": Control(
        _changed_by(_HALF_WAY), frozenset({Class.SILENT_WRONG})
    ),
    "MXFP4 weights in end_weight_update": Control(
        _changed_by("update from tensors after a broken one"), frozenset({Class.REFUSED})
    ),
    "correction bias in the wider dtype": Control(
        lambda cell, whole: cell.routing == "fp32 bias", frozenset({Class.SILENT_WRONG})
    ),
    "correction bias cache": Control(_changed_by(BIAS_UPDATE), frozenset({Class.SILENT_WRONG})),
    # Behind another patch (BEHIND): layers with a plan do not need these.
    "w13 layout selector": _NOTHING,
    "MXFP4 activation": _NOTHING,
}


def _left_to_the_selector(cell: Cell, whole: Class) -> bool:
    """SiTUv2 in A16W4 where SGLang can load it."""
    a16w4 = cell.activation == "situv2" and "1" not in (cell.a8w4, cell.a4w4)
    unmasked = cell.change in ("nothing", "set A8W4=1") and not cell.parallel.startswith("ep")
    loaded_once = unmasked and cell.then == "nothing"
    return a16w4 and loaded_once and cell.arch != "gfx1250" and cell.aiter == "0.1.20"


def _left_to_the_runner(cell: Cell, whole: Class) -> bool:
    """What SGLang calls SwiGLU although it is not, and what it calls separated and is."""
    if cell.activation == "swiglu_unclamped":
        return cell.gu_itlv == "0"
    other = cell.activation in ("silu", "silu_limit2", "gelu")
    return other and not _decided_at_the_call(cell, whole)


#: Patch -> the one that makes it unnecessary, and the cells that change when both are left out and not only that one.
BEHIND: dict[str, tuple[str, Callable[[Cell, Class], bool]]] = {
    "w13 layout selector": ("MXFP4 plan and sizes", _left_to_the_selector),
    "MXFP4 activation": ("MXFP4 call", _left_to_the_runner),
}


def _right_after(change: str) -> Callable[[Cell, Class], bool]:
    return lambda cell, whole: whole is Class.RIGHT and change in cell.update


#: The gpt-oss cells in two releases before 0.5.17, whose updates are in two places. Without the second the next call
#: is refused, as SGLang lays nothing out again there.
GPT_OSS_CONTROLS: dict[str, dict[str, Control]] = {
    release: {
        f"MXFP4 weights in {place}update_weights_from_disk": Control(
            _changed_by("broken update from disk"), frozenset({Class.SILENT_WRONG})
        ),
        f"MXFP4 weights in {place}update_weights_from_tensor": Control(
            _right_after("update from tensors"), frozenset({Class.REFUSED})
        ),
    }
    for release, place in (("0.5.13", "ModelRunner."), ("0.5.16", ""))
}

_UPDATES = "model_executor/test_weight_updater.py"
_OLD = "../e2e/test_matrix.py"
_ROUTING = "../e2e/test_routing.py"
_BIAS = "layers/moe/test_topk_correction_bias_cache.py"
_FLASHINFER = "../e2e/test_no_op.py"
_PROBE = "../e2e/test_patch_probe.py"
#: Patches of what no cell does (another way to update, routing, NVIDIA's kernels), and the test of each, below
#: ``test/registered/unit``.
OUTSIDE = {
    "self-check before the first MoE layer": "test_plugin.py",
    "MXFP4 weights in update_weights_from_ipc": _UPDATES,
    "MXFP4 weights in update_weights_from_distributed": _UPDATES,
    "MXFP4 weights in receive_weights_from_distributed": _UPDATES,
    "MXFP4 weights in load_weights_from_distributed": _UPDATES,
    "MXFP4 weights in ModelRunner.update_weights_from_disk": _OLD,
    "MXFP4 weights in ModelRunner.update_weights_from_tensor": _OLD,
    "MXFP4 weights in ModelRunner.update_weights_from_ipc": _UPDATES,
    "MXFP4 weights in ModelRunner.update_weights_from_distributed": _UPDATES,
    "raw form before a weight update": _PROBE,
    "gate_mode and plan of a call": _PROBE,
    "AITER quant type": _PROBE,
    "output buffer of a call": "patches/test_glue.py",
    "owner of a correction bias's copies": _BIAS,
    "correction bias after update_weights_from_disk": _ROUTING,
    "correction bias after update_weights_from_distributed": _ROUTING,
    "correction bias after update_weights_from_tensor": _ROUTING,
    "correction bias after update_weights_from_ipc": _ROUTING,
    "correction bias after resume_memory_occupation": _ROUTING,
    "correction bias after check_weights": _ROUTING,
    "correction bias after end_weight_update": _ROUTING,
    "correction bias after update_expert_location_with_recovery": _ROUTING,
    "published output of FlashInfer's MXFP4 kernel": _FLASHINFER,
    "published output of FlashInfer's MXFP4 runner": _FLASHINFER,
    "fused routing: biased_grouped_topk_gpu": _ROUTING,
    "fused routing: biased_topk_jit_kernel_impl": _ROUTING,
    "SiTUv2 routing bias of FlashInfer's MXFP4 kernel in the wider dtype": _FLASHINFER,
    "SiTUv2 routing bias of FlashInfer's MXFP4 runner in the wider dtype": _FLASHINFER,
    "portable routing: _use_aiter": _ROUTING,
    "portable routing: aiter_biased_grouped_topk": _ROUTING,
    "portable routing: aiter_fused_topk": _ROUTING,
}


def leave_outs() -> list[str | None]:
    """What :func:`~..matrix.run.run_without` leaves out, one after another."""
    return [None, *CONTROLS, *(f"{front} + {name}" for name, (front, _) in BEHIND.items())]


def shown(results: Mapping[str | None, Results]) -> dict[str, Any]:
    """How many cells each patch shows, and their classes without it, for ``docs/matrix_controls.json``."""

    def changed(before: str | None, after: str) -> dict[str, Any]:
        one, other = results[before].classes(), results[after].classes()
        classes = [other[cell] for cell in one if other[cell] is not one[cell]]
        return {"cells": len(classes), "become": sorted({kind.value for kind in classes})}

    return {
        "release": results[None].side.release,
        "cells": len(results[None].outcomes),
        "patches": {name: changed(None, name) for name in CONTROLS},
        "behind": {
            name: {"front": front, **changed(front, f"{front} + {name}")}
            for name, (front, _) in BEHIND.items()
        },
    }


def main(path: Path) -> None:
    release = "0.5.23"
    results = run_without(control_cells(), Side(release, True), sglang_of(release), leave_outs())
    path.write_text(json.dumps(shown(results), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
