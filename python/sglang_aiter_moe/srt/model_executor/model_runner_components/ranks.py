"""What the ranks of a tensor-parallel group tell each other about a weight update: whether it failed anywhere.

SGLang hands every rank's update to its own ``WeightUpdater`` and answers the client with what the first rank says
(read in 0.5.17 to 0.5.23). A rank that rolls back alone would serve its old weights beside the others' new ones.
"""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)
TAKES_PART = "1"
"""What a rank that asks the others says; another number once it asks them otherwise."""
WAIT = timedelta(seconds=10)


def announce() -> None:
    """Says in the store by which the ranks met that this one comes to every exchange.

    Called by each rank once its layers are laid out, which is before the first update. No collective: a rank without
    this code would never join one.
    """
    if (store := _store()) is not None:
        store.set(_key(torch.distributed.get_rank()), TAKES_PART.encode())


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
    if absent := _absent(group):
        return (
            f"rank {', '.join(map(str, absent))} of all ranks does not ask the others about updates (no plugin there, "
            "another version, or switched off) and may hold other weights now: start every rank with the same plugin"
        )
    said: list[str | None] = [None] * group.world_size
    try:
        torch.distributed.all_gather_object(said, reason, group=group.cpu_group)
    except Exception as error:  # a rank has gone: nobody knows what it wrote
        return f"the ranks of the group do not answer: {error}"
    for rank, failure in enumerate(said):
        if failure is not None and rank != group.rank_in_group:
            return f"rank {rank} of the tensor-parallel group: {failure}"
    return None


def _absent(group: Any) -> list[int]:
    """The ranks, counted over all, that have not announced themselves; none if this one could not."""
    store = _store()
    if store is None or not store.check([_key(torch.distributed.get_rank())]):
        return []
    absent, wait = [], WAIT
    for rank in torch.distributed.get_process_group_ranks(group.cpu_group):
        try:
            store.wait([_key(rank)], wait)
            here = store.get(_key(rank)) == TAKES_PART.encode()
        except RuntimeError:  # torch's DistStoreError among them
            here, wait = False, timedelta(milliseconds=100)  # the others had the same time
        if not here:
            absent.append(rank)
    return absent


def _key(rank: int) -> str:
    return f"sglang_aiter_moe/updates/{rank}"


def _store() -> Any:
    """The store of the default process group; None for one rank, and where torch does not say."""
    if not _several():
        return None
    get = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    try:
        return get() if get is not None else None
    except ValueError:  # no default process group
        return None


def _several() -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size() > 1


def _tensor_parallel_group() -> Any:
    """SGLang's; None if this rank is alone."""
    if not _several():
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
