"""The environment that SGLang's processes get."""

import socket
import sys

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_server import (
    Server,
    environment,
    free_port,
    plugin_messages,
    start,
)

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

BASE = {"PATH": "/bin", "AITER_SITUV2_A8W4": "1", "SGLANG_PLUGINS": "other", "HOME": "/home/a"}


def test_no_variable_of_sglang_or_aiter_is_passed_on_but_those_that_are_given():
    env = environment(base=BASE, AITER_SITUV2_A4W4="1", HOME=None)
    assert env["PATH"] == "/bin" and "HOME" not in env
    assert {n for n in env if n.startswith("AITER_")} == {"AITER_SITUV2_A4W4"}
    assert "SGLANG_PLUGINS" not in env


def test_compiled_modules_are_kept_whatever_this_process_does():
    env = environment(base={**BASE, "PYTHONDONTWRITEBYTECODE": "1"})
    assert "PYTHONDONTWRITEBYTECODE" not in env


@pytest.mark.parametrize("port", ["taken", 70000])
def test_a_port_that_somebody_listens_on_is_refused(port, tmp_path):
    """Its answer to /health would be taken for the new server's."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1] if port == "taken" else port
        with pytest.raises(ContractError, match=f"^port {number}: "):
            start(tmp_path, tmp_path / "log", env={}, port=number, python=tmp_path / "python")


def test_a_port_is_free_again_after_its_server_ended(tmp_path):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            other.accept()[0].close()
            client.recv(1)
    # nothing to start there: only the port was checked
    with pytest.raises(FileNotFoundError, match="sglang"):
        start(tmp_path, tmp_path / "log", env={}, port=port, python=tmp_path / "python")


@pytest.mark.parametrize("ranks, entries", [(1, 0), (2, 2), (3, 3)])
def test_each_rank_has_its_cores(ranks, entries):
    bound = environment(base=BASE, ranks=ranks).get("SGLANG_CPU_OMP_THREADS_BIND", "")
    assert len(bound.split("|") if bound else []) == entries


def test_what_each_rank_logged_is_found_behind_another_ranks_progress_bar():
    log = (
        "[2026-11-30 17:10:06 TP0] Load weight begin.\n"
        "[2026-11-30 17:10:06 TP0] sglang-aiter-moe: 35 in force (process 1)\n"
        "\rMulti-thread loading shards:   0% Completed | 0/1 [00:00<?, ?it/s]"
        "[2026-11-30 17:10:06 TP1] sglang-aiter-moe: 34 in force, 1 refused (process 2)\n"
        "[2026-11-30 17:10:07] sglang-aiter-moe: 35 in force (process 3)\n"
    )
    assert plugin_messages(log) == [
        ("TP0", "35 in force (process 1)"),
        ("TP1", "34 in force, 1 refused (process 2)"),
        ("", "35 in force (process 3)"),
    ]


def test_a_port_is_given_once():
    ports = [free_port() for _ in range(500)]  # without a memory some come again
    assert len(set(ports)) == 500


def test_a_line_of_the_log_or_how_it_ends(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\nthe plugin: here\nthe plugin: again\nlast\n")
    server = Server(0, None, log)
    assert server.logged("the plugin:") == "the plugin: here"
    with pytest.raises(ContractError) as caught:
        server.logged("nowhere")
    assert "'nowhere'" in caught.value.what and "again\nlast\n" in caught.value.what


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
