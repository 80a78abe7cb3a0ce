"""Paths that the patch set is not about: equal calls and equal bytes with and without the plugin."""

import functools
import sys

import pytest

from sglang_aiter_moe.testing.checkpoints import write_kimi_checkpoint
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_releases import MAIN, run_probe
from sglang_aiter_moe.testing.sglang_server import free_port

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
with_release = pytest.mark.parametrize("release", [MAIN, "0.5.19"])


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    model = write_kimi_checkpoint(tmp_path_factory.mktemp("checkpoints") / "kimi")

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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
