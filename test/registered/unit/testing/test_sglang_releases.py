"""What a process with SGLang prints for its parent is found, whatever else stands on the line."""

import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_process import RESULT, printed
from sglang_aiter_moe.testing.sglang_releases import FREE_PORT, run_probe

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

BAR = "\rLoading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]"


@pytest.mark.parametrize(
    "line,found",
    [
        ('RESULT {"a": 1}', (RESULT, {"a": 1})),
        ('RESULT {"a": 1}\n', (RESULT, {"a": 1})),
        (BAR + 'RESULT {"a": {"b": 2}}\n', (RESULT, {"a": {"b": 2}})),
        (BAR + 'CELL {"error": "RESULT {x}"}', ("CELL ", {"error": "RESULT {x}"})),
        ('CELL {"a": 1}' + BAR, ("CELL ", {"a": 1})),
        (BAR, None),
        ("RESULT of nothing", None),
    ],
)
def test_a_line_for_the_parent_is_found_behind_a_progress_bar(line, found):
    assert printed(line, "CELL ", RESULT) == found


def probe(folder, *lines):
    (folder / "said.py").write_text("\n".join(("import json, sys", *lines)))
    return "said"


def test_a_probe_behind_a_bar_is_read(tmp_path):
    module = probe(
        tmp_path,
        f"print({BAR!r}, end='')",
        "print('RESULT ' + json.dumps({'arguments': sys.argv[1:]}))",
    )
    found = run_probe(module, "model", FREE_PORT, path=str(tmp_path))
    model, port = found["arguments"]
    assert model == "model" and 1024 <= int(port) < 65536


def test_a_probe_that_says_nothing_ends_with_what_it_said_else(tmp_path):
    with pytest.raises(RuntimeError, match="reported nothing\nonly this"):
        run_probe(probe(tmp_path, "print('only this')"), path=str(tmp_path))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
