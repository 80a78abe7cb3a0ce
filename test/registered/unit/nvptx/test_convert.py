"""cvt and mov of the PTX interpreter, against torch's formats and Python's integers."""

import math
import sys

import numpy as np
import pytest
import torch

from sglang_aiter_moe.nvptx.errors import PtxError
from sglang_aiter_moe.testing.ptx_snippets import run_lines
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

SMALL = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def bits(count: int, dtype, seed: int = 1) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(count * np.dtype(dtype).itemsize), dtype)


def floats(count: int) -> np.ndarray:
    """float32: ties of short mantissas, special values, and random bits."""
    made = bits(count, np.float32).copy()
    made[:8] = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1 + 2.0**-8,
        1 + 2.0**-8 + 2.0**-20,
        448.0,
    ]
    scales = 2.0 ** np.arange(-12, 12).repeat(8)
    made[8:200] = (np.tile(np.arange(16, 32, 2) + 1, 24) / 16 * scales).astype(
        np.float32
    )  # ties of three bits
    return made


def run(line: str, out, **inputs) -> np.ndarray:
    return run_lines(line, inputs, {"y": out})["y"]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_small_floats_of_all_codes(kind):
    codes = np.arange(256, dtype=np.uint16)
    got = (
        run(f"cvt.rn.f16x2.{kind}x2 %y, %x;", np.uint32, x=codes | codes[::-1] << 8)
        .view(np.float16)
        .reshape(-1, 2)
    )
    expected = torch.arange(256, dtype=torch.uint8).view(SMALL[kind]).half().numpy()
    assert np.array_equal(got[:, 0], expected, equal_nan=True)
    assert np.array_equal(got[:, 1], expected[::-1], equal_nan=True)
    assert set(got.view(np.uint16)[np.isnan(got)].tolist()) == {0x7FFF}


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("of", ["f32", "f16x2"])
def test_to_small_floats_saturates(kind, of):
    high, low = floats(512), floats(512)[::-1].copy()
    if of == "f16x2":
        with np.errstate(over="ignore"):
            high, low = (torch.from_numpy(x).half() for x in (high, low))
        both = (
            low.view(torch.uint16).numpy().astype(np.uint32)
            | high.view(torch.uint16).numpy().astype(np.uint32) << 16
        )
        got = run(f"cvt.rn.satfinite.{kind}x2.f16x2 %y, %x;", np.uint16, x=both)
        high, low = high.float(), low.float()
    else:
        got = run(f"cvt.rn.satfinite.{kind}x2.f32 %y, %a, %b;", np.uint16, a=high, b=low)
        high, low = torch.from_numpy(high), torch.from_numpy(low)
    for part, x in ((got >> 8, high), (got & 255, low)):
        expected = x.clamp(-LARGEST[kind], LARGEST[kind]).to(SMALL[kind]).view(torch.uint8)
        expected = torch.where(x.isnan(), 0x7F, expected)
        assert torch.equal(torch.from_numpy(part.astype(np.uint8)), expected.to(torch.uint8))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_halves(kind):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    a, b = floats(512), floats(512)[::-1].copy()
    got = run_lines(
        f"cvt.rn.{kind}.f32 %y, %a; cvt.rn.{kind}x2.f32 %z, %a, %b;",
        {"a": a, "b": b},
        {"y": np.uint16, "z": np.uint32},
    )
    expected = [torch.from_numpy(x).to(dtype).view(torch.uint16).numpy().copy() for x in (a, b)]
    for e, x in zip(expected, (a, b), strict=True):
        e[np.isnan(x)] = 0x7FFF
    assert np.array_equal(got["y"], expected[0])
    assert np.array_equal(got["z"] >> 16, expected[0])
    assert np.array_equal(got["z"] & 0xFFFF, expected[1])
    codes = bits(512, np.uint16)
    wide = run(f"cvt.f32.{kind} %y, %x;", np.float32, x=codes)
    assert np.array_equal(
        wide, torch.from_numpy(codes.copy()).view(dtype).float().numpy(), equal_nan=True
    )


def test_relu_and_toward_zero():
    a = floats(512)
    got = run_lines(
        "cvt.rn.relu.bf16x2.f32 %y, %a, %a; cvt.rz.bf16.f32 %z, %a;",
        {"a": a},
        {"y": np.uint32, "z": np.uint16},
    )
    value = torch.from_numpy(a)
    expected = torch.where(value.isnan(), value, value.clamp(min=0)).bfloat16()
    found = torch.from_numpy((got["y"] & 0xFFFF).astype(np.uint16)).view(torch.bfloat16)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    finite = np.isfinite(a)
    assert np.array_equal(got["z"][finite], (a.view(np.uint32) >> 16).astype(np.uint16)[finite])


def test_tf32_rounds_ties_away():
    a = np.array(
        [1.0, 1 + 2.0**-11, 1 + 2.0**-12, -(1 + 2.0**-11), 1 + 3 * 2.0**-11, 0, -(2.0**-100), 3e38]
        * 4,
        np.float32,
    )
    got = run("cvt.rna.tf32.f32 %y, %a;", np.float32, a=a)
    unit = np.exp2(np.floor(np.log2(np.abs(np.where(a == 0, 1, a.astype(np.float64))))) - 10)
    expected = np.sign(a) * np.floor(np.abs(a) / unit + 0.5) * unit
    assert np.array_equal(got, expected.astype(np.float32))


@pytest.mark.parametrize("of", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("to", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_integers(of, to):
    """Through registers of at least 16 bits, as PTX has them; narrow results are extended by their sign."""
    size = {k: max(2, int(k[1:]) // 8) for k in (of, to)}
    x = bits(64, f"u{size[of]}")
    got = run(f"cvt.{to}.{of} %y, %x;", np.dtype(f"u{size[to]}").type, x=x)
    for a, r in zip(x.tolist(), got.tolist(), strict=True):
        a &= (1 << int(of[1:])) - 1
        if of[0] == "s" and a >> (int(of[1:]) - 1):
            a -= 1 << int(of[1:])
        a &= (1 << int(to[1:])) - 1
        if to[0] == "s" and a >> (int(to[1:]) - 1):
            a -= 1 << int(to[1:])
        assert r == a & ((1 << 8 * size[to]) - 1)


@pytest.mark.parametrize(
    ("mode", "f"), [("rzi", math.trunc), ("rni", round), ("rmi", math.floor), ("rpi", math.ceil)]
)
@pytest.mark.parametrize("to", ["s32", "u32"])
def test_floats_to_integers_saturate(mode, f, to):
    some = [
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        3e9,
        -3e9,
        5e9,
        math.inf,
        -math.inf,
        math.nan,
        7.0,
        -7.25,
        1e-40,
    ]
    a = np.array([*some, 2**31, 99.9] * 2, np.float32)
    low, high = (-(2**31), 2**31 - 1) if to == "s32" else (0, 2**32 - 1)
    got = run(f"cvt.{mode}.{to}.f32 %y, %a;", np.int32 if to == "s32" else np.uint32, a=a)
    expected = [
        0
        if math.isnan(v)
        else high
        if v == math.inf
        else low
        if v == -math.inf
        else min(max(f(float(v)), low), high)
        for v in a
    ]
    assert got.tolist() == expected


@pytest.mark.parametrize("of", ["s32", "u32"])
def test_integers_to_floats(of):
    x = bits(64, np.int32 if of == "s32" else np.uint32).copy()
    x[:4] = [0, 1, 2**24 + 1, 2**24 + 3]
    assert np.array_equal(
        run(f"cvt.rn.f32.{of} %y, %x;", np.float32, x=x),
        np.array([float(v) for v in x], np.float32),
    )


def test_saturation_of_integers():
    x = np.array([-500, -1, 0, 5, 127, 128, 255, 300] * 4, np.int32)
    got = run_lines(
        "cvt.sat.s8.s32 %y, %x; cvt.sat.u8.s32 %z, %x;", {"x": x}, {"y": np.int16, "z": np.uint16}
    )
    assert got["y"].tolist() == np.clip(x, -128, 127).tolist()
    assert got["z"].tolist() == np.clip(x, 0, 255).tolist()


def test_mov_joins_and_divides():
    x, z = bits(64, np.uint32), bits(64, np.uint64)
    got = run_lines(
        """mov.b32 {%rs1, %rs2}, %x; mov.b32 %y, {%rs2, %rs1}; mov.b64 {%r2, %r3}, %z; mov.b64 %w, {%r3, %r2};
        mov.b32 %v, 0f3FC00000; mov.f32 %u, 0f7FC00000; mov.b64 %t, -1;""",
        {"x": x, "z": z}, {"y": np.uint32, "w": np.uint64, "v": np.float32, "u": np.float32, "t": np.int64},
    )  # fmt: skip
    assert np.array_equal(got["y"], x >> 16 | x << 16)
    assert np.array_equal(got["w"], z >> np.uint64(32) | z << np.uint64(32))
    assert set(got["v"].tolist()) == {1.5}
    assert np.isnan(got["u"]).all()
    assert set(got["t"].tolist()) == {-1}


@pytest.mark.parametrize(
    "line",
    [
        "cvt.rn.e4m3x2.f32 %rs1, %a, %a;",
        "cvt.rz.f32.s32 %y, %x;",
        "cvt.rn.f32.e4m3 %y, %x;",
        "cvt.rna.s32.f32 %x, %a;",
    ],
)
def test_other_forms_are_refused(line):
    with pytest.raises(PtxError, match="not modelled"):
        run_lines(line, {"a": floats(512), "x": bits(512, np.uint32)}, {"y": np.float32})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
