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
TAKES_PART = "2"
"""What a rank that asks the others says; another number once it asks them otherwise."""
WAIT = timedelta(seconds=10)
_ATTRIBUTE = "aiter_moe_exchange"


class Exchange:
    """What a group has exchanged so far.

    Attributes:
        step: how many steps this rank has come to; equal on all of them, so that no two steps are taken for one.
        complete: every rank of the group has announced itself, which none takes back.
    """

    def __init__(self) -> None:
        self.step = 0
        self.complete = False

    @classmethod
    def of(cls, group: Any) -> Exchange:
        found = getattr(group, _ATTRIBUTE, None)
        if found is None:
            found = cls()
            setattr(group, _ATTRIBUTE, found)
        return found


class _Announced:
    """Whether this process has said that it comes to every exchange."""

    done = False


def announce() -> None:
    """Says in the store by which the ranks met that this one comes to every exchange; once for a process.

    Called by each rank once its layers are laid out, which is before the first update. No collective: a rank without
    this code would never join one. A store that does not answer is asked again at the next call.
    """
    if _Announced.done or (store := _store()) is None:
        return
    try:
        store.set(_key(torch.distributed.get_rank()), TAKES_PART.encode())
    except Exception as error:
        logger.warning("cannot tell the other ranks that this one takes part in updates: %s", error)
    else:
        _Announced.done = True


def failure_elsewhere(reason: str | None) -> str | None:
    """Exchanges one step's outcome with the group; every rank calls it once for every step.

    A rank that has come to fewer steps than another one, which refused a step without asking, fails its step; the
    other one waits for it.

    Args:
        reason: why the step failed here; None if it did not.

    Returns:
        The first failure of another rank; None if there is none, or no other rank.
    """
    group = _tensor_parallel_group()
    if group is None:
        return None
    exchange = Exchange.of(group)
    exchange.step += 1
    if not exchange.complete and (alone := _why_alone(group, exchange)) is not None:
        return alone
    while True:
        said: list[Any] = [None] * group.world_size
        try:
            torch.distributed.all_gather_object(
                said, (exchange.step, reason), group=group.cpu_group
            )
        except Exception as error:  # a rank has gone: nobody knows what it wrote
            return f"the ranks of the group do not answer: {error}"
        steps = [step for step, _ in said]
        if exchange.step < max(steps):
            return (
                f"the ranks of the tensor-parallel group are at different steps ({steps}, by rank): "
                f"another one has refused step {exchange.step}, which is this rank's"
            )
        if min(steps) == max(steps):
            break
    for rank, (_, failure) in enumerate(said):
        if failure is not None and rank != group.rank_in_group:
            return f"rank {rank} of the tensor-parallel group: {failure}"
    return None


def _why_alone(group: Any, exchange: Exchange) -> str | None:
    """Why the group is not asked: who has not announced itself; None if all have, or this one could not."""
    absent, wait = [], WAIT
    try:
        store = _store()
        if store is None or not store.check([_key(torch.distributed.get_rank())]):
            return None
        for rank in torch.distributed.get_process_group_ranks(group.cpu_group):
            key = _key(rank)
            try:
                store.wait([key], wait)
            except RuntimeError:  # too late, or a store that fails: the next line tells
                wait = timedelta(milliseconds=100)  # the others had the same time
            if not store.check([key]) or store.get(key) != TAKES_PART.encode():
                absent.append(rank)
    except Exception as error:
        return (
            "the store by which the ranks met does not answer, so nobody knows whether the others take part in the "
            f"update: {type(error).__name__}: {error}"
        )
    exchange.complete = not absent
    if exchange.complete:
        return None
    return (
        f"rank {', '.join(map(str, absent))} of all ranks does not ask the others about updates (no plugin there, "
        "another version, or switched off) and may hold other weights now: start every rank with the same plugin"
    )


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
