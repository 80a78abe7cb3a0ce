"""Starts the real ``sglang serve`` on this machine, asks it one question, and says whether it answered right.

``make serve``. The model is the trained Kimi-K3-like miniature, in MXFP4, on the portable backend.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation import exact_match
from sglang_aiter_moe.evaluation.miniature_runs import SERVER_ARGUMENTS
from sglang_aiter_moe.miniature import WEIGHTS, task
from sglang_aiter_moe.testing.sglang_server import environment, serving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="serve until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    options = parser.parse_args()
    (question,) = task.held_out_questions(1)
    with tempfile.TemporaryDirectory(prefix="sglang-aiter-moe-") as folder:
        print("starting sglang serve (a minute or two) ...", flush=True)
        start = time.monotonic()
        log = Path(folder) / "server.log"
        with serving(
            WEIGHTS / "kimi", log, *SERVER_ARGUMENTS, env=environment(), port=options.port
        ) as server:
            print(f"up after {time.monotonic() - start:.0f} s at {server.url}")
            print(server.logged("sglang-aiter-moe:"))
            answer = exact_match.ask(server.url, question)
            print(f"question  {question.text}")
            print(f"answer    {answer}")
            right = answer == question.answer
            print("right" if right else f"WRONG, expected {question.answer}")
            try:
                while options.keep:
                    time.sleep(1)
            except KeyboardInterrupt:
                print("stopping")
    return 0 if right else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ContractError as error:
        sys.exit(f"error: {error}")
