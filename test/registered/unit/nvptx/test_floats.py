"""Float arithmetic, comparisons and conversions of the PTX interpreter, against torch and exact fractions."""

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from sglang_aiter_moe.nvptx import float_alu, packed
from sglang_aiter_moe.nvptx.errors import PtxError
from sglang_aiter_moe.testing.ptx_snippets import run_lines
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

N = 64
SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1.0,
    -1.0,
    2.0**-130,
    -(2.0**-149),
    2.0**-126,
    3.4e38,
    1e-3,
]


def floats(seed: int, spread: float = 8.0) -> np.ndarray:
    """float32 [64]: the special values and numbers of many exponents."""
    rng = np.random.default_rng(seed)
    made = rng.standard_normal(N) * 2.0 ** rng.uniform(-spread, spread, N)
    made[: len(SPECIAL)] = np.roll(SPECIAL, seed)
    return made.astype(np.float32)


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, any NaN for a NaN."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    kind = f"u{got.dtype.itemsize}"
    assert np.array_equal(got[~nan].view(kind), expected.astype(got.dtype)[~nan].view(kind))


def run(line: str, out, **inputs) -> np.ndarray:
    return run_lines(line, inputs, {"y": out})["y"]


@pytest.mark.parametrize(
    ("name", "f"), [("add", torch.add), ("sub", torch.sub), ("mul", torch.mul)]
)
@pytest.mark.parametrize("mode", ["", ".rn"])
def test_f32(name, f, mode):
    a, b = floats(1), floats(2)
    expected = f(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    same(run(f"{name}{mode}.f32 %y, %a, %b;", np.float32, a=a, b=b), expected)


def test_fma_rounds_once():
    a, b, c = floats(1), floats(2), floats(3)
    # Cases that a product rounded first, or a float64 sum rounded twice, gets wrong.
    a[20:23], b[20:23], c[20:23] = 1 + 2.0**-23, 1 + 2.0**-23, [-1, 2.0**-60, -(2.0**-60)]
    got = run("fma.rn.f32 %y, %a, %b, %c;", np.float32, a=a, b=b, c=c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        if not all(map(math.isfinite, (x, y, z))):
            terms = torch.tensor([x, y, z], dtype=torch.float64)
            same(np.array([r]), (terms[:1] * terms[1:2] + terms[2:]).float().numpy())
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if math.isinf(r):
            assert abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103
            continue
        error = abs(Fraction(float(r)) - exact)
        for other in (np.nextafter(r, np.float32(np.inf)), np.nextafter(r, np.float32(-np.inf))):
            assert math.isinf(other) or error <= abs(Fraction(float(other)) - exact)


def test_flush_to_zero():
    a = np.array([2.0**-130, -(2.0**-127), 2.0**-126, 1.0] * 16, np.float32)
    flushed = np.where(np.abs(a) < 2.0**-126, np.copysign(np.float32(0), a), a)
    same(run("add.ftz.f32 %y, %a, 0f80000000;", np.float32, a=a), flushed)
    same(
        run("mul.ftz.f32 %y, %a, 0f3F000000;", np.float32, a=a * 2), flushed
    )  # subnormal results, too
    same(run("add.f32 %y, %a, 0f80000000;", np.float32, a=a), a)


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("ex2.approx", lambda x: 2**x), ("lg2.approx", np.log2), ("rcp.approx", lambda x: 1 / x),
        ("rcp.rn", lambda x: 1 / x),
        ("sqrt.rn", np.sqrt), ("sqrt.approx", np.sqrt), ("rsqrt.approx", lambda x: 1 / np.sqrt(x)),
        ("tanh.approx", np.tanh), ("sin.approx", np.sin), ("cos.approx", np.cos),
    ],
)  # fmt: skip
def test_functions_are_exact_but_for_one_rounding(name, f):
    a = floats(1)
    with np.errstate(all="ignore"):
        expected = f(a.astype(np.longdouble)).astype(np.float32)
    same(run(f"{name}.f32 %y, %a;", np.float32, a=a), expected)


@pytest.mark.parametrize("name", ["div.full", "div.rn", "div.approx"])
def test_division(name):
    a, b = floats(1), floats(2)
    same(
        run(f"{name}.f32 %y, %a, %b;", np.float32, a=a, b=b),
        torch.div(*map(torch.from_numpy, (a, b))).numpy(),
    )


def extreme(a: float, b: float, largest: bool, propagate: bool) -> float:
    """PTX: a NaN loses against a number unless .NaN; -0 is below +0."""
    if math.isnan(a) or math.isnan(b):
        return (
            math.nan
            if propagate or (math.isnan(a) and math.isnan(b))
            else (b if math.isnan(a) else a)
        )
    key = lambda v: (v, math.copysign(1, v))  # noqa: E731
    return (max if largest else min)((a, b), key=key)


@pytest.mark.parametrize("propagate", [False, True])
@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_extremes(name, propagate, kind):
    a, b = floats(1), floats(2)
    b[:4], a[:4] = [0.0, -0.0, math.nan, 1.0], [-0.0, 0.0, math.nan, math.nan]
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    a, b = (torch.from_numpy(x).to(dtype) for x in (a, b))
    expected = [
        extreme(x, y, name == "max", propagate) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    raw = np.uint32 if kind == "f32" else np.uint16
    got = run(
        f"{name}{'.NaN' if propagate else ''}.{kind} %y, %a, %b;", raw,
        a=a.view(torch.uint16 if raw is np.uint16 else torch.uint32).numpy(),
        b=b.view(torch.uint16 if raw is np.uint16 else torch.uint32).numpy(),
    )  # fmt: skip
    same(torch.from_numpy(got.copy()).view(dtype).float().numpy(), np.array(expected, np.float32))


@pytest.mark.parametrize("propagate", [False, True])
@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_of_magnitudes(name, propagate):
    """PTX: of the magnitudes, with the sign that a product would have; Triton clamps so."""
    a, b = floats(1), floats(2)
    given = ".NaN" if propagate else ""
    got = run(f"{name}{given}.xorsign.abs.f32 %y, %a, %b;", np.float32, a=a, b=b)
    expected = [
        math.copysign(1, x)
        * math.copysign(1, y)
        * extreme(abs(x), abs(y), name == "max", propagate)
        for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    same(got, np.array(expected, np.float32))


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_signs_change_one_bit(kind):
    size = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}[kind]
    bits = np.frombuffer(np.random.default_rng(1).bytes(N * size), f"u{size}")
    top = 1 << (8 * size - 1)
    got = run_lines(
        f"abs.{kind} %y, %x; neg.{kind} %z, %x;", {"x": bits}, {"y": bits.dtype, "z": bits.dtype}
    )
    assert [int(v) for v in got["y"]] == [int(v) & ~top for v in bits]
    assert [int(v) for v in got["z"]] == [int(v) ^ top for v in bits]


HALF = {"f16": torch.float16, "bf16": torch.bfloat16}


def halves(seed: int, kind: str, count: int = N) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    made = torch.from_numpy(rng.standard_normal(count) * 2.0 ** rng.uniform(-8, 8, count)).to(
        HALF[kind]
    )
    made[: len(SPECIAL)] = torch.tensor(np.roll(SPECIAL, seed)).to(HALF[kind])
    return made


def raw(x: torch.Tensor, dtype) -> np.ndarray:
    return x.view(torch.uint16).numpy().view(dtype)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_halves_round_once(name, kind):
    """One a register and two; torch computes in float64, where sums and products of these are exact."""
    count = 3 if name == "fma" else 2
    given = [halves(i, kind, 2 * N) for i in range(1, count + 1)]
    a, b, *c = (x.double() for x in given)
    expected = {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b,
        "fma": lambda: a * b + c[0],
    }[name]()
    listed = ", ".join(f"%x{i}" for i in range(count))
    inputs = {f"x{i}": raw(x, np.uint32) for i, x in enumerate(given)}
    pair = run(f"{name}.rn.{kind}x2 %y, {listed};", np.uint32, **inputs).view(np.uint16)
    inputs = {f"x{i}": raw(x, np.uint16)[:N] for i, x in enumerate(given)}
    one = run(f"{name}.rn.{kind} %y, {listed};", np.uint16, **inputs)
    for got, right in ((pair, expected), (one, expected[:N])):
        got = torch.from_numpy(got.copy()).view(HALF[kind]).double()
        nan = right.isnan()
        assert torch.equal(got.isnan(), nan)
        assert torch.equal(got[~nan], right.to(HALF[kind]).double()[~nan])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_of_extremes_and_signs(kind):
    a, b = halves(1, kind, 2 * N), halves(2, kind, 2 * N)
    x, y = raw(a, np.uint32), raw(b, np.uint32)
    got = run_lines(
        f"max.{kind}x2 %m, %a, %b; min.NaN.{kind}x2 %n, %a, %b; abs.{kind}x2 %p, %a; neg.{kind}x2 %q, %a;",
        {"a": x, "b": y}, dict.fromkeys("mnpq", np.uint32),
    )  # fmt: skip
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    for name, largest, propagate in (("m", True, False), ("n", False, True)):
        found = torch.from_numpy(got[name].view(np.uint16).copy()).view(HALF[kind]).float().numpy()
        same(found, np.array([extreme(*p, largest, propagate) for p in pairs], np.float32))
    assert got["p"].tolist() == [int(v) & 0x7FFF7FFF for v in x]
    assert got["q"].tolist() == [int(v) ^ 0x80008000 for v in x]


COMPARE = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("name", [*COMPARE, *(n + "u" for n in COMPARE), "num", "nan"])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_comparisons_with_nan(name, kind):
    a, b = floats(1), floats(2)
    b[30:40] = a[30:40]
    a[:3], b[:3] = math.nan, [math.nan, 1, 2]
    if kind == "bf16":
        a, b = (raw(torch.from_numpy(x).bfloat16(), np.uint16) for x in (a, b))
        x, y = (torch.from_numpy(v.copy()).view(torch.bfloat16).tolist() for v in (a, b))
    else:
        x, y = a.tolist(), b.tolist()
    unordered = [math.isnan(p) or math.isnan(q) for p, q in zip(x, y, strict=True)]
    if name in ("num", "nan"):
        expected = [u == (name == "nan") for u in unordered]
    else:
        f = COMPARE[name[:2]]
        expected = [name.endswith("u") and name not in COMPARE if u else f(p, q)
                    for p, q, u in zip(x, y, unordered, strict=True)]  # fmt: skip
    assert run(f"setp.{name}.{kind} %y, %a, %b;", bool, a=a, b=b).tolist() == expected


def test_setp_combines_and_gives_both():
    a = np.arange(N, dtype=np.int32)
    c = a % 3 == 0
    got = run_lines(
        "setp.lt.and.s32 %y|%z, %a, 20, %c; setp.ge.or.s32 %w, %a, 20, !%c; setp.eq.xor.u32 %v, %a, 5, %c;",
        {"a": a, "c": c}, dict.fromkeys("yzwv", bool),
    )  # fmt: skip
    assert np.array_equal(got["y"], (a < 20) & c)
    assert np.array_equal(got["z"], (a >= 20) & c)
    assert np.array_equal(got["w"], (a >= 20) | ~c)
    assert np.array_equal(got["v"], (a == 5) ^ c)


def test_set_gives_ones_or_a_float():
    a = np.array([1.0, 2.0, math.nan, -0.0] * 16, np.float32)
    c = np.arange(N) % 3 == 0
    got = run_lines(
        "set.lt.u32.f32 %y, %a, 0f40000000; set.geu.f32.f32 %z, %a, 0f40000000;"
        "set.le.or.s32.f32 %w, %a, 0f00000000, %c; set.ge.u32.s32 %v, %n, 5;",
        {"a": a, "c": c, "n": np.arange(N, dtype=np.int32) - 9},
        {"y": np.uint32, "z": np.float32, "w": np.int32, "v": np.uint32},
    )  # fmt: skip
    assert got["y"].tolist() == [0xFFFFFFFF, 0, 0, 0xFFFFFFFF] * 16
    assert got["z"].tolist() == [0.0, 1.0, 1.0, 0.0] * 16
    assert got["w"].tolist() == [-1 if v == 0 or i % 3 == 0 else 0 for i, v in enumerate(a)]
    assert got["v"].tolist() == [0xFFFFFFFF if i - 9 >= 5 else 0 for i in range(N)]


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_copysign_takes_the_sign_of_the_first(kind):
    size = {"f32": 4, "f64": 8}[kind]
    bits = np.frombuffer(np.random.default_rng(1).bytes(2 * N * size), f"u{size}").reshape(2, N)
    top = 1 << (8 * size - 1)
    got = run_lines(
        f"copysign.{kind} %y, %a, %b;", {"a": bits[0], "b": bits[1]}, {"y": bits.dtype}
    )["y"]
    assert got.tolist() == [(a & top) | (b & ~top) for a, b in zip(*bits.tolist(), strict=True)]


def test_selections():
    a = np.arange(N, dtype=np.int32) - 9
    got = run_lines(
        "selp.b32 %y, %a, 7, %p; selp.f32 %z, 0f3F800000, 0f40000000, %p; slct.b32.s32 %w, %a, 3, %a;",
        {"a": a, "p": a % 2 == 0}, {"y": np.int32, "z": np.float32, "w": np.int32},
    )  # fmt: skip
    assert got["y"].tolist() == [int(v) if v % 2 == 0 else 7 for v in a]
    assert got["z"].tolist() == [1.0 if v % 2 == 0 else 2.0 for v in a]
    assert got["w"].tolist() == [max(int(v), 3) if v < 0 else int(v) for v in a]


def test_every_opcode_is_tested():
    assert set(float_alu.TABLE) - {"mad"} == {
        "add", "sub", "mul", "fma", "div", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "tanh", "sin", "cos", "max", "min",
        "abs", "neg", "copysign",
    }  # fmt: skip
    assert set(packed.TABLE) == {"add", "sub", "mul", "fma", "max", "min", "abs", "neg"}


@pytest.mark.parametrize(
    "line",
    [
        "add.rz.f32 %y, %a, %a;",
        "add.f32 %y, %a, 1;",
        "ex2.f64 %y, %a;",
        "div.f32x2 %y, %a, %a;",
        "min.xorsign.f32 %y, %a, %a;",
        "max.xorsign.abs.f64 %rd1, %rd2, %rd3;",
    ],
)
def test_other_forms_are_refused(line):
    with pytest.raises(PtxError, match="not modelled"):
        run(line, np.float32, a=floats(1))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
