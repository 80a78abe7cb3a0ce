"""The sweep: which points, in which order, and SGLang's own client for each.

The sizes are those of SGLang #33838: random prompts of exactly 8,192 tokens, 1,024 tokens of output, 2 to 32
requests at a time, 8 prompts for each of them after 2 for warming up.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.serving.sglang_python import SGLang

CONCURRENCIES = (2, 4, 8, 16, 32)
INPUT_LEN, OUTPUT_LEN = 8192, 1024
PROMPTS_PER, WARMUP_PER = 8, 2
DATASETS = ("random", "random-ids")
#: Metric -> field of the client's result. Times are milliseconds.
METRICS = {
    "total_tok_s": "total_throughput",
    "output_tok_s": "output_throughput",
    "e2el_ms": "median_e2e_latency_ms",
    "ttft_ms": "median_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "itl_ms": "median_itl_ms",
}


@dataclass(frozen=True)
class Load:
    """What a server is asked.

    Attributes:
        concurrencies: requests at a time, a point each.
        input_len, output_len: tokens of each prompt and each answer.
        prompts_per, warmup_per: requests at each point, and before it, as multiples of the concurrency.
        dataset: ``random`` (ShareGPT text cut to length) or ``random-ids`` (needs no file).
        dataset_path: a ShareGPT JSON file; without one SGLang's client downloads it.
        tokenizer: None for the model's.
    """

    concurrencies: tuple[int, ...] = CONCURRENCIES
    input_len: int = INPUT_LEN
    output_len: int = OUTPUT_LEN
    prompts_per: int = PROMPTS_PER
    warmup_per: int = WARMUP_PER
    dataset: str = "random"
    dataset_path: Path | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        sizes = (*self.concurrencies, self.input_len, self.output_len, self.prompts_per)
        if not self.concurrencies or min(sizes) < 1 or self.warmup_per < 0:
            raise ContractError(
                f"a load of concurrency {self.concurrencies}, input {self.input_len}, output {self.output_len}, "
                f"prompts {self.prompts_per}, warm-up {self.warmup_per}",
                allowed="at least one concurrency, sizes of at least 1, a warm-up of at least 0",
                fix="leave the options out for the sweep of SGLang #33838",
            )
        if len(set(self.concurrencies)) < len(self.concurrencies):
            raise ContractError(
                f"concurrency {self.concurrencies}",
                allowed="each of them once: two points of one would be taken for two rounds",
                fix="measure again with --rounds",
            )
        if self.dataset not in DATASETS:
            raise ContractError(
                f"--dataset {self.dataset}",
                allowed=", ".join(DATASETS),
                fix="leave it out for the text of SGLang #33838",
            )
        if self.dataset_path is not None and not self.dataset_path.is_file():
            raise ContractError(
                f"--dataset-path {self.dataset_path} is no file",
                allowed="a ShareGPT JSON file",
                fix="leave it out, and SGLang's client downloads one",
            )


def order(rounds: int) -> Iterator[tuple[int, str]]:
    """(round, side): A B, then B A, and so on, so that a drift of the machine falls on both."""
    for number in range(rounds):
        for side in "AB" if number % 2 == 0 else "BA":
            yield number, side


def client_command(
    sglang: SGLang, url: str, load: Load, concurrency: int, seed: int, output: Path
) -> list[str]:
    """The command line of SGLang's own benchmark client for one point."""
    command = [
        str(sglang.python),
        "-m",
        "sglang.benchmark.serving",
        "--backend=sglang",
        f"--base-url={url}",
        f"--dataset-name={load.dataset}",
        f"--random-input-len={load.input_len}",
        f"--random-output-len={load.output_len}",
        "--random-range-ratio=1.0",
        f"--num-prompts={load.prompts_per * concurrency}",
        f"--max-concurrency={concurrency}",
        f"--warmup-requests={load.warmup_per * concurrency}",
        f"--seed={seed}",
        f"--output-file={output}",
        "--disable-tqdm",
    ]
    if load.dataset_path is not None:
        command.append(f"--dataset-path={load.dataset_path}")
    if load.tokenizer is not None:
        command.append(f"--tokenizer={load.tokenizer}")
    return command


def run_point(
    command: Sequence[str], env: Mapping[str, str], output: Path, expected: int, timeout_s: float
) -> dict[str, float]:
    """Runs the client once; returns the metrics of :data:`METRICS` and ``duration_s``.

    Args:
        command: of :func:`client_command`.
        env: of the client.
        output: where it writes its result.
        expected: requests that have to complete.
        timeout_s: for the whole point.

    Raises:
        ContractError: it failed, took too long, or did not complete every request.
    """
    output.unlink(missing_ok=True)
    log = output.with_suffix(".log")
    try:
        with log.open("w", encoding="utf-8") as out:
            done = subprocess.run(
                command,
                env=dict(env),
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        status = f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        status = f"no end within {timeout_s:.0f} s"
    try:
        result: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
        completed = result["completed"]
        metrics = {name: float(result[field]) for name, field in METRICS.items()}
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise ContractError(
            f"SGLang's client gave no result ({status}): {_end(log)}",
            allowed="a result of every request",
            fix=f"look at {log} and at the server's log beside it",
        ) from error
    if completed != expected:
        raise ContractError(
            f"{completed} of {expected} requests completed",
            allowed="all of them: what fails early makes the rest look fast",
            fix=f"look at {log} and at the server's log beside it",
        )
    return {**metrics, "duration_s": float(result["duration"])}


def _end(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in lines[-3:])
