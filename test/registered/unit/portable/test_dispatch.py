"""AITER's dispatch rules, each expectation written out from docs/contract.md section b."""

import logging
import sys

import pytest

from sglang_aiter_moe.portable import explain
from sglang_aiter_moe.portable.dispatch import Dispatcher
from sglang_aiter_moe.portable.machine import Machine
from sglang_aiter_moe.portable.resolution import Call
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

K3 = {"num_experts": 896, "topk": 16, "hidden_size": 3584, "intermediate_size": 384}
SMALL = {"num_experts": 8, "topk": 2, "hidden_size": 512, "intermediate_size": 256}
# few enough tokens per expert for split-k
WIDE = {"num_experts": 256, "topk": 2, "hidden_size": 3072, "intermediate_size": 256}
GPT_OSS = {"num_experts": 128, "topk": 4, "hidden_size": 3072, "intermediate_size": 512}


def resolve(activation, env=None, tokens=64, shape=SMALL, **kwargs):
    return explain(activation=activation, tokens=tokens, env=env or {}, **{**shape, **kwargs})


def summary(r):
    return r.family, r.mode, r.w13_layout


A8W4, A4W4 = {"AITER_SITUV2_A8W4": "1"}, {"AITER_SITUV2_A4W4": "1"}
FLY16 = ("flydsl_a16w4", "A16W4", "separated")
FLY8 = ("flydsl_a8w4", "A8W4", "gu_interleaved")
FLY4 = ("flydsl_a4w4", "A4W4", "separated")


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
        for env in (A8W4, A4W4):
            resolve("situv2", env, has_expert_mask=True)

    def test_without_flydsl(self):
        assert resolve("silu", flydsl=False).family == "ck2stages"
        with pytest.raises(RuntimeError, match="ck_moe_stage1"):
            resolve("situv2", A4W4, flydsl=False)


class TestEnvironment:
    """Section b.5: parsers and the moment of reading."""

    @pytest.mark.parametrize("value", ["", "0", "true", "True", "yes", " 1", "1 ", "01", "2", "on"])
    def test_situv2_flags_are_exactly_1(self, value):
        for flag in ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4"):
            assert resolve("situv2", {flag: value}).mode == "A16W4"

    @pytest.mark.parametrize(
        "value, mode",
        [("1", "A8W4"), ("", "A8W4"), ("0", "A4W4"), ("true", "A4W4"), ("11", "A4W4")],
    )
    def test_force_a8w4_is_a_substring_test(self, value, mode):
        env = {"AITER_FORCE_A8W4": value}
        assert resolve("silu", env, arch="gfx1250", gate_mode="interleave").mode == mode

    def test_force_a8w4_is_for_gfx1250_alone(self):
        assert resolve("situv2", {"AITER_FORCE_A8W4": "1"}).mode == "A16W4"

    @pytest.mark.parametrize("value", ["", "x", "1.5"])
    @pytest.mark.parametrize("activation", ["silu", "situv2"])
    def test_bf16_fp8_bound_raises_on_junk_at_every_call(self, value, activation):
        with pytest.raises(ValueError, match="invalid literal for int"):
            resolve(activation, {"AITER_BF16_FP8_MOE_BOUND": value})

    def test_bounds_take_the_real_token_count(self):
        env = {"AITER_BF16_FP8_MOE_BOUND": "100", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "100"}
        assert resolve("swiglu", env, 99, gate_mode="interleave").mode == "A16W4"
        assert resolve("swiglu", env, 100, gate_mode="interleave").mode == "A8W4"
        assert resolve("swiglu", env, 99).mode == "A16W4"
        assert resolve("swiglu", env, 100).mode == "A4W4"

    @pytest.mark.parametrize("name", ["AITER_KSPLIT", "AITER_BYPASS_TUNE_CONFIG", "AITER_USE_NT"])
    def test_integers_of_a_miss(self, name):
        with pytest.raises(ValueError, match="invalid literal for int"):
            resolve("silu", {name: "junk"})

    def test_ksplit_forces_split_k(self):
        env = {"AITER_FLYDSL_FORCE": "0", "AITER_KSPLIT": "4"}
        assert resolve("silu", env, 4096).family == "cktile_splitk"

    def call(self, activation, tokens=64):
        return Call(tokens, 2, 8, 512, 256, activation)

    def test_swiglu_bound_is_read_at_import(self):
        env = {"GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "10"}
        dispatcher = Dispatcher(Machine.make(), env)
        env["GPTOSS_SWIGLU_MXFP4_BF16_BOUND"] = "1000"
        assert dispatcher.resolve(self.call(2)).mode == "A4W4"
        with pytest.raises(ValueError, match="invalid literal for int"):
            Dispatcher(Machine.make(), {"GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "many"})

    def test_situv2_flags_are_read_at_every_call(self):
        env = {}
        dispatcher = Dispatcher(Machine.make(), env)
        assert dispatcher.resolve(self.call(3)).mode == "A16W4"
        env["AITER_SITUV2_A8W4"] = "1"
        assert dispatcher.resolve(self.call(3)).mode == "A8W4"

    def test_flydsl_force_is_read_at_the_first_call_of_a_key(self):
        env = {}
        dispatcher = Dispatcher(Machine.make(), env)
        assert dispatcher.resolve(self.call(0)).family == "flydsl_a4w4"
        env["AITER_FLYDSL_FORCE"] = "0"
        assert dispatcher.resolve(self.call(0)).family == "flydsl_a4w4"  # cached
        assert dispatcher.resolve(self.call(0, tokens=60)).family == "flydsl_a4w4"  # same padded M
        assert dispatcher.resolve(self.call(0, tokens=65)).family == "ck2stages"

    def test_the_process_environment_is_the_default(self, monkeypatch):
        monkeypatch.setenv("AITER_SITUV2_A4W4", "1")
        monkeypatch.delenv("AITER_SITUV2_A8W4", raising=False)
        assert explain(activation="situv2", tokens=1, **SMALL).mode == "A4W4"

    def test_the_heuristic_is_logged_once(self, caplog):
        dispatcher = Dispatcher(Machine.make(), {})
        with caplog.at_level(logging.WARNING, logger="aiter"):
            dispatcher.resolve(self.call(0))
            dispatcher.resolve(self.call(0))
        assert [r.message for r in caplog.records if "no tuned FlyDSL config" in r.message] == [
            caplog.records[0].message
        ]


class TestReleases:
    """Section e."""

    def test_situv2_came_with_0_1_19(self):
        with pytest.raises(AttributeError):
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
        with pytest.raises(RuntimeError):
            resolve("silu", aiter="0.1.17", arch="gfx1250", gate_mode="interleave")

    @pytest.mark.parametrize("aiter", ["0.1.6", "main", "", "deadbeef0"])
    def test_unknown_release(self, aiter):
        with pytest.raises(ValueError, match="unknown AITER release"):
            resolve("silu", aiter=aiter)


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
            assert r.hidden_skip_k == r.intermediate_skip_n == r.hidden_skip_n == 0


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


def test_gate_mode_none():
    with pytest.raises(ValueError, match="None is not a valid GateMode"):
        resolve("silu", gate_mode=None)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
