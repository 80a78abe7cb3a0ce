"""The kinds of silent failure: told apart by what SGLang packed and AITER read, and where they are public."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_aiter_moe.environ import VARIABLES
from sglang_aiter_moe.matrix.cells import BIAS_UPDATE, CHANGES, Cell
from sglang_aiter_moe.matrix.one_cell import Outcome

#: Activations for which SGLang alone sends no gate_mode, whatever the variables say.
_NEVER_TOLD = ("swiglu_unclamped", "silu", "gelu")


@dataclass(frozen=True)
class Kind:
    """One kind.

    Attributes:
        key: in the JSON.
        title: for people.
        public: issues and pull requests that report it; "" where none was found.
        applies: whether a silently wrong cell is of this kind.
        near: where "public" is empty: the nearest report, and how it differs.
    """

    key: str
    title: str
    public: str
    applies: Callable[[Cell, Outcome], bool]
    near: str = ""

    @property
    def reported(self) -> str:
        """For a table: where it is public, or that nothing was found."""
        if self.public:
            return self.public
        return f"none found; nearest: {self.near}" if self.near else "none found"


def _changed_variable(cell: Cell, outcome: Outcome) -> bool:
    change = CHANGES[cell.change]
    if change is None or "layout" not in outcome.why:
        return False
    situ = cell.activation == "situv2"
    return change[0].startswith("AITER_SITUV2") == situ and cell.activation not in _NEVER_TOLD


def _misread(cell: Cell, outcome: Outcome) -> bool:
    """A SiTUv2 flag that is on for SGLang and off for AITER, or the other way round."""
    flags = {"AITER_SITUV2_A8W4": cell.a8w4, "AITER_SITUV2_A4W4": cell.a4w4}
    return "layout" in outcome.why and any(
        bool(VARIABLES[name].sglang_reads(value)) != bool(VARIABLES[name].aiter_reads(value))
        for name, value in flags.items()
    )


def _has(difference: str) -> Callable[[Cell, Outcome], bool]:
    return lambda cell, outcome: difference in outcome.why


#: In this order: a cell is of the first kind that applies.
KINDS = (
    Kind(
        "broken update",
        "an update that does not fit is written all the same",
        "",
        lambda cell, outcome: cell.update.startswith("broken"),
    ),
    Kind(
        "old correction bias",
        "the copy of a router's correction bias stays old after an update",
        "",
        _has("old routing"),
    ),
    Kind(
        "laid out twice",
        "weights are laid out again by a second post-processing: called directly, or at the end of an update",
        "sglang#28963",
        lambda cell, outcome: (
            cell.change == "process again"
            or cell.update == "update from disk"
            or (cell.update == BIAS_UPDATE and "packed twice" in outcome.why)
        ),
    ),
    Kind(
        "raw update",
        "an update writes raw bytes over packed ones",
        "sglang#21825",
        lambda cell, outcome: cell.update.startswith("update from tensors"),
    ),
    Kind(
        "flag changed after load",
        "layout fixed at load, mode chosen at each call",
        "",
        _changed_variable,
    ),
    Kind(
        "another activation",
        "SiLU and GELU layers run as SwiGLU-OAI",
        "",
        _has("activation"),
        "sglang#34540, the reverse (Quark's SwiGLU-OAI runs as SiLU)",
    ),
    Kind(
        "spelling",
        "a SiTUv2 flag that SGLang and AITER read differently",
        "",
        lambda cell, outcome: cell.activation == "situv2" and _misread(cell, outcome),
        "vllm#52442 (AITER's flag is on, vLLM's own for the layout is not)",
    ),
    Kind(
        "SiTUv2 layout",
        "SiTUv2 packed in a layout that its mode does not read",
        "sglang#33838",
        lambda cell, outcome: cell.activation == "situv2" and "layout" in outcome.why,
    ),
    Kind(
        "no gate_mode sent",
        "SwiGLU without a limit goes out as separated over interleaved bytes",
        "sglang#30993",
        lambda cell, outcome: cell.activation == "swiglu_unclamped" and "layout" in outcome.why,
    ),
    Kind(
        "gate_mode",
        "gate_mode says another layout than the bytes have, or AITER's gate_mode decides nothing",
        "sglang#26884, vllm#44893, aiter#5760",
        _has("layout"),
    ),
    Kind(
        "pads",
        "columns that hold weights are declared padding",
        "sglang#27201, aiter#4108",
        _has("pads"),
    ),
    Kind("bias dropped", "AITER picks a kernel that adds no bias", "aiter#4526", _has("bias")),
    Kind(
        "limit",
        "the kernel clamps with a built-in limit, or not at all",
        "aiter#4526, aiter#5502",
        _has("limit"),
    ),
    Kind("betas", "SiTUv2 with other constants than the model's", "", _has("betas")),
    Kind(
        "rounded correction bias",
        "a router's float32 correction bias is rounded to the bf16 of the logits",
        "sglang#31213, sglang#37133",
        _has("routing"),
    ),
    Kind("other", "not explained by what is recorded", "", lambda cell, outcome: True),
)
BY_KEY = {kind.key: kind for kind in KINDS}


def kind_of(cell: Cell, outcome: Outcome) -> Kind:
    """The kind of a silently wrong cell."""
    return next(kind for kind in KINDS if kind.applies(cell, outcome))
