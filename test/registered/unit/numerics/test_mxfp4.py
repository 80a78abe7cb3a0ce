import math
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics import (
    ScaleRounding,
    decode_e2m1,
    dequantize_mxfp4,
    encode_e2m1,
    pack_e2m1,
    quantize_mxfp4,
    quantize_mxfp4_epilogue,
    unpack_e2m1,
)
from sglang_aiter_moe.testing import mx_reference
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
QUANTISERS = {
    "down": lambda x: quantize_mxfp4(x, ScaleRounding.DOWN),
    "up": quantize_mxfp4,
    "even": lambda x: quantize_mxfp4(x, ScaleRounding.EVEN),
    "ceil": lambda x: quantize_mxfp4(x, ScaleRounding.CEIL),
    "epilogue": quantize_mxfp4_epilogue,
}
finite32 = st.floats(-(2.0**100), 2.0**100, width=32)


def reference_code(x: float) -> int:
    """A sign bit and the code nearest to the magnitude, ties to the even code."""
    sign = 8 if math.copysign(1.0, x) < 0 else 0
    if math.isnan(x):
        return sign | 3
    if math.isinf(x):
        return sign | 7
    return sign | mx_reference.nearest(Fraction(x), mx_reference.E2M1)


# --- E2M1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_encode_every_16_bit_value(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = [reference_code(v) for v in x.double().tolist()]
    assert encode_e2m1(x).tolist() == expected
    assert encode_e2m1(x.double()).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_encode_around_every_midpoint(dtype):
    x = [torch.tensor((*MIDPOINTS, 6.0, 7.0, 8.0), dtype=dtype)]
    for _ in range(3):
        x = [torch.nextafter(x[0], torch.zeros(1, dtype=dtype)), *x]
        x.append(torch.nextafter(x[-1], torch.full((1,), 9.0, dtype=dtype)))
    x = torch.cat([*x, *(-v for v in x)])
    assert encode_e2m1(x).tolist() == [reference_code(v) for v in x.tolist()]


@given(st.floats(width=32))
def test_encode_any_float32(value):
    assert encode_e2m1(torch.tensor([value])).item() == reference_code(value)


def test_encode_float64_rounds_once():
    above = torch.tensor([m + 2.0**-50 for m in MIDPOINTS], dtype=torch.float64)
    assert encode_e2m1(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    # Through float32 the same values are ties, and every second one falls.
    assert encode_e2m1(above.float()).tolist() == [0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_decode_every_code(dtype):
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8), dtype)
    assert values.dtype == dtype
    assert values.tolist() == [0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values.signbit().tolist() == [False] * 8 + [True] * 8
    assert encode_e2m1(values).tolist() == list(range(16))


def test_packing_puts_the_even_element_in_the_low_nibble():
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x0]], dtype=torch.uint8)
    packed = pack_e2m1(codes)
    assert packed.tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_e2m1(packed), codes)
    assert torch.equal(unpack_e2m1(packed.view(torch.float4_e2m1fn_x2)), codes)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_every_byte_survives_unpack_and_pack(values):
    packed = torch.tensor(values, dtype=torch.uint8)
    assert torch.equal(pack_e2m1(unpack_e2m1(packed)), packed)


# --- blocks


@pytest.mark.parametrize("rule", QUANTISERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_block_against_rationals(rule, data):
    exponent = data.draw(st.integers(-90, 90))
    numbers = st.one_of(
        st.floats(-8, 8, width=32).map(lambda v: v if abs(v) > 2.0**-20 else 0.0),
        st.sampled_from((*MIDPOINTS, 6.0, 1.5, 12.0, 0.0)),
    )
    values = data.draw(st.lists(numbers, min_size=32, max_size=32).filter(any))
    x = torch.tensor([math.ldexp(v, exponent) for v in values])
    codes, byte = mx_reference.quantize_block(x.tolist(), mx_reference.E2M1, rule)
    packed, scales = QUANTISERS[rule](x)
    assert scales.tolist() == [byte]
    assert (unpack_e2m1(packed) & 7).tolist() == codes
    assert torch.equal(unpack_e2m1(packed) >> 3, x.signbit().to(torch.uint8))


def test_epilogue_at_its_tie():
    """amax = 1.5 * 2**k is where the fused rule and RoundUp part, by a factor of two."""
    x = torch.zeros(32)
    x[:4] = torch.tensor([6.0, 5.0, 1.0, -0.5])
    packed, scales = quantize_mxfp4(x)
    assert scales.tolist() == [127]
    assert unpack_e2m1(packed)[:4].tolist() == [7, 6, 2, 9]
    packed, scales = quantize_mxfp4_epilogue(x)
    assert scales.tolist() == [128]
    assert unpack_e2m1(packed)[:4].tolist() == [5, 4, 1, 8]  # 3, 2.5 -> 2, 0.5, -0.25 -> -0


@given(st.lists(st.integers(0, 255), min_size=16, max_size=16), st.integers(10, 240), st.booleans())
def test_values_of_a_block_survive_quantisation(values, byte, fused):
    """What MXFP4 can hold comes back as it was, though perhaps as another scale and other codes."""
    packed, scales = (
        torch.tensor(values, dtype=torch.uint8),
        torch.tensor([byte], dtype=torch.uint8),
    )
    x = dequantize_mxfp4(packed, scales)
    if fused and float(x.abs().max()) == 6.0 * 2.0 ** (byte - 127):
        return  # the fused rule's tie: see above
    quantise = quantize_mxfp4_epilogue if fused else quantize_mxfp4
    assert torch.equal(dequantize_mxfp4(*quantise(x)), x)


@settings(deadline=None)
@given(st.lists(finite32, min_size=32, max_size=32))
def test_roundup_error_is_at_most_one_scale(values):
    x = torch.tensor(values, dtype=torch.float64)
    packed, scales = quantize_mxfp4(x)
    unit = 2.0 ** (scales.item() - 127)
    assert (x - dequantize_mxfp4(packed, scales, torch.float64)).abs().max() <= unit


def test_a_bad_element_spoils_its_own_block_only():
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(2, 96)
        x[0, 40] = bad
        packed, scales = quantize_mxfp4(x)
        assert scales.tolist() == [[125, 255, 125], [125, 125, 125]]
        value = dequantize_mxfp4(packed, scales)
        assert value.isnan().sum() == 32 and value[0, 32:64].isnan().all()
        assert torch.equal(value[1], x[1])


@pytest.mark.parametrize("rule", QUANTISERS)
def test_codes_under_a_nan_scale_do_not_depend_on_what_is_there(rule):
    x = torch.linspace(-3, 3, 32)
    x[5] = torch.tensor(-math.nan)
    assert x[5].signbit() and x[0].signbit()
    packed, scales = QUANTISERS[rule](x)
    assert scales.tolist() == [255]
    assert unpack_e2m1(packed).tolist() == [3] * 32


def test_epilogue_of_inf_saturates_and_of_nan_stays_nan():
    x = torch.zeros(64)
    x[:3] = torch.tensor([math.inf, -math.inf, 1.0])
    x[40] = math.nan
    packed, scales = quantize_mxfp4_epilogue(x)
    assert scales.tolist() == [253, 255]
    assert unpack_e2m1(packed)[:3].tolist() == [7, 15, 0]
    value = dequantize_mxfp4(packed, scales, torch.float64)
    assert value[:2].tolist() == [6 * 2.0**126, -6 * 2.0**126]
    assert value[32:].isnan().all()


@pytest.mark.parametrize("rule", QUANTISERS)
def test_zeros_keep_their_sign(rule):
    x = torch.zeros(64)
    x[1::2] = -0.0
    packed, scales = QUANTISERS[rule](x)
    assert scales.tolist() == [0, 0]
    assert packed.tolist() == [0x80] * 32
    assert torch.equal(dequantize_mxfp4(packed, scales).signbit(), x.signbit())


def test_subnormals_are_not_flushed():
    x = torch.full((32,), 2.0**-130)
    assert (
        decode_block(quantize_mxfp4(x, ScaleRounding.DOWN)) == [0.0] * 32
    )  # below a quarter of 2**-127
    x = torch.full((32,), 2.0**-128)
    assert decode_block(quantize_mxfp4(x, ScaleRounding.DOWN)) == [2.0**-128] * 32
    assert decode_block(quantize_mxfp4_epilogue(x)) == [2.0**-128] * 32


def decode_block(quantised) -> list[float]:
    return dequantize_mxfp4(*quantised, dtype=torch.float64).tolist()


@pytest.mark.parametrize("rule", QUANTISERS)
def test_dtype_strides_and_shape_do_not_matter(rule):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(3, 4, 64, generator=generator).to(torch.float16).to(torch.bfloat16).float()
    x = x.half().float()  # values that all four dtypes hold
    packed, scales = QUANTISERS[rule](x)
    assert packed.shape == (3, 4, 32) and scales.shape == (3, 4, 2)
    for other in (
        x.bfloat16(),
        x.half(),
        x.double(),
        x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch.cat((x, x), -1)[..., :64],
        x.requires_grad_(),
    ):
        got = QUANTISERS[rule](other)
        assert torch.equal(got[0], packed) and torch.equal(got[1], scales)
    flat = QUANTISERS[rule](x.reshape(12, 64))
    assert torch.equal(flat[0], packed.view(12, 32)) and torch.equal(flat[1], scales.view(12, 2))
    one = QUANTISERS[rule](x[1, 2])
    assert torch.equal(one[0], packed[1, 2]) and torch.equal(one[1], scales[1, 2])


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 32), (0,)])
def test_empty(shape):
    for quantise in QUANTISERS.values():
        packed, scales = quantise(torch.zeros(shape))
        assert packed.shape == (*shape[:-1], shape[-1] // 2)
        assert scales.shape == (*shape[:-1], shape[-1] // 32)
        assert dequantize_mxfp4(packed, scales).shape == shape


# --- decoding blocks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dequantize_against_enumeration(dtype):
    rng = np.random.default_rng(3)
    packed = rng.integers(0, 256, (5, 48), dtype=np.uint8)
    scales = rng.integers(0, 252, (5, 3), dtype=np.uint8)
    expected = [
        mx_reference.decode_mxfp4_row(p, s)
        for p, s in zip(packed.tolist(), scales.tolist(), strict=True)
    ]
    got = dequantize_mxfp4(torch.from_numpy(packed), torch.from_numpy(scales), dtype)
    assert got.dtype == dtype
    assert got.double().tolist() == expected
    stored = torch.from_numpy(packed).view(torch.float4_e2m1fn_x2)
    again = dequantize_mxfp4(stored, torch.from_numpy(scales).view(torch.float8_e8m0fnu), dtype)
    assert torch.equal(again, got)


def test_dequantize_takes_any_strides():
    packed = torch.randint(0, 256, (6, 4, 64), dtype=torch.uint8)
    scales = torch.randint(100, 150, (6, 4, 4), dtype=torch.uint8)
    whole = dequantize_mxfp4(packed, scales)
    half = dequantize_mxfp4(packed[::2, :, :32], scales[::2, :, :2])
    assert torch.equal(half, whole[::2, :, :64])
    one = dequantize_mxfp4(packed[:1].expand(6, -1, -1), scales)
    assert torch.equal(one[0], whole[0])


def test_dequantize_at_the_top_of_the_range():
    packed = pack_e2m1(torch.arange(32, dtype=torch.uint8) % 8)
    scales = torch.tensor([254], dtype=torch.uint8)
    expected = [
        0.0,
        2.0**126,
        2.0**127,
        1.5 * 2.0**127,
        2.0**128,
        3 * 2.0**127,
        2.0**129,
        3 * 2.0**128,
    ]
    assert dequantize_mxfp4(packed, scales, torch.float64)[:8].tolist() == expected
    assert dequantize_mxfp4(packed, scales)[:8].tolist() == expected[:4] + [math.inf] * 4


# --- refusals


def byte(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_mxfp4(torch.ones(2, 48), name="w2"), r"w2 has shape \[2, 48\]"),
        (
            lambda: quantize_mxfp4(torch.ones(4, 16)),
            r"x has shape \[4, 16\]",
        ),  # 64 elements all the same
        (lambda: quantize_mxfp4(torch.tensor(1.0)), r"x has shape \[\]"),
        (lambda: quantize_mxfp4(torch.ones(32, dtype=torch.int32)), "x has dtype torch.int32"),
        (
            lambda: quantize_mxfp4(torch.ones(32).to(torch.float8_e4m3fn)),
            "x has dtype torch.float8",
        ),
        (lambda: quantize_mxfp4(torch.ones(32), 7), "rounding is 7"),
        (lambda: quantize_mxfp4_epilogue(torch.ones(33), name="y"), r"y has shape \[33\]"),
        (lambda: encode_e2m1(torch.ones(3, dtype=torch.int64)), "x has dtype torch.int64"),
        (lambda: pack_e2m1(byte(3)), r"codes has shape \[3\]"),
        (lambda: pack_e2m1(byte(2) + 16), "codes holds the value 16"),
        (lambda: decode_e2m1(byte(2) + 255), "codes holds the value 255"),
        (lambda: decode_e2m1(torch.zeros(2)), "codes has dtype torch.float32"),
        (lambda: unpack_e2m1(torch.zeros(2)), "packed has dtype torch.float32"),
        (
            lambda: dequantize_mxfp4(byte(2, 32), byte(2, 4)),
            r"packed has shape \[2, 32\] and scales \[2, 4\]",
        ),
        (lambda: dequantize_mxfp4(byte(2, 32), byte(4)), r"scales \[4\]"),
        (lambda: dequantize_mxfp4(byte(2, 32), torch.ones(2, 2)), "scales has dtype torch.float32"),
        (lambda: dequantize_mxfp4(torch.ones(2, 32), byte(2, 2)), "packed has dtype torch.float32"),
        (lambda: dequantize_mxfp4(byte(2, 32), byte(2, 2), torch.float16), "float16"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ContractError, match=message):
        call()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
