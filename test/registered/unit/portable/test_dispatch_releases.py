"""What each AITER release dispatches to: docs/contract.md section e."""

import sys

import pytest

from sglang_aiter_moe.testing.dispatch_inputs import A4W4, A8W4, FLY16, resolve, summary
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


class TestReleases:
    """Section e."""

    def test_situv2_came_with_0_1_19(self):
        with pytest.raises(AttributeError, match="Situv2"):
            resolve("situv2", aiter="0.1.18")
        with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
            resolve("silu", aiter="0.1.18", beta=4.0)
        assert resolve("situv2", A8W4, aiter="0.1.19").mode == "A8W4"

    @pytest.mark.parametrize(
        "aiter, mode",
        [
            ("0.1.19", "A16W4"),
            ("v0.1.19", "A16W4"),
            ("0.1.19.post1", "A4W4"),
            ("0.1.19.post2", "A4W4"),
            ("6dc26b7a8", "A4W4"),
            ("6dc26b7a81", "A4W4"),
            ("4045b2de7b", "A4W4"),
            ("00cbe979f2", "A16W4"),  # two days before the flag
            ("0.1.20", "A4W4"),
            ("0.1.20.post1", "A4W4"),
            ("e4048607a535", "A4W4"),
        ],
    )
    def test_a4w4_flag_came_with_0_1_19_post1(self, aiter, mode):
        assert resolve("situv2", A4W4, aiter=aiter).mode == mode

    @pytest.mark.parametrize("aiter", ["0.1.19", "0.1.19.post1", "6dc26b7a8", "0.1.20"])
    def test_a16w4_reads_separated_in_every_release(self, aiter):
        assert summary(resolve("situv2", aiter=aiter)) == FLY16
        built = resolve("situv2", aiter=aiter, a16w4_kernel="gu_interleaved")
        assert (built.w13_layout, built.w13_scale_layout) == ("gu_interleaved", "gu_interleaved")
        # the build option is the A16W4 SiTUv2 kernel's alone
        assert resolve("situv2", A4W4, a16w4_kernel="gu_interleaved").w13_layout == "separated"
        assert resolve("swiglu", a16w4_kernel="gu_interleaved").w13_layout == "separated"

    @pytest.mark.parametrize("aiter", ["0.1.12", "0.1.13"])
    def test_before_gate_mode_decided(self, aiter):
        assert summary(resolve("swiglu", tokens=511, aiter=aiter)) == (
            "cktile",
            "A16W4",
            "gu_interleaved",
        )
        assert summary(resolve("swiglu", tokens=512, aiter=aiter)) == (
            "cktile",
            "A8W4",
            "gu_interleaved",
        )
        assert resolve("silu", aiter=aiter).family == "ck2stages"
        # not read yet
        assert resolve("silu", {"AITER_BF16_FP8_MOE_BOUND": "junk"}, aiter=aiter).mode == "A4W4"

    def test_gate_mode_keyword(self):
        with pytest.raises(TypeError, match="unexpected keyword argument 'gate_mode'"):
            resolve("silu", aiter="0.1.12", gate_mode="separated")
        with pytest.raises(TypeError, match="unexpected keyword argument 'swiglu_limit'"):
            resolve("silu", aiter="0.1.13", swiglu_limit=7.0)
        assert resolve("silu", aiter="0.1.13", gate_mode="interleave").mode == "A4W4"
        assert resolve("silu", tokens=256, aiter="0.1.14", gate_mode="interleave").mode == "A8W4"

    def test_scale_rounding_before_0_1_16(self):
        old, new = resolve("silu", aiter="0.1.14"), resolve("silu", aiter="0.1.16")
        assert (old.input_rounding, old.requantization) == ("even", "even_bf16")
        assert (new.input_rounding, new.requantization) == ("roundup", "roundup_bf16")

    def test_flydsl_force_came_with_0_1_16(self):
        assert resolve("silu", aiter="0.1.14").family == "ck2stages"
        assert resolve("silu", aiter="0.1.16").family == "flydsl_a4w4"

    def test_gfx1250_grouped_came_with_0_1_18(self):
        args = {"arch": "gfx1250", "gate_mode": "interleave"}
        with pytest.raises(RuntimeError, match="which gfx1250 does not have"):
            resolve("silu", aiter="0.1.17", **args)
        assert resolve("silu", aiter="0.1.18", **args).family == "grouped_gfx1250"

    @pytest.mark.parametrize("aiter", ["0.1.6", "main", "", "deadbeef0"])
    def test_unknown_release(self, aiter):
        with pytest.raises(ValueError, match="unknown AITER release"):
            resolve("silu", aiter=aiter)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
