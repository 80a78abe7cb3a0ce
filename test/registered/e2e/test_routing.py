"""SGLang's own routing, rebalancing and weight-update code with the patch set (``testing/routing_probe.py``).

Expected routings are the float64 reference's.
"""

import sys

import pytest

from sglang_aiter_moe.testing.checkpoints import write_kimi_checkpoint
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_releases import MAIN, run_probe
from sglang_aiter_moe.testing.sglang_server import free_port

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
RELEASES = ("0.5.17", MAIN)
with_release = pytest.mark.parametrize("release", RELEASES)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("routing") / "kimi"
    write_kimi_checkpoint(checkpoint)
    found = {}

    def of(release):
        if release not in found:
            found[release] = run_probe(
                "sglang_aiter_moe.testing.routing_probe",
                str(checkpoint),
                str(free_port()),
                release=release,
            )
        return found[release]

    return of


def test_choices_follow_the_map_of_a_rebalancing(report):
    # On a CPU older releases leave out the map from logical to physical experts.
    found = report(MAIN)["rebalancing"]
    rows = [count for name, count in found.items() if "static" in name or "dynamic" in name]
    assert rows == [0, 0, 0, 0], found


@with_release
def test_a_rebalancing_leaves_the_bias_alone(report, release):
    found = report(release)["rebalancing"]
    assert found["experts_moved"] and found["bias_stays"]


@with_release
def test_a_rebalancing_that_reloads_weights_reaches_the_graphs(report, release):
    assert report(release)["recovery"] == {"reloads": 1, "graph_follows": True}


@with_release
def test_nothing_is_touched_until_the_last_memory_is_back(report, release):
    assert report(release)["wake_up"] == {"kv_cache": False, "cuda_graph": True}


@with_release
def test_weights_that_a_check_resets_reach_the_graphs(report, release):
    assert report(release)["check_weights"] is True


@with_release
def test_select_experts_reaches_the_fused_kernel(report, release):
    found = report(release)["fused"]
    assert len(found) == 6
    for name, case in found.items():
        assert case == {"by_the_kernel": 1, "differ": 0}, name


def test_sm100_routes_a_wide_bias_before_the_kernel(report):
    # In 0.5.17 to 0.5.19 the same code is inside apply, between calls of FlashInfer: unit tests alone.
    found = report(MAIN)["sm100"]
    assert found["torch.float32"] == {"standard": True, "routing_bias": None, "differ": 0}
    assert found["torch.bfloat16"]["routing_bias"] == "torch.bfloat16"


@with_release
def test_no_patch_of_the_routing_is_missing(report, release):
    states = report(release)["states"]
    ours = {
        n: s
        for n, s in states.items()
        if "correction bias" in n or n.startswith(("fused", "SiTUv2"))
    }
    assert len(ours) >= 12
    # FlashInfer's SM100 call has moved once: one of its two patches is not needed in each release.
    missing = [name for name, state in ours.items() if state == "not needed"]
    assert set(ours.values()) <= {"in force", "not needed"}, ours
    assert len(missing) <= (3 if release != MAIN else 1), missing


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
