"""Float instructions of the vector ALU. Expected values: exact fractions, rounded to nearest even by hand."""

import math
import operator
import sys
from fractions import Fraction

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import vector_float
from sglang_aiter_moe.amdgpu.errors import AssemblyError, Fault
from sglang_aiter_moe.testing.amdgpu_wave import Waves, bits, number
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

INF, NAN = math.inf, math.nan
TINY, SMALLEST, LARGEST = 2.0**-126, 2.0**-149, float(np.finfo(np.float32).max)
EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    2.0**-24,
    1 + 2.0**-23,
    3.0,
    TINY,
    -TINY * 0.75,
    SMALLEST,
    LARGEST,
    -LARGEST,
    INF,
    -INF,
    NAN,
    0.1,
    1e-40,
    6e37,
    2.0**24 + 2,
    -7.25,
]


def rounded(x: Fraction, mantissa=23, lowest=-126, highest=127) -> float:
    """The nearest float of a binary format, ties to even; subnormal numbers included."""
    if x == 0:
        return 0.0
    sign, x = (-1, -x) if x < 0 else (1, x)
    e = max(x.numerator.bit_length() - x.denominator.bit_length() - 1, lowest)
    while Fraction(2) ** (e + 1) <= x:
        e += 1
    while e > lowest and Fraction(2) ** e > x:
        e -= 1
    step = Fraction(2) ** (e - mantissa)
    n = x / step
    whole = n.numerator // n.denominator
    rest = n - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    value = whole * step
    return sign * (INF if value >= Fraction(2) ** (highest + 1) else float(value))


def fma(a, b, c) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        if (
            any(map(math.isnan, (a, b, c)))
            or (math.isinf(a) and b == 0)
            or (math.isinf(b) and a == 0)
        ):
            return NAN
        product = a * b if math.isinf(a) or math.isinf(b) else 0.0
        return product + c if not (math.isinf(c) and not math.isinf(product)) else c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        product = (
            math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b))
            if a == 0 or b == 0
            else None
        )
        if product is not None and c == 0:
            return product + c
        return 0.0
    return math.copysign(rounded(exact), exact)


def larger(a, b):
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    if a == b == 0:
        return 0.0 if math.copysign(1, a) > 0 or math.copysign(1, b) > 0 else -0.0
    return max(a, b)


def smaller(a, b):
    return -larger(-a, -b)


def middle(a, b, c):
    if any(map(math.isnan, (a, b, c))):
        return smaller(smaller(a, b), c)
    return sorted((a, b, c))[1]


def lanes(count, seed=0):
    """[count][64] float32: edges against edges, and random bits."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(np.array(EDGES, np.float32), (count, 40))
    noise = rng.integers(0, 1 << 32, (count, 12), np.uint32).view(np.float32)
    near = (rng.standard_normal((count, 12)) * 4).astype(np.float32)
    return np.concatenate([rows, noise, near], 1)


def same(got, want):
    """Equal by bits; any NaN for NaN."""
    for i, (g, w) in enumerate(zip(np.asarray(got, np.float32), want, strict=True)):
        if math.isnan(w):
            assert math.isnan(g), (i, g, w)
        else:
            assert bits(float(g)) == bits(w), (i, g, w)


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


def product(a, b):
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    return math.copysign(
        rounded(Fraction(a) * Fraction(b)), math.copysign(1, a) * math.copysign(1, b)
    )


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


def near(exact_value: float) -> float:
    return float(np.float32(exact_value))


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


def divide(numerators, denominators):
    """LLVM's sequence for a float32 division that rounds correctly."""
    w = (
        Waves()
        .set("v1", np.asarray(numerators, np.float32))
        .set("v2", np.asarray(denominators, np.float32))
    )
    w.do(
        "v_div_scale_f32 v3, s[0:1], v2, v2, v1", "v_div_scale_f32 v4, vcc, v1, v2, v1", "v_rcp_f32_e32 v5, v3",
        "v_fma_f32 v6, -v3, v5, 1.0", "v_fmac_f32_e32 v5, v6, v5", "v_mul_f32_e32 v6, v4, v5",
        "v_fma_f32 v7, -v3, v6, v4", "v_fmac_f32_e32 v6, v7, v5", "v_fma_f32 v3, -v3, v6, v4",
        "v_div_fmas_f32 v3, v3, v5, v6", "v_div_fixup_f32 v0, v3, v2, v1",
    )  # fmt: skip
    return w.v(0, np.float32)


def quotient(a, b):
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        with np.errstate(all="ignore"):
            return float(np.float64(a) / np.float64(b))
    exact_quotient = Fraction(a) / Fraction(b)
    return math.copysign(rounded(exact_quotient), exact_quotient)


def test_the_division_sequence_divides():
    """Everywhere: also where an operand or the quotient is subnormal or close to the largest number."""
    special = [near(x) for x in EDGES if not math.isnan(x)]
    pairs = [(a, b) for a in special for b in special]
    rng = np.random.default_rng(4)
    for _ in range(64 * 12):
        mantissas = 1 + rng.integers(0, 1 << 23, 2) * 2.0**-23
        exponents = rng.integers(-126, 128, 2)
        pairs.append(
            tuple(float(np.float32(m * 2.0**e)) for m, e in zip(mantissas, exponents, strict=True))
        )
    pairs = pairs[: len(pairs) // 64 * 64]
    for start in range(0, len(pairs), 64):
        a, b = zip(*pairs[start : start + 64], strict=True)
        same(divide(a, b), [quotient(*p) for p in pairs[start : start + 64]])


def test_division_of_ordinary_numbers_needs_no_scaling():
    w = Waves().set("v1", np.full(64, 3.0, np.float32)).set("v2", np.full(64, 7.0, np.float32))
    w.do("v_div_scale_f32 v3, vcc, v1, v2, v1")
    assert (w.v(3, np.float32) == 3.0).all() and w.s64(106) == 0
    w.set("v1", np.full(64, 3 * 2.0**90, np.float32)).set(
        "v2", np.full(64, 7 * 2.0**-60, np.float32)
    )
    w.do("v_div_scale_f32 v3, vcc, v2, v2, v1")
    assert (w.v(3, np.float32) == 7 * 2.0**4).all() and w.s64(106) == (1 << 64) - 1


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


def exact64(x: Fraction) -> float:
    return rounded(x, 52, -1022, 1023)


def test_fma_of_doubles():
    rng = np.random.default_rng(6)
    cases = [
        (1 + 2.0**-27, 1 + 2.0**-26, 2.0**-120),
        (1 + 2.0**-27, 1 + 2.0**-26, -(2.0**-120)),
        (2.0**-540, 2.0**-535, 0.0),
        (3 * 2.0**-540, 2.0**-535, 2.0**-1074),
        (2.0**600, 2.0**400, -1.0),
        (2.0**1000, 2.0**23, -(2.0**1023)),
        (1e300, 1e-300, -1.0),
        (2.0**-700, 2.0**-700, 1.0),
        (2.0**-700, 2.0**-700, 2.0**-1074),
        (0.0, 5.0, -0.0),
        (1.5, 2.0**-53, 1.0),
        (1.0, 2.0**-53, 1.0),
        (1.0, 2.0**-53, 1 + 2.0**-52),
        (2.0**512, 2.0**512, 1.0),
        (3.0, -(2.0**-1074), 2.0**-1022),
        (2.0**-1074, 2.0**-1074, 2.0**-1074),
    ]
    while len(cases) < 62:
        a, b = (1 + rng.integers(0, 1 << 27, 2) * 2.0**-27).tolist()
        cases.append(
            (
                a * 2.0 ** rng.integers(-40, 40),
                b,
                float(rng.choice([-1, 1])) * 2.0 ** rng.integers(-140, 60),
            )
        )
    cases += [(INF, 1.0, 2.0), (INF, 0.0, 1.0)]
    a, b, c = (np.array(x) for x in zip(*cases, strict=True))
    w = Waves().set("v2", a).set("v4", b).set("v6", c).set("v8", c)
    w.do("v_fma_f64 v[0:1], v[2:3], -v[4:5], v[6:7]", "v_fmac_f64_e32 v[8:9], v[2:3], v[4:5]")
    for i, (x, y, z) in enumerate(cases[:62]):
        for got, product in (
            (w.v64(0, np.float64)[i], -Fraction(x) * Fraction(y)),
            (w.v64(8, np.float64)[i], Fraction(x) * Fraction(y)),
        ):
            assert got == exact64(product + Fraction(z)), (x, y, z)
    assert w.v64(8, np.float64)[62] == INF and np.isnan(w.v64(8, np.float64)[63])


def test_the_division_sequence_of_doubles_divides():
    """Two Newton steps after v_rcp_f64, as LLVM prints them."""
    rng = np.random.default_rng(7)
    special = [
        0.0,
        -0.0,
        1.0,
        -3.0,
        0.1,
        1e-310,
        2.0**-1074,
        2.0**-1022,
        1.7e308,
        1e290,
        1e-290,
        INF,
        -INF,
        7.0,
    ]
    pairs = [(a, b) for a in special for b in special]
    for _ in range(64 * 8):
        m, e = 1 + rng.integers(0, 1 << 52, 2) * 2.0**-52, rng.integers(-1022, 1022, 2)
        pairs.append((float(m[0] * 2.0 ** e[0]), float(m[1] * 2.0 ** e[1])))
    pairs = [p for p in pairs if not (abs(p[1]) >= 2.0**1022 and math.isfinite(p[1]))]
    pairs = pairs[: len(pairs) // 64 * 64]
    for start in range(0, len(pairs), 64):
        block = pairs[start : start + 64]
        a, b = (np.array(x) for x in zip(*block, strict=True))
        w = Waves().set("v2", a).set("v4", b)
        w.do(
            "v_div_scale_f64 v[6:7], s[0:1], v[4:5], v[4:5], v[2:3]", "v_rcp_f64_e32 v[8:9], v[6:7]",
            "v_fma_f64 v[10:11], -v[6:7], v[8:9], 1.0", "v_fmac_f64_e32 v[8:9], v[8:9], v[10:11]",
            "v_fma_f64 v[10:11], -v[6:7], v[8:9], 1.0", "v_fmac_f64_e32 v[8:9], v[8:9], v[10:11]",
            "v_div_scale_f64 v[10:11], vcc, v[2:3], v[4:5], v[2:3]", "v_mul_f64 v[12:13], v[10:11], v[8:9]",
            "v_fma_f64 v[6:7], -v[6:7], v[12:13], v[10:11]", "v_div_fmas_f64 v[6:7], v[6:7], v[8:9], v[12:13]",
            "v_div_fixup_f64 v[0:1], v[6:7], v[4:5], v[2:3]",
        )  # fmt: skip
        for (x, y), got in zip(block, w.v64(0, np.float64).tolist(), strict=True):
            if math.isfinite(x) and math.isfinite(y) and x != 0 and y != 0:
                q = Fraction(x) / Fraction(y)
                want = math.copysign(exact64(q), -1 if q < 0 else 1)
                # A subnormal quotient is rounded twice: to 53 bits, then scaled down.
                exactly = abs(want) >= 2.0**-1022
                assert got == want if exactly else abs(got - want) <= 2.0**-1074, (x, y)
            else:
                with np.errstate(all="ignore"):
                    want = float(np.float64(x) / np.float64(y))
                assert (
                    got == want and math.copysign(1, got) == math.copysign(1, want)
                ) or np.isnan([got, want]).all()


def test_a_double_division_that_the_manual_leaves_open_is_reported():
    w = Waves().set("v2", np.full(64, 2.0**-30)).set("v4", np.full(64, 1.5 * 2.0**1022))
    with pytest.raises(Fault, match="both subnormal"):
        w.do("v_div_scale_f64 v[6:7], s[0:1], v[4:5], v[4:5], v[2:3]")


FLOAT_RELATIONS = {
    "f": lambda a, b: False, "lt": operator.lt, "eq": operator.eq, "le": operator.le, "gt": operator.gt,
    "lg": lambda a, b: a < b or a > b, "ge": operator.ge, "o": lambda a, b: not (math.isnan(a) or math.isnan(b)),
    "u": lambda a, b: math.isnan(a) or math.isnan(b), "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b), "ngt": lambda a, b: not a > b, "nle": lambda a, b: not a <= b,
    "neq": operator.ne, "nlt": lambda a, b: not a < b, "tru": lambda a, b: True,
}  # fmt: skip
INTEGER_RELATIONS = {
    "f": lambda a, b: False, "lt": operator.lt, "eq": operator.eq, "le": operator.le, "gt": operator.gt,
    "ne": operator.ne, "ge": operator.ge, "t": lambda a, b: True,
}  # fmt: skip


def compared(kind):
    size = int(kind[1:]) // 8
    rng = np.random.default_rng(size)
    if kind[0] == "f":
        with np.errstate(all="ignore"):
            return np.concatenate([lanes(2, 20)[:, :62], [[0, 1], [-0.0, 1]]], 1).astype(f"f{size}")
    raw = rng.integers(0, 1 << (8 * size), (2, 64), np.uint64).astype(f"u{size}")
    raw[1, :20] = raw[0, :20]
    raw[0, 20:24] = (1 << (8 * size)) - 1
    return raw.view(f"{'i' if kind[0] == 'i' else 'u'}{size}")


@pytest.mark.parametrize("kind", ["f16", "f32", "f64", "i16", "u16", "i32", "u32", "i64", "u64"])
@pytest.mark.parametrize("also", ["cmp", "cmpx"])
def test_comparisons(kind, also):
    data = compared(kind)
    size = data.dtype.itemsize
    before = 0xFFFF_FFFF_0FFF_FFF0
    for relation, f in (FLOAT_RELATIONS if kind[0] == "f" else INTEGER_RELATIONS).items():
        w = Waves()
        for register, row in (("v2", data[0]), ("v4", data[1])):
            w.set(register, row.view(np.uint16).astype(np.uint32) if size == 2 else row)
        names = "v[2:3], v[4:5]" if size == 8 else "v2, v4"
        w.exec(before).do(f"v_{also}_{relation}_{kind} s[6:7], {names}")
        want = (
            sum(int(f(a, b)) << i for i, (a, b) in enumerate(zip(*data.tolist(), strict=True)))
            & before
        )
        assert w.s64(6) == want, relation
        assert w.s64(126) == (want if also == "cmpx" else before), relation


def test_comparisons_with_byte_selection_and_constants():
    a = np.arange(64, dtype=np.uint32) * 0x01020304
    w = Waves().set("v1", a).set("v2", 0).set("s4", 7)
    w.do(
        "v_cmp_ne_u16_sdwa s[0:1], v1, v2 src0_sel:BYTE_1 src1_sel:DWORD",
        "v_cmp_gt_u32_e32 vcc, s4, v1",
    )
    assert w.s64(0) == sum(int((int(x) >> 8 & 255) != 0) << i for i, x in enumerate(a))
    assert w.s64(106) == sum(int(int(x) < 7) << i for i, x in enumerate(a))
    wide = np.arange(-32, 32).astype(np.int64)
    w = (
        Waves()
        .set("v2", wide)
        .do("v_cmp_gt_i64_e32 vcc, -1, v[2:3]", "v_cmp_eq_u64_e32 vcc, 3, v[2:3]")
    )
    assert w.s64(106) == 1 << 35


CLASSES = [0x7F800001, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000001, 0x80000000, 0x00000000, 0x00000001, 0x3F800000,
           0x7F800000]  # fmt: skip


def test_classes():
    """Bits 0 to 9: signalling and quiet NaN, then from -infinity to +infinity."""
    for kind, values in {
        "f32": CLASSES,
        "f16": [0x7C01, 0x7E00, 0xFC00, 0xBC00, 0x8001, 0x8000, 0, 1, 0x3C00, 0x7C00],
    }.items():
        for k in range(10):
            w = Waves().set("v1", np.resize(np.array(values, np.uint32), 64)).set("v2", 1 << k)
            w.do(f"v_cmp_class_{kind} s[0:1], v1, v2")
            assert w.s64(0) & 0x3FF == 1 << k, (kind, k)
    doubles = np.array(
        [
            0x7FF0000000000001,
            0x7FF8000000000000,
            0xFFF0000000000000,
            0xBFF0000000000000,
            0x8000000000000001,
            1 << 63,
            0,
            1,
            0x3FF0000000000000,
            0x7FF0000000000000,
        ],
        np.uint64,
    )
    for k in range(10):
        w = (
            Waves()
            .set("v2", np.resize(doubles, 64))
            .set("v4", 1 << k)
            .do("v_cmp_class_f64 s[0:1], v[2:3], v4")
        )
        assert w.s64(0) & 0x3FF == 1 << k, k
    w = Waves().set("v1", np.resize(np.array(CLASSES, np.uint32), 64)).set("v2", 3)
    w.do("v_cmpx_class_f32 s[0:1], v1, v2")
    assert w.s64(126) & 0x3FF == 3


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
