"""A whole comparison: servers up and down in alternated order, every point, results kept as they come."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.serving import report, sweep
from sglang_aiter_moe.serving.sglang_python import SGLang, find
from sglang_aiter_moe.serving.side import Side
from sglang_aiter_moe.testing.sglang_server import (
    Server,
    ServerDied,
    free_port,
    stop,
    wait_until_healthy,
)

_TP = ("--tp", "--tp-size", "--tensor-parallel-size")
_PLUGIN_LINE = "sglang-aiter-moe:"


@dataclass(frozen=True)
class Setup:
    """What both sides share.

    Attributes:
        model: path or name.
        arguments: of the server, besides model, host and port.
        load: what it is asked.
        rounds: how often each side is measured.
        sglang: the common SGLang.
        env: the common environment of the servers.
        client_env: the client's.
        folder: where logs and results go.
        gpus: of one server.
        start_s, point_s: longest start of a server, and longest point.
    """

    model: str
    arguments: tuple[str, ...]
    load: sweep.Load
    rounds: int
    sglang: SGLang
    env: Mapping[str, str]
    client_env: Mapping[str, str]
    folder: Path
    gpus: int
    start_s: float = 3600
    point_s: float = 7200
    progress: Callable[[str], None] = field(default=print, repr=False)


def gpus_of(arguments: Sequence[str]) -> int:
    """The tensor-parallel size in a server's arguments, 1 without one."""
    for place, argument in enumerate(arguments):
        name, separator, value = argument.partition("=")
        if name in _TP:
            if not separator:
                value = arguments[place + 1] if place + 1 < len(arguments) else ""
            if value.isdigit() and int(value):
                return int(value)
            raise ContractError(
                f"{name} {value}", allowed="a number of at least 1", fix=f"write {name} 8"
            )
    return 1


def compare(setup: Setup, sides: Mapping[str, Side]) -> dict[str, Any]:
    """Measures one side, or two in alternated order.

    Returns:
        What is written to ``results.json`` in the folder: sides, commands, every run, the summary.

    Raises:
        ContractError: a server or a point failed. What was measured before is in ``results.json``.
    """
    setup.folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "model": setup.model,
        "server_arguments": list(setup.arguments),
        "sglang": setup.sglang.release,
        "gpus": setup.gpus,
        "load": {**asdict(setup.load), "dataset_path": str(setup.load.dataset_path or "")},
        "sides": {name: side.to_json() for name, side in sides.items()},
        "servers": [],
        "runs": [],
    }
    for number, name in sweep.order(setup.rounds):
        if name not in sides:
            continue
        side = sides[name]
        setup.progress(f"round {number + 1} of {setup.rounds}, side {name}: {side.label}")
        with _server(setup, side, number) as (url, server):
            result["servers"].append({"round": number, "side": name, **server})
            for concurrency in setup.load.concurrencies:
                run = _point(setup, url, name, number, concurrency)
                result["runs"].append(run)
                result["summary"] = report.to_json(report.summarise(result["runs"], setup.gpus))
                _write(setup.folder / "results.json", json.dumps(result, indent=2) + "\n")
    rows = report.summarise(result["runs"], setup.gpus)
    labels = {name: side.label for name, side in sides.items()} | {
        name: "" for name in "AB" if name not in sides
    }
    _write(setup.folder / "table.md", report.markdown(rows))
    _write(setup.folder / "throughput.svg", report.plot(rows, labels))
    return result


def server_command(sglang: SGLang, model: str, port: int, arguments: Sequence[str]) -> list[str]:
    """The command line of a server."""
    return [
        str(sglang.python),
        "-m",
        "sglang.launch_server",
        f"--model-path={model}",
        "--host=127.0.0.1",
        f"--port={port}",
        *arguments,
    ]


@contextmanager
def _server(setup: Setup, side: Side, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if side.url is not None:
        yield side.url.rstrip("/").removesuffix("/v1"), {"url": side.url}
        return
    sglang = setup.sglang if side.python is None else find(side.python)
    env = side.environment(sglang.environment(setup.env))
    port = free_port()
    command = server_command(sglang, setup.model, port, setup.arguments)
    log = setup.folder / f"server-{side.name}{number + 1}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    server = Server(port, process, log)
    try:
        try:
            wait_until_healthy(server, setup.start_s)
        except ServerDied as error:
            raise ContractError(
                f"side {side.name}'s server did not start: {str(error).splitlines()[0]}",
                allowed="a server that answers /health",
                fix=f"look at the end of {log}",
            ) from error
        # The patch set's own word for which side this is: nothing in an unpatched server's log.
        plugin = [line for line in server.log_text().splitlines() if _PLUGIN_LINE in line]
        yield (
            server.url,
            {
                "command": command,
                "sglang": sglang.release,
                "plugin": [line.partition(_PLUGIN_LINE)[2].strip() for line in plugin],
            },
        )
    finally:
        stop(server)


def _point(setup: Setup, url: str, side: str, number: int, concurrency: int) -> dict[str, Any]:
    output = setup.folder / f"client-{side}{number + 1}-c{concurrency}.jsonl"
    # Both sides get the same prompts in a round, and other ones in the next.
    command = sweep.client_command(setup.sglang, url, setup.load, concurrency, number + 1, output)
    prompts = setup.load.prompts_per * concurrency
    env = setup.sglang.environment(setup.client_env)
    metrics = sweep.run_point(command, env, output, prompts, setup.point_s)
    setup.progress(
        f"  {concurrency} at a time: {metrics['total_tok_s']:.1f} tok/s, TTFT "
        f"{metrics['ttft_ms']:.0f} ms, TPOT {metrics['tpot_ms']:.2f} ms"
    )
    return {"side": side, "round": number, "concurrency": concurrency, **metrics}


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
