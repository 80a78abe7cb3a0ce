"""Weight updates of a running ``sglang serve``, over HTTP, against a float32 forward of the same files."""

import json
import re
import shutil
import sys
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_aiter_moe.testing.carrier_reference import CarrierReference, clear_prompts
from sglang_aiter_moe.testing.checkpoints import CarrierConfig, write_kimi_checkpoint
from sglang_aiter_moe.testing.probe_layers import MODES
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_server import ask, environment, serving

register_cpu_ci(est_time=90, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

STEPS = 4
torch.set_num_threads(1)


def post(server, path, **body):
    """The answer, also of a request that SGLang calls a bad one."""
    request = urllib.request.Request(
        f"{server.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What a server with weights ``a`` says before and after it is told to take ``b``, and a broken ``b``."""
    folder = tmp_path_factory.mktemp("updates")
    config = CarrierConfig(num_experts=8)
    paths = {
        name: write_kimi_checkpoint(folder / name, replace(config, seed=seed))
        for seed, name in enumerate("ab")
    }
    broken = folder / "broken"
    shutil.copytree(paths["a"], broken)
    tensors = load_file(broken / "model.safetensors")
    last = sorted(name for name in tensors if ".experts." in name and "packed" in name)[-1]
    tensors[last] = tensors[last][:-1].contiguous()
    save_file(tensors, broken / "model.safetensors")
    references = {name: CarrierReference(path, "A8W4") for name, path in paths.items()}
    prompts = {name: clear_prompts(r, 2, STEPS) for name, r in references.items()}
    found = {"broken_name": last}
    env = environment(**MODES["A8W4"])
    with serving(paths["a"], folder / "server.log", env=env) as server:

        def says(name):
            """Whether the server answers as the reference of ``a`` or ``b`` does."""
            reference = references[name]
            given = [(ask(server, p, STEPS).tokens, p) for p in prompts[name]]
            return all(tokens == reference.generate(p, STEPS).tokens for tokens, p in given)

        found["before"] = says("a"), says("b")
        found["update"] = post(server, "update_weights_from_disk", model_path=str(paths["b"]))
        found["after"] = says("a"), says("b")
        found["refused"] = post(server, "update_weights_from_disk", model_path=str(broken))
        found["kept"] = says("a"), says("b")
        found["back"] = post(server, "update_weights_from_disk", model_path=str(paths["a"]))
        found["at_last"] = says("a"), says("b")
        found["log"] = server.log_text()
    return found


def test_the_new_weights_answer_and_then_the_old_ones_again(story):
    assert story["before"] == (True, False)
    assert story["update"]["success"], story["update"]
    assert story["after"] == (False, True)
    assert story["back"]["success"] and story["at_last"] == (True, False)


def test_an_update_that_does_not_fit_is_told_and_nothing_changes(story):
    assert not story["refused"]["success"]
    assert "ContractError" in story["refused"]["message"]
    assert story["broken_name"] in story["refused"]["message"]
    assert story["kept"] == (False, True)


def test_loading_says_how_far_it_is(story):
    """Whole once at the start, and once for each update; not a terminal, so no bar."""
    said = re.findall(r"rank (\d+): (\d)/2 MoE layers laid out", story["log"])
    assert said.count(("0", "2")) == 3
    assert set(said) <= {
        ("0", "1"),
        ("0", "2"),
    }  # half of them after ten seconds, where that is slow


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
