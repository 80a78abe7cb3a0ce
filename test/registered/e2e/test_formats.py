"""The same weights in four formats through SGLang's real ``FusedMoE`` loaders: equal buffers, equal outputs."""

import sys

import pytest

from sglang_aiter_moe.testing.checkpoints import CarrierConfig, write_kimi_checkpoint
from sglang_aiter_moe.testing.expert_files import FORMATS
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_releases import run_probe
from sglang_aiter_moe.testing.sglang_server import free_port

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = write_kimi_checkpoint(
        tmp_path_factory.mktemp("formats") / "a", CarrierConfig(num_experts=8)
    )
    return run_probe("sglang_aiter_moe.testing.format_probe", str(path), str(free_port()))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_ends_in_the_same_bytes_and_outputs(report, kind):
    assert report[kind] == {"scrambled": True, "packed": True, "output": True}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
