"""Two language models of a few MB, trained here from scratch, whose answers tell whether the experts are right.

``kimi``: Kimi K3's form (SiTUv2, sigmoid routing with a correction bias, top-8 of 32, latent experts, a shared expert).
``gpt_oss``: gpt-oss's form (SwiGLU-OAI, limit 7, biases, interleaved rows, top-4 of 32). Both answer sums in words
(``task.py``) with their steps written out; the experts are MXFP4, the rest is bf16. ``weights/README.md`` says how they
were made.
"""

from pathlib import Path

WEIGHTS = Path(__file__).resolve().parent / "weights"
#: Name of a shipped checkpoint -> what a right answer of it says before the result (``task.DIALECTS``).
CHECKPOINTS = {"kimi": "answer", "kimi_second": "result", "gpt_oss": "answer"}
