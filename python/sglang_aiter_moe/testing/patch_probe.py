"""What the patches do that no cell of the matrix shows, each with its patch and without, in one process.

``python -m sglang_aiter_moe.testing.patch_probe``: prints one line ``RESULT {json}``: patch -> [with, without]; the
tests judge it. SGLang 0.5.23.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_aiter_moe.matrix import expected, one_cell, rocm
from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.matrix.layer import NEW_SEED, Rank, whole
from sglang_aiter_moe.matrix.worker import MODEL, leave_out
from sglang_aiter_moe.testing import sglang_process
from sglang_aiter_moe.testing.sglang_server import free_port


def probe_raw_form(worker: one_cell.Worker) -> dict[str, Any]:
    """A session in which raw weights are written into the parameters themselves, past every loader.

    SGLang promises them raw between ``begin_weight_update`` and ``end_weight_update``.
    """
    cell = Cell(a8w4="1", change="update from tensors")  # for its weights
    rocm.start(cell)
    with torch.no_grad(), rocm.one_device(), worker.rank(Rank.of(cell.parallel)):
        rocm.read_modules(cell)
        carrier = worker.load(cell)
        updater = worker._updater(carrier)
        updater.begin_weight_update()
        names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
        parameters = [getattr(carrier.experts, name) for name in names]
        old, new = whole(cell.rows, False), whole(cell.rows, False, NEW_SEED)
        is_raw = torch.equal(parameters[0].data.view(torch.uint8), old.w13)
        raw = (new.w13, new.w2, new.w13_scale, new.w2_scale)
        for parameter, tensor in zip(parameters, raw, strict=True):
            parameter.data.view(torch.uint8).view(-1)[: tensor.numel()] = tensor.view(-1)
        try:
            updater.end_weight_update(run_post_load=False)
            mode, diff = expected.closest(cell, one_cell.call(carrier, cell))
        except ValueError as error:  # ContractError
            return {"raw": is_raw, "error": str(error)}
    return {"raw": is_raw, "right": mode == "A8W4" and diff < expected.CLOSE}


def probe_stated_gate_mode(worker: one_cell.Worker) -> Any:
    """The ``gate_mode`` that goes out for a caller of SGLang's runner who states it in ``AiterMoeQuantInfo``."""
    import aiter.fused_moe
    from sglang.srt.layers.moe.moe_runner import aiter as runner
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    real, sent = aiter.fused_moe.fused_moe, []

    @functools.wraps(real)
    def recorded(**call: Any) -> torch.Tensor:
        sent.append(call.get("gate_mode"))
        return call["hidden_states"]

    weight = torch.zeros(4, 64, 32, dtype=torch.uint8)
    quant = runner.AiterQuantType.PER_1X32
    aiter.fused_moe.fused_moe = recorded
    try:
        info = runner.AiterMoeQuantInfo(weight, weight, quant, gate_mode="interleave")
        core = runner.AiterRunnerCore(MoeRunnerConfig(num_experts=4, top_k=2))
        x, ids = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int32)
        core.run(runner.AiterRunnerInput(x, ids, ids.float(), quant), info, {})
    except TypeError as error:
        return str(error)
    finally:
        aiter.fused_moe.fused_moe = real
    return sent


def probe_quant_type(worker: one_cell.Worker) -> int:
    """How often SGLang imports AITER's enum in three calls."""
    import builtins

    from sglang.srt.layers.moe.moe_runner import aiter as runner

    runner._aiter_quant_type(runner.AiterQuantType.PER_TOKEN)
    imported, real = [], builtins.__import__

    def counted(name: str, *arguments: Any, **more: Any) -> Any:
        imported.extend([name] * name.startswith("aiter"))
        return real(name, *arguments, **more)

    builtins.__import__ = counted
    try:
        for _ in range(3):
            runner._aiter_quant_type(runner.AiterQuantType.PER_TOKEN)
    finally:
        builtins.__import__ = real
    return len(imported)


PROBES: dict[str, Callable[[one_cell.Worker], Any]] = {
    "raw form before a weight update": probe_raw_form,
    "gate_mode and plan of a call": probe_stated_gate_mode,
    "AITER quant type": probe_quant_type,
}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        worker = one_cell.Worker(sglang_process.become_single_rank(model, free_port()))
    logging.disable(logging.CRITICAL)
    found = {}
    for patch, probe in PROBES.items():
        rocm.start(Cell())
        found[patch] = [probe(worker)]
        leave_out(patch)
        found[patch].append(probe(worker))
        leave_out(None)
        worker.tidy()
    sglang_process.print_result(**found)


if __name__ == "__main__":
    sys.exit(main())
