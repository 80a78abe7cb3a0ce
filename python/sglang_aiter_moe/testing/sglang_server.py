"""Starts the real ``sglang serve`` on this machine and takes it down again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_aiter_moe.errors import ContractError

PACKAGE = Path(__file__).resolve().parents[1]
PLACEHOLDERS = PACKAGE / "testing" / "placeholders"
#: Engine arguments of a machine without a GPU.
CPU_ENGINE = (
    "--device=cpu",
    "--dtype=bfloat16",
    "--attention-backend=torch_native",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--disable-radix-cache",
    "--max-total-tokens=512",
    # An idle scheduler spins on a core otherwise, and two ranks leave none for the rest of the server.
    "--sleep-on-idle",
)


class ServerDied(RuntimeError):
    """The server ended, or did not answer in time; the message ends with its log."""


@dataclass
class Server:
    """A running server."""

    port: int
    process: subprocess.Popen
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def logged(self, mark: str) -> str:
        """The first line of the log that holds ``mark``.

        Raises:
            ContractError: there is none; with the end of the log.
        """
        for line in self.log_text().splitlines():
            if mark in line:
                return line
        raise ContractError(
            f"the server answers, and its log has no line with {mark!r}; it ends:\n{_tail(self)}\n",
            allowed="a line of the plugin by each process that builds a model",
            fix="run `sglang-aiter-moe doctor` with the same Python",
        )


def plugin_messages(log: str) -> list[tuple[str, str]]:
    """(rank, message) of each line that the plugin logged, in their order; the rank is "" on a single rank.

    Args:
        log: what the processes of one server wrote into one file. A progress bar of one process, which ends without a
            newline, may stand before another's line.
    """
    return re.findall(r"\[[^\[\]\r\n]*?(?: (TP\d+))?\] sglang-aiter-moe: ([^\r\n]*)", log)


_GIVEN: set[int] = set()


def free_port() -> int:
    """A TCP port that nobody listens on; another one at each call, as who got the last one may not listen yet."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        if port not in _GIVEN:
            _GIVEN.add(port)
            return port


def _check_free(port: int) -> None:
    with socket.socket() as sock:
        # As servers do: what is left of ended connections is in nobody's way.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ContractError(
                f"port {port}: {error}",
                allowed="a TCP port that nobody listens on",
                fix="give another one, or none for a free one",
            ) from error


def environment(
    *,
    release: str | None = None,
    controls: bool = False,
    ranks: int = 1,
    base: Mapping[str, str] | None = None,
    **variables: str | None,
) -> dict[str, str]:
    """The environment of an SGLang process on a machine without a GPU.

    Args:
        release: directories of another SGLang release, joined by ``os.pathsep``; searched first.
        controls: make the second plugin of ``testing/controls.py`` visible.
        ranks: tensor-parallel size; from 2 on SGLang wants to be told the cores of each rank.
        base: environment to start from; this process's if None.
        variables: set on top; None removes one.
    """
    env = dict(os.environ if base is None else base)
    for name in list(env):
        if name.startswith(("AITER_", "SGLANG_")):
            del env[name]
    # A server is four processes or more, and each would compile all of SGLang and transformers anew.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = [] if release is None else [release]
    if controls:
        paths.append(str(PACKAGE / "testing" / "controls_dist"))
    env["PYTHONPATH"] = os.pathsep.join([*paths, str(PLACEHOLDERS), str(PACKAGE.parent)])
    env |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_aiter_moe.testing.carrier",
        "SGLANG_AITER_MOE_BACKEND": "portable",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        bound = [str(cores[rank % len(cores)]) for rank in range(ranks)]
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    for name, value in variables.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def start(
    model: Path,
    log: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    port: int = 0,
    python: Path | None = None,
) -> Server:
    """Starts ``sglang serve`` in a process group of its own and returns at once.

    ``python``: the interpreter whose SGLang it is; this process's if None.

    Raises:
        ContractError: somebody listens on ``port`` already, and would be taken for the server.
    """
    if port:
        _check_free(port)
    port = port or free_port()
    command = [
        str(Path(python or sys.executable).with_name("sglang")),
        "serve",
        f"--model-path={model}",
        "--host=127.0.0.1",
        f"--port={port}",
        *CPU_ENGINE,
        *arguments,
    ]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env or environment()),
            start_new_session=True,
            cwd=log.parent,
        )
    return Server(port, process, log)


def wait_until_healthy(server: Server, timeout: float = 900) -> None:
    """Returns when the server answers.

    Raises:
        ServerDied: it ended or stayed silent; with the end of its log.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerDied(f"exit status {server.process.returncode}\n{_tail(server)}")
        if _answers(server):
            return
        time.sleep(0.5)
    raise ServerDied(f"no answer within {timeout:.0f} s\n{_tail(server)}")


def _answers(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:  # URLError and HTTPError are OSErrors
        return False


def stop(server: Server) -> None:
    """Ends the server and everything it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(timeout=10)
        if not _group_alive(server.process.pid):
            return


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def serving(
    model: Path,
    log: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    port: int = 0,
    python: Path | None = None,
) -> Iterator[Server]:
    """A server that answers, for the length of a ``with`` block."""
    server = start(model, log, *arguments, env=env, port=port, python=python)
    try:
        wait_until_healthy(server)
        yield server
    finally:
        stop(server)


def _tail(server: Server, lines: int = 60) -> str:
    return "\n".join(server.log_text().splitlines()[-lines:])


@dataclass
class Answer:
    """What the server generated: token ids, and the logarithm of each one's probability."""

    tokens: list[int]
    logprobs: list[float]


def ask(server: Server, prompt: list[int], count: int) -> Answer:
    """Continues a prompt greedily by ``count`` tokens, through the openai client."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)
    choice = client.completions.create(
        model="carrier",
        prompt=prompt,
        max_tokens=count,
        temperature=0,
        logprobs=1,
        extra_body={"ignore_eos": True},
    ).choices[0]
    # The tokenizer's word for token i is "wi"; 0 and 1 are special.
    special = {"<s>": 0, "</s>": 1}
    words = [token.strip() for token in choice.logprobs.tokens]
    tokens = [special[word] if word in special else int(word[1:]) for word in words]
    return Answer(tokens, list(choice.logprobs.token_logprobs))
