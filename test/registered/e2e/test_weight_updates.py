"""Weight updates of SGLang's real layers by its real loaders and ``WeightUpdater``.

One process for each model builds it, updates it in every way, and reports (``testing/reload_probe.py``);
the tests judge what it reports.
"""

import functools
import sys
from dataclasses import replace

import pytest

from sglang_aiter_moe.testing.checkpoints import (
    GPT_OSS_CONFIG,
    CarrierConfig,
    write_gpt_oss_checkpoint,
    write_kimi_checkpoint,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_environment import OTHER_RELEASES
from sglang_aiter_moe.testing.sglang_releases import MAIN, run_probe
from sglang_aiter_moe.testing.sglang_server import free_port

register_cpu_ci(est_time=360, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

WRITERS = {
    "kimi": (write_kimi_checkpoint, CarrierConfig(num_experts=8)),
    "gpt_oss": (write_gpt_oss_checkpoint, GPT_OSS_CONFIG),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("updates")


@functools.cache
def probe(folder, model, release):
    write, config = WRITERS[model]
    for number, name in enumerate("ab"):
        if not (folder / model / name).is_dir():
            write(folder / model / name, replace(config, seed=number))
    module = "sglang_aiter_moe.testing.reload_probe"
    return run_probe(module, str(folder / model), str(free_port()), release=release)


#: Both models on the main release; on every other one the model whose layers are padded and have biases.
RUNS = [*((model, MAIN) for model in WRITERS), *(("gpt_oss", r) for r in OTHER_RELEASES)]


@pytest.fixture(params=RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def report(request, folder):
    found = probe(folder, *request.param)
    assert found["other_weights"]
    return found


def test_from_tensor_in_a_session_ends_as_a_fresh_load(report):
    results, fresh, call = report["session"]
    assert [success for success, _ in results] == [True, True]
    assert fresh and call is None


@pytest.mark.parametrize("way", ["disk", "distributed", "without_session"])
def test_every_other_way_ends_as_a_fresh_load(report, way):
    (success, message), fresh = report[way]
    assert success, message
    assert fresh


def test_a_partial_update_changes_what_it_names_and_nothing_else(report):
    partial = report["partial"]
    assert [success for success, _ in partial["result"] + partial["back"]] == [True, True]
    assert partial["changed"] == [
        f"model.layers.0.mlp.experts.{name}" for name in ("w13_weight_scale", "w2_weight_scale")
    ]
    assert partial["right"] and partial["restored"]


@pytest.mark.parametrize("case", ["shape", "dtype", "name"])
def test_an_update_that_does_not_fit_writes_nothing(report, case):
    (success, message), unchanged = report["refused"][case]
    assert not success and "ContractError" in message and "layers.1." in message
    assert unchanged


def test_a_failed_update_with_a_copy_on_the_host_is_undone(report):
    found = report["failures"]["host"]
    assert found["result"][0] is False and "connection lost" in found["result"][1]
    assert found["kept"] and found["call"] is None


def test_a_failed_update_without_a_copy_refuses_calls_until_a_full_update(report):
    found = report["failures"]["none"]
    assert found["result"][0] is False and not found["kept"]
    assert "no valid weights" in found["call"]
    assert found["healed"][0] and found["fresh"] and found["call_after"] is None


def test_other_tensors_of_a_failed_update_are_undone_from_a_copy(report):
    found = report["others"]["host"]
    assert found["result"][0] is False and found["undone"] and found["call"] is None


def test_other_tensors_that_are_half_way_make_calls_refuse(report):
    found = report["others"]["none"]
    assert found["result"][0] is False and not found["undone"]
    assert "tensors beside the experts are open" in found["call"]
    assert found["healed"][0] and found["fresh"] and found["after"] is None


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
