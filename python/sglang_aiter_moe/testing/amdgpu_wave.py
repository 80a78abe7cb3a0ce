"""A few waves whose registers a test sets, and which execute single instructions of the AMD interpreter."""

from __future__ import annotations

import struct

import numpy as np

from sglang_aiter_moe.amdgpu import semantics
from sglang_aiter_moe.amdgpu.assembly import parse_instruction
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.amdgpu.state import LANES, Batch

HEADER = """
	.amdgcn_target "amdgcn-amd-amdhsa-unknown-{target}"
	.text
k:
{body}
	s_endpgm
	.section .rodata
	.amdhsa_kernel k
		.amdhsa_group_segment_fixed_size {lds}
		.amdhsa_kernarg_size {kernargs}
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_system_sgpr_workgroup_id_y {y}
		.amdhsa_system_vgpr_workitem_id {items}
		.amdhsa_float_denorm_mode_32 3
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
      - .offset:         0
        .size:           8
        .value_kind:     global_buffer
    .max_flat_workgroup_size: {block}
    .name:           k
    .symbol:         k.kd
    .wavefront_size: 64
...
	.end_amdgpu_metadata
"""


def kernel_text(body: str, *, target="gfx950", lds=0, kernargs=8, block=64, y=0, items=0) -> str:
    """Assembly of a kernel ``k``: s[0:1] is the kernarg address, s2 the workgroup's x, v0 the work-item."""
    return HEADER.format(
        body=body, target=target, lds=lds, kernargs=kernargs, block=block, y=y, items=items
    )


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def bits(value: float) -> int:
    """A float32's bits."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def number(value: int) -> float:
    """The float32 of 32 bits."""
    return struct.unpack("<f", struct.pack("<I", value & 0xFFFFFFFF))[0]


def signed(x: int, bits_: int) -> int:
    """A two's complement number, as the 32 bits of a register."""
    return (x - (1 << bits_) if x >> (bits_ - 1) else x) & 0xFFFFFFFF


def bf16(x: float) -> int:
    """The bits of the nearest bf16, ties to even; x is finite."""
    raw = bits(x)
    return (raw + 0x7FFF + (raw >> 16 & 1)) >> 16


def _halves(f):
    """f of the two low halves and of the two high ones."""
    return lambda a, b: f(a & 0xFFFF, b & 0xFFFF) | f(a >> 16, b >> 16) << 16


def _half(x: int) -> np.float16:
    return np.array(x, np.uint16).view(np.float16)[()]


def _flipped(f):
    """f of signed numbers: their order is that of the unsigned ones with the top bit flipped."""
    return lambda a, b: f(a ^ 1 << 31, b ^ 1 << 31) ^ 1 << 31


ATOMICS = {
    "add": lambda a, b: (a + b) & 0xFFFFFFFF,
    "sub": lambda a, b: (a - b) & 0xFFFFFFFF,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "umax": max,
    "umin": min,
    "smax": _flipped(max),
    "smin": _flipped(min),
    "swap": lambda a, b: b,
    "add_f32": lambda a, b: bits(float(np.float32(number(a)) + np.float32(number(b)))),
    "pk_add_bf16": _halves(lambda a, b: bf16(number(a << 16) + number(b << 16))),
    "pk_add_f16": _halves(lambda a, b: int((_half(a) + _half(b)).view(np.uint16))),
}
"""Atomic -> the word that is left, of the word before and the operand."""


def atomic_words(name: str, count: int) -> np.ndarray:
    """uint32 [count]: random numbers of the type that an atomic adds."""
    rng = np.random.default_rng(7)
    if "f" not in name:
        return rng.integers(0, 1 << 32, count, np.uint64).astype(np.uint32)
    floats = (rng.standard_normal((count, 2)) * 3).astype(
        np.float16 if name == "pk_add_f16" else np.float32
    )
    words = floats.view(np.uint32)
    if name == "pk_add_bf16":
        return (words[:, 0] >> 16) | (words[:, 1] & 0xFFFF0000)
    return words[:, 0].copy()


class Waves:
    """``waves`` waves, all of one workgroup, with an own memory and LDS."""

    def __init__(
        self, waves: int = 1, *, lds: int = 0, target: str = "gfx950", checked=True
    ) -> None:
        self.batch = Batch(waves, waves, 64, 64, lds, checked)
        self.batch.memory = self.memory = Memory()
        self.target = target

    def set(self, register: str, value) -> Waves:
        """``set("v1", array)``: 64 or [waves, 64] numbers for v and a, one number or [waves] for s.

        Arrays are taken by their bits; 64-bit ones and Python integers above 2**32 fill two registers.
        """
        b, kind, i = self.batch, register[0], int(register[1:])
        if isinstance(value, int):
            value = np.array(value, np.uint32 if value < 1 << 32 else np.uint64)
        array = np.asarray(value)
        if array.dtype.itemsize == 8:
            raw = np.ascontiguousarray(array).view(np.uint64)
            parts = [raw.astype(np.uint32), (raw >> np.uint64(32)).astype(np.uint32)]
        else:
            parts = [array.view(np.uint32)]
        for part in parts:
            if kind == "s":
                b.set_s(i, np.broadcast_to(part.reshape(-1), b.waves).copy())
            else:
                b.set_all_lanes(kind, i, np.broadcast_to(part, (b.waves, LANES)).copy())
            i += 1
        return self

    def exec(self, mask: int) -> Waves:
        b = self.batch
        b.set_s64(
            126,
            np.full(b.waves, mask & 0xFFFFFFFF, np.uint32),
            np.full(b.waves, mask >> 32, np.uint32),
        )
        return self

    def do(self, *lines: str) -> Waves:
        with np.errstate(all="ignore"):
            for number_, line in enumerate(lines, 1):
                semantics.build(parse_instruction(line, number_, self.target))(self.batch)
        return self

    def v(self, i: int, dtype=np.uint32, kind: str = "v") -> np.ndarray:
        """Register v[i] of the first wave: 64 numbers."""
        return np.ascontiguousarray((self.batch.v if kind == "v" else self.batch.a)[i][0]).view(
            dtype
        )

    def v64(self, i: int, dtype=np.uint64) -> np.ndarray:
        low, high = self.v(i).astype(np.uint64), self.v(i + 1).astype(np.uint64)
        return (low | (high << np.uint64(32))).view(dtype)

    def s(self, i: int) -> int:
        return int(self.batch.s[i][0])

    def s64(self, i: int) -> int:
        return self.s(i) | self.s(i + 1) << 32

    @property
    def scc(self) -> int:
        return int(self.batch.scc[0])
