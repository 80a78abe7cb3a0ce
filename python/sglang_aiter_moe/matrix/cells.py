"""The cells: what is combined with what, and which part of it a run takes.

An axis is a field of :class:`Cell`. :func:`full` is the union of blocks, each a product of some axes with the
others at their usual value; :func:`covering` is a part of it in which every pair of values that occurs together
in the whole still does.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace

#: How people spell a flag; None: not set. AITER takes exactly "1", SGLang true or 1 in any case.
SPELLINGS = (None, "", "0", "1", "true", "True", "yes", "on", " 1", "01", "junk")
#: Releases and commits whose rules differ: before gate_mode, its first form, and each change since.
AITER = ("0.1.12", "0.1.14", "0.1.19", "0.1.19.post1", "6dc26b7a8", "0.1.20")
ARCHES = ("gfx942", "gfx950", "gfx1250")
#: Both sides of AITER's bound of 256; 2 is few enough for a split K.
TOKENS = (2, 255, 256, 257)
#: Both sides of the bound that FP8_BOUND=512 sets.
TOKENS_AT_512 = (511, 512, 513)
ACTIVATIONS = (
    "situv2",
    "swiglu",
    "swiglu_unclamped",
    "swiglu_limit3",
    "silu",
    "silu_limit2",
    "gelu",
)
ROWS = ("halves", "interleaved")
#: One rank of so many; r: which.
PARALLEL = ("tp1", "tp2r1", "tp4r0", "tp4r3", "tp8r0", "tp8r7", "ep2r0", "ep2r1")
#: Further variables, by a short name.
SETTINGS: dict[str, dict[str, str]] = {
    "usual": {},
    "K3_OPT=1": {"SGLANG_AITER_K3_OPT": "1"},
    "FP8_BOUND=0": {"AITER_BF16_FP8_MOE_BOUND": "0"},
    "FP8_BOUND=512": {"AITER_BF16_FP8_MOE_BOUND": "512"},
    "FP8_BOUND=many": {"AITER_BF16_FP8_MOE_BOUND": "many"},
    "BF16_BOUND=0": {"GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0"},
    "FLYDSL_FORCE=0": {"AITER_FLYDSL_FORCE": "0"},
    "FLYDSL_FORCE=0,KSPLIT=1": {"AITER_FLYDSL_FORCE": "0", "AITER_KSPLIT": "1"},
    "FORCE_A8W4=empty": {"AITER_FORCE_A8W4": ""},
    "FORCE_A8W4=1": {"AITER_FORCE_A8W4": "1"},
    "FORCE_A8W4=true": {"AITER_FORCE_A8W4": "true"},
    "A16W4_KERNEL": {"SGLANG_AITER_MOE_A16W4_KERNEL": "gu_interleaved"},
}
#: The server has answered, and then the router's correction bias alone is updated.
BIAS_UPDATE = "correction bias update"
#: What happens between the load and the call. A change of variables: (name, value or None).
CHANGES: dict[str, tuple[str, str | None] | None] = {
    "nothing": None,
    "set A8W4=1": ("AITER_SITUV2_A8W4", "1"),
    "unset A8W4": ("AITER_SITUV2_A8W4", None),
    "set A4W4=1": ("AITER_SITUV2_A4W4", "1"),
    "unset A4W4": ("AITER_SITUV2_A4W4", None),
    "set GU_ITLV=0": ("SGLANG_USE_AITER_MOE_GU_ITLV", "0"),
    "set GU_ITLV=1": ("SGLANG_USE_AITER_MOE_GU_ITLV", "1"),
    "set FP8_BOUND=1": ("AITER_BF16_FP8_MOE_BOUND", "1"),
    "process again": None,
    "update from disk": None,
    "update from tensors": None,
    "broken update from disk": None,
    "broken update from tensors": None,
    "update from tensors in two steps": None,
    "broken update from tensors in two steps": None,
    "update from tensors after a broken one": None,
    BIAS_UPDATE: None,
}
#: What happens after a changed variable: a server that trains on, or that somebody repairs by a reload.
THEN = ("nothing", "update from disk", "update from tensors")
#: Where the experts of a token come from: given, or SGLang's routing, by the dtypes of its logits and of its
#: correction bias (``matrix/routing.py``).
ROUTINGS = (
    "given",
    "softmax",
    "bf16 bias",
    "bf16 bias, fp32 logits",
    "fp32 bias",
    "fp32 bias and logits",
)


@dataclass(frozen=True, order=True)
class Cell:
    """One combination.

    Attributes:
        activation: one of ACTIVATIONS.
        rows: how the checkpoint orders w13's rows: gate half and up half (Kimi K3, one tensor for each expert)
            or gate and up in turn (gpt-oss, one tensor for all).
        a8w4, a4w4, gu_itlv: raw values of AITER_SITUV2_A8W4, AITER_SITUV2_A4W4 and
            SGLANG_USE_AITER_MOE_GU_ITLV; None: not set.
        setting: a key of SETTINGS.
        arch, aiter: the machine.
        tokens: M of the call; one of TOKENS or TOKENS_AT_512.
        parallel: one of PARALLEL.
        bias: the experts have biases.
        change: a key of CHANGES.
        then: one of THEN, after a change of a variable.
        routing: one of ROUTINGS.
    """

    activation: str = "situv2"
    rows: str = "halves"
    a8w4: str | None = None
    a4w4: str | None = None
    gu_itlv: str | None = None
    setting: str = "usual"
    arch: str = "gfx950"
    aiter: str = "0.1.20"
    tokens: int = 257
    parallel: str = "tp1"
    bias: bool = False
    change: str = "nothing"
    then: str = "nothing"
    routing: str = "given"

    @property
    def name(self) -> str:
        """Unique, and short where the usual value is taken."""
        parts = [self.activation, self.rows, self.arch, self.aiter, f"m{self.tokens}"]
        parts += [
            f"{flag}={value!r}"
            for flag, value in (("A8W4", self.a8w4), ("A4W4", self.a4w4), ("GU_ITLV", self.gu_itlv))
            if value is not None
        ]
        usual = Cell()
        parts += [
            v for v in (self.setting, self.parallel) if v not in (usual.setting, usual.parallel)
        ]
        parts += ["bias"] if self.bias else []
        parts += [self.change] if self.change != usual.change else []
        parts += [f"then {self.then}"] if self.then != usual.then else []
        parts += [f"routed, {self.routing}"] if self.routing != usual.routing else []
        return "/".join(parts)

    @property
    def environment(self) -> dict[str, str]:
        """The variables when the process starts."""
        values = {
            "AITER_SITUV2_A8W4": self.a8w4,
            "AITER_SITUV2_A4W4": self.a4w4,
            "SGLANG_USE_AITER_MOE_GU_ITLV": self.gu_itlv,
        }
        return {k: v for k, v in values.items() if v is not None} | SETTINGS[self.setting]

    @property
    def update(self) -> str:
        """How weights are updated between the load and the call; "" if they are not."""
        return next((step for step in (self.change, self.then) if "update" in step), "")


AXES = tuple(f.name for f in fields(Cell))


def _product(**axes: Iterable) -> Iterator[Cell]:
    for values in itertools.product(*axes.values()):
        yield replace(Cell(), **dict(zip(axes, values, strict=True)))


def _flags() -> Iterator[tuple[str | None, str | None]]:
    yield from ((value, None) for value in SPELLINGS)
    yield from ((None, value) for value in SPELLINGS[1:])
    yield from (("1", "1"), ("true", "1"), ("1", "true"), ("0", "1"), ("1", "0"), ("0", "0"))


def _blocks() -> Iterator[Cell]:
    situ = {"activation": ("situv2",)}
    other = {"activation": ACTIVATIONS[1:]}
    machines = {"arch": ARCHES, "aiter": AITER}
    newest = {"aiter": ("0.1.14", "0.1.20")}
    # Every spelling of the SiTUv2 flags, on every machine.
    for cell in _product(**situ, rows=ROWS, **machines, tokens=(2, 257)):
        for a8w4, a4w4 in _flags():
            yield replace(cell, a8w4=a8w4, a4w4=a4w4)
    # The other activations, by what they say of their layout.
    yield from _product(**other, rows=ROWS, gu_itlv=(None, "0", "1"), **machines, tokens=TOKENS)
    yield from _product(
        activation=ACTIVATIONS, rows=ROWS, gu_itlv=SPELLINGS, tokens=(255, 256), aiter=("0.1.20",)
    )
    # Further variables.
    yield from _product(
        **other,
        rows=ROWS,
        setting=tuple(SETTINGS),
        gu_itlv=(None, "0", "1"),
        tokens=TOKENS,
        **newest,
    )
    yield from _product(
        activation=ACTIVATIONS,
        rows=ROWS,
        setting=("FP8_BOUND=512",),
        gu_itlv=(None, "0", "1"),
        tokens=TOKENS_AT_512,
    )
    yield from _product(
        **situ, rows=ROWS, setting=tuple(SETTINGS), a8w4=(None, "1"), a4w4=(None, "1"), arch=ARCHES
    )
    yield from _product(
        activation=ACTIVATIONS, rows=ROWS, arch=("gfx1250",), setting=tuple(SETTINGS)
    )
    # Ranks: sizes that need padding, shares that differ, expert masks.
    yield from _product(
        **situ,
        rows=ROWS,
        parallel=PARALLEL,
        a8w4=(None, "1"),
        a4w4=(None, "1"),
        setting=("usual", "K3_OPT=1"),
        tokens=(2, 257),
        aiter=("0.1.19.post1", "0.1.20"),
    )
    yield from _product(
        **other, rows=ROWS, parallel=PARALLEL, gu_itlv=(None, "0", "1"), tokens=TOKENS, **newest
    )
    yield from _product(
        activation=ACTIVATIONS, rows=ROWS, parallel=PARALLEL, arch=("gfx942", "gfx1250")
    )
    # Biases, which only gpt-oss's format carries.
    yield from _product(
        activation=ACTIVATIONS,
        rows=("interleaved",),
        bias=(True,),
        gu_itlv=(None, "0", "1"),
        parallel=PARALLEL,
        tokens=TOKENS,
    )
    yield from _product(
        activation=ACTIVATIONS, rows=("interleaved",), bias=(True,), **machines, tokens=(2, 257)
    )
    yield from _product(
        **situ, rows=("interleaved",), bias=(True,), a8w4=(None, "1"), a4w4=(None, "1")
    )
    # Changes after the load.
    yield from _product(
        **situ,
        rows=ROWS,
        change=tuple(CHANGES),
        a8w4=(None, "1"),
        a4w4=(None, "1"),
        aiter=("0.1.19", "0.1.20"),
        parallel=("tp1", "tp8r0", "ep2r1"),
    )
    yield from _product(
        **other, rows=ROWS, change=tuple(CHANGES), gu_itlv=(None, "0"), tokens=TOKENS[1:3]
    )
    yield from _product(
        activation=("swiglu",), rows=("interleaved",), bias=(True,), change=tuple(CHANGES),
        gu_itlv=(None, "0"), parallel=("tp1", "tp8r7"), tokens=(255,),
    )  # fmt: skip
    # Routing by SGLang, as Kimi K3 (SiTUv2) and MiniMax-M3 (SwiGLU) do with a correction bias.
    routed = {
        "routing": ROUTINGS[1:],
        "change": ("nothing", "update from disk", "update from tensors", BIAS_UPDATE),
        "parallel": ("tp1", "ep2r1"),
        "aiter": ("0.1.19", "0.1.20"),
        "tokens": (2, 257),
    }
    yield from _product(**situ, a8w4=(None, "1"), **routed)
    yield from _product(activation=("swiglu",), gu_itlv=(None, "0"), **routed)
    # A flag that changes, and weights that come again: Kimi K3's layers and gpt-oss's.
    crossed = {
        "change": tuple(name for name, change in CHANGES.items() if change is not None),
        "then": THEN[1:],
        "gu_itlv": (None, "0", "1"),
    }
    served = ("gfx950", "gfx1250")  # on gfx942 few of these layers load
    yield from _product(**situ, a8w4=(None, "1"), a4w4=(None, "1"), arch=served, **crossed)
    gpt_oss = {"activation": ("swiglu",), "rows": ("interleaved",), **crossed}
    yield from _product(**gpt_oss, arch=served, tokens=(255, 257))
    yield from _product(**gpt_oss, bias=(True,), parallel=("tp8r7",), tokens=(255,))


@functools.cache
def full() -> tuple[Cell, ...]:
    """Every cell, without repetition, in an order that does not depend on anything."""
    return tuple(dict.fromkeys(cell for cell in _blocks() if _makes_sense(cell)))


def _makes_sense(cell: Cell) -> bool:
    """A change has to change something."""
    if cell.change == BIAS_UPDATE:
        return cell.routing.startswith(("bf16", "fp32"))
    change = CHANGES[cell.change]
    if change is None:
        return True
    name, value = change
    return cell.environment.get(name) != value


@functools.cache
def default() -> tuple[Cell, ...]:
    """Every pair of values, and one in seventeen of the rest, chosen by name."""
    chosen = set(covering())
    return tuple(cell for cell in full() if cell in chosen or _digest(cell) % 17 == 0)


@functools.cache
def covering(strength: int = 2) -> tuple[Cell, ...]:
    """A part of :func:`full` with every ``strength`` values of different axes that occur together in it."""
    cells = sorted(full(), key=_digest)
    wanted = {group for cell in cells for group in groups(cell, strength)}
    chosen = []
    for least in (
        24,
        12,
        8,
        6,
        4,
        3,
        2,
        1,
    ):  # greedy, in rounds: the cells that add most come first
        for cell in cells:
            new = wanted.intersection(groups(cell, strength))
            if len(new) >= least:
                wanted -= new
                chosen.append(cell)
    kept = set(chosen)
    return tuple(cell for cell in full() if cell in kept)


@functools.cache
def gpt_oss() -> tuple[Cell, ...]:
    """Those of :func:`covering` with gpt-oss's format and activation: what is planned before SGLang 0.5.17."""
    return tuple(
        cell
        for cell in covering()
        if cell.rows == "interleaved" and cell.activation.startswith("swiglu")
    )


def groups(cell: Cell, strength: int) -> list[tuple]:
    """Every choice of ``strength`` axes with the cell's values."""
    return list(itertools.combinations(zip(AXES, astuple(cell), strict=True), strength))


def part(cells: tuple[Cell, ...], number: int, parts: int) -> tuple[Cell, ...]:
    """Every ``parts``-th cell, from the ``number``-th on; ``number`` counts from 1."""
    return cells[number - 1 :: parts]


def _digest(cell: Cell) -> int:
    return int.from_bytes(hashlib.sha256(cell.name.encode()).digest()[:8])


SETS = {"gpt-oss": gpt_oss, "covering": covering, "default": default, "full": full}
