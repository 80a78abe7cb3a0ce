"""Runs many cells in one process, for one SGLang release, with the patch set or without.

``python -m sglang_aiter_moe.matrix.worker JOB PORT``: JOB is a JSON file, ``{"cells": [...], "without": [...]}``. The
cells run once for each entry of ``without``: null for the patch set as it is, or the name of a patch to leave out,
or several joined by " + ". Prints one line ``CELL {json}`` for each, and ``RESULT {json}`` at the end. Whether the
patch set is on at all is up to SGLANG_AITER_MOE_ENABLE.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CELL = "CELL "
_left_out: list[Any] = []
#: What SGLang wants to know of a model before it builds layers; the layers take their sizes from the cells.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}


def main(job: Path, port: int) -> None:
    import torch

    from sglang_aiter_moe import plugin
    from sglang_aiter_moe.matrix import one_cell
    from sglang_aiter_moe.matrix.cells import Cell
    from sglang_aiter_moe.testing import sglang_process

    torch.set_num_threads(1)
    asked = json.loads(job.read_text())
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        config = sglang_process.become_single_rank(model, port)
    logging.disable(logging.CRITICAL)
    worker = one_cell.Worker(config)
    # SGLang collects garbage when an update fails; its modules' half a million objects are none.
    gc.freeze()
    start = time.monotonic()
    in_force = []
    for without in asked["without"]:
        leave_out(without)
        for fields in asked["cells"]:
            cell = Cell(**fields)
            outcome = one_cell.run(cell, worker)
            answer = {"cell": cell.name, "without": without} | outcome.as_dict()
            print(CELL + json.dumps(answer), flush=True)
        in_force.append(sum(state.status.value == "in force" for state in plugin.states()))
    sglang_process.print_result(
        release=sglang_process.release(),
        seconds=round(time.monotonic() - start, 1),
        in_force=in_force,
    )


def leave_out(name: str | None) -> None:
    """Takes patches out of this process, and puts back what was taken out before.

    Args:
        name: of a patch that is in force, or several joined by " + "; None: only put back.

    Raises:
        ValueError: no such patch is in force.
    """
    from sglang_aiter_moe import plugin
    from sglang_aiter_moe.patches.install import install, uninstall

    while _left_out:
        install(_left_out.pop())
    in_force = {s.patch.name: s for s in plugin.states() if s.status.value == "in force"}
    for one in name.split(" + ") if name else ():
        if one not in in_force:
            raise ValueError(f"no patch called {one!r} is in force")
        uninstall(in_force[one])
        _left_out.append(in_force[one])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
