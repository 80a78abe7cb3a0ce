"""Float instructions of the vector ALU. Expected values: exact fractions, rounded to nearest even by hand."""

import math
import operator
import sys
from fractions import Fraction

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import vector_float
from sglang_aiter_moe.amdgpu.errors import AssemblyError
from sglang_aiter_moe.testing.amdgpu_floats import (
    INF,
    LARGEST,
    NAN,
    fma,
    lanes,
    larger,
    middle,
    near,
    product,
    rounded,
    same,
    smaller,
)
from sglang_aiter_moe.testing.amdgpu_wave import Waves, bits, number
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def execute(line, data, dtype=np.float32):
    w = Waves()
    for i, row in enumerate(data):
        w.set(f"v{i + 1}", row)
    return w.do(line).v(0, dtype)


def exact(f):
    """Of Fractions; special values by Python's floats."""

    def apply(a, b):
        if math.isfinite(a) and math.isfinite(b):
            r = f(Fraction(a), Fraction(b))
            return rounded(r) if r != 0 else f(a, b)
        return f(a, b)

    return apply


TWO = {
    "v_add_f32": exact(operator.add), "v_sub_f32": exact(operator.sub), "v_subrev_f32": exact(lambda a, b: b - a),
    "v_mul_f32": lambda a, b: product(a, b),
    "v_max_f32": larger, "v_min_f32": smaller,
    "v_mul_legacy_f32": lambda a, b: 0.0 if a == 0 or b == 0 else TWO["v_mul_f32"](a, b),
}  # fmt: skip
THREE = {
    "v_fma_f32": fma, "v_med3_f32": middle,
    "v_max3_f32": lambda a, b, c: larger(larger(a, b), c), "v_min3_f32": lambda a, b, c: smaller(smaller(a, b), c),
    "v_maximum3_f32": lambda a, b, c: NAN if any(map(math.isnan, (a, b, c))) else larger(larger(a, b), c),
    "v_minimum3_f32": lambda a, b, c: NAN if any(map(math.isnan, (a, b, c))) else smaller(smaller(a, b), c),
}  # fmt: skip


@pytest.mark.parametrize("opcode", TWO)
def test_two_operands(opcode):
    data = lanes(2)
    want = [TWO[opcode](float(a), float(b)) for a, b in data.T]
    same(execute(f"{opcode}_e32 v0, v1, v2", data), want)


@pytest.mark.parametrize("opcode", THREE)
def test_three_operands(opcode):
    data = lanes(3, 5)
    same(
        execute(f"{opcode} v0, v1, v2, v3", data),
        [THREE[opcode](*map(float, row)) for row in data.T],
    )


def test_fma_rounds_once():
    """Sums that lie half-way between float32 numbers after rounding to float64, and subnormal ones."""
    cases = [
        (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60),
        (1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-60)),
        (1 + 2.0**-23, 1 - 2.0**-24, 2.0**-100),
        (2.0**-75, 2.0**-75, 2.0**-149),
        (2.0**-75, 1.5 * 2.0**-75, 2.0**-148),
        (2.0**-100, 2.0**-50, 2.0**-149),
        (3 * 2.0**-76, 2.0**-74, 0.0),
        (LARGEST, 2.0, -LARGEST),
        (16777215.0, 16777213.0, 1.0),
        (1 + 2.0**-11, 1 + 2.0**-13, 2.0**-80),
        (1.5, 2.0**-24, 1.0),
        (1.0, 2.0**-24, 1.0),
        (1.0, 2.0**-24, 1 + 2.0**-23),
    ]
    rng = np.random.default_rng(9)
    # Products of 12-bit numbers plus a far smaller addend: half-way cases by construction.
    while len(cases) < 64:
        a, b = (1 + rng.integers(0, 4096, 2) * 2.0**-12).tolist()
        cases.append((a, b, float(np.float32(rng.choice([-1, 1]) * 2.0 ** rng.integers(-90, -40)))))
    data = np.array(cases, np.float32).T
    same(execute("v_fma_f32 v0, v1, v2, v3", data), [fma(*map(float, row)) for row in data.T])


def test_fma_with_literals_and_with_its_own_destination():
    data = lanes(2, 7)
    k = number(0x3FB8AA3B)
    w = Waves().set("v1", data[0]).set("v2", data[1]).set("v0", data[1])
    w.do(
        "v_fmaak_f32 v3, v1, v2, 0x3fb8aa3b",
        "v_fmamk_f32 v4, v1, 0x3fb8aa3b, v2",
        "v_fmac_f32_e32 v0, v1, v2",
    )
    pairs = [(float(a), float(b)) for a, b in data.T]
    same(w.v(3, np.float32), [fma(a, b, k) for a, b in pairs])
    same(w.v(4, np.float32), [fma(a, k, b) for a, b in pairs])
    same(w.v(0, np.float32), [fma(a, b, b) for a, b in pairs])


def one(a, f, at_zero, at_infinity, negative=NAN):
    if math.isnan(a):
        return NAN
    if a == 0:
        return at_zero(a)
    if a < 0 and negative is NAN:
        return NAN
    return at_infinity(a) if math.isinf(a) else near(f(a))


signed_infinity = lambda a: math.copysign(INF, a)  # noqa: E731
signed_zero = lambda a: math.copysign(0.0, a)  # noqa: E731


def inverse(a):
    return 1 / a if abs(1 / a) <= LARGEST else signed_infinity(a)


def power_of_two(a):
    if math.isnan(a):
        return NAN
    return INF if a >= 128 else 0.0 if a <= -160 else near(2.0**a)


ONE = {
    "v_rcp_f32": lambda a: one(a, inverse, signed_infinity, signed_zero, 0),
    "v_rcp_iflag_f32": lambda a: ONE["v_rcp_f32"](a),
    "v_rsq_f32": lambda a: one(a, lambda x: 1 / math.sqrt(x), signed_infinity, lambda a: 0.0),
    "v_sqrt_f32": lambda a: one(a, math.sqrt, lambda a: a, lambda a: INF),
    "v_log_f32": lambda a: one(a, math.log2, lambda a: -INF, lambda a: INF),
    "v_exp_f32": power_of_two,
    "v_floor_f32": lambda a: float(np.copysign(math.floor(a), a)) if math.isfinite(a) else a,
    "v_ceil_f32": lambda a: float(np.copysign(math.ceil(a), a)) if math.isfinite(a) else a,
    "v_trunc_f32": lambda a: float(np.copysign(math.trunc(a), a)) if math.isfinite(a) else a,
    "v_rndne_f32": lambda a: math.copysign(float(round(a)), a) if math.isfinite(a) else a,
    "v_frexp_mant_f32": lambda a: math.frexp(a)[0] if math.isfinite(a) else a,
}


@pytest.mark.parametrize("opcode", ONE)
def test_one_operand(opcode):
    data = lanes(1, 3)
    same(execute(f"{opcode}_e32 v0, v1", data), [ONE[opcode](float(a)) for a in data[0]])


def test_fraction_sine_cosine_and_exponent():
    data = np.array([0.0, 0.25, 0.5, 1.75, -0.25, 100.125, 1e-3, -3.0] * 8, np.float32)
    w = Waves().set("v1", data)
    w.do(
        "v_fract_f32_e32 v0, v1",
        "v_sin_f32_e32 v2, v1",
        "v_cos_f32_e32 v3, v1",
        "v_frexp_exp_i32_f32_e32 v4, v1",
    )
    for i, a in enumerate(data.tolist()):
        assert w.v(0, np.float32)[i] == a - math.floor(a)
        assert abs(w.v(2, np.float32)[i] - math.sin(2 * math.pi * a)) < 1e-6
        assert abs(w.v(3, np.float32)[i] - math.cos(2 * math.pi * a)) < 1e-6
        assert w.v(4, np.int32)[i] == math.frexp(a)[1]
    below_zero = (
        Waves().set("v1", np.full(64, -(2.0**-30), np.float32)).do("v_fract_f32_e32 v0, v1")
    )
    assert below_zero.v(0, np.float32)[0] == np.float32(1 - 2.0**-24)  # never 1


def test_ldexp():
    rng = np.random.default_rng(2)
    a, n = lanes(1)[0], rng.integers(-200, 200, 64).astype(np.int32)
    n[:4] = -(1 << 31), (1 << 31) - 1, -149, 127
    want = []
    for x, k in zip(a.tolist(), n.tolist(), strict=True):
        if math.isfinite(x) and x != 0:
            scaled = rounded(Fraction(x) * Fraction(2) ** max(min(k, 400), -400))
            want.append(math.copysign(scaled, x))
        else:
            want.append(x)
    same(execute("v_ldexp_f32 v0, v1, v2", [a, n]), want)


@pytest.mark.parametrize("kind", ["f16", "f64"])
def test_other_widths(kind):
    """The same functions in half and double precision: numpy's own arithmetic, which rounds to nearest even."""
    dtype = np.float16 if kind == "f16" else np.float64
    data = (np.random.default_rng(1).standard_normal((2, 64)) * 8).astype(dtype)
    data[0, :4], data[1, :4] = (0.0, -0.0, np.inf, np.nan), (-0.0, 0.0, 1.0, 2.0)
    if kind == "f16":
        registers = ["v[1]", "v[2]"]
        raw = data.view(np.uint16).astype(np.uint32)
        w = Waves().set("v1", raw[0]).set("v2", raw[1])
        target, read = "v0", lambda: w.v(0).astype(np.uint16).view(dtype)
    else:
        registers = ["v[2:3]", "v[4:5]"]
        w = Waves().set("v2", data[0]).set("v4", data[1])
        target, read = "v[0:1]", lambda: w.v64(0, dtype)
    with np.errstate(all="ignore"):
        for name, f in {"add": np.add, "mul": np.multiply}.items():
            w.do(f"v_{name}_{kind} {target}, {', '.join(registers)}")
            np.testing.assert_array_equal(read(), f(*data))
        for name, f in {"max": larger, "min": smaller}.items():
            w.do(f"v_{name}_{kind} {target}, {', '.join(registers)}")
            np.testing.assert_array_equal(
                read(), np.array([f(float(a), float(b)) for a, b in data.T], dtype)
            )
        for name, f in {
            "rcp": lambda a: 1 / a,
            "sqrt": np.sqrt,
            "rsq": lambda a: 1 / np.sqrt(a),
            "floor": np.floor,
            "ceil": np.ceil,
            "trunc": np.trunc,
            "rndne": np.rint,
        }.items():
            w.do(f"v_{name}_{kind} {target}, {registers[0]}")
            np.testing.assert_array_equal(read(), f(data[0].astype(np.float64)).astype(dtype))
        w.do(f"v_fract_{kind} {target}, {registers[1]}")
        fraction = data[1] - np.floor(data[1])
        np.testing.assert_array_equal(
            read(), np.minimum(fraction, np.nextafter(dtype(1), dtype(0)))
        )
        if kind == "f16":
            w.do("v_sub_f16 v0, v1, v2")
            np.testing.assert_array_equal(read(), data[0] - data[1])
            w.do("v_subrev_f16 v0, v1, v2")
            np.testing.assert_array_equal(read(), data[1] - data[0])
            for name, f in {"exp": np.exp2, "log": np.log2}.items():
                w.do(f"v_{name}_f16 v0, v1")
                np.testing.assert_array_equal(read(), f(data[0].astype(np.float64)).astype(dtype))
            w.do("v_sin_f16 v0, v2")
            np.testing.assert_allclose(
                read().astype(float), np.sin(2 * np.pi * data[1].astype(float)), atol=1e-3
            )
            w.do("v_cos_f16 v0, v2")
            np.testing.assert_allclose(
                read().astype(float), np.cos(2 * np.pi * data[1].astype(float)), atol=1e-3
            )
        else:
            w.set("v1", np.arange(-32, 32).astype(np.int32)).do("v_ldexp_f64 v[0:1], v[2:3], v1")
            np.testing.assert_array_equal(read(), data[0] * 2.0 ** np.arange(-32, 32))


@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_packed(name):
    count = 3 if name == "fma" else 2
    data = lanes(2 * count, 11)
    w = Waves()
    for i, row in enumerate(data):
        w.set(f"v{i + 10}", row)
    text = ", ".join(f"v[{10 + 2 * i}:{11 + 2 * i}]" for i in range(count))
    zeros = ",".join("0" * (count - 1))
    w.do(f"v_pk_{name}_f32 v[0:1], {text}")
    words = f"op_sel:[1,{zeros}] op_sel_hi:[0,{zeros}]"
    w.do(f"v_pk_{name}_f32 v[2:3], {text} {words} neg_lo:[1,{zeros}] neg_hi:[0,{zeros[:-1]}1]")
    f = {"add": TWO["v_add_f32"], "mul": TWO["v_mul_f32"], "fma": fma}[name]
    columns = data.T.tolist()
    same(w.v(0, np.float32), [f(*c[0::2]) for c in columns])
    same(w.v(1, np.float32), [f(*c[1::2]) for c in columns])
    same(w.v(2, np.float32), [f(-c[1], *c[2::2]) for c in columns])
    last = [[c[0], *c[2::2][:-1], -c[2::2][-1]] for c in columns]
    same(w.v(3, np.float32), [f(*row) for row in last])


def test_packed_with_a_scalar_pair_and_a_constant():
    data = lanes(2, 12)
    w = Waves().set("v2", data[0]).set("v3", data[1]).set("s4", bits(2.5)).set("s5", bits(-0.5))
    w.do("v_pk_mul_f32 v[0:1], v[2:3], s[4:5]", "v_pk_add_f32 v[4:5], v[2:3], 1.0 op_sel_hi:[1,0]")
    same(w.v(0, np.float32), [TWO["v_mul_f32"](a, 2.5) for a in data[0].tolist()])
    same(w.v(1, np.float32), [TWO["v_mul_f32"](a, -0.5) for a in data[1].tolist()])
    same(w.v(5, np.float32), [TWO["v_add_f32"](a, 1.0) for a in data[1].tolist()])
    with pytest.raises(AssemblyError, match="high word of a constant"):
        w.do("v_pk_add_f32 v[4:5], v[2:3], 1.0")


def test_neg_abs_clamp_and_output_multipliers():
    data = lanes(2, 13)
    w = Waves().set("v1", data[0]).set("v2", data[1])
    w.do(
        "v_mul_f32_e64 v0, |v1|, -v2",
        "v_add_f32_e64 v3, -|v1|, v2 clamp",
        "v_mul_f32_e64 v4, v1, v2 mul:4",
    )
    pairs = [(float(a), float(b)) for a, b in data.T]
    same(w.v(0, np.float32), [TWO["v_mul_f32"](abs(a), -b) for a, b in pairs])
    sums = [TWO["v_add_f32"](-abs(a), b) for a, b in pairs]
    same(
        np.abs(w.v(3, np.float32)), [0.0 if math.isnan(x) else min(max(x, 0.0), 1.0) for x in sums]
    )
    same(w.v(4, np.float32), [TWO["v_mul_f32"](TWO["v_mul_f32"](a, b), 4.0) for a, b in pairs])


def test_every_opcode_of_the_table_is_in_this_file():
    here = set(ONE) | set(TWO) | set(THREE)
    here |= {
        "v_fract_f32",
        "v_sin_f32",
        "v_cos_f32",
        "v_frexp_exp_i32_f32",
        "v_ldexp_f32",
        "v_ldexp_f64",
        "v_fmaak_f32",
        "v_fma_f64",
        "v_div_fixup_f64",
        "v_fmamk_f32",
        "v_div_fixup_f32",
    }
    names = "add mul max min rcp sqrt rsq floor ceil trunc rndne fract"
    here |= {f"v_{n}_{k}" for n in names.split() for k in ("f16", "f64")}
    here |= {f"v_{n}_f16" for n in ["sub", "subrev", "exp", "log", "sin", "cos"]}
    assert set(vector_float.TABLE) == here


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
