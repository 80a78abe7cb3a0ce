"""Every array of tables.npz, quant.npz and moe_reference.npz is an input, or met by numerics."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_aiter_moe.numerics import (
    RawExperts,
    ScaleRounding,
    apply_gate_up,
    decode_e8m0,
    dequantize_mxfp4,
    dequantize_mxfp8,
    encode_e2m1,
    pack_e2m1,
    quantize_mxfp4,
    quantize_mxfp8,
    relative_error,
    routed_moe,
)
from sglang_aiter_moe.numerics.e8m0 import E2M1, E4M3FN, E4M3FNUZ, scale_from_amax
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

GOLDEN = Path(__file__).parents[3] / "golden"
MODES = {"a16": "A16W4", "a8": "A8W4", "a4": "A4W4"}
TOLERANCE = 4e-3  # rms; AITER's reference rounds each product to bfloat16


def load(name: str) -> dict[str, torch.Tensor]:
    """The arrays of a file as tensors; those that hold bits of floats by name as these floats."""
    with np.load(GOLDEN / name) as file:
        arrays = {k: torch.from_numpy(file[k]) for k in file.files if not k.startswith("_")}
    for key, value in arrays.items():
        if key.endswith("bf16bits") or re.search(r"_o[12]$", key):
            arrays[key] = value.view(torch.bfloat16)
        elif key in ("f32_in", "amax", "sp_f32bits"):
            arrays[key] = value.view(torch.float32)
    return arrays


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.shape == b.shape and a.element_size() == b.element_size()
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


TABLES = load("tables.npz")
QUANT = load("quant.npz")
MOE = load("moe_reference.npz")


def e8m0_ones(*shape: int) -> torch.Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


def test_every_table_is_met():
    byte, amax = TABLES["byte"], TABLES["amax"]
    met = {
        "mxfp4_to_f32": dequantize_mxfp4(byte.view(16, 16), e8m0_ones(16, 1)).view(256, 2),
        "e8m0_to_f32_bits": decode_e8m0(byte),
        "fp8_e4m3fn_to_f32_bits": dequantize_mxfp8(byte.view(8, 32), e8m0_ones(8, 1)).view(256),
        "f32_to_mxfp4_packed": pack_e2m1(encode_e2m1(TABLES["f32_in"])),
        "e8m0_scale_mode_dtype_amax": torch.stack(
            [
                torch.stack([scale_from_amax(amax, e, mode) for e in (E2M1, E4M3FN, E4M3FNUZ)])
                for mode in range(4)
            ]
        ),
    }
    assert met.keys() | {"byte", "amax", "f32_in"} == TABLES.keys()
    assert [key for key in met if not same_bits(met[key], TABLES[key])] == []


def quantised(
    inputs: dict[str, torch.Tensor], mode_of=lambda mode: mode
) -> dict[str, torch.Tensor]:
    met = {}
    for case, x in inputs.items():
        for mode in range(4):
            packed, scales = quantize_mxfp4(x, mode_of(mode))
            met |= {f"{case}_f4_mode{mode}": packed, f"{case}_f4s_mode{mode}": scales}
        met[f"{case}_f8"], met[f"{case}_f8s"] = quantize_mxfp8(x, mode_of(1))
        if x.dtype == torch.bfloat16:
            met[f"{case}_f4_deq"] = dequantize_mxfp4(*quantize_mxfp4(x, mode_of(1)))
    return met


QUANT_INPUTS = {k.rsplit("_", 1)[0]: v for k, v in QUANT.items() if k.endswith("bits")}


def test_every_quantised_array_is_met():
    met = quantised(QUANT_INPUTS)
    assert {key for key in QUANT if not key.endswith("bits")} == met.keys()
    assert [key for key in met if not same_bits(met[key], QUANT[key])] == []


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_another_rounding_mode_does_not_meet_them(shift):
    met = quantised(QUANT_INPUTS, lambda mode: ScaleRounding((mode + shift) % 4))
    wrong = {key.split("_", 1)[1] for key in met if not same_bits(met[key], QUANT[key])}
    assert wrong >= {f"f4_mode{mode}" for mode in range(4)} | {
        f"f4s_mode{mode}" for mode in range(4)
    }
    assert wrong >= ({"f8", "f8s"} if shift == 2 else set())  # CEIL in place of UP


@pytest.mark.parametrize("swap", ["nibbles", "sign"])
def test_another_packing_does_not_meet_them(swap):
    packed = quantize_mxfp4(QUANT["x2_bf16bits"])[0]
    wrong = (packed << 4) | (packed >> 4) if swap == "nibbles" else packed ^ 0x88
    assert not same_bits(wrong, QUANT["x2_f4_mode1"])


ACTIVATION_GRIDS = sorted(
    k for k in MOE if k.startswith("act_") and k not in ("act_gate", "act_up")
)


@pytest.mark.parametrize("key", ACTIVATION_GRIDS)
def test_activation_grids(key):
    name, limit, beta, linear_beta = key.removeprefix("act_").split("_")
    args = {
        "limit": None if limit == "None" else float(limit),
        "beta": float(beta),
        "linear_beta": float(linear_beta),
    }
    got = apply_gate_up(name, MOE["act_gate"], MOE["act_up"], **args)
    torch.testing.assert_close(got, MOE[key], rtol=1e-6, atol=1e-30)


# name in the file -> how the oracle is asked for it
CASES = {
    "silu": {"activation": "silu"},
    "silu_lim": {"activation": "silu", "limit": 2.0},
    "swiglu_None": {"activation": "swiglu"},
    "swiglu_lim3_bias": {"activation": "swiglu", "limit": 3.0},
    "situ_4_25": {"activation": "situv2", "beta": 4.0, "linear_beta": 25.0},
    "situ_1_1": {"activation": "situv2", "beta": 1.0, "linear_beta": 1.0},
}


def reference_layer(case: int, bias: bool) -> tuple[RawExperts, tuple[torch.Tensor, ...]]:
    names = ("w1q", "w1s", "w2q", "w2s", *(("b1", "b2") if bias else ()))
    experts = RawExperts(*(MOE[f"c{case}_{name}"] for name in names))
    return experts, tuple(MOE[f"c{case}_{name}"] for name in ("ids", "tw"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [0, 1])
def test_moe_reference(case, mode, name, dtype):
    key = f"c{case}_{mode}_{name}"
    experts, routing = reference_layer(case, bias="bias" in name)
    stage1 = torch.zeros(MOE[f"{key}_o1"].shape, dtype=dtype)
    out = routed_moe(
        MOE[f"c{case}_x_bf16bits"],
        experts,
        *routing,
        mode=MODES[mode],
        requantization="roundup",
        dtype=dtype,
        stage1=stage1,
        **CASES[name],
    )
    assert relative_error(out, MOE[f"{key}_o2"]) < TOLERANCE
    stored = MOE[f"{key}_o1"]
    if mode == "a16":
        assert relative_error(stage1, stored) < TOLERANCE
        return
    quantize, dequantize = {
        "a8": (quantize_mxfp8, dequantize_mxfp8),
        "a4": (quantize_mxfp4, dequantize_mxfp4),
    }[mode]
    # Given the stored stage-1 output, its requantisation is exact.
    codes, scales = quantize(stored)
    assert same_bits(codes, MOE[f"{key}_a2q"])
    assert same_bits(scales.flatten(0, -2), MOE[f"{key}_a2s"])
    # The oracle's own stage-1 output may round the other way here and there.
    values = dequantize(codes, scales)
    assert (stage1 == values).double().mean() > 0.99


def test_every_moe_array_is_an_input_or_met():
    inputs = {"x_bf16bits", "w1q", "w1s", "w2q", "w2s", "b1", "b2", "ids", "tw"}
    results = {f"{m}_{n}_{o}" for m in MODES for n in CASES for o in ("o1", "o2")}
    results |= {f"{m}_{n}_{a}" for m in ("a8", "a4") for n in CASES for a in ("a2q", "a2s")}
    expected = {f"c{c}_{name}" for c in (0, 1) for name in inputs | results}
    assert expected | {"act_gate", "act_up"} | set(ACTIVATION_GRIDS) == MOE.keys()


@pytest.mark.parametrize(
    "wrong",
    [
        {"activation": "silu"},
        {"beta": 1.0},
        {"linear_beta": 4.0},
        {"limit": 0.5},
        {"mode": None},
        {"mode": "A8W4"},
        {"weight_on_input": True},
    ],
    ids=str,
)
def test_a_wrong_request_does_not_meet_the_reference(wrong):
    experts, routing = reference_layer(1, bias=False)
    asked = {"mode": "A4W4", "requantization": "roundup"} | CASES["situ_4_25"] | wrong
    out = routed_moe(MOE["c1_x_bf16bits"], experts, *routing, **asked)
    assert relative_error(out, MOE["c1_a4_situ_4_25_o2"]) > 5 * TOLERANCE


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
