"""Integer and bit operations of the PTX interpreter, against Python's integers."""

import sys

import numpy as np
import pytest

from sglang_aiter_moe.nvptx import integer
from sglang_aiter_moe.nvptx.errors import PtxError
from sglang_aiter_moe.testing.ptx_snippets import run_lines
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

N = 64
DTYPES = {
    "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "u32": np.uint32, "s32": np.int32, "b32": np.uint32,
    "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
}  # fmt: skip


def values(kind: str, seed: int) -> np.ndarray:
    """Random bits, with the smallest, the largest and small numbers among them."""
    dtype = np.dtype(DTYPES[kind])
    made = np.frombuffer(np.random.default_rng(seed).bytes(N * dtype.itemsize), dtype).copy()
    limits = np.iinfo(dtype)
    made[: 2 + 4 * (seed % 2)] = limits.max if seed % 2 else limits.min
    made[8:24] = (np.arange(16) * (seed + 1) % 7).astype(dtype)
    return made


def wrapped(value: int, kind: str) -> int:
    bits = 8 * np.dtype(DTYPES[kind]).itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def width(kind: str) -> int:
    return int(kind[1:])


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def shifted(a: int, n: int, kind: str, left: bool) -> int:
    return a << n if left else a >> n  # Python's shift of a negative number copies the sign


def prmt(a: int, b: int, selector: int) -> int:
    source = (a | b << 32).to_bytes(8, "little")
    out = []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = source[nibble & 7]
        out.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def bfe(a: int, position: int, length: int, kind: str) -> int:
    """PTX ISA: bits beyond the top are the sign of the field, whose last bit is at most the top one."""
    position, length, top = position & 255, length & 255, width(kind) - 1
    bits = a & ((1 << width(kind)) - 1)
    signed = kind[0] == "s" and length > 0
    sign = bits >> min(position + length - 1, top) & 1 if signed else 0
    out = 0
    for i in range(top + 1):
        inside = i < length and position + i <= top
        out |= (bits >> (position + i) & 1 if inside else sign) << i
    return wrapped(out, kind)


def bfi(a: int, b: int, position: int, length: int, kind: str) -> int:
    position, length, top = position & 255, length & 255, width(kind) - 1
    for i in range(length):
        if position + i <= top:
            b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return b


def lop3(a: int, b: int, c: int, table: int) -> int:
    return sum(
        (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32)
    )


TWO = {
    "add": lambda a, b, k: a + b, "sub": lambda a, b, k: a - b, "min": lambda a, b, k: min(a, b),
    "max": lambda a, b, k: max(a, b), "and": lambda a, b, k: a & b, "or": lambda a, b, k: a | b,
    "xor": lambda a, b, k: a ^ b, "mul.lo": lambda a, b, k: a * b, "mul.hi": lambda a, b, k: a * b >> width(k),
}  # fmt: skip
ONE = {
    "neg": lambda a, k: -a, "abs": lambda a, k: abs(a), "not": lambda a, k: ~a, "cnot": lambda a, k: int(a == 0),
}  # fmt: skip


def run(
    name: str, kind: str, *inputs: np.ndarray, out: str | None = None, more: str = ""
) -> list[int]:
    named = {f"x{i}": v for i, v in enumerate(inputs)}
    listed = ", ".join(f"%x{i}" for i in range(len(inputs)))
    result = run_lines(f"{name}.{kind} %y, {listed}{more};", named, {"y": DTYPES[out or kind]})
    return [int(v) for v in result["y"]]


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", TWO)
def test_of_two(name, kind):
    if name in ("and", "or", "xor"):
        kind = "b" + kind[1:]
    a, b = values(kind, 1), values(kind, 2)
    expected = [wrapped(TWO[name](int(x), int(y), kind), kind) for x, y in zip(a, b, strict=True)]
    assert run(name, kind, a, b) == expected


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
@pytest.mark.parametrize("name", ONE)
def test_of_one(name, kind):
    given = "b" + kind[1:] if name in ("not", "cnot") else kind
    a = values(given, 1)
    assert run(name, given, a) == [wrapped(ONE[name](int(x), given), given) for x in a]


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products(kind):
    double = kind[0] + str(2 * width(kind))
    a, b, c = values(kind, 1), values(kind, 2), values(double, 3)
    product = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    assert run("mul.wide", kind, a, b, out=double) == product
    sums = [wrapped(p + int(z), double) for p, z in zip(product, c, strict=True)]
    assert run("mad.wide", kind, a, b, c, out=double) == sums


@pytest.mark.parametrize("kind", ["s32", "u32", "s64"])
def test_mad_lo_wraps(kind):
    a, b, c = (values(kind, i) for i in (1, 2, 3))
    expected = [wrapped(int(x) * int(y) + int(z), kind) for x, y, z in zip(a, b, c, strict=True)]
    assert run("mad.lo", kind, a, b, c) == expected


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_division_goes_toward_zero(kind):
    a, b = values(kind, 1), values(kind, 2)
    b[b == 0] = 3
    pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert run("div", kind, a, b) == [wrapped(quotient(x, y), kind) for x, y in pairs]
    assert run("rem", kind, a, b) == [wrapped(x - y * quotient(x, y), kind) for x, y in pairs]


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_shifts_beyond_the_width_leave_zeros_or_signs(kind):
    a = values(kind, 1)
    n = np.array([0, 1, 5, 15, 16, 31, 32, 33, 63, 64, 100, 2**32 - 1] * 6, np.uint32)[:N]
    right = [wrapped(int(x) >> min(int(m), 200), kind) for x, m in zip(a, n, strict=True)]
    left = [wrapped(int(x) << min(int(m), 200), kind) for x, m in zip(a, n, strict=True)]
    assert run("shr", kind, a, n) == right
    unsigned = "b" + kind[1:]
    assert [wrapped(v, kind) for v in run("shl", unsigned, a.view(DTYPES[unsigned]), n)] == left


@pytest.mark.parametrize("amount", [0, 3, 31, 32, 40])
def test_shifts_by_a_constant(amount):
    a = values("s32", 1)
    got = run_lines(
        f"shr.s32 %y, %x, {amount}; shl.b32 %z, %x, {amount};",
        {"x": a},
        {"y": np.int32, "z": np.uint32},
    )
    assert got["y"].tolist() == [int(x) >> min(amount, 31) for x in a]
    assert got["z"].tolist() == [(int(x) << amount) & 0xFFFFFFFF for x in a]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    a = values(kind, 1)
    position = np.array([0, 1, 7, 31, 32, 63, 64, 255] * 8, np.uint32)
    length = np.repeat(np.array([0, 1, 5, 31, 32, 40, 64, 255], np.uint32), 8)
    expected = [
        bfe(int(x), int(p), int(n), kind) for x, p, n in zip(a, position, length, strict=True)
    ]
    assert run("bfe", kind, a, position, length) == expected
    unsigned = "b" + kind[1:]
    x, y = a.view(DTYPES[unsigned]), values(unsigned, 4)
    inserted = [
        bfi(int(i), int(j), int(p), int(n), unsigned)
        for i, j, p, n in zip(x, y, position, length, strict=True)
    ]
    assert run("bfi", unsigned, x, y, position, length) == inserted


@pytest.mark.parametrize(("position", "length"), [(0, 1), (3, 8), (16, 16), (31, 1), (0, 32)])
def test_bit_fields_by_constants(position, length):
    a = values("s32", 1)
    more = f", {position}, {length}"
    assert run("bfe", "s32", a, more=more) == [bfe(int(x), position, length, "s32") for x in a]
    b = a.view(np.uint32)
    assert run("bfe", "u32", b, more=more) == [bfe(int(x), position, length, "u32") for x in b]


@pytest.mark.parametrize("table", [0xEA, 0xF8, 0x96, 0xFE, 0x80, 0xCA, 0x00, 0xFF, 0x1B, 0x3C])
def test_lop3_is_its_truth_table(table):
    a, b, c = (values("b32", i) for i in (1, 2, 3))
    expected = [lop3(int(x), int(y), int(z), table) for x, y, z in zip(a, b, c, strict=True)]
    assert run("lop3", "b32", a, b, c, more=f", {table}") == expected


def test_prmt_takes_bytes_and_signs():
    a, b, s = values("b32", 1), values("b32", 2), values("b32", 3)
    assert run("prmt", "b32", a, b, s) == [
        prmt(int(x), int(y), int(z)) for x, y, z in zip(a, b, s, strict=True)
    ]
    for selector in (0x5140, 0x7362, 0x3340, 0xFEDC):
        expected = [prmt(int(x), int(y), selector) for x, y in zip(a, b, strict=True)]
        assert run("prmt", "b32", a, b, more=f", {selector}") == expected


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bit_counts(kind):
    a = values(kind, 1)
    bits = [f"{int(x):0{width(kind)}b}" for x in a]
    assert run("popc", kind, a, out="u32") == [b.count("1") for b in bits]
    assert run("clz", kind, a, out="u32") == [len(b) - len(b.lstrip("0")) for b in bits]
    assert run("brev", kind, a) == [int(b[::-1], 2) for b in bits]
    highest = [len(b.lstrip("0")) - 1 if "1" in b else 0xFFFFFFFF for b in bits]
    assert run("bfind", "u" + kind[1:], a.view(DTYPES["u" + kind[1:]]), out="u32") == highest


def test_funnel_shifts():
    a, b = values("b32", 1), values("b32", 2)
    n = np.arange(N, dtype=np.uint32)
    both = [int(x) | int(y) << 32 for x, y in zip(a, b, strict=True)]
    got = run("shf.r.wrap", "b32", a, b, n)
    assert got == [v >> (i & 31) & 0xFFFFFFFF for i, v in enumerate(both)]
    assert run("shf.r.clamp", "b32", a, b, n) == [
        v >> min(i, 32) & 0xFFFFFFFF for i, v in enumerate(both)
    ]
    assert run("shf.l.wrap", "b32", a, b, n) == [
        (v << (i & 31)) >> 32 & 0xFFFFFFFF for i, v in enumerate(both)
    ]


def test_relu_of_extremes():
    a, b = values("s32", 1), values("s32", 2)
    expected = [max(int(x), int(y), 0) for x, y in zip(a, b, strict=True)]
    assert run("max.relu", "s32", a, b) == expected


def test_predicates():
    a, b = np.arange(N) % 2 == 0, np.arange(N) % 3 == 0
    got = run_lines(
        "and.pred %y, %a, %b; or.pred %z, %a, %b; xor.pred %w, %a, %b; not.pred %v, %a;",
        {"a": a, "b": b}, dict.fromkeys("yzwv", bool),
    )  # fmt: skip
    for name, expected in {"y": a & b, "z": a | b, "w": a ^ b, "v": ~a}.items():
        assert np.array_equal(got[name], expected)


def test_every_opcode_is_tested():
    tested = {n.split(".")[0] for n in (*TWO, *ONE)} | {
        "mad", "div", "rem", "shl", "shr", "bfe", "bfi", "lop3", "prmt", "popc", "clz", "brev", "bfind", "shf",
    }  # fmt: skip
    assert set(integer.TABLE) == tested


def test_sums_saturate():
    a, b = values("s32", 1).copy(), values("s32", 2).copy()
    a[:4], b[:4] = [2**31 - 1, -(2**31), 2**31 - 1, 0], [3, -1, -1, -(2**31)]
    low, high = -(2**31), 2**31 - 1
    pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert run("add.sat", "s32", a, b) == [min(max(x + y, low), high) for x, y in pairs]
    assert run("sub.sat", "s32", a, b) == [min(max(x - y, low), high) for x, y in pairs]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfind_of_signs_and_as_a_shift(kind):
    """PTX: of a negative number the highest bit that is 0; all ones where there is none."""
    a = values(kind, 1).copy()
    a[:4] = [0, 1, 0, 1]
    a[2:4] = ~a[2:4]  # -1 and -2, or all ones and all but the last
    found = [(~int(v) if v < 0 else int(v)).bit_length() - 1 for v in a]
    width = int(kind[1:])
    assert run("bfind", kind, a, out="u32") == [p & 0xFFFFFFFF for p in found]
    shifts = [0xFFFFFFFF if p < 0 else width - 1 - p for p in found]
    assert run("bfind.shiftamt", kind, a, out="u32") == shifts


@pytest.mark.parametrize(
    "line",
    ["add.sat.u32 %y, %x, %x;", "mul.s32 %y, %x, %x;", "shl.u17 %y, %x, 1;", "add.s64 %y, %x, %x;"],
)
def test_other_forms_are_refused(line):
    with pytest.raises(PtxError, match="not modelled"):
        run_lines(line, {"x": values("s32", 1)}, {"y": np.int32})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
