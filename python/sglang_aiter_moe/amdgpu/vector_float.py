"""Vector ALU on floats: arithmetic, selection, comparison, the division steps, packed float32.

Source: AMD, "CDNA3 ISA", sections VOP1, VOP2, VOP3, VOP3P, VOPC; "CDNA4 ISA" for what gfx950 adds. v_exp, v_log, v_rcp,
v_rsq, v_sqrt, v_sin and v_cos are computed in float64 and rounded once, where hardware is allowed 1 ulp. Subnormal
numbers are kept, also where hardware's v_exp and v_log flush them: LLVM scales around that.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_aiter_moe.amdgpu import floats
from sglang_aiter_moe.amdgpu.assembly import Instruction
from sglang_aiter_moe.amdgpu.decode import Modifiers, refuse, vector, words, write
from sglang_aiter_moe.amdgpu.encoding import Row, build_row, encoded_result, encoded_sources
from sglang_aiter_moe.amdgpu.state import VCC, Batch

F16, F32, F64 = np.float16, np.float32, np.float64
TAU = 2 * np.pi


def _fract(a):
    r = a - np.floor(a)
    return np.minimum(r, np.nextafter(a.dtype.type(1), a.dtype.type(0)))


def _one_operand(kind: str) -> dict[str, Row]:
    dtype = {"f16": F16, "f32": F32, "f64": F64}[kind]

    def by64(f):
        return lambda a: f(np.asarray(a, F64)).astype(dtype)

    functions = {
        "rcp": by64(lambda a: 1.0 / a), "rsq": by64(lambda a: 1.0 / np.sqrt(a)), "sqrt": by64(np.sqrt),
        "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rndne": np.rint, "fract": _fract,
    }  # fmt: skip
    if kind != "f64":
        functions |= {
            "exp": by64(np.exp2), "log": by64(np.log2),
            "sin": by64(lambda a: np.sin(a * TAU)), "cos": by64(lambda a: np.cos(a * TAU)),
        }  # fmt: skip
    return {f"v_{name}_{kind}": (kind, kind, f) for name, f in functions.items()}


def _two_operands(kind: str) -> dict[str, Row]:
    pair = f"{kind} {kind}"
    functions = {
        "add": np.add, "mul": np.multiply, "max": floats.maximum, "min": floats.minimum,
        "sub": np.subtract, "subrev": lambda a, b: b - a,
    }  # fmt: skip
    return {f"v_{name}_{kind}": (kind, pair, f) for name, f in functions.items()}


THREE = "f32 f32 f32"
TABLE: dict[str, Row] = {}
for _kind in ("f32", "f16", "f64"):
    TABLE |= _one_operand(_kind) | _two_operands(_kind)
for _name in ("v_sub_f64", "v_subrev_f64"):
    del TABLE[_name]  # there is none
TABLE |= {
    "v_rcp_iflag_f32": TABLE["v_rcp_f32"],
    "v_mul_legacy_f32": (
        "f32",
        "f32 f32",
        lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b).astype(F32),
    ),
    "v_max3_f32": ("f32", THREE, lambda a, b, c: floats.maximum(floats.maximum(a, b), c)),
    "v_min3_f32": ("f32", THREE, lambda a, b, c: floats.minimum(floats.minimum(a, b), c)),
    "v_med3_f32": ("f32", THREE, floats.median),
    "v_maximum3_f32": ("f32", THREE, lambda a, b, c: _MAXIMUM(_MAXIMUM(a, b), c)),
    "v_minimum3_f32": ("f32", THREE, lambda a, b, c: _MINIMUM(_MINIMUM(a, b), c)),
    "v_fma_f32": ("f32", THREE, floats.fma),
    "v_fmaak_f32": ("f32", THREE, floats.fma),
    "v_fmamk_f32": ("f32", THREE, floats.fma),
    "v_div_fixup_f32": ("f32", THREE, floats.div_fixup),
    "v_fma_f64": ("f64", "f64 f64 f64", floats.fma64),
    "v_div_fixup_f64": ("f64", "f64 f64 f64", floats.div_fixup),
    "v_ldexp_f32": ("f32", "f32 i32", floats.ldexp),
    "v_ldexp_f64": ("f64", "f64 i32", lambda a, n: np.ldexp(a, n)),
    "v_frexp_mant_f32": ("f32", "f32", floats.mantissa),
    "v_frexp_exp_i32_f32": ("i32", "f32", floats.exponent),
}
_MAXIMUM, _MINIMUM = floats.propagating(floats.maximum), floats.propagating(floats.minimum)


def _type_of(instruction: Instruction) -> str:
    return instruction.opcode.rsplit("_", 1)[1]


def _fmac(instruction: Instruction):
    """D = S0 * S1 + D."""
    target, *sources = instruction.operands
    modifiers, kind = Modifiers(instruction), _type_of(instruction)
    if len(sources) != 2:
        raise refuse(instruction, f"{instruction.opcode} with {len(sources)} sources")
    (a, c), dpp = encoded_sources(instruction, modifiers, sources, [kind, kind])
    if dpp is not None:
        raise refuse(instruction, f"DPP of {instruction.opcode}")
    old = vector(instruction, target, kind)
    put = encoded_result(instruction, modifiers, target, kind)
    modifiers.done()
    f = floats.fma64 if kind == "f64" else floats.fma
    return lambda b: put(b, f(a(b), c(b), old(b)))


def _div_scale(instruction: Instruction):
    target, flags, *sources = instruction.operands
    Modifiers(instruction).done()
    words(instruction, flags, 2)
    reads = [vector(instruction, o, _type_of(instruction)) for o in sources]
    put = write(instruction, target, _type_of(instruction))

    def scale(b: Batch) -> None:
        value, flag = floats.div_scale(*(read(b) for read in reads))
        put(b, value)
        b.set_bits(flags.index, np.broadcast_to(flag, b.mask.shape) & b.mask)

    return scale


def _div_fmas(instruction: Instruction):
    target, *sources = instruction.operands
    Modifiers(instruction).done()
    reads = [vector(instruction, o, _type_of(instruction)) for o in sources]
    put = write(instruction, target, _type_of(instruction))
    return lambda b: put(b, floats.div_fmas(*(read(b) for read in reads), b.bits(VCC)))


def _packed(instruction: Instruction):
    """v_pk_{add,mul,fma}_f32: two float32 in a register pair; op_sel chooses words, neg_lo and neg_hi their signs."""
    f = {"add": np.add, "mul": np.multiply, "fma": floats.fma}[instruction.opcode.split("_")[2]]
    modifiers = Modifiers(instruction)
    target, *sources = instruction.operands
    n = len(sources)
    words(instruction, target, 2)
    halves = []
    selects = (modifiers.take("op_sel", (0,) * n), modifiers.take("op_sel_hi", (1,) * n))
    signs = (modifiers.take("neg_lo", (0,) * n), modifiers.take("neg_hi", (0,) * n))
    modifiers.done()
    for half in (0, 1):
        reads = []
        for i, operand in enumerate(sources):
            word = selects[half][i]
            if not operand.plain:
                raise refuse(instruction, "neg or abs around a packed operand")
            if operand.kind in "vas":
                words(instruction, operand, 2)
                one = replace(
                    operand, index=operand.index + word, count=1, negate=bool(signs[half][i])
                )
            elif word and operand.value != 0:
                raise refuse(instruction, "the high word of a constant")
            else:
                one = replace(operand, negate=bool(signs[half][i]))
            reads.append(vector(instruction, one, "f32"))
        halves.append(reads)
    puts = [
        write(instruction, replace(target, index=target.index + i, count=1), "f32") for i in (0, 1)
    ]

    def execute(b: Batch) -> None:
        low, high = (f(*(read(b) for read in reads)) for reads in halves)
        puts[0](b, low)
        puts[1](b, high)

    return execute


def _always(answer: bool):
    return lambda a, b: np.full(np.broadcast(a, b).shape, answer)


_RELATIONS = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "f": _always(False),
}  # fmt: skip
_OF_INTEGERS = _RELATIONS | {"ne": np.not_equal, "t": _always(True)}
_OF_FLOATS = _RELATIONS | {
    "lg": lambda a, b: (a < b) | (a > b), "o": lambda a, b: (a == a) & (b == b), "u": lambda a, b: (a != a) | (b != b),
    "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)), "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b), "neq": lambda a, b: ~(a == b), "nlt": lambda a, b: ~(a < b), "tru": _always(True),
}  # fmt: skip
COMPARISONS: dict[str, tuple[str, str, object]] = {}
for _kind in ("f16", "f32", "f64", "i16", "u16", "i32", "u32", "i64", "u64"):
    for _name, _f in (_OF_FLOATS if _kind[0] == "f" else _OF_INTEGERS).items():
        for _x in ("cmp", "cmpx"):
            COMPARISONS[f"v_{_x}_{_name}_{_kind}"] = (_kind, _kind, _f)
for _kind in ("f16", "f32", "f64"):
    for _x in ("cmp", "cmpx"):
        COMPARISONS[f"v_{_x}_class_{_kind}"] = (_kind, "u32", floats.is_class)


def _compare(instruction: Instruction):
    """One bit a lane, 0 for lanes that do not act; v_cmpx writes EXEC too."""
    first, second, f = COMPARISONS[instruction.opcode]
    modifiers = Modifiers(instruction)
    target, *sources = instruction.operands
    if target.kind != "s" or len(sources) != 2:
        raise refuse(instruction, "a destination that is not a pair of scalar registers")
    words(instruction, target, 2)
    (a, c), dpp = encoded_sources(instruction, modifiers, sources, [first, second])
    if dpp is not None:
        raise refuse(instruction, "DPP of a comparison")
    modifiers.done()
    i, also_exec = target.index, instruction.opcode.startswith("v_cmpx")

    def compare(b: Batch) -> None:
        bits = f(a(b), c(b))
        if bits.shape != b.mask.shape:
            bits = np.broadcast_to(bits, b.mask.shape)
        if not b.full:
            bits = bits & b.mask
        b.set_bits(i, bits)
        if also_exec:
            b.set_bits(126, bits)

    return compare


SPECIAL = {
    "v_fmac_f32": _fmac, "v_div_scale_f32": _div_scale, "v_div_fmas_f32": _div_fmas,
    "v_fmac_f64": _fmac, "v_div_scale_f64": _div_scale, "v_div_fmas_f64": _div_fmas,
    "v_pk_add_f32": _packed, "v_pk_mul_f32": _packed, "v_pk_fma_f32": _packed,
} | dict.fromkeys(COMPARISONS, _compare)  # fmt: skip


def build(instruction: Instruction):
    if instruction.opcode in SPECIAL:
        return SPECIAL[instruction.opcode](instruction)
    return build_row(instruction, TABLE[instruction.opcode])
