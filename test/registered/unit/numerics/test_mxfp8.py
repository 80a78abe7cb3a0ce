import math
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics import (
    ScaleRounding,
    dequantize_mxfp8,
    quantize_mxfp8,
    quantize_mxfp8_epilogue,
)
from sglang_aiter_moe.numerics.e8m0 import E2M1, E4M3FN, E4M3FNUZ
from sglang_aiter_moe.testing import mx_reference
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

FORMATS = {E4M3FN: mx_reference.E4M3FN, E4M3FNUZ: mx_reference.E4M3FNUZ}
QUANTISERS = {
    "down": lambda x: quantize_mxfp8(x, ScaleRounding.DOWN),
    "up": quantize_mxfp8,
    "even": lambda x: quantize_mxfp8(x, ScaleRounding.EVEN),
    "ceil": lambda x: quantize_mxfp8(x, ScaleRounding.CEIL),
    "epilogue": quantize_mxfp8_epilogue,
}


def code_bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("element", FORMATS, ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_rounds_to_the_nearest(element, dtype):
    """In blocks whose last element is the format's largest, which makes the scale 1."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.abs() <= element.max_normal]  # leaves NaN out too
    x = torch.cat((x, x.new_zeros(-len(x) % 31))).view(-1, 31)
    x = torch.cat((x, x.new_full((len(x), 1), element.max_normal)), dim=-1)
    codes, scales = quantize_mxfp8(x, element=element)
    assert (scales == 127).all()
    expected = []
    for value in x.double().flatten().tolist():
        magnitude = mx_reference.nearest(Fraction(value), FORMATS[element])
        negative = math.copysign(1.0, value) < 0 and (
            magnitude or element is E4M3FN
        )  # FNUZ has no -0
        expected.append(magnitude | (0x80 if negative else 0))
    assert code_bytes(codes).flatten().tolist() == expected


@pytest.mark.parametrize("rule", QUANTISERS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_block_against_rationals(rule, data):
    exponent = data.draw(st.integers(-80, 80))
    numbers = st.floats(-500, 500, width=32).map(lambda v: v if abs(v) > 2.0**-20 else 0.0)
    values = data.draw(st.lists(numbers, min_size=32, max_size=32).filter(any))
    x = torch.tensor([math.ldexp(v, exponent) for v in values])
    expected, byte = mx_reference.quantize_block(x.tolist(), mx_reference.E4M3FN, rule)
    codes, scales = QUANTISERS[rule](x)
    assert scales.tolist() == [byte]
    assert (code_bytes(codes) & 0x7F).tolist() == expected
    assert torch.equal(code_bytes(codes) >> 7, x.signbit().to(torch.uint8))


def test_what_is_too_large_saturates():
    x = torch.full((32,), 500.0)
    codes, scales = quantize_mxfp8(x, ScaleRounding.DOWN)
    assert scales.tolist() == [127]
    assert dequantize_mxfp8(codes, scales).tolist() == [448.0] * 32


@pytest.mark.parametrize(
    ("amax", "roundup", "fused"),
    [(256.0, 127, 127), (383.0, 127, 127), (384.0, 127, 128), (448.0, 127, 128), (449.0, 128, 128)],
)
def test_epilogue_takes_the_larger_scale_from_a_mantissa_of_one_and_a_half(amax, roundup, fused):
    x = torch.zeros(32)
    x[3] = amax
    assert quantize_mxfp8(x)[1].tolist() == [roundup]
    codes, scales = quantize_mxfp8_epilogue(x)
    assert scales.tolist() == [fused]
    assert code_bytes(codes)[3].item() <= 0x7C  # 384: never in need of saturation


def test_a_bad_element_spoils_its_own_block_only():
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(2, 96)
        x[0, 40] = bad
        codes, scales = quantize_mxfp8(x)
        assert scales.tolist() == [[119, 255, 119], [119, 119, 119]]
        assert code_bytes(codes)[0, 32:64].tolist() == [0x7F] * 32
        value = dequantize_mxfp8(codes, scales)
        assert value.isnan().sum() == 32 and value[0, 32:64].isnan().all()


@pytest.mark.parametrize("rule", QUANTISERS)
def test_codes_under_a_nan_scale_do_not_depend_on_what_is_there(rule):
    x = torch.linspace(-3, 3, 32)
    x[5] = torch.tensor(-math.nan)
    assert x[5].signbit() and x[0].signbit()
    codes, scales = QUANTISERS[rule](x)
    assert scales.tolist() == [255]
    assert code_bytes(codes).tolist() == [0x7F] * 32


def test_epilogue_of_inf_and_nan_stay_nan():
    x = torch.zeros(64)
    x[:2] = torch.tensor([math.inf, 2.0**120])
    x[40] = math.nan
    codes, scales = quantize_mxfp8_epilogue(x)
    assert scales.tolist() == [247, 255]
    value = dequantize_mxfp8(codes, scales)
    assert value[0].isnan() and value[1] == 2.0**120 and (value[2:32] == 0).all()
    assert value[32:].isnan().all()


@pytest.mark.parametrize("element", FORMATS, ids=lambda e: e.name)
def test_dequantize_every_code_under_every_kind_of_scale(element):
    codes = torch.arange(256, dtype=torch.uint8).view(
        quantize_mxfp8(torch.ones(32), element=element)[0].dtype
    )
    nan = {E4M3FN: (0x7F, 0xFF), E4M3FNUZ: (0x80,)}[element]
    magnitudes = [float(v) for v in FORMATS[element]]
    for byte in (0, 1, 127, 200, 254):
        scales = torch.full((8,), byte, dtype=torch.uint8)
        got = dequantize_mxfp8(codes, scales, torch.float64).tolist()
        for code, value in enumerate(got):
            if code in nan:
                assert math.isnan(value)
            else:
                expected = math.copysign(
                    magnitudes[code & 0x7F] * 2.0 ** (byte - 127), -1 if code & 0x80 else 1
                )
                assert (value, math.copysign(1, value)) == (expected, math.copysign(1, expected))
    assert dequantize_mxfp8(codes, torch.full((8,), 255, dtype=torch.uint8)).isnan().all()


def test_plain_bytes_are_read_as_e4m3fn():
    codes, scales = quantize_mxfp8(torch.linspace(-3, 3, 64))
    assert torch.equal(dequantize_mxfp8(code_bytes(codes), scales), dequantize_mxfp8(codes, scales))
    as_stored = dequantize_mxfp8(codes, scales.view(torch.float8_e8m0fnu))
    assert torch.equal(as_stored, dequantize_mxfp8(codes, scales))


@given(st.lists(st.integers(0, 255).filter(lambda c: c & 0x7F != 0x7F), min_size=32, max_size=32))
def test_values_of_a_block_survive_quantisation(values):
    """As long as none is too small for the scale of the largest, which the three smallest exponents can be."""
    codes = torch.tensor(values, dtype=torch.uint8)
    scales = torch.tensor([127], dtype=torch.uint8)
    x = dequantize_mxfp8(codes, scales)
    if x.abs().max() < 16:
        return
    x[x.abs() < 2.0**-3] = 0.0
    assert torch.equal(dequantize_mxfp8(*quantize_mxfp8(x)), x)


@pytest.mark.parametrize("rule", QUANTISERS)
def test_dtype_strides_and_shape_do_not_matter(rule):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(3, 4, 64, generator=generator).bfloat16().half().float()
    codes, scales = QUANTISERS[rule](x)
    assert codes.shape == (3, 4, 64) and codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (3, 4, 2) and scales.dtype == torch.uint8
    for other in (
        x.bfloat16(),
        x.half(),
        x.double(),
        x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ):
        got = QUANTISERS[rule](other)
        assert torch.equal(code_bytes(got[0]), code_bytes(codes)) and torch.equal(got[1], scales)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 32), (0,)])
def test_empty(shape):
    for quantise in QUANTISERS.values():
        codes, scales = quantise(torch.zeros(shape))
        assert codes.shape == shape and scales.shape == (*shape[:-1], shape[-1] // 32)
        assert dequantize_mxfp8(codes, scales).shape == shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_mxfp8(torch.ones(2, 48), name="a2"), r"a2 has shape \[2, 48\]"),
        (lambda: quantize_mxfp8(torch.ones(32, dtype=torch.int8)), "x has dtype torch.int8"),
        (lambda: quantize_mxfp8(torch.ones(32), 9), "rounding is 9"),
        (lambda: quantize_mxfp8(torch.ones(32), element=E2M1), "element is ElementFormat"),
        (lambda: quantize_mxfp8_epilogue(torch.ones(16), name="y"), r"y has shape \[16\]"),
        (
            lambda: dequantize_mxfp8(
                torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
            ),
            r"codes has shape \[2, 64\] and scales \[2, 1\]",
        ),
        (
            lambda: dequantize_mxfp8(torch.zeros(32), torch.zeros(1, dtype=torch.uint8)),
            "codes has dtype torch.float32",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ContractError, match=message):
        call()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
