"""SGLang's AITER runner with the patch set: what goes around AITER, tracing, DeepEP (``testing/runner_probe.py``)."""

import functools
import sys

import pytest

from sglang_aiter_moe.testing.checkpoints import write_kimi_checkpoint
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_releases import MAIN, run_probe
from sglang_aiter_moe.testing.sglang_server import free_port

register_cpu_ci(est_time=120, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
with_release = pytest.mark.parametrize("release", ["0.5.17", "0.5.21", MAIN])


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    model = write_kimi_checkpoint(tmp_path_factory.mktemp("checkpoints") / "kimi")

    @functools.cache
    def run(release):
        module = "sglang_aiter_moe.testing.runner_probe"
        return run_probe(module, str(model), str(free_port()), release=release)

    return run


@with_release
def test_no_kernel_goes_around_aiter(report, release):
    found = report(release)["bypass"]
    if release < "0.5.21":
        assert found is None  # the small-M kernel came with 0.5.21
        return
    assert found["on"]
    for layout in ("separated", "interleave"):
        assert found[layout] == {
            "sent": layout,
            "calls_around": 0,
            # The kernel reads separated bytes: the plan says for which layers it may.
            "named": ["smallm_moe_gfx950", True, layout == "separated"],
            "calls_around_by_sglang_alone": 1,
        }


@with_release
def test_a_planned_layer_traces_in_one_graph(report, release):
    found = report(release)["tracing"]
    assert found["same"] and found["depends"], found


@with_release
def test_no_environment_is_read_while_tracing(report, release):
    found = report(release)["tracing"]
    assert found["eager_refuses"] and found["traced_reads_nothing"], found


@with_release
def test_a_planned_layer_runs_on_fake_tensors(report, release):
    assert report(release)["tracing"]["fake"] == [3, 256]


@with_release
def test_a_layer_without_a_plan_traces_in_one_graph(report, release):
    assert report(release)["tracing"]["without_plan"] is None


@with_release
@pytest.mark.parametrize("form", ["deepep_normal", "deepep_ll"])
@pytest.mark.parametrize("mode", ["A8W4", "A4W4"])
def test_deepep_agrees_with_the_reference(report, release, mode, form):
    found = report(release)["deepep"][f"{mode} {form}"]
    assert found["cosine"] > 0.9999 and found["relative_error"] < 0.006, found


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
