"""A side is what its settings say, and settings that cannot be are refused."""

import json
import sys
from pathlib import Path

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.serving.miniature import adapt, tiny_load
from sglang_aiter_moe.serving.side import parse_side
from sglang_aiter_moe.testing.checkpoints import CarrierConfig
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def test_variables_plugin_and_python():
    settings = ["AITER_SITUV2_A8W4=1", "unset=AITER_SITUV2_A4W4", "plugin=off", "python=/x/python"]
    side = parse_side("B", settings)
    env = side.environment({"AITER_SITUV2_A4W4": "1", "HOME": "/root"})
    assert env == {"AITER_SITUV2_A8W4": "1", "SGLANG_AITER_MOE_ENABLE": "0", "HOME": "/root"}
    assert side.python == Path("/x/python") and side.url is None
    assert side.label == " ".join(settings)


def test_no_settings_change_nothing():
    side = parse_side("A", [])
    assert side.environment({"A": "1"}) == {"A": "1"} and side.label == "as is"


def test_a_value_may_hold_an_equals_sign():
    assert parse_side("A", ["X=a=b"]).env == {"X": "a=b"}


def test_a_running_server_takes_no_settings():
    assert parse_side("A", ["url=http://h:1", "label=old"]).label == "old"
    with pytest.raises(ContractError, match="running server"):
        parse_side("A", ["url=http://h:1", "AITER_SITUV2_A8W4=1"])


@pytest.mark.parametrize("setting", ["AITER_SITUV2_A8W4", "=1", "plugin=maybe", ""])
def test_other_settings_are_refused(setting):
    with pytest.raises(ContractError, match="--b"):
        parse_side("B", [setting])


@pytest.mark.parametrize("url", ["nonsense", "h:1", "file:///etc/passwd", "http://", ""])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ContractError, match="no server's address"):
        parse_side("A", [f"url={url}"])


def test_the_miniature_opens_the_released_path_where_the_patch_set_is_off():
    on = parse_side("A", ["AITER_SITUV2_A8W4=1"])
    assert adapt(on) is on
    off = adapt(parse_side("B", ["plugin=off"]))
    assert off.env == {"SGLANG_AITER_MOE_ENABLE": "0", "CARRIER_CONTROL": "released"}
    assert off.label == "plugin=off"


def test_the_miniatures_conversations_are_in_its_own_words(tmp_path):
    load = tiny_load(tmp_path, (3,))
    data = json.loads(load.dataset_path.read_text())
    assert load.concurrencies == (3,) and len(data) >= 32
    words = {w for c in data for turn in c["conversations"] for w in turn["value"].split()}
    assert words <= {f"w{n}" for n in range(CarrierConfig().vocab_size)}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
