"""Which variables AITER's dispatch reads, how it parses them and when: docs/contract.md section b.5."""

import logging
import sys

import pytest

from sglang_aiter_moe.portable import explain
from sglang_aiter_moe.portable.dispatch import Dispatcher
from sglang_aiter_moe.portable.machine import Machine
from sglang_aiter_moe.portable.resolution import Call
from sglang_aiter_moe.testing.dispatch_inputs import SMALL, resolve
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
