"""Which family, mode and layout AITER chooses: each expectation written out from docs/contract.md section b."""

import sys

import pytest

from sglang_aiter_moe.testing.dispatch_inputs import (
    A4W4,
    A8W4,
    FLY4,
    FLY8,
    FLY16,
    GPT_OSS,
    K3,
    SMALL,
    WIDE,
    resolve,
    summary,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


class TestResultTable:
    """Section b.4, row by row."""

    @pytest.mark.parametrize(
        "gate_mode", ["separated", "interleave", "gate_only", "mock_gate_only"]
    )
    @pytest.mark.parametrize("tokens", [1, 255, 256, 100000])
    @pytest.mark.parametrize("shape", [K3, SMALL])
    def test_situv2_gfx950(self, gate_mode, tokens, shape):
        args = {"tokens": tokens, "shape": shape, "gate_mode": gate_mode}
        assert summary(resolve("situv2", {}, **args)) == FLY16
        assert summary(resolve("situv2", A8W4, **args)) == FLY8
        assert summary(resolve("situv2", A4W4, **args)) == FLY4
        assert summary(resolve("situv2", A8W4 | A4W4, **args)) == FLY8  # A8W4 wins

    def test_situv2_gfx942_runs_a16w4_only(self):
        assert summary(resolve("situv2", {}, arch="gfx942")) == FLY16
        for env in (A8W4, A4W4):
            with pytest.raises(RuntimeError, match="gfx942"):
                resolve("situv2", env, arch="gfx942")

    @pytest.mark.parametrize("env", [{}, A8W4, A4W4, A8W4 | A4W4])
    @pytest.mark.parametrize("activation", ["situv2", "silu", "swiglu"])
    def test_gfx1250_ignores_the_situv2_flags(self, env, activation):
        r = resolve(activation, env, arch="gfx1250", gate_mode="interleave")
        assert summary(r) == ("grouped_gfx1250", "A4W4", "gu_interleaved_gfx1250")
        assert (r.w13_scale_layout, r.w2_layout, r.w2_scale_layout) == (
            "n32k4_gu",
            "separated",
            "n32k4",
        )
        r = resolve(
            activation, env | {"AITER_FORCE_A8W4": "1"}, arch="gfx1250", gate_mode="interleave"
        )
        assert r.mode == "A8W4"

    def test_gfx1250_separated_has_no_kernel(self):
        with pytest.raises(RuntimeError, match="gfx1250"):
            resolve("situv2", {}, arch="gfx1250")

    @pytest.mark.parametrize(
        "activation, gate_mode, tokens, expected",
        [
            ("silu", "separated", 1, FLY4),
            ("silu", "separated", 4096, FLY4),
            ("silu", "interleave", 256, FLY8),
            ("swiglu", "separated", 255, ("cktile_splitk", "A16W4", "separated")),
            ("swiglu", "separated", 256, FLY4),
            ("swiglu", "interleave", 255, ("cktile", "A16W4", "gu_interleaved")),
            ("swiglu", "interleave", 256, ("cktile", "A8W4", "gu_interleaved")),
            ("swiglu", "gate_only", 255, ("cktile", "A16W4", "gu_interleaved")),
            ("gelu", "separated", 1, FLY4),
        ],
    )
    def test_others_gfx950(self, activation, gate_mode, tokens, expected):
        assert summary(resolve(activation, tokens=tokens, gate_mode=gate_mode)) == expected

    def test_gpt_oss_interleave_tuned(self):
        shape = GPT_OSS | {"intermediate_size": 3072}
        r = resolve("swiglu", tokens=512, shape=shape, gate_mode="interleave")
        assert summary(r) == FLY8 and r.tuned and r.requantization == "epilogue"

    def test_gelu_runs_silu_on_flydsl(self):
        assert resolve("gelu").activation == "silu"
        r = resolve("gelu", {"AITER_FLYDSL_FORCE": "0"}, num_experts=1)
        assert (r.family, r.activation) == ("ck2stages", "gelu")

    def test_silu_interleave_below_the_bound(self):
        # few tokens: split-k CK-tile; enough of them: CK 2-stage, which has no such kernel
        r = resolve("silu", tokens=1, gate_mode="interleave", shape=WIDE)
        assert summary(r) == ("cktile_splitk", "A16W4", "gu_interleaved")
        with pytest.raises(RuntimeError, match="Unsupported scales/output dtype!"):
            resolve("silu", tokens=255, gate_mode="interleave")
        assert (
            summary(resolve("silu", {"AITER_BF16_FP8_MOE_BOUND": "0"}, 1, gate_mode="interleave"))
            == FLY8
        )

    def test_swiglu_gfx942(self):
        args = {"arch": "gfx942"}
        assert summary(resolve("swiglu", tokens=255, **args)) == (
            "cktile_splitk",
            "A16W4",
            "separated",
        )
        for tokens in (1, 4096):
            r = resolve("swiglu", tokens=tokens, gate_mode="interleave", **args)
            assert summary(r) == ("cktile", "A16W4", "gu_interleaved")
        with pytest.raises(RuntimeError, match="gfx942"):
            resolve("swiglu", tokens=256, **args)


class TestMissOrder:
    """Section b.3."""

    def test_flydsl_needs_shuffled_weights(self):
        assert summary(resolve("silu", is_shuffled=False)) == ("ck2stages", "A4W4", "raw")

    def test_doweight_switches_flydsl_off(self):
        r = resolve("silu", doweight_stage1=True)
        assert r.family == "ck2stages" and r.weight_on_input

    def test_force_off_goes_to_ck(self):
        r = resolve("silu", {"AITER_FLYDSL_FORCE": "0"})
        assert summary(r) == ("ck2stages", "A4W4", "separated")
        # SwiGLU and SiTUv2 do not need it
        assert summary(resolve("swiglu", {"AITER_FLYDSL_FORCE": "0"}, 256)) == FLY4
        assert summary(resolve("situv2", {"AITER_FLYDSL_FORCE": "0"} | A8W4)) == FLY8

    def test_force_off_with_split_k_reads_interleaved(self):
        # post_activation_layout "auto" goes by the dtype, not by the layout
        r = resolve("silu", {"AITER_FLYDSL_FORCE": "0"}, 1, shape=WIDE)
        assert summary(r) == ("cktile_splitk", "A16W4", "gu_interleaved")
        assert r.q_dtype_a == "fp4"

    def test_swiglu_left_over(self):
        r = resolve("swiglu", tokens=256, doweight_stage1=True)
        assert summary(r) == ("cktile_splitk", "A16W4", "gu_interleaved")
        with pytest.raises(ValueError, match="interleaved split-k bias"):
            resolve("swiglu", tokens=256, doweight_stage1=True, has_bias=True)

    def test_situv2_reaching_ck(self):
        with pytest.raises(RuntimeError, match="Unsupported activation for ck_moe_stage1"):
            resolve("situv2", A4W4, doweight_stage1=True)
        with pytest.raises(RuntimeError, match="CK-tile MoE has no branch for situv2"):
            resolve("situv2", A4W4, 1, shape=WIDE, doweight_stage1=True)
        with pytest.raises(RuntimeError, match="CK-tile MoE has no branch for gelu"):
            resolve("gelu", {"AITER_FLYDSL_FORCE": "0"}, 1, shape=WIDE)

    @pytest.mark.parametrize(
        "bad, why",
        [
            ({"has_bias": True}, "per-expert bias"),
            ({"has_expert_mask": True}, "expert-parallel masking"),
            ({"is_shuffled": False}, "non-preshuffled"),
            ({"doweight_stage1": True}, "doweight_stage1"),
            ({"flydsl": False}, "requires the FlyDSL kernel"),
            ({"hidden_size": 640}, "aligned"),
            ({"intermediate_size": 192}, "aligned"),
        ],
    )
    def test_a16w4_situv2_refuses(self, bad, why):
        with pytest.raises(NotImplementedError, match=why):
            resolve("situv2", {}, **bad)

    def test_expert_parallel_runs_in_the_other_modes(self):
        assert summary(resolve("situv2", A8W4, has_expert_mask=True)) == FLY8
        assert summary(resolve("situv2", A4W4, has_expert_mask=True)) == FLY4

    def test_without_flydsl(self):
        assert resolve("silu", flydsl=False).family == "ck2stages"
        with pytest.raises(RuntimeError, match="ck_moe_stage1"):
            resolve("situv2", A4W4, flydsl=False)


def test_gate_mode_none():
    with pytest.raises(ValueError, match="None is not a valid GateMode"):
        resolve("silu", gate_mode=None)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
