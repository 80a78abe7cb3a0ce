"""What kernels make of limits, betas, biases, pads and stage-1 results: docs/contract.md sections c and d."""

import sys

import pytest

from sglang_aiter_moe.testing.dispatch_inputs import A4W4, A8W4, K3, resolve
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


class TestSemantics:
    """Section c: what the families make of limit, betas, biases and pads."""

    def test_default_betas_differ_by_family(self):
        r = resolve("situv2", A4W4)
        assert (r.beta, r.linear_beta) == (1.0, 1.0)
        r = resolve("situv2", arch="gfx1250", gate_mode="interleave")
        assert (r.beta, r.linear_beta) == (1.0, 1.0)
        r = resolve("situv2", A4W4, beta=4, linear_beta=25)
        assert (r.beta, r.linear_beta) == (4.0, 25.0)

    @pytest.mark.parametrize(
        "betas", [{"beta": 0.0}, {"linear_beta": -1.0}, {"beta": float("nan")}]
    )
    def test_betas_must_be_positive(self, betas):
        with pytest.raises(ValueError, match="must be > 0"):
            resolve("situv2", A4W4, **betas)

    def test_limits(self):
        assert resolve("situv2", A4W4).limit is None
        assert resolve("situv2", A4W4, swiglu_limit=0.0).limit is None
        assert resolve("situv2", swiglu_limit=3.0).limit == 3.0
        assert resolve("silu", swiglu_limit=3.0).limit == 3.0
        assert resolve("swiglu", tokens=256).limit == 7.0
        assert resolve("swiglu", tokens=256, swiglu_limit=5.0).limit == 5.0
        # CK-tile and CK are not handed the limit
        assert resolve("swiglu", tokens=1, swiglu_limit=5.0).limit == 7.0
        assert resolve("swiglu", tokens=1, swiglu_limit=5.0, gate_mode="interleave").limit == 7.0
        assert resolve("silu", {"AITER_FLYDSL_FORCE": "0"}, swiglu_limit=3.0).limit is None

    def test_biases(self):
        assert resolve("swiglu", tokens=256).uses_bias1 and resolve("swiglu", tokens=256).uses_bias2
        assert resolve("swiglu", tokens=1).uses_bias1
        ck = resolve("silu", {"AITER_FLYDSL_FORCE": "0"})
        assert not ck.uses_bias1 and not ck.uses_bias2
        layout = resolve("situv2", A4W4, shape=K3)
        assert layout.uses_bias1 and not layout.uses_bias2

    def test_pads_on_flydsl_vanish_with_a_bias(self):
        pads = {"hidden_pad": 192, "intermediate_pad": 48}
        r = resolve("swiglu", tokens=256, **pads)
        assert (r.hidden_skip_k, r.intermediate_skip_n) == (192, 48)
        assert (r.intermediate_skip_k, r.hidden_skip_n) == (48, 192)
        r = resolve("swiglu", tokens=256, has_bias=True, **pads)
        assert not any(
            (r.hidden_skip_k, r.intermediate_skip_n, r.intermediate_skip_k, r.hidden_skip_n)
        )

    @pytest.mark.parametrize(
        "hidden_pad, inter_pad, expected",
        [(192, 96, (128, 64, 0, 192)), (192, 152, (128, 128, 128, 192)), (100, 48, (0, 0, 0, 64))],
    )
    def test_pads_on_cktile_are_rounded_down(self, hidden_pad, inter_pad, expected):
        r = resolve("swiglu", tokens=1, hidden_pad=hidden_pad, intermediate_pad=inter_pad)
        skips = (r.hidden_skip_k, r.intermediate_skip_n, r.intermediate_skip_k, r.hidden_skip_n)
        assert skips == expected

    def test_pads_elsewhere_are_ignored(self):
        pads = {"hidden_pad": 128, "intermediate_pad": 128}
        for r in (
            resolve("situv2", **pads),
            resolve("silu", {"AITER_FLYDSL_FORCE": "0"}, **pads),
            resolve("silu", arch="gfx1250", gate_mode="interleave", **pads),
        ):
            assert r.hidden_skip_k == r.intermediate_skip_n == 0
            assert r.intermediate_skip_k == r.hidden_skip_n == 0


class TestRequantization:
    """Section d: the rule follows the kernel's name."""

    @pytest.mark.parametrize("env", [A8W4, A4W4])
    def test_k3_is_tuned_and_fused(self, env):
        for tokens in (1, 2, 3, 4, 8, 1024, 20000, 32768, 200000):
            r = resolve("situv2", env, tokens, K3)
            assert r.tuned and r.requantization == "epilogue"

    def test_k3_padded_to_512_has_no_a4w4_row(self):
        shape = K3 | {"intermediate_size": 512}
        r = resolve("situv2", A4W4, shape=shape)
        assert not r.tuned and r.requantization == "roundup_bf16"
        assert resolve("situv2", A8W4, shape=shape).tuned

    def test_k3_a16w4_is_tuned_up_to_16384(self):
        assert resolve("situv2", tokens=16384, shape=K3).tuned
        assert not resolve("situv2", tokens=16385, shape=K3).tuned

    def test_k3_full_width_has_one_row(self):
        shape = K3 | {"intermediate_size": 3072}
        tuned = [m for m in (1, 2048, 3000, 4096, 8192) if resolve("situv2", A8W4, m, shape).tuned]
        assert tuned == [3000, 4096]  # 3000 is padded to 4096

    def test_a_miss_quantises_from_bf16(self):
        for env in (A8W4, A4W4):
            assert resolve("situv2", env).requantization == "roundup_bf16"
        assert resolve("situv2").requantization == "none"

    def test_bypass(self):
        r = resolve("situv2", A4W4 | {"AITER_BYPASS_TUNE_CONFIG": "1"}, shape=K3)
        assert not r.tuned and r.requantization == "roundup_bf16"

    @pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu", "situv2"])
    def test_mxmoe_runs_silu_for_any_activation(self, activation):
        shape = {"num_experts": 512, "topk": 10, "hidden_size": 4096, "intermediate_size": 512}
        r = resolve(activation, A4W4, 512, shape, swiglu_limit=3.0)
        assert (r.family, r.activation, r.limit) == ("mxmoe", "silu", None)
        assert r.requantization == "roundup_fp32"
        assert not r.uses_bias1 and not r.uses_bias2 and not r.forwards_num_local_tokens

    def test_mxmoe_follows_gate_mode_and_refuses_expert_masks(self):
        shape = {"num_experts": 512, "topk": 10, "hidden_size": 4096, "intermediate_size": 512}
        r = resolve("situv2", A4W4, 512, shape, gate_mode="interleave")
        assert (r.family, r.w13_layout) == ("mxmoe", "gu_interleaved")
        with pytest.raises(NotImplementedError, match="expert-parallel"):
            resolve("silu", {}, 512, shape | {"topk": 11}, has_expert_mask=True)

    def test_mxmoe_came_with_0_1_18(self):
        shape = {"num_experts": 512, "topk": 10, "hidden_size": 4096, "intermediate_size": 512}
        assert resolve("silu", shape=shape, aiter="0.1.17").family == "flydsl_a4w4"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
