"""The real layers of every supported SGLang release, with the patch set, against the float32 reference.

One process for each release builds SGLang's own ``KimiK3MoE``, ``GptOssSparseMoeBlock``, ``FusedMoE``,
``Mxfp4MoEMethod`` and ``TopK`` (``testing/layer_probe.py``); the tests judge what it reports. The last tests
run the same layers of the released SGLang without patches and see them fail.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_aiter_moe.testing.checkpoints import write_gpt_oss_checkpoint, write_kimi_checkpoint
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_environment import GPT_OSS_RELEASES
from sglang_aiter_moe.testing.sglang_releases import FREE_PORT, MAIN, RELEASES, run_probe

register_cpu_ci(est_time=300, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]
RELEASED = (
    ("controls", True),
    ("SGLANG_AITER_MOE_ENABLE", "0"),
    ("CARRIER_CONTROL", "released"),
)
SOURCES = ("disk", "tensor", "ipc", "distributed")
with_release = pytest.mark.parametrize("release", RELEASES)
with_gpt_oss = pytest.mark.parametrize("release", (*GPT_OSS_RELEASES, *RELEASES))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    write_kimi_checkpoint(folder / "kimi")
    write_gpt_oss_checkpoint(folder / "gpt_oss")
    return folder


class Probes:
    """Runs the probe of a release once, two releases at a time."""

    def __init__(self, folder, pool):
        self.folder, self.pool, self.futures = folder, pool, {}

    def start(self, release, variables=()):
        key = (release, tuple(variables))
        if key not in self.futures:
            self.futures[key] = self.pool.submit(
                run_probe,
                "sglang_aiter_moe.testing.layer_probe",
                str(self.folder),
                FREE_PORT,
                release=release,
                **dict(variables),
            )
        return self.futures[key]


@pytest.fixture(scope="session")
def probes(checkpoints):
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield Probes(checkpoints, pool)


@pytest.fixture(scope="session")
def report(probes, request):
    chosen = {
        getattr(item, "callspec", None) and item.callspec.params.get("release")
        for item in request.session.items
    }
    for release in (*GPT_OSS_RELEASES, *RELEASES):
        if release in chosen:
            probes.start(release)
    return lambda release: probes.start(release).result()


@pytest.fixture(scope="session")
def released(probes):
    """The same layers on SGLang's own AITER branch, without our patches."""
    return lambda release: probes.start(release, RELEASED).result()


@with_gpt_oss
def test_it_is_this_release(report, release):
    assert report(release)["release"] == release


@with_release
@pytest.mark.parametrize("mode", ["A16W4", "A8W4", "A4W4"])
def test_kimi_block_agrees_with_the_reference(report, release, mode):
    found = report(release)["kimi"][mode]
    assert found["rows"] >= 15
    assert found["cosine"] > 0.9999 and found["relative_error"] < 0.012, found


@with_gpt_oss
def test_gpt_oss_block_agrees_with_the_reference(report, release):
    found = report(release)["gpt_oss"]["A16W4"]
    assert found["rows"] >= 15
    assert found["cosine"] > 0.9999 and found["relative_error"] < 0.006, found


@with_gpt_oss
@pytest.mark.parametrize("layout", ["interleave", "separated"])
def test_gate_mode_is_sent_without_a_limit_too(report, release, layout):
    found = report(release)["unstated_limit"][layout]
    assert found["sent"] == layout
    assert found["cosine"] > 0.9999 and found["relative_error"] < 0.006, found


@with_release
def test_plain_silu_stays_silu(report, release):
    found = report(release)["silu"]
    assert found["silu"]["relative_error"] < 0.004, found
    assert found["swiglu"]["relative_error"] > 0.1, found


@with_release
def test_the_published_buffer_comes_back(report, release):
    assert report(release)["published_output"] == {
        "same_object": True,
        "same_values": True,
        "misfit_untouched": True,
    }


@with_release
def test_a_flag_that_changes_after_the_load_is_refused(report, release):
    found = report(release)["flags"]
    assert found["before"] is None and found["restored"] is None
    assert found["changed"]["type"] == "ContractError"
    assert "AITER_SITUV2_A8W4" in found["changed"]["text"]


@with_release
def test_spellings_that_two_readers_read_differently_are_refused_at_load(report, release):
    for value, error in report(release)["flags"]["spellings"].items():
        assert error is not None, value
        assert error["type"] == "ContractError" and "AITER_SITUV2_A8W4" in error["text"]


@with_release
def test_processing_twice_changes_nothing(report, release):
    assert report(release)["second_processing"] == {"same_bytes": True, "same_objects": True}


@with_release
@pytest.mark.parametrize(
    "case, named",
    [("weight_on_input", "doweight"), ("no_betas", "beta"), ("unknown_activation", "relu2")],
)
def test_what_aiter_refuses_at_the_first_forward_is_refused_at_load(report, release, case, named):
    error = report(release)["refusals"][case]
    assert error is not None and error["type"] == "ContractError"
    assert named in error["text"]


@with_release
def test_the_layout_selector_by_its_name_in_sglang(report, release):
    found = report(release)["selector"]
    if release < "0.5.20":
        assert found is None  # the function came with 0.5.20
        return
    assert found == {
        "unset": False,  # departs from sglang#33838; docs/contract.md section 0
        "A8W4": True,
        "A4W4": False,
        "both": True,
        "A8W4=0": False,
        "stated": True,
    }


@with_gpt_oss
def test_quant_info_and_runner_input_keep_their_names_and_bases(report, release):
    assert report(release)["quant_info"] == {
        "gate_mode": "separated",
        "is_moe_quant_info": True,
        "module": "sglang.srt.layers.moe.moe_runner.aiter",
        "name": "AiterMoeQuantInfo",
        "output": "no such field" if release in GPT_OSS_RELEASES else None,
        "backend": "aiter",
    }


@with_release
def test_a_float32_correction_bias_is_not_rounded(report, release):
    found = report(release)["correction_bias"]
    assert found["differing_rows"] == 0
    if release >= "0.5.20":
        assert found["cache"] == {
            "original_when_equal": True,
            "dtype": "torch.bfloat16",
            "same_pointer": True,
            "fresh_after_copy": True,
        }


@with_release
def test_every_patch_is_in_force_or_says_why_not(report, release):
    states = {state["name"]: state for state in report(release)["states"]}
    assert not [s for s in states.values() if s["state"] in ("refused", "waiting")]
    assert all(state["reason"] for state in states.values())
    not_needed = {name for name, state in states.items() if state["state"] == "not needed"}
    expected = set()
    if release < "0.5.20":
        expected |= {"w13 layout selector", "correction bias cache"}
        flashinfers = "runner"
    else:
        flashinfers = "kernel"
    expected |= {
        f"published output of FlashInfer's MXFP4 {flashinfers}",
        f"SiTUv2 routing bias of FlashInfer's MXFP4 {flashinfers} in the wider dtype",
    }
    # Weight updates in sessions, and distributed ones in two steps, came with 0.5.21; they left ModelRunner in 0.5.16.
    updates = "MXFP4 weights in"
    expected |= {f"{updates} ModelRunner.update_weights_from_{source}" for source in SOURCES}
    if release < "0.5.21":
        expected |= {"correction bias after end_weight_update", "raw form before a weight update"}
        expected |= {f"{updates} begin_weight_update", f"{updates} end_weight_update"}
        expected |= {f"{updates} {step}_weights_from_distributed" for step in ("receive", "load")}
    else:
        expected |= {f"{updates} update_weights_from_distributed"}
    if release >= "0.5.22":
        expected |= {"output buffer of a call"}
    assert not_needed == expected


@pytest.mark.parametrize("release", GPT_OSS_RELEASES)
def test_before_0_5_17_what_gpt_oss_needs_is_in_force_and_nothing_else(report, release):
    states = {state["name"]: state for state in report(release)["states"]}
    updates = "MXFP4 weights in" + (" ModelRunner." if release < "0.5.16" else " ")
    assert {name for name, state in states.items() if state["state"] == "in force"} == {
        *(f"{updates}update_weights_from_{source}" for source in SOURCES),
        "self-check before the first MoE layer",
        "MXFP4 plan and sizes",
        "MXFP4 weight layout",
        "MXFP4 activation",
        "MXFP4 call",
        "gate_mode and plan of a call",
        "AITER runner",
    }
    assert {state["state"] for state in states.values()} == {"in force", "not needed"}
    assert "gpt-oss" in states["correction bias in the wider dtype"]["reason"]


@pytest.mark.parametrize("release", GPT_OSS_RELEASES)
def test_before_0_5_17_other_mxfp4_experts_are_refused_at_load(report, release):
    error = report(release)["other_experts"]
    assert error["type"] == "ContractError"
    assert release in error["text"] and "sglang>=0.5.17" in error["text"]


@with_gpt_oss
def test_doctor_lists_every_patch_with_its_state(report, release):
    found = report(release)
    for state in found["states"]:
        line = next(t for t in found["doctor"] if t.startswith(f"{state['name']}: "))
        assert line.startswith(f"{state['name']}: {state['state']}")


# --- without the patches the same checks fail ----------------------------------------------------


@pytest.mark.parametrize("release", ["0.5.13", "0.5.16", "0.5.19", MAIN])
def test_released_gpt_oss_without_a_limit_is_noise(released, release):
    found = released(release)
    assert found["states"] == []
    assert found["gpt_oss"]["A16W4"]["cosine"] > 0.999
    unstated = found["unstated_limit"]
    assert unstated["interleave"]["sent"] is None and unstated["interleave"]["cosine"] < 0.5
    assert unstated["separated"]["cosine"] > 0.999  # AITER's default


@pytest.mark.parametrize("release", [MAIN, "0.5.19"])
def test_released_sglang_without_patches_fails_these_checks(released, release):
    found = released(release)
    assert found["states"] == []
    # gpt-oss, which upstream gets right, shows that the branch runs at all.
    assert found["gpt_oss"]["A16W4"]["cosine"] > 0.999
    assert found["silu"]["silu"]["relative_error"] > 0.1
    assert found["published_output"]["same_object"] is False
    assert found["flags"]["changed"] is None
    if release >= "0.5.20":
        assert found["kimi"]["A16W4"]["cosine"] < 0.5
        assert found["selector"]["unset"] is True
        assert found["correction_bias"]["differing_rows"] > 10
        assert found["correction_bias"]["cache"]["fresh_after_copy"] is False


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
