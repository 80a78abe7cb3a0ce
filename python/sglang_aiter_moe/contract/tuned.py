"""Which shapes AITER ships tuned rows for: enough of its tables to tell hits, misses and traps.

A row is looked up by (arch, CUs, padded tokens, H, I, E, top-k, activation, activation type); on a
miss, AITER looks again and *ignores the activation*. Neither gate_mode, pads nor the limit are part of
the key. Source: docs/contract.md sections b.2, b.4 and f; AITER's ``model_configs/*_tuned_fmoe.csv``.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.modes import ActivationMode
from sglang_aiter_moe.numerics.activations import Activation

#: Padded token counts above which AITER has only these two.
LARGE_TIERS = (32768, 131072)
_POWERS = frozenset(1 << n for n in range(16))  # 1 .. 32768


@dataclass(frozen=True)
class TunedShapes:
    """The rows of one of AITER's tables that share a kernel family.

    Attributes:
        table: AITER's file, without ``_tuned_fmoe.csv``.
        activation, mode: part of the key.
        hidden: H, as padded.
        intermediate: values of I, as padded; None: all.
        experts: pairs (E, top-k); a top-k of None stands for any.
        family: name of the kernel family (``families.FAMILIES``).
        tokens: padded token counts with a row.
        since: the capability that AITER needs to have them.
        drops_bias: stage 2 is the layout kernel, which drops bias2, or is not known to add it.
    """

    table: str
    activation: Activation
    mode: ActivationMode
    hidden: int
    intermediate: tuple[int, ...] | None
    experts: tuple[tuple[int, int | None], ...]
    family: str
    tokens: frozenset[int] = _POWERS
    since: str = "swiglu_limit"
    drops_bias: bool = False

    def matches(self, hidden: int, intermediate: int, experts: int, topk: int) -> bool:
        """Whether the shape is one of these, whatever its activation and token count."""
        return (
            hidden == self.hidden
            and (self.intermediate is None or intermediate in self.intermediate)
            and any(e == experts and k in (None, topk) for e, k in self.experts)
        )


_A16, _A8, _A4 = ActivationMode.A16W4, ActivationMode.A8W4, ActivationMode.A4W4
_K3 = ((896, 16),)
_GPTOSS = ((128, 4),)

TUNED = (
    TunedShapes(
        "kimik3_fp4",
        Activation.SITUV2,
        _A16,
        3584,
        (384, 512),
        _K3,
        "flydsl_a16w4",
        tokens=_POWERS - {32768},
        since="situv2",
    ),
    TunedShapes(
        "kimik3_a8w4",
        Activation.SITUV2,
        _A8,
        3584,
        (384, 512),
        _K3,
        "flydsl_a8w4",
        since="situv2",
        drops_bias=True,
    ),
    TunedShapes(
        "kimik3_a4w4",
        Activation.SITUV2,
        _A4,
        3584,
        (384,),
        _K3,
        "flydsl_a4w4",
        since="situv2_a4w4",
        drops_bias=True,
    ),
    TunedShapes(
        "gptoss_a16w4",
        Activation.SWIGLU,
        _A16,
        3072,
        (512, 1536, 3072),
        _GPTOSS,
        "cktile",
        tokens=frozenset(1 << n for n in range(9)),
    ),
    TunedShapes(
        "gptoss_fp4", Activation.SWIGLU, _A4, 3072, (512, 1536, 3072), _GPTOSS, "flydsl_a4w4"
    ),
    TunedShapes("gptoss_fp8fp4", Activation.SWIGLU, _A8, 3072, (3072,), _GPTOSS, "flydsl_a8w4"),
    TunedShapes(
        "dsv4_fp8fp4",
        Activation.SILU,
        _A8,
        7168,
        (256, 384, 512, 768, 1536),
        ((384, 6), (385, 7), (48, 6)),
        "flydsl_a8w4",
        drops_bias=True,
    ),
    TunedShapes(
        "dsv4_fp8fp4",
        Activation.SILU,
        _A8,
        4096,
        (256,),
        ((256, 6),),
        "flydsl_a8w4",
        drops_bias=True,
    ),
    TunedShapes(
        "minimax_m3_fp4",
        Activation.SWIGLU,
        _A4,
        6144,
        (384, 768),
        ((129, 5),),
        "flydsl_a4w4",
        since="mxmoe",
        drops_bias=True,
    ),
    # Rows whose kernels know SiLU alone. Their exact I and top-k are not all known here: any that
    # shares H and E is taken for one of them, because the penalty of a miss is a silent SiLU.
    TunedShapes(
        "qwen3_5_397b_fp4",
        Activation.SILU,
        _A4,
        4096,
        None,
        ((512, None), (513, None)),
        "silu_tuned",
    ),
    TunedShapes(
        "kimik2_fp4", Activation.SILU, _A4, 7168, None, ((384, None), (385, None)), "silu_tuned"
    ),
    TunedShapes("glm5_fp4", Activation.SILU, _A4, 6144, None, ((257, None),), "silu_tuned"),
)


@dataclass(frozen=True)
class Lookup:
    """What AITER's table gives for one key.

    Attributes:
        row: the row's group, None for a miss.
        exact: whether the row is of the layer's own activation.
        reason: one sentence.
    """

    row: TunedShapes | None
    exact: bool
    reason: str


def padded_tokens(tokens: int) -> int:
    """The token count in AITER's key: the next power of two, from 32768 on one of two tiers."""
    if tokens >= LARGE_TIERS[1]:
        return LARGE_TIERS[1]
    if tokens >= LARGE_TIERS[0]:
        return LARGE_TIERS[0]
    return 1 << max(0, tokens - 1).bit_length()


def tier_starts() -> tuple[int, ...]:
    """The smallest token count of each key."""
    return (1, 2, *(1 + (1 << n) for n in range(1, 15)), LARGE_TIERS[1])


def lookup(
    activation: Activation,
    mode: ActivationMode,
    hidden: int,
    intermediate: int,
    experts: int,
    topk: int,
    tokens: int,
    capabilities: Capabilities,
) -> Lookup:
    """What AITER finds for a layer (sizes as padded) and a token count, on gfx950 with 256 CUs."""
    key = padded_tokens(tokens)
    known = [
        row
        for row in TUNED
        if row.mode is mode
        and row.matches(hidden, intermediate, experts, topk)
        and capabilities.has(row.since)
    ]
    found = [row for row in known if key in row.tokens or _smaller_tier(key, row)]
    for row in found:
        if row.activation is activation:
            return Lookup(row, True, f"{row.table} has rows for it")
    if found:
        row = found[0]
        return Lookup(
            row,
            False,
            f"{row.table} has {row.activation} rows of this shape, and AITER's second lookup ignores "
            "the activation",
        )
    if known:
        return Lookup(None, False, f"{known[0].table} has this shape, but not these token counts")
    others = sorted(
        {
            i
            for row in TUNED
            if row.mode is mode and row.activation is activation and row.intermediate
            for i in row.intermediate
            if row.matches(hidden, i, experts, topk)
        }
    )
    if others:
        sizes = ", ".join(map(str, others))
        return Lookup(None, False, f"rows exist for I of {sizes}, not {intermediate}")
    return Lookup(None, False, f"no table has H={hidden} I={intermediate} E={experts} top-{topk}")


def tables_with(
    activation: Activation,
    mode: ActivationMode,
    hidden: int,
    intermediate: int,
    experts: int,
    topk: int,
) -> str:
    """The tables with rows of this activation, mode and shape, joined; empty for none."""
    tables = [
        row.table
        for row in TUNED
        if row.activation is activation
        and row.mode is mode
        and row.matches(hidden, intermediate, experts, topk)
    ]
    return ", ".join(tables)


def has_rows(activation: Activation, hidden: int, intermediate: int) -> bool:
    """Whether some table has this activation and these sizes, for any mode and expert count."""
    return any(
        row.activation is activation
        and row.hidden == hidden
        and row.intermediate is not None
        and intermediate in row.intermediate
        for row in TUNED
    )


def _smaller_tier(key: int, row: TunedShapes) -> bool:
    return key == LARGE_TIERS[1] and LARGE_TIERS[0] in row.tokens
