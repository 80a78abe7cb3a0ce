"""Paths that the patch set is not about: equal calls and equal bytes with and without the plugin."""

import functools
import sys

import pytest

from sglang_aiter_moe.testing.checkpoints import write_kimi_checkpoint
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_releases import MAIN, run_probe
from sglang_aiter_moe.testing.sglang_server import free_port

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
with_release = pytest.mark.parametrize("release", [MAIN, "0.5.19"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_kimi_checkpoint(tmp_path_factory.mktemp("checkpoints") / "kimi")


@pytest.fixture(scope="module")
def report(model):

    @functools.cache
    def run(release):
        module = "sglang_aiter_moe.testing.no_op_probe"
        return run_probe(module, str(free_port()), str(model), release=release)

    return run


@with_release
@pytest.mark.parametrize("arch", ["calls", "calls on gfx95"])
def test_calls_of_other_paths_are_the_released_ones(report, release, arch):
    found = report(release)
    assert found["in_force"] > 5
    patched, released = found["patched"][arch], found["released"][arch]
    assert len(released) == 30  # 10 paths, 3 dispatch formats
    for case, call in released.items():
        assert patched[case] == call, case


@with_release
def test_the_recording_sees_what_the_paths_differ_in(report, release):
    calls = report(release)["released"]["calls"]
    assert calls["deepseek-v4 fp8 / standard"]["gate_mode"] == "'interleave'"
    assert "gate_mode" not in calls["fp8 block / standard"]
    assert len({repr(sorted(call.items())) for call in calls.values()}) == len(calls)


@with_release
def test_weights_of_other_methods_and_runners_are_the_released_ones(report, release):
    found = report(release)
    assert len(found["released"]["weights"]) >= 8
    assert found["patched"]["weights"] == found["released"]["weights"]


@with_release
def test_on_other_machines_only_flashinfers_output_and_bias_are_patched(model, release):
    found = run_probe(
        "sglang_aiter_moe.testing.flashinfer_probe",
        str(free_port()),
        str(model),
        release=release,
        SGLANG_AITER_MOE_BACKEND="auto",
    )
    # The stand-in for FlashInfer's kernel writes 7 into the published buffer and returns a tensor of 9.
    assert found["patched"] == {"is_published": True, "value": 7}
    assert found["released"] == {"is_published": False, "value": 9}
    states = {state["name"]: state for state in found["states"]}
    in_force = {name for name, state in states.items() if state["state"] == "in force"}
    kernel = "kernel" if release < "0.5.20" else "runner"
    assert in_force == {
        "self-check before the first MoE layer",
        f"published output of FlashInfer's MXFP4 {kernel}",
        f"SiTUv2 routing bias of FlashInfer's MXFP4 {kernel} in the wider dtype",
    }
    assert "not a ROCm build" in states["AITER runner"]["reason"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
