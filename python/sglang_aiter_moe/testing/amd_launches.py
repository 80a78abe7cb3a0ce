"""Launches of a kernel of Kimi K3's sizes that can be run again, with a layer's operands and with extreme ones.

For ``amd_mutation.py``: what the unchanged kernel writes in each of them is kept.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from sglang_aiter_moe.amdgpu.launch import Device
from sglang_aiter_moe.amdgpu.placing import as_bytes
from sglang_aiter_moe.amdgpu.triton_driver import Call, scalar
from sglang_aiter_moe.testing import amd_cases
from sglang_aiter_moe.testing.packing import pack_scale
from sglang_aiter_moe.testing.triton_cases import Case
from sglang_aiter_moe.testing.triton_compile import LAYOUTS

ARCH = "gfx950"
CUT = 37
"""Bytes that the weights' scales are short of in :func:`wide`."""
ROWS = ("x_ptr", "y_ptr", "part_ptr")
"""Arguments that hold activations, in the kernel that reads them."""


@dataclass(frozen=True)
class Kept:
    """A launch that can be run again: the call, its tensors as they were before, and what it wrote."""

    arch: str
    call: Call
    fresh: frozenset[str]
    """Tensors that nothing had written before the launch."""
    written: dict[str, torch.Tensor]
    executed: dict[int, int]
    """Line of the text -> how often a wave executed it."""
    scale_layout: str = "separated"
    """Of the weights' scales."""

    @property
    def instructions(self) -> int:
        return sum(self.executed.values())


class _Keeping(Device):
    """Keeps the launches of one kernel."""

    def __init__(self, arch: str, kernel: str, **options) -> None:
        super().__init__(arch, **options)
        self.arch, self.kernel, self.kept = arch, kernel, []

    def launched(self, call: Call) -> None:
        before = dict(call.arguments)
        fresh = set()
        for name, value in call.arguments.items():
            if isinstance(value, torch.Tensor):
                before[name] = value.clone()
                if self.placing.scratch(value):
                    address = self.placing.address(value, name)
                    if not self.memory.written(address, as_bytes(value).size).any():
                        fresh.add(name)
        super().launched(call)
        if call.name == self.kernel:
            after = {n: a.clone() for n, a in call.arguments.items() if isinstance(a, torch.Tensor)}
            done = dict(self.launches[-1].statistics.lines)
            kept = dataclasses.replace(call, arguments=before)
            self.kept.append(Kept(self.arch, kept, frozenset(fresh), after, done))


def layer(mode: str, hidden: int = 3584, inter: int = 384) -> Case:
    """Kimi K3's layer with two experts of 32 rows each: the table's row for many tokens, no row empty."""
    w13, w13_scale, w2_scale = LAYOUTS.get((ARCH, mode), ("separated",) * 3)
    return Case(
        f"mutation-{mode}", mode, tokens=32, experts=2, topk=2, hidden=hidden, inter=inter, w13=w13,
        w13_scale=w13_scale, w2_scale=w2_scale, spread=True,
    )  # fmt: skip


def keep(case: Case, kernel: str, seed: int = 1) -> Kept:
    """The launch of ``kernel`` in the layer ``case``."""
    devices = []

    def make(arch: str, **options) -> Device:
        devices.append(_Keeping(arch, kernel, **options))
        return devices[-1]

    row = amd_cases.execute(ARCH, case, seed, device=make)
    if not amd_cases.right(row):
        raise RuntimeError(f"{case.name} is wrong before any change: {row}")
    (kept,) = devices[0].kept
    layout = case.w13_scale if kernel == "stage1_kernel" else case.w2_scale
    return dataclasses.replace(kept, scale_layout=layout)


def launches(kept: Kept) -> list[Kept]:
    """Every launch that a mutant has to repeat."""
    return [kept, wide(kept), ragged(kept), extreme(kept)]


def wide(kept: Kept, seed: int = 1) -> Kept:
    """The same launch with values of every size, a few NaN and zeros, and scales whose memory ends early."""
    g = torch.Generator().manual_seed(seed)
    changed = {}
    for name, old in _operands(kept):
        if name == "w_scale_bytes":  # the last scales lie past the end: they read as NaN
            changed[name] = scalar(old.value - CUT, "i32")
        elif name in ROWS:
            sizes = torch.randint(-44, 0, (old.shape[0], 1), generator=g)
            changed[name] = _values(old, sizes, g)
        elif name in ("x_scale_ptr", "y_scale_ptr") and old.dtype == torch.uint8:
            rows = torch.randint(75, 125, (old.shape[0], 1), generator=g)
            changed[name] = (rows + torch.randint(0, 4, old.shape, generator=g)).byte()
            changed[name][:4, 0] = torch.tensor([0, 1, 254, 255], dtype=torch.uint8)
        elif name == "w_scale_ptr":
            # Rows of very different sizes, so that neighbours in a block take different branches of the activation;
            # on both sides of 128, whose sign would be seen if a byte were read as a signed one.
            experts, rows, half = kept.call.arguments["w_ptr"].shape
            sizes = torch.randint(112, 136, (experts, rows, 1), generator=g)
            scales = sizes + torch.randint(0, 4, (experts, rows, half // 16), generator=g)
            count = old.numel() - CUT
            changed[name] = pack_scale(scales.byte(), kept.scale_layout).flatten()[:count].clone()
            some = torch.randint(0, count, (4,), generator=g)
            changed[name][some] = torch.tensor([0, 1, 200, 255], dtype=torch.uint8)
        elif name == "weights_ptr":
            sizes = torch.randint(-20, 20, old.shape, generator=g)
            changed[name] = torch.randn(old.shape, generator=g) * 2.0**sizes
    return _again(kept, changed)


def extreme(kept: Kept, seed: int = 1) -> Kept:
    """The same launch with weights' scales of 0 to 3 and NaN, which alone reach the special cases of decoding E8M0.

    Rows are large enough for their products to be of middle size. NaN stands in few places, each of which takes a row
    of the weights, and with it a block of what is quantised.
    """
    g = torch.Generator().manual_seed(seed)
    changed = {}
    quantises = any(
        t.dtype != torch.bfloat16 for n, t in kept.written.items() if n in ROWS and n in kept.fresh
    )
    rows_a_nan = 128 if quantises else 4
    for name, old in _operands(kept):
        if name in ROWS:
            sizes = torch.randint(104, 120, (old.shape[0], 1), generator=g)
            changed[name] = _values(old, sizes, g)
        elif name in ("x_scale_ptr", "y_scale_ptr") and old.dtype == torch.uint8:
            changed[name] = torch.randint(228, 244, old.shape, generator=g).byte()
        elif name == "w_scale_ptr":
            changed[name] = torch.randint(0, 4, old.shape, generator=g).byte()
            blocks = kept.call.arguments["w_ptr"].shape[-1] // 16  # of 32 codes along K
            count = old.numel() // (rows_a_nan * blocks)
            changed[name].view(-1)[torch.randint(0, old.numel(), (count,), generator=g)] = 255
    return _again(kept, changed)


def ragged(kept: Kept) -> Kept:
    """The same launch with five rows of each block of 32 that hold no pair, and three slots a token."""
    pairs = kept.call.arguments["pairs_ptr"].clone()
    pairs.view(-1, 32)[:, 13:18] = kept.call.arguments["num_pairs"].value
    changed = {"pairs_ptr": pairs}
    if (
        "topk" in kept.call.arguments
    ):  # a pair's token is a quotient by it, and 2 divides too easily
        changed["topk"] = scalar(3, "i32")
    return _again(kept, changed)


def _operands(kept: Kept) -> list[tuple[str, Any]]:
    """The arguments that the launch reads."""
    return [(n, value) for n, value in kept.call.arguments.items() if n not in kept.fresh]


def _values(old: torch.Tensor, sizes: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Random rows: bf16 of about 2 to the power of ``sizes``, or codes, whose scales say how large they are."""
    if old.dtype == torch.bfloat16:
        return (torch.randn(old.shape, generator=g) * 2.0**sizes).bfloat16()
    codes = torch.randint(0, 256, old.shape, generator=g)
    codes[codes & 0x7F == 0x7F] = 0  # NaN in E4M3
    return codes.byte()


def _again(kept: Kept, changed: dict[str, Any]) -> Kept:
    """The launch with some arguments changed, and what it writes then."""
    call = dataclasses.replace(kept.call, arguments=kept.call.arguments | changed)
    written, executed = run(dataclasses.replace(kept, call=call), kept.call.assembly)
    return dataclasses.replace(kept, call=call, written=written, executed=executed)


def run(kept: Kept, text: str) -> tuple[dict[str, torch.Tensor], dict[int, int]]:
    """What the tensors hold afterwards, and how often each line was executed."""
    arguments = {
        n: a.clone() if isinstance(a, torch.Tensor) else a for n, a in kept.call.arguments.items()
    }
    fresh = {id(arguments[name]) for name in kept.fresh}
    device = Device(
        kept.arch,
        scratch=lambda tensor: id(tensor) in fresh,
        max_instructions=4 * kept.instructions,
    )
    device.launched(dataclasses.replace(kept.call, assembly=text, arguments=arguments))
    tensors = {n: a for n, a in arguments.items() if isinstance(a, torch.Tensor)}
    return tensors, dict(device.launches[-1].statistics.lines)
