"""Starts the real ``sglang serve`` on this machine, asks it one question, and says whether it answered right.

``make serve``. The model is the small random Kimi-K3-like one of ``testing/checkpoints.py``, in MXFP4, on the
portable backend; "right" is a float32 forward of the same file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from sglang_aiter_moe.testing.carrier_reference import CarrierReference, clear_prompts
from sglang_aiter_moe.testing.checkpoints import write_kimi_checkpoint
from sglang_aiter_moe.testing.sglang_server import ask, environment, serving

STEPS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="serve until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sglang-aiter-moe-") as folder:
        model = write_kimi_checkpoint(Path(folder) / "kimi")
        reference = CarrierReference(model, "A16W4")
        (prompt,) = clear_prompts(reference, 1, STEPS)
        print("starting sglang serve (a minute or two) ...", flush=True)
        start = time.monotonic()
        log = Path(folder) / "server.log"
        with serving(model, log, env=environment(), port=options.port) as server:
            print(f"up after {time.monotonic() - start:.0f} s at {server.url}")
            print(
                next(line for line in server.log_text().splitlines() if "sglang-aiter-moe:" in line)
            )
            answer, want = ask(server, prompt, STEPS), reference.generate(prompt, STEPS)
            print(f"prompt            {' '.join(f'w{t}' for t in prompt)}")
            print(f"answer            {' '.join(f'w{t}' for t in answer.tokens)}")
            print(f"float32 reference {' '.join(f'w{t}' for t in want.tokens)}")
            right = answer.tokens == want.tokens
            print("right" if right else "WRONG")
            try:
                while options.keep:
                    time.sleep(1)
            except KeyboardInterrupt:
                print("stopping")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
