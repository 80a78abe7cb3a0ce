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
        sure: whether these rows are known to be there; if not, they may be.
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
    sure: bool = True

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
    TunedShapes(
        "qwen3_5_397b_fp4",
        Activation.SILU,
        _A4,
        4096,
        (256, 512),
        ((512, 10), (513, 11)),
        "silu_tuned",
    ),
    # More rows whose kernels know SiLU alone. Their exact I and top-k are not all known here: any layer
    # that shares H and E may meet one, and the price of a wrong guess is a silent SiLU.
    TunedShapes(
        "qwen3_5_397b_fp4",
        Activation.SILU,
        _A4,
        4096,
        None,
        ((512, None), (513, None)),
        "silu_tuned",
        sure=False,
    ),
    TunedShapes(
        "kimik2_fp4",
        Activation.SILU,
        _A4,
        7168,
        None,
        ((384, None), (385, None)),
        "silu_tuned",
        sure=False,
    ),
    TunedShapes(
        "glm5_fp4", Activation.SILU, _A4, 6144, None, ((257, None),), "silu_tuned", sure=False
    ),
)


@dataclass(frozen=True)
class Lookup:
    """What AITER's tables may give for one key.

    Attributes:
        rows: the groups of rows that it may find, none for a miss.
        reason: one sentence.
    """

    rows: tuple[TunedShapes, ...]
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
    shape: tuple[int, int, int],
    topks: tuple[int, ...],
    tokens: int,
    capabilities: Capabilities,
) -> Lookup:
    """What AITER may find for a layer and a token count, on gfx950 with 256 CUs.

    Args:
        activation, mode: the layer's.
        shape: (H, I, E), as padded.
        topks: top-k, and top-k less one where an expert mask is passed: AITER takes one off then,
            for the masked slot that it expects callers to add.
        tokens: M.
        capabilities: of the AITER.
    """
    key = padded_tokens(tokens)
    known = [
        row
        for row in TUNED
        if row.mode is mode
        and any(row.matches(*shape, topk) for topk in topks)
        and capabilities.has(row.since)
    ]
    found = [row for row in known if key in row.tokens or _smaller_tier(key, row)]
    own = tuple(row for row in found if row.activation is activation)
    if own:
        return Lookup(own, f"{own[0].table} {'has' if own[0].sure else 'may have'} rows for it")
    if found:
        first = found[0]
        return Lookup(
            tuple(found),
            f"{first.table} has {first.activation} rows of this shape, and AITER's second lookup "
            "ignores the activation",
        )
    if known:
        return Lookup((), f"{known[0].table} has this shape, but not these token counts")
    return Lookup((), _why_none(activation, mode, shape, topks))


def _why_none(
    activation: Activation,
    mode: ActivationMode,
    shape: tuple[int, int, int],
    topks: tuple[int, ...],
) -> str:
    hidden, intermediate, experts = shape
    others = {
        i
        for row in TUNED
        if row.mode is mode and row.activation is activation and row.intermediate
        for i in row.intermediate
        if any(row.matches(hidden, i, experts, topk) for topk in topks)
    }
    if others:
        return f"rows exist for I of {', '.join(map(str, sorted(others)))}, not {intermediate}"
    return f"no table has H={hidden} I={intermediate} E={experts} top-{topks[0]}"


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
