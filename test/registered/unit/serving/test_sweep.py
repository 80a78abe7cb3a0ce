"""The sweep is SGLang #33838's, sides alternate, and a client that fails is no result.

The clients here are scripts written by the test; the real one is run in test/registered/e2e.
"""

import json
import sys

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.serving import session, sweep
from sglang_aiter_moe.serving.sglang_python import SGLang
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SGLANG = SGLang("/venv/bin/python", "0.5.23")


def options(command):
    pairs = [word.partition("=") for word in command if word.startswith("--")]
    return {name: value for name, _, value in pairs}


def test_the_sweep_is_the_pull_requests(tmp_path):
    load = sweep.Load()
    assert load.concurrencies == (2, 4, 8, 16, 32)
    command = sweep.client_command(SGLANG, "http://h:1", load, 16, 1, tmp_path / "out")
    assert command[:3] == ["/venv/bin/python", "-m", "sglang.benchmark.serving"]
    found = options(command)
    assert found["--dataset-name"] == "random" and found["--random-range-ratio"] == "1.0"
    assert (found["--random-input-len"], found["--random-output-len"]) == ("8192", "1024")
    assert found["--max-concurrency"] == "16"
    assert (found["--num-prompts"], found["--warmup-requests"]) == ("128", "32")


def test_sides_alternate():
    assert list(sweep.order(3)) == [(0, "A"), (0, "B"), (1, "B"), (1, "A"), (2, "A"), (2, "B")]


@pytest.mark.parametrize("bad", [{"concurrencies": ()}, {"input_len": 0}, {"warmup_per": -1}])
def test_loads_that_cannot_be_are_refused(bad):
    with pytest.raises(ContractError, match="load"):
        sweep.Load(**bad)


RESULT = {field: float(n) for n, field in enumerate(sweep.METRICS.values(), 1)}
RESULT |= {"completed": 16, "duration": 2.5}


def client(tmp_path, body):
    """A command that stands in for SGLang's client."""
    path = tmp_path / "client.py"
    path.write_text(body)
    return [sys.executable, str(path)]


def test_metrics_are_the_clients_last_line(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("an old result\n")
    lines = json.dumps({**RESULT, "completed": 3}) + "\n" + json.dumps(RESULT) + "\n"
    command = client(tmp_path, f"open({str(output)!r}, 'x').write({lines!r})")
    found = sweep.run_point(command, {}, output, 16, 30)
    assert found == {
        "total_tok_s": 1.0,
        "output_tok_s": 2.0,
        "e2el_ms": 3.0,
        "ttft_ms": 4.0,
        "tpot_ms": 5.0,
        "itl_ms": 6.0,
        "duration_s": 2.5,
    }


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("print('no server there'); raise SystemExit(3)", "exit status 3.*no server there"),
        ("import time; time.sleep(60)", "no end within 1 s"),
        ("open(OUT, 'w').write('{}')", "gave no result"),
        (f"open(OUT, 'w').write({json.dumps({**RESULT, 'completed': 15})!r})", "15 of 16"),
    ],
)
def test_a_client_that_fails_is_no_result(tmp_path, body, named):
    output = tmp_path / "out.jsonl"
    command = client(tmp_path, f"OUT = {str(output)!r}\n{body}")
    with pytest.raises(ContractError, match=named):
        sweep.run_point(command, {}, output, 16, 1 if "sleep" in body else 30)


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ((), 1),
        (("--tp", "8"), 8),
        (("--trust-remote-code", "--tp-size=4"), 4),
        (("--tensor-parallel-size", "2", "--port", "9"), 2),
    ],
)
def test_gpus_of_a_server(arguments, gpus):
    assert session.gpus_of(arguments) == gpus


@pytest.mark.parametrize("arguments", [("--tp",), ("--tp", "all"), ("--tp=0",)])
def test_a_size_that_is_none_is_refused(arguments):
    with pytest.raises(ContractError, match="--tp"):
        session.gpus_of(arguments)


def test_a_server_that_does_not_start_stops_the_comparison(tmp_path):
    from sglang_aiter_moe.serving.side import parse_side

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of memory\nexit 7\n")
    python.chmod(0o755)
    setup = session.Setup(
        "m", (), sweep.Load(), 1, SGLang(python, "0.5.23"), {}, {}, tmp_path / "out", 1, start_s=30
    )
    with pytest.raises(ContractError, match="side A's server did not start: exit status 7"):
        session.compare(setup, {"A": parse_side("A", [])})
    assert "out of memory" in (tmp_path / "out" / "server-A1.log").read_text()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
