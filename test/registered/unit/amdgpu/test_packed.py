"""Packed 16-bit arithmetic, half by half in Python numbers."""

import sys
from fractions import Fraction

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import packed
from sglang_aiter_moe.amdgpu.errors import AssemblyError
from sglang_aiter_moe.testing.amdgpu_floats import larger, rounded, smaller
from sglang_aiter_moe.testing.amdgpu_wave import Waves
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def s(x):
    return x - 65536 if x >> 15 else x


INTEGERS = {
    "v_pk_add_u16": lambda a, b: a + b, "v_pk_sub_u16": lambda a, b: a - b, "v_pk_add_i16": lambda a, b: a + b,
    "v_pk_sub_i16": lambda a, b: a - b, "v_pk_mul_lo_u16": lambda a, b: a * b, "v_pk_max_u16": lambda a, b: max(a, b),
    "v_pk_min_u16": lambda a, b: min(a, b), "v_pk_max_i16": lambda a, b: max(s(a), s(b)),
    "v_pk_min_i16": lambda a, b: min(s(a), s(b)), "v_pk_lshlrev_b16": lambda a, b: b << (a & 15),
    "v_pk_lshrrev_b16": lambda a, b: b >> (a & 15), "v_pk_ashrrev_i16": lambda a, b: s(b) >> (a & 15),
    "v_pk_mad_u16": lambda a, b, c: a * b + c, "v_pk_mad_i16": lambda a, b, c: a * b + c,
}  # fmt: skip


def half(x: Fraction, zero=0.0) -> float:
    return rounded(x, 10, -14, 15) if x else zero


FLOATS = {
    "v_pk_add_f16": lambda a, b: half(Fraction(a) + Fraction(b)),
    "v_pk_mul_f16": lambda a, b: half(Fraction(a) * Fraction(b), a * b),
    "v_pk_fma_f16": lambda a, b, c: half(Fraction(a) * Fraction(b) + Fraction(c)),
    "v_pk_max_f16": larger,
    "v_pk_min_f16": smaller,
}


def halves(word, which):
    return word >> 16 if which else word & 0xFFFF


def operands(count):
    words = np.random.default_rng(1).integers(0, 1 << 32, (count, 64), np.uint64).astype(np.uint32)
    words[0, :4] = 0, 0xFFFFFFFF, 0x80007FFF, 0x00018000
    return words


def execute(opcode, words, modifiers=""):
    w = Waves()
    for i, row in enumerate(words):
        w.set(f"v{i + 1}", row)
    w.do(f"{opcode} v0, {', '.join(f'v{i + 1}' for i in range(len(words)))} {modifiers}")
    return w.v(0).tolist()


@pytest.mark.parametrize("opcode", INTEGERS)
def test_integers(opcode):
    f = INTEGERS[opcode]
    count = f.__code__.co_argcount
    words = operands(count)
    for select, high in (
        ((0,) * count, (1,) * count),
        ((1,) + (0,) * (count - 1), (0,) + (1,) * (count - 1)),
    ):
        modifiers = f"op_sel:[{','.join(map(str, select))}] op_sel_hi:[{','.join(map(str, high))}]"
        want = []
        for lane in words.T.tolist():
            parts = [
                f(*(halves(x, k) for x, k in zip(lane, which, strict=True))) & 0xFFFF
                for which in (select, high)
            ]
            want.append(parts[0] | parts[1] << 16)
        assert execute(opcode, words, modifiers) == want


@pytest.mark.parametrize("opcode", FLOATS)
def test_floats(opcode):
    f = FLOATS[opcode]
    count = 3 if "fma" in opcode else 2
    rng = np.random.default_rng(2)
    values = (
        rng.standard_normal((count, 64, 2)) * np.exp2(rng.integers(-12, 6, (count, 64, 2)))
    ).astype(np.float16)
    zeros = ",".join("0" * (count - 1))
    got = execute(
        opcode, values.view(np.uint32)[..., 0], f"neg_lo:[1,{zeros}] neg_hi:[0,{zeros[:-1]}1]"
    )
    for lane, word in enumerate(got):
        x = [[float(v) for v in values[:, lane, k]] for k in (0, 1)]
        low, high = f(-x[0][0], *x[0][1:]), f(*x[1][:-1], -x[1][-1])
        parts = np.array([word & 0xFFFF, word >> 16], np.uint16).view(np.float16).astype(float)
        assert parts.tolist() == [low, high], (lane, x)


def test_constants():
    w = (
        Waves()
        .set("v1", 0x00050003)
        .do("v_pk_add_u16 v0, v1, 7 op_sel_hi:[1,0]", "v_pk_mul_lo_u16 v2, v1, 0")
    )
    assert (w.v(0)[0], w.v(2)[0]) == (0x000C000A, 0)
    with pytest.raises(AssemblyError, match="high half of a constant"):
        w.do("v_pk_add_u16 v0, v1, 7")
    with pytest.raises(AssemblyError, match="sign of this packed operand"):
        w.do("v_pk_add_u16 v0, v1, v1 neg_lo:[1,0]")


def test_every_opcode_of_the_table_is_in_this_file():
    assert set(packed.TABLE) == set(INTEGERS) | set(FLOATS)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
