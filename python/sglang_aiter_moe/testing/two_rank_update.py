"""``python -m sglang_aiter_moe.testing.two_rank_update RANK FILE [absent]``: updates that fail on one of two ranks.

Both ranks (gloo, meeting in FILE) hold a layer that is laid out. Prints a JSON line per scenario: what the update
answered on this rank, and whether its layer then has the ``old`` weights, the ``new`` ones, or is ``invalid``.
With ``absent`` rank 1 is one without the plugin: it lays nothing out and comes to no update.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch

from sglang_aiter_moe.contract.scale_layouts import NAN_SCALE
from sglang_aiter_moe.srt.layers.quantization import mxfp4_reload
from sglang_aiter_moe.srt.model_executor.model_runner_components import weight_updater
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import (
    load,
    loaded_layer,
    packed_bytes,
    random_raw,
    same,
)

SPEC = plans.situv2(4, 2, 256, 128)
PLAN = plans.plan(SPEC)
OLD, NEW = random_raw(SPEC, 1), random_raw(SPEC, 2)
UNKNOWN = ("model.layers.0.mlp.experts.0.w9.weight", torch.zeros(1))


class Updater:
    """As SGLang's, with one layer."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.model.experts = loaded_layer(PLAN, OLD)

    def get_model(self) -> torch.nn.Module:
        return self.model


def whole(updater: Updater, *_: Any) -> tuple[bool, str]:
    load(updater.model.experts, NEW)
    return True, "done"


def raises(updater: Updater, *_: Any) -> tuple[bool, str]:
    load(updater.model.experts, NEW, [0, 1])
    raise OSError("connection lost")


def reports(updater: Updater, *_: Any) -> tuple[bool, str]:
    return False, "SGLang went back to the old weights"


def says_no(updater: Updater, *_: Any) -> tuple[bool, Any]:
    return False, None


def nan_scale(updater: Updater, *_: Any) -> tuple[bool, str]:
    scales = NEW["w2_weight_scale"].clone()
    scales.view(torch.uint8)[0, 0, 0] = NAN_SCALE
    load(updater.model.experts, NEW | {"w2_weight_scale": scales})
    return True, "done"


def distributed(rank: int, updater: Updater) -> tuple[bool, str]:
    """As SGLang's scheduler from 0.5.21 on: what could not be received is not loaded."""

    def receive(_: Any) -> list:
        if rank == 1:
            raise OSError("connection lost")
        return []

    try:
        tensors = weight_updater.receiving(receive, updater)
    except Exception as error:
        return False, f"Failed to receive weights: {error}"
    return weight_updater.from_received(whole, updater, tensors)


def later_step(rank: int, updater: Updater) -> tuple[bool, str]:
    """A session whose second step does not reach rank 1."""
    weight_updater.begin_session(lambda _: None, updater)
    first = weight_updater.from_received(whole, updater, [])
    second = distributed(rank, updater)
    weight_updater.end_session(lambda _: None, updater)
    return second if first[0] else (False, f"the first step: {first[1]}")


#: What rank 1's update does, and what else its tensors are; rank 0's is whole.
SCENARIOS: dict[str, tuple[Callable[..., tuple[bool, str]], list]] = {
    "both": (whole, []),
    "raises": (raises, []),
    "reports": (reports, []),
    "says no": (says_no, []),
    "nan": (nan_scale, []),
    "refused": (whole, [UNKNOWN]),
    "received": (whole, []),
    "later step": (whole, []),
}


def run(rank: int, scenario: str) -> dict[str, Any]:
    updater = Updater()
    write, tensors = (whole, []) if rank == 0 else SCENARIOS[scenario]
    if scenario in ("reports", "says no"):
        success, message = weight_updater.from_disk(write, updater, "no folder")
    elif scenario == "received":
        success, message = distributed(rank, updater)
    elif scenario == "later step":
        success, message = later_step(rank, updater)
    else:
        success, message = weight_updater.from_tensor(write, updater, tensors)
    state = mxfp4_reload.weights_of(updater.model.experts)
    now = packed_bytes(updater.model.experts)
    old, new = (same(now, packed_bytes(loaded_layer(PLAN, raw))) for raw in (OLD, NEW))
    holds = "invalid" if state.invalid else "old" if old else "new" if new else "a mixture"
    healed, _ = weight_updater.from_tensor(whole, updater, [])
    return {
        "scenario": scenario,
        "staging": mxfp4_reload.staging(),
        "success": success,
        "message": message,
        "holds": holds,
        "healed": healed and same(packed_bytes(updater.model.experts), packed_bytes(loaded_layer(PLAN, NEW))),
    }  # fmt: skip


def alone(rank: int) -> None:
    """Rank 0's update, and how long it took to be refused."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["done"])
        return
    updater, start = Updater(), time.monotonic()
    success, message = weight_updater.from_tensor(whole, updater, [])
    seconds = time.monotonic() - start
    old = same(packed_bytes(updater.model.experts), packed_bytes(loaded_layer(PLAN, OLD)))
    print(json.dumps({"success": success, "message": message, "old": old, "seconds": seconds}))
    store.set("done", "")


def main(rank: int, file: str, *how: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    state = types.ModuleType("sglang.srt.distributed.parallel_state")
    group = types.SimpleNamespace(
        cpu_group=torch.distributed.group.WORLD, world_size=2, rank_in_group=rank
    )
    state.get_tp_group = lambda: group
    sys.modules[state.__name__] = state
    if how:
        return alone(rank)
    for staging in mxfp4_reload.STAGINGS:
        os.environ[mxfp4_reload.STAGING] = staging
        for scenario in SCENARIOS:
            print(json.dumps(run(rank, scenario)), flush=True)
    # Control: without a group each decides alone.
    state.get_tp_group = lambda: None
    print(json.dumps(run(rank, "raises") | {"scenario": "alone"}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
