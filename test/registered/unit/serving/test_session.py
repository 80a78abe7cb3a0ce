"""A whole comparison against a package that only looks like SGLang: order, what is kept, what ends it.

The real servers and the real client are in test/registered/e2e/test_operator.py.
"""

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.serving import session
from sglang_aiter_moe.serving.sglang_python import SGLang
from sglang_aiter_moe.serving.side import parse_side
from sglang_aiter_moe.serving.sweep import Load
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

# Answers /health and says in its log which side it is.
SERVER = """
    import http.server, os, sys

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = os.environ.get("SPEED", "").encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    if os.environ.get("SPEED") == "dead":
        sys.exit("no such speed")
    print("sglang-aiter-moe:", os.environ.get("SGLANG_AITER_MOE_ENABLE", "1"), "in force", flush=True)
    port = next(int(a.partition("=")[2]) for a in sys.argv if a.startswith("--port="))
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
# The faster the server, the more tokens and the less time.
CLIENT = """
    import json, sys, urllib.request

    given = dict(a[2:].partition("=")[::2] for a in sys.argv[1:] if a.startswith("--"))
    speed = float(urllib.request.urlopen(given["base-url"] + "/health").read())
    result = {"completed": int(given["num-prompts"]), "duration": 1.0, "total_throughput": 100 * speed}
    result["output_throughput"] = 10 * speed
    for name in ("e2e_latency", "ttft", "tpot", "itl"):
        result[f"median_{name}_ms"] = 1 / speed
    open(given["output-file"], "w").write(json.dumps(result) + "\\n")
"""


@pytest.fixture
def sglang(tmp_path):
    folder = tmp_path / "site" / "sglang"
    (folder / "benchmark").mkdir(parents=True)
    for name, code in (("launch_server", SERVER), ("benchmark/serving", CLIENT)):
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
    for name in ("", "benchmark/"):
        (folder / f"{name}__init__.py").write_text("")
    return SGLang(Path(sys.executable), "0.0", (str(tmp_path / "site"),))


def compare(sglang, tmp_path, rounds=2, **sides):
    setup = session.Setup(
        "model",
        (),
        Load((1, 2), 4, 4, 2, 0, dataset="random-ids"),
        rounds,
        sglang,
        dict(os.environ),
        dict(os.environ),
        tmp_path / "out",
        2,
        start_s=60,
        point_s=60,
        progress=lambda line: None,
    )
    return session.compare(setup, {name: parse_side(name, s) for name, s in sides.items()})


def test_two_sides_in_alternated_order(sglang, tmp_path):
    b = ["SPEED=2", "plugin=off"]
    result = compare(sglang, tmp_path, A=["SPEED=1"], B=b)
    seen = [(run["round"], run["side"], run["concurrency"]) for run in result["runs"]]
    assert [(r, s) for r, s, c in seen if c == 1] == [(0, "A"), (0, "B"), (1, "B"), (1, "A")]
    assert [c for _, _, c in seen] == [1, 2] * 4
    plugin = {server["side"]: server["plugin"] for server in result["servers"]}
    assert plugin == {"A": ["1 in force"], "B": ["0 in force"]}
    for row in result["summary"]:  # B is twice as fast, on two GPUs
        assert row["delta"]["total_tok_s"] == pytest.approx(1.0)
        assert row["delta"]["ttft_ms"] == pytest.approx(-0.5)
        assert row["A"]["tok_s_gpu"]["median"] == pytest.approx(50)
    kept = json.loads((tmp_path / "out" / "results.json").read_text())
    assert kept == json.loads(json.dumps(result))
    assert len((tmp_path / "out" / "table.md").read_text().splitlines()) == 2 + 2 * 3
    assert "<svg" in (tmp_path / "out" / "throughput.svg").read_text()


def test_one_side_alone(sglang, tmp_path):
    result = compare(sglang, tmp_path, rounds=1, A=["SPEED=1"])
    assert [run["side"] for run in result["runs"]] == ["A", "A"]
    assert result["summary"][0]["delta"] == {}


def test_a_server_that_ends_is_named_and_what_was_measured_is_kept(sglang, tmp_path):
    with pytest.raises(ContractError, match="side B's server did not start: exit status 1"):
        compare(sglang, tmp_path, A=["SPEED=1"], B=["SPEED=dead"])
    kept = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [run["side"] for run in kept["runs"]] == ["A", "A"]
    assert "no such speed" in (tmp_path / "out" / "server-B1.log").read_text()


def test_no_server_is_left_behind(sglang, tmp_path):
    result = compare(sglang, tmp_path, rounds=1, A=["SPEED=1"])
    (command,) = [server["command"] for server in result["servers"]]
    port = next(a for a in command if a.startswith("--port="))
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:  # it ended while we looked
            continue
    assert found and not any(port.encode() in line for line in found)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
