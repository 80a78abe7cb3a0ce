"""Roundings of the PTX interpreter at and next to ties: every expected bit from fractions and Python's integers."""

import math
import struct
import sys
from fractions import Fraction

import numpy as np
import pytest

from sglang_aiter_moe.nvptx.errors import PtxError
from sglang_aiter_moe.testing.ptx_snippets import run_lines
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

# Format -> (bits, exponent bits, mantissa bits)
FORMATS = {
    "bf16": (16, 8, 7), "f16": (16, 5, 10), "f32": (32, 8, 23), "f64": (64, 11, 52), "tf32": (19, 8, 10),
}  # fmt: skip
SMALL = {"e4m3": (4, 3, 448), "e5m2": (5, 2, 57344)}
N = 512


def value_of(code: int, kind: str) -> Fraction:
    """A finite code's value."""
    bits, exponents, mantissas = FORMATS[kind]
    sign = -1 if code >> (bits - 1) else 1
    e, m = code >> mantissas & ((1 << exponents) - 1), code & ((1 << mantissas) - 1)
    assert e != (1 << exponents) - 1
    low = 1 - ((1 << (exponents - 1)) - 1) - mantissas
    return (
        sign
        * (Fraction(m) if e == 0 else m + (1 << mantissas))
        * Fraction(2) ** (low + max(e - 1, 0))
    )


def nearest(x: Fraction, exponents: int, mantissas: int, mode: str = "rn") -> int:
    """The magnitude's code as if exponents had no end: |x| in units of the last place, rounded in integers."""
    x = abs(x)
    if x == 0:
        return 0
    low = 2 - (1 << (exponents - 1))
    e = max(x.numerator.bit_length() - x.denominator.bit_length() - 1, low)
    while x >= Fraction(2) ** (e + 1):
        e += 1
    units = x / Fraction(2) ** (e - mantissas)
    whole, rest = divmod(units.numerator, units.denominator)
    twice = 2 * rest - units.denominator
    if mode == "rn":
        whole += twice > 0 or (twice == 0 and whole & 1)
    elif mode == "rna":
        whole += twice >= 0
    return ((e - low) << mantissas) + whole


def code_of(x: Fraction, kind: str, mode: str = "rn") -> int:
    bits, exponents, mantissas = FORMATS[kind]
    largest = ((1 << exponents) - 1 << mantissas) - (mode == "rz")
    return min(nearest(x, exponents, mantissas, mode), largest) | ((x < 0) << (bits - 1))


def codes(kind: str, seed: int, centre: float | None = None, spread: int = 8) -> np.ndarray:
    """Finite codes: of all exponents, or near ``centre``; short mantissas among them, which meet ties."""
    bits, exponents, mantissas = FORMATS[kind]
    rng = np.random.default_rng(seed)
    m = rng.integers(0, 1 << mantissas, N)
    m = np.where(rng.random(N) < 0.5, m & (-1 << mantissas - 2), m)
    top = (1 << exponents) - 1
    e = rng.integers(0, top, N)
    if centre is not None:
        bias = (1 << (exponents - 1)) - 1
        e = np.clip(bias + int(centre) + rng.integers(-spread, spread + 1, N), 0, top - 1)
    sign = rng.integers(0, 2, N)
    out = [
        int(s) << (bits - 1) | int(x) << mantissas | int(y)
        for s, x, y in zip(sign, e, m, strict=True)
    ]
    return np.array(out, f"u{bits // 8}")


def bits_of(values, kind: str) -> np.ndarray:
    return np.array([code_of(Fraction(v), kind) for v in values], f"u{FORMATS[kind][0] // 8}")


def run(line: str, size: int, **inputs) -> list[int]:
    """In CTAs of up to 1024 threads; the last one's inputs are repeated up to whole warps."""
    count = max(v.size for v in inputs.values())
    out = []
    for at in range(0, count, 1024):
        width = -(-min(1024, count - at) // 32) * 32
        given = {k: np.resize(v[at : at + 1024], width) for k, v in inputs.items()}
        out.append(run_lines(line, given, {"y": np.dtype(f"u{size}").type})["y"])
    return np.concatenate(out)[:count].tolist()


def halves(words: list[int]) -> list[int]:
    return np.array(words, np.uint32).view(np.uint16).tolist()


def without_zero(got: int, kind: str) -> int:
    """A zero's sign is not the subject here."""
    bits = FORMATS[kind][0]
    return 0 if got == 1 << (bits - 1) else got


def test_the_oracle_agrees_with_struct():
    for x in (1.5, -0.1, 2.0**-149, 3e38, 65504.0, 2.0**-24):
        assert code_of(Fraction(x), "f32") == struct.unpack("<I", struct.pack("<f", x))[0]
        assert code_of(Fraction(x), "f64") == struct.unpack("<Q", struct.pack("<d", x))[0]
        assert value_of(code_of(Fraction(x), "f64"), "f64") == Fraction(x)
    assert code_of(Fraction(65519), "f16") == 0x7BFF and code_of(Fraction(65520), "f16") == 0x7C00


FMA_TIES = {
    "bf16": [(3.0, 129.0, -(2.0**-20)), (3.0, 129.0, -(2.0**-100)), (3.0, 129.0, 2.0**-100), (3.0, 129.0, 0.0)],
    "f16": [(3.0, 683.0, -(2.0**-24)), (3.0, 683.0, 2.0**-24),
            (2.0**-12, 2.0**-13, 2.0**-24), (2.0**-24, 2.0**-24, 2049.0)],
    "f32": [(1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-100)), (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-100),
            (2.0**-75, 3 * 2.0**-75, 2.0**-149), (2.0**-149, 2.0**-149, 2.0**-126)],
    "f64": [(1 + 2.0**-27, 1 + 2.0**-26, -(2.0**-200)), (1 + 2.0**-27, 1 + 2.0**-26, 2.0**-200),
            (2.0**-538, 3 * 2.0**-537, 2.0**-1074), (2.0**-600, 2.0**-600, 1.0)],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32", "f64", "bf16x2", "f16x2"])
def test_fma_rounds_once(kind):
    one = kind.removesuffix("x2")
    parts = []
    for seed, centre in ((1, 0), (2, 0), (3, None)):
        parts.append([codes(one, 10 * seed + i, centre if i != 2 else None) for i in range(3)])
    # c of about the product's size, half a unit of it, and far below.
    for shift in (0, -8, -12, -24, -60):
        parts.append([codes(one, 90 + i, (0, 0, shift)[i], 3) for i in range(3)])
    # Results around the smallest normal number and below.
    low = 2 - (1 << (FORMATS[one][1] - 1))
    for down in (0, 2, 12):
        centres = (low // 2, low - low // 2, low - down)
        parts.append([codes(one, 70 + i + down, centres[i], 3 if i < 2 else 1) for i in range(3)])
    a, b, c = (np.concatenate([p[i] for p in parts]) for i in range(3))
    for i, x in enumerate(zip(*FMA_TIES[one], strict=True)):
        (a, b, c)[i][: len(x)] = bits_of(x, one)
    size = FORMATS[one][0] // 8
    given = {"a": a, "b": b, "c": c}
    if kind != one:
        packed = {k: v.view(np.uint32) for k, v in given.items()}
        got = halves(run(f"fma.rn.{kind} %y, %a, %b, %c;", 4, **packed))
    else:
        got = run(f"fma.rn.{kind} %y, %a, %b, %c;", size, **given)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True):
        exact = value_of(x, one) * value_of(y, one) + value_of(z, one)
        assert without_zero(r, one) == without_zero(code_of(exact, one), one) or (
            # A result that vanishes keeps its sign.
            r & ~(1 << (8 * size - 1)) == 0 == code_of(abs(exact), one)
        ), (hex(x), hex(y), hex(z))


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
@pytest.mark.parametrize("kind", ["bf16", "f16", "f32", "f64", "bf16x2", "f16x2"])
def test_sums_and_products_round_once(name, kind):
    one = kind.removesuffix("x2")
    low = 2 - (1 << (FORMATS[one][1] - 1))
    parts = [
        (None, None),
        (0, 0),
        (0, -8),
        (0, -12),
        (0, -60),
        (low // 2, low - low // 2),
        (low, low),
    ]
    a, b = (
        np.concatenate([codes(one, 7 * i + j, p[j]) for i, p in enumerate(parts)]) for j in (0, 1)
    )
    if kind != one:
        packed = {"a": a.view(np.uint32), "b": b.view(np.uint32)}
        got = halves(run(f"{name}.rn.{kind} %y, %a, %b;", 4, **packed))
    else:
        got = run(f"{name}.rn.{kind} %y, %a, %b;", FORMATS[one][0] // 8, a=a, b=b)
    f = {"add": Fraction.__add__, "sub": Fraction.__sub__, "mul": Fraction.__mul__}[name]
    top = 1 << (FORMATS[one][0] - 1)
    for x, y, r in zip(a.tolist(), b.tolist(), got, strict=True):
        exact = f(value_of(x, one), value_of(y, one))
        want = code_of(exact, one)
        assert r == want or (r & ~top == 0 == want & ~top), (hex(x), hex(y))


@pytest.mark.parametrize("of", ["f32", "f64"])
@pytest.mark.parametrize("to", ["bf16", "f16", "f32"])
def test_floats_to_floats_round_once(to, of):
    if to == of:
        return
    x = np.concatenate([codes(of, 1), codes(of, 2, 0), codes(of, 3, -14), codes(of, 4, -128)])
    ties = [1 + Fraction(1, 2**s) * k + d for s in (8, 11, 24) for k in (1, 3)
            for d in (0, Fraction(1, 2**22), -Fraction(1, 2**22), Fraction(1, 2**40), -Fraction(1, 2**40))]  # fmt: skip
    x[: len(ties)] = bits_of(ties, of)
    got = run(f"cvt.rn.{to}.{of} %y, %x;", FORMATS[to][0] // 8, x=x)
    for a, r in zip(x.tolist(), got, strict=True):
        exact = value_of(a, of)
        sign = (a >> (FORMATS[of][0] - 1)) << (FORMATS[to][0] - 1)
        assert r == code_of(abs(exact), to) | sign, hex(a)


@pytest.mark.parametrize("to", ["bf16", "f16"])
def test_toward_zero(to):
    x = np.concatenate(
        [codes("f32", 1), codes("f32", 2, 0), codes("f32", 3, -14), codes("f32", 4, 15)]
    )
    got = run(f"cvt.rz.{to}.f32 %y, %x;", 2, x=x)
    for a, r in zip(x.tolist(), got, strict=True):
        assert r == code_of(abs(value_of(a, "f32")), to, "rz") | (a >> 31) << 15, hex(a)


@pytest.mark.parametrize("of", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("to", ["bf16", "f16", "f32", "f64"])
def test_integers_to_floats_round_once(to, of):
    width = int(of[1:])
    rng = np.random.default_rng(5)
    some = [
        int(v) >> int(s)
        for v, s in zip(rng.integers(0, 1 << 63, N), rng.integers(0, 63, N), strict=True)
    ]
    some += [
        0x01010001,
        0x01010000,
        0x01000001,
        (1 << 53) + 1,
        (1 << 63) - 1,
        (1 << 64) - 1,
        65519,
        65520,
    ]
    for top in (16, 24, 31, 40, 62, 63):
        for half in (8, 11, 24, 53):
            if half <= top:
                tie = (1 << top) + (1 << (top - half))
                some += [tie - 1, tie, tie + 1, tie + (2 << (top - half))]
    some += [-v for v in some]
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if of[0] == "s" else (0, (1 << width) - 1)
    some = [v for v in some if low <= v <= high]
    some += [0] * (-len(some) % 32)
    x = np.array(some, np.dtype(f"{'i' if of[0] == 's' else 'u'}{width // 8}"))
    got = run(f"cvt.rn.{to}.{of} %y, %x;", FORMATS[to][0] // 8, x=x)
    for v, r in zip(some, got, strict=True):
        assert r == code_of(Fraction(v), to), v


@pytest.mark.parametrize("mode", ["rn", "rna", "rz"])
def test_tf32(mode):
    x = np.concatenate([codes("f32", 1), codes("f32", 2, 0), codes("f32", 3, -126)])
    x[:4] = 0x3F801000, 0x3F803000, 0x3F801001, 0xBF801000
    got = run(f"cvt.{mode}.tf32.f32 %y, %x;", 4, x=x)
    for a, r in zip(x.tolist(), got, strict=True):
        assert r == (code_of(abs(value_of(a, "f32")), "tf32", mode) << 13) | (a >> 31 << 31), hex(a)
    tie = {
        "rn": [0x3F800000, 0x3F804000], "rna": [0x3F802000, 0x3F804000], "rz": [0x3F800000, 0x3F802000],
    }  # fmt: skip
    assert got[:2] == tie[mode]


@pytest.mark.parametrize("of", ["f32", "f16x2"])
@pytest.mark.parametrize("kind", list(SMALL))
def test_small_floats_at_ties(kind, of):
    exponents, mantissas, largest = SMALL[kind]
    source = "f32" if of == "f32" else "f16"
    x = np.concatenate(
        [codes(source, 1), codes(source, 2, 0), codes(source, 3, -8), codes(source, 4, 7)]
    )
    ties = [
        Fraction(2 * k + 1, 2 ** (mantissas + 1)) * 2**e
        for e in (-8, -6, 0, 5)
        for k in range(2 << mantissas)
    ]
    ties += [t + Fraction(d, 1 << 22) * t for t in ties for d in (1, -1)] if source == "f32" else []
    x[: len(ties)] = bits_of(ties, source)
    if source == "f32":
        got = run(f"cvt.rn.satfinite.{kind}x2.f32 %y, %x, %x;", 2, x=x)
        assert all(r >> 8 == r & 255 for r in got)
        got = [r & 255 for r in got]
    else:
        words = run(f"cvt.rn.satfinite.{kind}x2.f16x2 %y, %x;", 2, x=x.view(np.uint32))
        got = np.array(words, np.uint16).view(np.uint8).tolist()
    most = nearest(Fraction(largest), exponents, mantissas)
    for a, r in zip(x.tolist(), got, strict=True):
        want = min(nearest(value_of(a, source), exponents, mantissas), most)
        assert r == want | (a >> (FORMATS[source][0] - 1)) << 7, hex(a)


@pytest.mark.parametrize("of", ["bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_nan_and_range_to_integers(to, of):
    """PTX: NaN is 0, but the highest bit alone from f64 or to 64 bits; numbers out of range are the nearest integer."""
    width = int(to[1:])
    x = np.concatenate([codes(of, 1), codes(of, 2, width), codes(of, 3, 0)])
    top = FORMATS[of]
    nan = ((1 << top[1]) - 1 << top[2]) | 1 << (top[2] - 1)
    x[:3] = nan, nan | 1 << (top[0] - 1), nan | 1
    size = max(2, width // 8)
    got = run(f"cvt.rzi.{to}.{of} %y, %x;", size, x=x)
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if to[0] == "s" else (0, (1 << width) - 1)
    nothing = 1 << (width - 1) if of == "f64" or width == 64 else 0
    if to[0] == "s" and nothing:
        nothing -= 1 << width
    for i, (a, r) in enumerate(zip(x.tolist(), got, strict=True)):
        want = nothing if i < 3 else min(max(math.trunc(value_of(a, of)), low), high)
        assert r == want & ((1 << 8 * size) - 1), hex(a)


WHOLE = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("mode", list(WHOLE))
@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_to_whole_numbers_of_the_same_type(kind, mode):
    x = np.concatenate([codes(kind, 1), codes(kind, 2, 0), codes(kind, 3, FORMATS[kind][2])])
    x[:6] = bits_of([0.5, 1.5, 2.5, -0.5, -1.5, -0.2], kind)
    got = run(f"cvt.{mode}.{kind}.{kind} %y, %x;", FORMATS[kind][0] // 8, x=x)
    top = 1 << (FORMATS[kind][0] - 1)
    for a, r in zip(x.tolist(), got, strict=True):
        assert r == code_of(Fraction(abs(WHOLE[mode](value_of(a, kind)))), kind) | (a & top), hex(a)


def test_whole_numbers_flush_what_is_subnormal():
    x = np.array([2.0**-130, -(2.0**-130), 2.0**-126, 1.5] * 8, np.float32)
    got = run_lines(
        "cvt.rpi.ftz.f32.f32 %y, %x; cvt.rpi.f32.f32 %z, %x;",
        {"x": x},
        dict.fromkeys("yz", np.uint32),
    )
    assert [hex(v) for v in got["y"][:4]] == ["0x0", "0x80000000", "0x3f800000", "0x40000000"]
    assert [hex(v) for v in got["z"][:4]] == [
        "0x3f800000",
        "0x80000000",
        "0x3f800000",
        "0x40000000",
    ]


def test_ftz_flushes_the_result_of_a_conversion():
    x = np.array([2.0**-130, -(2.0**-130), 2.0**-126, 1.0] * 8)
    got = run_lines(
        "cvt.rn.ftz.f32.f64 %y, %x; cvt.rn.f32.f64 %z, %x;",
        {"x": x},
        dict.fromkeys("yz", np.uint32),
    )
    assert [hex(v) for v in got["y"][:4]] == ["0x0", "0x80000000", "0x800000", "0x3f800000"]
    assert [hex(v) for v in got["z"][:4]] == ["0x80000", "0x80080000", "0x800000", "0x3f800000"]


@pytest.mark.parametrize(
    "line",
    [
        "add.ftz.f16 %rs1, %h, %h;", "cvt.rna.bf16.f32 %rs1, %a;", "cvt.tf32.f32 %y, %a;",
        "cvt.rn.rz.f16.f32 %rs1, %a;",
        "cvt.rn.tf32.s32 %y, %a;", "cvt.rzi.rmi.f32.f32 %y, %a;", "cvt.rmi.sat.f32.f32 %y, %a;",
    ],
)  # fmt: skip
def test_other_roundings_are_refused(line):
    given = {"a": np.zeros(32, np.float32), "h": np.zeros(32, np.float16)}
    with pytest.raises(PtxError, match="not modelled"):
        run_lines(line, given, {"y": np.float32})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
