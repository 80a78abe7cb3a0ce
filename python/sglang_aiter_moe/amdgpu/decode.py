"""From an instruction's operands and modifiers to functions of a :class:`Batch`.

An operand is resolved once, when its instruction is decoded: what is left at run time is one call that returns an
array. Sources: AMD, "CDNA3 ISA" and "CDNA4 ISA", chapters on operand encoding, SDWA, DPP and VOP3P;
LLVM, "AMDGPU Modifiers".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction, Operand
from sglang_aiter_moe.amdgpu.errors import AssemblyError
from sglang_aiter_moe.amdgpu.state import Batch

Read = Callable[[Batch], np.ndarray]
DTYPES = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64, "f64": np.float64,
    "u16": np.uint16, "i16": np.int16, "f16": np.float16, "b32": np.uint32, "b64": np.uint64, "b16": np.uint16,
}  # fmt: skip


class Modifiers:
    """An instruction's modifiers; each has to be taken by who understands it."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self._left = dict(instruction.modifiers)

    def take(self, name: str, default=0):
        return self._left.pop(name, default)

    def put(self, name: str, value) -> None:
        """Gives one back, for another reader."""
        self._left[name] = value

    def done(self) -> None:
        if self._left:
            name, value = next(iter(self._left.items()))
            text = name if value is True else f"{name}:{value}"
            raise refuse(self.instruction, f"the modifier {text} of {self.instruction.mnemonic}")


_BITS = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
_VALUES = {
    "row_shl": range(1, 16), "row_shr": range(1, 16), "row_ror": range(1, 16), "row_newbcast": range(16),
    "row_bcast": (15, 31), "wave_shl": (1,), "wave_shr": (1,), "wave_rol": (1,), "wave_ror": (1,),
    "row_mask": range(16), "bank_mask": range(16), "bound_ctrl": (0, 1), "mul": (2, 4), "div": (2,),
    "bitop3": range(256), "cbsz": range(5), "blgp": range(5), "offset0": range(256), "offset1": range(256),
}  # fmt: skip
_OFFSETS = {"ds": range(1 << 16), "buffer": range(1 << 12), "s": range(-(1 << 20), 1 << 20)}


def check_modifiers(instruction: Instruction) -> None:
    """Refuses a modifier whose value its encoding cannot hold.

    Raises:
        AssemblyError: ``row_shl:20``, ``op_sel:[2,0]``, ``offset:x`` and the like.
    """
    for name, value in instruction.modifiers.items():
        if name in _BITS:
            good = isinstance(value, tuple) and set(value) <= {0, 1}
        elif name == "quad_perm":
            good = isinstance(value, tuple) and len(value) == 4 and set(value) <= set(range(4))
        elif name == "offset" and instruction.opcode != "ds_swizzle_b32":
            space = instruction.opcode.split("_")[0]
            good = type(value) is int and value in _OFFSETS.get(space, range(-4096, 4096))
        else:
            good = name not in _VALUES or (type(value) is int and value in _VALUES[name])
        if not good:
            raise refuse(instruction, f"the value {value!r} of the modifier {name}")


def refuse(instruction: Instruction, what: str) -> AssemblyError:
    """The error for an opcode, modifier or operand that is not modelled."""
    return AssemblyError(
        f"line {instruction.line}: {what} is not modelled ({instruction.text})",
        allowed="the opcodes and modifiers in docs/amd-execution.md",
        fix="add its semantics to sglang_aiter_moe/amdgpu, from the ISA manual",
    )


def constant(operand: Operand, kind: str, instruction: Instruction) -> np.generic:
    """The value of an inline constant or literal as ``kind`` sees it.

    Integers are bits (a float operand ``1`` is the smallest subnormal), sign-extended; floats are numbers of the
    operand's width.
    """
    dtype = np.dtype(DTYPES[kind])
    size = dtype.itemsize
    value = operand.value
    if operand.kind == "float":
        packed = struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
        bits = int.from_bytes(packed, "little")
    else:
        if kind == "f64" and not -16 <= value <= 64:
            bits = (value & 0xFFFFFFFF) << 32  # a literal is the high half of a double
        else:
            bits = value & ((1 << 8 * size) - 1)
            if size == 8 and value >= 1 << 31:
                raise refuse(
                    instruction, "a 32-bit literal whose extension to 64 bits is not written"
                )
    return np.frombuffer(bits.to_bytes(size, "little"), dtype)[0]


def words(instruction: Instruction, operand: Operand, count: int | None = None) -> None:
    """Refuses a register operand of another size than ``count`` registers."""
    if count is not None and operand.kind in "vas" and operand.count != count:
        raise refuse(
            instruction, f"an operand of {operand.count} registers where {count} are meant"
        )


# Scalar operands: arrays [waves], or a scalar.


def scalar(instruction: Instruction, operand: Operand, kind: str = "u32") -> Read:
    """Reads an SGPR (pair) or constant for a scalar instruction."""
    dtype = np.dtype(DTYPES[kind])
    if operand.kind in ("int", "float"):
        value = constant(operand, kind, instruction)
        return lambda b: value
    if operand.kind == "name" and operand.value in ("scc", "src_scc"):
        return lambda b: b.scc.astype(dtype)
    if operand.kind != "s" or not operand.plain:
        raise refuse(
            instruction, f"the scalar operand {operand.kind} {operand.value or operand.index}"
        )
    i = operand.index
    words(instruction, operand, max(1, dtype.itemsize // 4))
    if dtype.itemsize == 8:

        def pair(b: Batch) -> np.ndarray:
            if b.s_known[i] is not True or b.s_known[i + 1] is not True:
                b.check_s(i)
                b.check_s(i + 1)
            value = np.empty((b.waves, 2), np.uint32)
            value[:, 0], value[:, 1] = b.s[i], b.s[i + 1]
            return value.view(dtype)[:, 0]

        return pair

    def single(b: Batch) -> np.ndarray:
        if b.s_known[i] is not True:
            b.check_s(i)
        return b.s[i].view(dtype)

    return single


def scalar_destination(instruction: Instruction, operand: Operand, count: int) -> int:
    if operand.kind != "s":
        raise refuse(instruction, "a destination that is not a scalar register")
    words(instruction, operand, count)
    return operand.index


# Vector operands: arrays that broadcast to [waves, 64].


def vector(
    instruction: Instruction, operand: Operand, kind: str = "u32", *, all_lanes: bool = False
) -> Read:
    """Reads a vector or scalar register or a constant, with its abs, neg and sext."""
    dtype = np.dtype(DTYPES[kind])
    bare = replace(operand, negate=False, absolute=False, sext=False)
    read = _plain(instruction, bare, dtype, kind, all_lanes)
    if operand.sext and kind not in ("i16", "i32", "u32", "u16"):
        raise refuse(instruction, "sext of a float operand")
    if operand.negate or operand.absolute:
        if dtype.kind != "f":
            raise refuse(instruction, "neg or abs of an integer operand")
        return _signs(read, operand.negate, operand.absolute)
    return read


def kept(instruction: Instruction, target: Operand) -> Read:
    """What a destination holds of which only a part is written.

    Not checked: LLVM leaves the other part unwritten where nothing uses it. The whole register counts as written after.
    """
    if target.kind not in "va":
        raise refuse(instruction, "a destination that is not a vector register")
    words(instruction, target, 1)
    i, vgpr = target.index, target.kind == "v"
    return lambda b: (b.v if vgpr else b.a)[i]


def _signs(read: Read, negate: bool, absolute: bool) -> Read:
    if negate and absolute:
        return lambda b: -np.abs(read(b))
    return (lambda b: np.abs(read(b))) if absolute else (lambda b: -read(b))


def _plain(
    instruction: Instruction, operand: Operand, dtype: np.dtype, kind: str, all_lanes: bool
) -> Read:
    if operand.kind in ("int", "float"):
        value = constant(operand, kind, instruction)
        return lambda b: value
    if operand.kind == "s" or operand.kind == "name":
        if dtype.itemsize == 2:
            inner = scalar(instruction, operand, "u32")
            return lambda b: inner(b).astype(np.uint16).view(dtype)[:, None]
        inner = scalar(instruction, operand, kind)
        return lambda b: inner(b)[:, None]
    if operand.kind not in "va":
        raise refuse(instruction, f"the operand {operand.value!r}")
    i, bank = operand.index, operand.kind
    words(instruction, operand, max(1, dtype.itemsize // 4))

    def check(b: Batch) -> list[np.ndarray]:
        values, known = (b.v, b.v_known) if bank == "v" else (b.a, b.a_known)
        if known[i] is not True:
            b.check(bank, i, all_lanes)
        return values

    if dtype.itemsize == 8:

        def pair(b: Batch) -> np.ndarray:
            values = check(b)
            if (b.v_known if bank == "v" else b.a_known)[i + 1] is not True:
                b.check(bank, i + 1, all_lanes)
            value = values[i + 1].astype(np.uint64)
            value <<= np.uint64(32)
            value |= values[i]
            return value.view(dtype)

        return pair
    if dtype.itemsize == 2:
        return lambda b: check(b)[i].astype(np.uint16).view(dtype)
    if bank == "a":
        return lambda b: check(b)[i].view(dtype)
    if all_lanes:
        return lambda b: check(b)[i].view(dtype)
    if dtype == np.uint32:

        def word(b: Batch) -> np.ndarray:
            if b.v_known[i] is not True:
                b.check("v", i)
            return b.v[i]

        return word

    def viewed(b: Batch) -> np.ndarray:
        if b.v_known[i] is not True:
            b.check("v", i)
        return b.v[i].view(dtype)

    return viewed


def write(
    instruction: Instruction, operand: Operand, kind: str = "u32"
) -> Callable[[Batch, np.ndarray], None]:
    """Writes the lanes that act: 32-bit values, 64-bit ones to two registers, 16-bit ones zero-extended.

    GFX9's VOP1, VOP2 and VOP3 16-bit instructions clear the high half of their destination.
    """
    size = np.dtype(DTYPES[kind]).itemsize
    if operand.kind not in "va" or not operand.plain:
        raise refuse(instruction, "a destination that is not a vector register")
    words(instruction, operand, max(1, size // 4))
    i = operand.index
    if operand.kind == "a":
        if size != 4:
            raise refuse(instruction, "an accumulation register pair as destination")
        return lambda b, value: b.set_a(i, value.view(np.uint32))
    if size == 2:
        return lambda b, value: b.set_v(i, value.view(np.uint16).astype(np.uint32))
    if size == 4:
        return lambda b, value: b.set_v(i, value.view(np.uint32))

    def pair(b: Batch, value: np.ndarray) -> None:
        value = value.view(np.uint64)
        b.set_v(i, value.astype(np.uint32))
        b.set_v(i + 1, (value >> np.uint64(32)).astype(np.uint32))

    return pair
