"""What the ranks of a tensor-parallel group tell each other about a weight update: whether it failed anywhere.

SGLang hands every rank's update to its own ``WeightUpdater`` and answers the client with what the first rank says
(read in 0.5.17 to 0.5.23). A rank that rolls back alone would serve its old weights beside the others' new ones.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)


def failure_elsewhere(reason: str | None) -> str | None:
    """Exchanges one step's outcome with the group; every rank calls it once for every step.

    Args:
        reason: why the step failed here; None if it did not.

    Returns:
        The first failure of another rank; None if there is none, or no other rank.
    """
    group = _tensor_parallel_group()
    if group is None:
        return None
    said: list[str | None] = [None] * group.world_size
    try:
        torch.distributed.all_gather_object(said, reason, group=group.cpu_group)
    except Exception as error:  # a rank has gone: nobody knows what it wrote
        return f"the ranks of the group do not answer: {error}"
    for rank, failure in enumerate(said):
        if failure is not None and rank != group.rank_in_group:
            return f"rank {rank} of the tensor-parallel group: {failure}"
    return None


def _tensor_parallel_group() -> Any:
    """SGLang's; None if this rank is alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if torch.distributed.get_world_size() == 1:
        return None
    state = sys.modules.get("sglang.srt.distributed.parallel_state")
    try:
        group = state.get_tp_group() if state is not None else None
    except (AssertionError, AttributeError, ValueError):  # how releases say that there is none
        group = None
    if group is None or group.cpu_group is None:
        _say_alone()
        return None
    return group if group.world_size > 1 else None


@cache
def _say_alone() -> None:
    logger.warning(
        "several ranks, but SGLang has no tensor-parallel group: each decides alone whether a weight update failed"
    )
