"""Which cells of the matrix each patch is for: what has to show when it alone is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.matrix.classes import Class


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


CONTROLS: dict[str, Control] = {}
