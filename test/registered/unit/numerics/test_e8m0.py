import math
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.e8m0 import (
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    ScaleRounding,
    decode_e8m0,
    epilogue_scale,
    scale_from_amax,
)
from sglang_aiter_moe.testing import mx_reference
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

FORMATS = {
    E2M1: mx_reference.E2M1,
    E4M3FN: mx_reference.E4M3FN,
    E4M3FNUZ: mx_reference.E4M3FNUZ,
}
RULES = ("down", "up", "even", "ceil", "epilogue")


def scale(amax: torch.Tensor, element, rule: str) -> torch.Tensor:
    if rule == "epilogue":
        return epilogue_scale(amax, element)
    return scale_from_amax(amax, element, ScaleRounding[rule.upper()])


def from_bits(*bits: int) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


# --- decoding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_decode_every_byte(dtype):
    values = decode_e8m0(torch.arange(256, dtype=torch.uint8), dtype).double().tolist()
    assert values[:255] == [math.ldexp(1.0, b - 127) for b in range(255)]
    assert math.isnan(values[255])


def test_decode_agrees_with_torch_float8_e8m0fnu():
    stored = torch.arange(1, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(decode_e8m0(stored), stored.to(torch.float32))


def test_decode_keeps_shape_and_takes_any_strides():
    byte = torch.randint(0, 255, (4, 6, 8), dtype=torch.uint8)
    assert torch.equal(decode_e8m0(byte.transpose(0, 2)), decode_e8m0(byte).transpose(0, 2))
    assert torch.equal(decode_e8m0(byte[:, ::2, 1::3]), decode_e8m0(byte)[:, ::2, 1::3])
    assert decode_e8m0(byte[0, 0, 0]).shape == ()
    assert decode_e8m0(byte[:, :0]).shape == (4, 0, 8)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(2, dtype=torch.int32),), "scales has dtype torch.int32"),
        ((torch.zeros(2, dtype=torch.uint8), torch.float16), "float16"),
    ],
)
def test_decode_refuses(args, message):
    with pytest.raises(ContractError, match=message):
        decode_e8m0(*args)


# --- choosing


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", FORMATS, ids=lambda e: e.name)
def test_every_threshold(element, rule):
    """Each mantissa at which some rule changes its mind, and its neighbours, from small to large exponents."""
    thresholds = (1.0, 1.5, 1.75, 1.875, 1.9375, 1.96875)
    mantissas = {int((t - 1) * 2**23) + d for t in thresholds for d in (-1, 0, 1)} & set(
        range(2**23)
    )
    bits = [
        (e << 23) | m for e in (*range(12, 254, 11), 253) for m in sorted(mantissas | {2**23 - 1})
    ]
    amax = from_bits(*bits)
    expected = [
        mx_reference.scale_exponent(Fraction(a), FORMATS[element], rule) + 127
        for a in amax.tolist()
    ]
    assert scale(amax, element, rule).tolist() == expected


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", FORMATS, ids=lambda e: e.name)
@settings(max_examples=60, deadline=None)
@given(amax=st.floats(2.0**-110, 2.0**126, width=32))
def test_random_values(element, rule, amax):
    expected = mx_reference.scale_exponent(Fraction(amax), FORMATS[element], rule) + 127
    assert scale(torch.tensor(amax), element, rule).item() == expected


@pytest.mark.parametrize("element", FORMATS, ids=lambda e: e.name)
def test_the_rules_differ_where_they_should(element):
    """Each rule differs from each other one for some amax, so that none can stand in for another unnoticed."""
    amax = from_bits(*((130 << 23) | m << 15 for m in range(256)), (130 << 23) | 0x400000)
    scales = {rule: scale(amax, element, rule).tolist() for rule in RULES}
    same = [(a, b) for i, a in enumerate(RULES) for b in RULES[i + 1 :] if scales[a] == scales[b]]
    assert same == []


def all_mantissas(exponent: int) -> torch.Tensor:
    bits = (np.uint32(exponent) << np.uint32(23)) | np.arange(2**23, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


@pytest.mark.parametrize("element", FORMATS, ids=lambda e: e.name)
def test_reciprocal_gives_the_same_scale(element):
    """AITER's HIP kernels multiply by 1/max; the quotient may differ in its last bit, the scale does not."""
    amax = all_mantissas(127)
    product = amax.numpy() * np.float32(1 / np.float32(element.max_normal))
    quotient = amax.numpy() / np.float32(element.max_normal)
    byte = (product.view(np.uint32) + np.uint32(0x7FFFFF)) >> np.uint32(23)
    assert (product != quotient).any()
    assert np.array_equal(scale_from_amax(amax, element).numpy(), byte)


def test_epilogue_against_roundup_over_all_mantissas():
    amax = all_mantissas(127)
    fp4 = epilogue_scale(amax, E2M1).int() - scale_from_amax(amax, E2M1).int()
    assert amax[fp4 != 0].tolist() == [1.5]
    assert fp4[fp4 != 0].tolist() == [1]
    fp8 = epilogue_scale(amax, E4M3FN).int() - scale_from_amax(amax, E4M3FN).int()
    assert torch.equal(fp8, ((amax >= 1.5) & (amax <= 1.75)).int())


@pytest.mark.parametrize("element", FORMATS, ids=lambda e: e.name)
def test_roundup_never_saturates_and_is_the_smallest_that_does_not(element):
    amax = all_mantissas(130)[:: 2**9 - 1].double()
    scaled = amax / decode_e8m0(scale_from_amax(amax, element), torch.float64)
    assert (scaled <= element.max_normal).all()
    assert (scaled > element.max_normal / 2).all()


@pytest.mark.parametrize(
    ("bits", "expected"),
    [  # amax: then the E2M1 byte by each rule of RULES
        (0x00000000, (0, 0, 0, 0, 0)),  # zero
        (0x00000001, (0, 0, 0, 0, 0)),  # the smallest subnormal: its quotient rounds to zero
        (0x000116C2, (0, 1, 0, 1, 0)),  # 1e-40
        (0x00400000, (0, 1, 0, 1, 0)),  # 2**-127
        (0x00800000, (0, 1, 0, 1, 0)),  # 2**-126
        (0x01800000, (1, 1, 1, 1, 1)),  # 2**-124: 2**-126 under the rules that divide by 4
        (0x02400000, (2, 2, 2, 3, 3)),  # 1.5 * 2**-123
        (0x7F7FFFFF, (252, 253, 255, 253, 253)),  # the largest float32
        (0x7F800000, (255, 255, 255, 255, 253)),  # Inf
        (0x7FC00000, (255, 255, 255, 255, 255)),  # NaN
        (0x7F800001, (255, 255, 255, 255, 255)),
        (0xFF800000, (255, 255, 255, 255, 253)),  # -Inf
        (0xFFC00000, (255, 255, 255, 255, 255)),
    ],
)
def test_ends_of_the_range(bits, expected):
    got = tuple(scale(from_bits(bits), E2M1, rule).item() for rule in RULES)
    assert got == expected


def test_epilogue_scale_of_inf_keeps_the_headroom():
    assert epilogue_scale(torch.tensor(math.inf), E4M3FN).item() == 255 - 8


@pytest.mark.parametrize("rule", RULES)
def test_sign_dtype_and_strides_do_not_matter(rule):
    amax = torch.tensor([[0.0, 1.0, 1.5, 1.75], [2.5, 3.0, 6.0, 448.0]])
    expected = scale(amax, E2M1, rule)
    assert torch.equal(scale(-amax, E2M1, rule), expected)
    assert torch.equal(scale(amax.t(), E2M1, rule), expected.t())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(scale(amax.to(dtype), E2M1, rule), expected)
    assert scale(amax[:, :0], E2M1, rule).shape == (2, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scale_from_amax(torch.ones(1), E2M1, 4), "rounding is 4"),
        (lambda: scale_from_amax(torch.ones(1), E2M1, "up"), "rounding is 'up'"),
        (
            lambda: scale_from_amax(torch.ones(1, dtype=torch.int32), E2M1),
            "amax has dtype torch.int32",
        ),
        (
            lambda: epilogue_scale(torch.ones(1, dtype=torch.uint8), E2M1),
            "amax has dtype torch.uint8",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ContractError, match=message):
        call()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
