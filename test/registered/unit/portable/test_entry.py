"""``portable.fused_moe``: signature, errors, and AITER's behaviour end to end against the oracle."""

import inspect
import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.numerics import cosine, logits_diff, relative_error
from sglang_aiter_moe.numerics.mxfp4 import quantize_mxfp4
from sglang_aiter_moe.numerics.oracle import routed_moe
from sglang_aiter_moe.testing import portable_cases as pc
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

E, H, I, K, M = 6, 512, 256, 2, 9
RAW = pc.random_experts(E, H, I, bias=True)
PLAIN = replace(RAW, b13=None, b2=None)
ROUTED = pc.random_routing(M, E, K, H)
BETAS = {"beta": 4.0, "linear_beta": 25.0}
BIASES = {"bias1": RAW.b13, "bias2": RAW.b2}
A8W4, A4W4 = "AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (
        A8W4,
        A4W4,
        "AITER_FORCE_A8W4",
        "AITER_FLYDSL_FORCE",
        "AITER_BF16_FP8_MOE_BOUND",
        "GPTOSS_SWIGLU_MXFP4_BF16_BOUND",
        "AITER_CONFIG_FMOE",
        "AITER_KSPLIT",
    ):
        monkeypatch.delenv(name, raising=False)


def oracle(mode, activation, routed=ROUTED, raw=PLAIN, requantization="roundup", **kwargs):
    return routed_moe(
        routed.x,
        raw,
        routed.ids,
        routed.weights,
        mode=mode,
        activation=activation,
        dtype=torch.float32,
        requantization=requantization,
        **kwargs,
    )


def close(out, want):
    assert not out.isnan().any()
    assert logits_diff(out, want) < 1e-4, logits_diff(out, want)
    return True


# -- every family with the layout that it reads ---------------------------------------------------


@pytest.mark.parametrize(
    "activation, flags, call, form, mode, requantization",
    [
        ("Situv2", {}, {}, "separated", "A16W4", "roundup"),
        ("Situv2", {A8W4: "1"}, {}, "gu_interleaved", "A8W4", "roundup"),
        ("Situv2", {A4W4: "1"}, {}, "separated", "A4W4", "roundup"),
        ("Silu", {}, {}, "separated", "A4W4", "roundup"),
        (
            "Silu",
            {"AITER_BF16_FP8_MOE_BOUND": "0"},
            {"gate_mode": "interleave"},
            "gu_interleaved",
            "A8W4",
            "roundup",
        ),
        ("Silu", {"AITER_FLYDSL_FORCE": "0"}, {}, "separated", "A4W4", "roundup"),
        ("Gelu", {"AITER_FLYDSL_FORCE": "0"}, {}, "separated", "A4W4", "roundup"),
        ("Swiglu", {}, {}, "separated", "A16W4", "roundup"),
        ("Swiglu", {}, {"gate_mode": "interleave"}, "gu_interleaved", "A16W4", "roundup"),
        (
            "Swiglu",
            {"AITER_BF16_FP8_MOE_BOUND": "0"},
            {"gate_mode": "interleave"},
            "gu_interleaved",
            "A8W4",
            "roundup",
        ),
        ("Swiglu", {"GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0"}, {}, "separated", "A4W4", "roundup"),
    ],
)
def test_right_layout_right_result_wrong_layout_garbage(
    monkeypatch, activation, flags, call, form, mode, requantization
):
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    kwargs = call | (BETAS if activation == "Situv2" else {})
    with portable.installed():
        want = oracle(mode, activation.lower(), requantization=requantization)
        close(pc.fused_moe(ROUTED, pc.pack(PLAIN, form), activation, **kwargs), want)
        wrong = "separated" if form == "gu_interleaved" else "gu_interleaved"
        garbage = pc.fused_moe(ROUTED, pc.pack(PLAIN, wrong), activation, **kwargs)
        assert cosine(garbage, want) < 0.5


@pytest.mark.parametrize("force, mode", [(None, "A4W4"), ("1", "A8W4"), ("", "A8W4")])
def test_gfx1250(monkeypatch, force, mode):
    if force is not None:
        monkeypatch.setenv("AITER_FORCE_A8W4", force)
    with portable.installed(arch="gfx1250"):
        want = oracle(mode, "situv2", **BETAS)
        call = {"gate_mode": "interleave", **BETAS}
        close(pc.fused_moe(ROUTED, pc.pack(PLAIN, "gfx1250"), "Situv2", **call), want)
    with portable.installed(arch="gfx950"):
        tiles = pc.pack(PLAIN, "gu_interleaved")
    with portable.installed(arch="gfx1250"):
        assert cosine(pc.fused_moe(ROUTED, tiles, "Situv2", **call), want) < 0.5


def test_unshuffled_weights_are_read_raw_by_ck():
    with portable.installed():
        out = pc.fused_moe(ROUTED, pc.pack(PLAIN, "raw"), "Silu")
        close(out, oracle("A4W4", "silu"))
        lost = pc.pack(PLAIN, "separated")
        for name in ("w1", "w2"):  # the attribute does not survive a view
            lost[name] = lost[name].view(torch.uint8).view(pc.FP4)
        assert cosine(pc.fused_moe(ROUTED, lost, "Silu"), out) < 0.5


def test_one_shuffled_weight_is_enough_to_count_as_shuffled():
    with portable.installed():
        packed = pc.pack(PLAIN)
        packed["w2"] = packed["w2"].view(torch.uint8).view(pc.FP4)
        close(pc.fused_moe(ROUTED, packed, "Silu"), oracle("A4W4", "silu"))


def test_separated_scales_come_in_two_forms():
    with portable.installed():
        packed = pc.pack(PLAIN)
        out = pc.fused_moe(ROUTED, packed, "Situv2", **BETAS)
        packed["w1_scale"] = portable.e8m0_shuffle(PLAIN.w13_scale.reshape(E * 2 * I, -1))
        packed["w2_scale"] = portable.shuffle_scale(PLAIN.w2_scale.reshape(E * H, -1))
        assert torch.equal(pc.fused_moe(ROUTED, packed, "Situv2", **BETAS), out)
        # unshuffled scales are not what the kernel reads
        packed["w1_scale"] = PLAIN.w13_scale
        assert relative_error(pc.fused_moe(ROUTED, packed, "Situv2", **BETAS), out) > 0.1


def test_hostile_scale_padding_is_never_read():
    raw = pc.random_experts(3, 512, 384, seed=5)  # 12 scale columns of w2, padded to 16 with 0xFF
    routed = pc.random_routing(4, 3, 2, 512, seed=5)
    with portable.installed():
        packed = pc.pack(raw)
        packed["w2_scale"] = portable.shuffle_scale(raw.w2_scale.reshape(3 * 512, -1))
        assert (packed["w2_scale"] == 0xFF).any()
        out = pc.fused_moe(routed, packed, "Situv2", **BETAS)
    close(out, oracle("A16W4", "situv2", routed, raw, **BETAS))


# -- known defects of AITER ------------------------------------------------------------------------


def test_gelu_is_silently_silu():
    with portable.installed():
        out = pc.fused_moe(ROUTED, pc.pack(PLAIN), "Gelu")
    close(out, oracle("A4W4", "silu"))
    assert logits_diff(out, oracle("A4W4", "gelu")) > 1e-3


def test_missing_betas_are_1(monkeypatch):
    monkeypatch.setenv(A4W4, "1")
    with portable.installed():
        out = pc.fused_moe(ROUTED, pc.pack(PLAIN), "Situv2")
    close(out, oracle("A4W4", "situv2", beta=1.0, linear_beta=1.0))
    assert cosine(out, oracle("A4W4", "situv2", **BETAS)) < 0.99


def test_ck_drops_biases_and_limit(monkeypatch):
    monkeypatch.setenv("AITER_FLYDSL_FORCE", "0")
    with portable.installed():
        out = pc.fused_moe(ROUTED, pc.pack(PLAIN), "Silu", swiglu_limit=0.5, **BIASES)
    close(out, oracle("A4W4", "silu"))


def test_flydsl_takes_biases_and_limit():
    with portable.installed():
        out = pc.fused_moe(ROUTED, pc.pack(PLAIN), "Silu", swiglu_limit=0.5, **BIASES)
    close(out, oracle("A4W4", "silu", raw=RAW, limit=0.5))


def test_swiglu_biases():
    with portable.installed():
        out = pc.fused_moe(ROUTED, pc.pack(PLAIN), "Swiglu", swiglu_limit=0.5, **BIASES)
    # CK-tile is not handed the limit: 7 is its own
    close(out, oracle("A16W4", "swiglu", raw=RAW, limit=7.0))


def test_bias_must_be_fp32_where_it_is_used(monkeypatch):
    halves = {k: v.to(torch.bfloat16) for k, v in BIASES.items()}
    with (
        portable.installed(),
        pytest.raises(TypeError, match=r"MoE bias must be fp32, got torch\.bfloat16"),
    ):
        pc.fused_moe(ROUTED, pc.pack(PLAIN), "Silu", **halves)
    monkeypatch.setenv("AITER_FLYDSL_FORCE", "0")
    with portable.installed():
        pc.fused_moe(ROUTED, pc.pack(PLAIN), "Silu", **halves)  # dropped unseen


def test_pads_are_skipped_unless_there_is_a_bias():
    pads = {"hidden_pad": 128, "intermediate_pad": 64}
    with portable.installed():
        packed = pc.pack(PLAIN)
        out = pc.fused_moe(ROUTED, packed, "Silu", **pads)
        x = ROUTED.x.clone()
        x[:, -128:] = 0
        want = oracle(
            "A4W4",
            "silu",
            pc.Routed(x, ROUTED.ids, ROUTED.weights),
            hidden_pad=128,
            intermediate_pad=64,
        )
        close(out, want)
        assert not out[:, -128:].any()
        with_bias = pc.fused_moe(ROUTED, packed, "Silu", **pads, **BIASES)
        close(with_bias, oracle("A4W4", "silu", raw=RAW))


# -- call semantics --------------------------------------------------------------------------------


def test_doweight_stage1():
    with portable.installed():
        out = pc.fused_moe(ROUTED, pc.pack(PLAIN), "Silu", doweight_stage1=True)
    close(out, oracle("A4W4", "silu", weight_on_input=True))


def test_expert_parallel(monkeypatch):
    monkeypatch.setenv(A8W4, "1")
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.int32)
    routed = pc.random_routing(M, 9, 4, H, seed=3)
    with portable.installed():
        packed = pc.pack(PLAIN, "gu_interleaved")
        out = pc.fused_moe(routed, packed, "Situv2", expert_mask=mask, **BETAS)
        close(out, oracle("A8W4", "situv2", routed, expert_mask=mask, **BETAS))
        # a slot that points to a masked expert, as a caller remaps -1
        routed.ids[2, 1] = 1
        out = pc.fused_moe(routed, packed, "Situv2", expert_mask=mask, **BETAS)
        close(out, oracle("A8W4", "situv2", routed, expert_mask=mask, **BETAS))
        routed.ids[2, 1] = -1
        with pytest.raises(IndexError, match="-1"):
            pc.fused_moe(routed, packed, "Situv2", expert_mask=mask, **BETAS)


@pytest.mark.parametrize("bad", [-1, E, 1 << 20])
def test_ids_out_of_range(bad):
    ids = ROUTED.ids.clone()
    ids[0, 0] = bad
    with portable.installed(), pytest.raises(IndexError, match=str(bad)):
        pc.fused_moe(pc.Routed(ROUTED.x, ids, ROUTED.weights), pc.pack(PLAIN), "Silu")


def test_no_tokens():
    empty = pc.Routed(ROUTED.x[:0], ROUTED.ids[:0], ROUTED.weights[:0])
    with portable.installed():
        out = pc.fused_moe(empty, pc.pack(PLAIN), "Situv2", **BETAS)
    assert out.shape == (0, H) and out.dtype == torch.bfloat16


def test_num_local_tokens():
    with portable.installed():
        packed = pc.pack(PLAIN)
        whole = pc.fused_moe(ROUTED, packed, "Silu")
        part = pc.fused_moe(ROUTED, packed, "Silu", num_local_tokens=torch.tensor([4]))
    close(part[:4], whole[:4])
    assert not part[4:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_dtype(dtype):
    with portable.installed():
        packed = pc.pack(PLAIN)
        out = pc.fused_moe(ROUTED, packed, "Situv2", dtype=dtype, **BETAS)
        assert out.dtype == dtype
        close(out, oracle("A16W4", "situv2", **BETAS))
        with pytest.raises(AssertionError, match=r"unsupported out dtype: torch\.float32"):
            pc.fused_moe(ROUTED, packed, "Situv2", dtype=torch.float32, **BETAS)


def test_float4_input():
    packed_x, scales = quantize_mxfp4(ROUTED.x)
    routed = pc.Routed(packed_x.view(pc.FP4), ROUTED.ids, ROUTED.weights)
    with portable.installed():
        packed = pc.pack(PLAIN)
        got = pc.fused_moe(routed, packed, "Silu", a1_scale=scales, dtype=torch.bfloat16)
        assert torch.equal(got, pc.fused_moe(ROUTED, packed, "Silu"))
        with pytest.raises(RuntimeError, match="float4 input"):
            pc.fused_moe(routed, packed, "Situv2", a1_scale=scales, dtype=torch.bfloat16, **BETAS)


def test_the_input_is_left_alone():
    x, ids, weights = ROUTED.x.clone(), ROUTED.ids.clone(), ROUTED.weights.clone()
    with portable.installed():
        packed = pc.pack(PLAIN)
        before = {k: v.view(torch.uint8).clone() for k, v in packed.items()}
        pc.fused_moe(ROUTED, packed, "Silu")
    assert (
        torch.equal(ROUTED.x, x)
        and torch.equal(ROUTED.ids, ids)
        and torch.equal(ROUTED.weights, weights)
    )
    assert all(torch.equal(packed[k].view(torch.uint8), v) for k, v in before.items())


# -- bad input, as AITER takes it ------------------------------------------------------------------


def test_uint8_weights_have_no_kernel():
    with portable.installed():
        packed = pc.pack(PLAIN)
        packed["w1"] = packed["w1"].view(torch.uint8)
        with pytest.raises(RuntimeError, match="float4_e2m1fn_x2"):
            pc.fused_moe(ROUTED, packed, "Silu")


def test_shapes_that_do_not_belong_together():
    with portable.installed():
        packed = pc.pack(PLAIN)
        packed["w2"] = packed["w2"][:, :, :32]
        with pytest.raises(AssertionError, match="Invalid MoE weight"):
            pc.fused_moe(ROUTED, packed, "Silu")


def test_missing_scale_and_gate_mode_none():
    with portable.installed():
        packed = pc.pack(PLAIN)
        with pytest.raises(TypeError, match="w2_scale"):
            pc.fused_moe(ROUTED, {**packed, "w2_scale": None}, "Silu")
        with pytest.raises(ValueError, match="None is not a valid GateMode"):
            pc.fused_moe(ROUTED, packed, "Silu", gate_mode=None)


def test_other_quantisations_are_not_modelled():
    with portable.installed():
        packed = pc.pack(PLAIN)
        with pytest.raises(NotImplementedError, match="per_1x32"):
            portable.fused_moe(ROUTED.x, packed["w1"], packed["w2"], ROUTED.weights, ROUTED.ids)
        with pytest.raises(NotImplementedError, match="shared-expert"):
            pc.fused_moe(ROUTED, packed, "Silu", shared_expert_id=3)


# -- the signature of each release -----------------------------------------------------------------

ALL = {"gate_mode", "swiglu_limit", "beta", "linear_beta", "shared_w1", "stage2_scatter"}


@pytest.mark.parametrize(
    "aiter, known",
    [
        ("0.1.12", set()),
        ("0.1.13", {"gate_mode"}),
        ("0.1.14", {"gate_mode", "swiglu_limit"}),
        ("0.1.16", {"gate_mode", "swiglu_limit"}),
        ("0.1.18", {"gate_mode", "swiglu_limit"}),
        ("0.1.19", {"gate_mode", "swiglu_limit", "beta", "linear_beta"}),
        ("0.1.19.post1", ALL - {"stage2_scatter"}),
        ("00cbe979f2", ALL - {"stage2_scatter"}),
        ("6dc26b7a8", ALL - {"stage2_scatter"}),
        ("0.1.20", ALL - {"stage2_scatter"}),
        ("e4048607a535", ALL),
    ],
)
def test_keywords(aiter, known):
    with portable.installed(aiter=aiter):
        from aiter.fused_moe import fused_moe

        names = set(inspect.signature(fused_moe).parameters)
        assert names & ALL == known
        assert not names & {"output", "no_combine", "quant_dtype_a"}
        packed = pc.pack(PLAIN)
        for name in (ALL | {"output", "no_combine", "quant_dtype_a"}) - names:
            with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{name}'"):
                pc.fused_moe(ROUTED, packed, "Silu", **{name: None})


def test_missing_argument():
    with portable.installed(), pytest.raises(TypeError, match="missing a required argument: 'w1'"):
        portable.fused_moe(ROUTED.x)


def test_output_extension():
    with portable.installed(extensions=("output",)):
        packed = pc.pack(PLAIN)
        buffer = torch.full((M, H), float("nan"), dtype=torch.bfloat16)
        out = pc.fused_moe(ROUTED, packed, "Silu", output=buffer)
        assert out is buffer
        assert torch.equal(out, pc.fused_moe(ROUTED, packed, "Silu"))
        for bad in (buffer[:-1], buffer.float(), buffer.T.contiguous().T):
            with pytest.raises(RuntimeError, match="output must be contiguous"):
                pc.fused_moe(ROUTED, packed, "Silu", output=bad)


def test_no_combine_extension():
    with portable.installed(extensions=("no_combine",)):
        packed = pc.pack(PLAIN)
        slots = pc.fused_moe(ROUTED, packed, "Situv2", no_combine=True, **BETAS)
        assert slots.shape == (M, K, H)
        close(slots.float().sum(1), oracle("A16W4", "situv2", **BETAS))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
