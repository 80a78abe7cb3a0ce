"""Weight updates that fail on one of two ranks: both keep the old weights, or both refuse; never one of each."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglang_aiter_moe.srt.model_executor.model_runner_components import ranks
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def unannounced(monkeypatch):
    monkeypatch.setattr(ranks._Announced, "done", False)


def two_ranks(folder, *how):
    """What each of two processes printed: lists of rows."""
    module = "sglang_aiter_moe.testing.two_rank_update"
    children = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder / "meeting"), *how],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = []
    for child in children:
        stdout, stderr = child.communicate(timeout=300)
        assert child.returncode == 0, stderr[-3000:]
        printed.append([json.loads(line) for line in stdout.splitlines() if line.startswith("{")])
    return printed


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(rank, staging, scenario) -> what the rank printed."""
    printed = two_ranks(tmp_path_factory.mktemp("ranks"))
    return {
        (rank, row["staging"], row["scenario"]): row
        for rank, rows in enumerate(printed)
        for row in rows
    }


def holds(found, staging, scenario):
    return [found[rank, staging, scenario]["holds"] for rank in range(2)]


@pytest.mark.parametrize("staging", ["none", "host"])
def test_an_update_that_fits_both_is_made_on_both(found, staging):
    assert holds(found, staging, "both") == ["new", "new"]
    assert all(found[rank, staging, "both"]["success"] for rank in range(2))


@pytest.mark.parametrize("scenario", ["raises", "nan"])
def test_a_failure_on_one_rank_is_one_on_both(found, scenario):
    assert holds(found, "host", scenario) == ["old", "old"]
    assert holds(found, "none", scenario) == ["invalid", "invalid"]


@pytest.mark.parametrize("scenario", ["reports", "says no"])  # with and without a message
def test_what_sglang_itself_undoes_on_one_rank_is_not_kept_by_the_other(found, scenario):
    assert holds(found, "host", scenario) == ["old", "old"]
    assert holds(found, "none", scenario) == ["invalid", "old"]  # calls of rank 0 refuse


@pytest.mark.parametrize("staging", ["none", "host"])
@pytest.mark.parametrize("scenario", ["refused", "received"])
def test_what_one_rank_refuses_or_does_not_receive_is_written_by_none(found, staging, scenario):
    assert holds(found, staging, scenario) == ["old", "old"]


def test_a_step_that_one_rank_did_not_receive_takes_the_session_with_it_on_both(found):
    assert holds(found, "host", "later step") == ["old", "old"]
    assert holds(found, "none", "later step") == ["invalid", "invalid"]


@pytest.mark.parametrize("staging", ["none", "host"])
@pytest.mark.parametrize(
    "scenario", ["raises", "nan", "reports", "says no", "refused", "received", "later step"]
)
def test_the_first_rank_which_answers_the_client_names_the_other_one(found, staging, scenario):
    row = found[0, staging, scenario]
    assert not row["success"] and "rank 1" in row["message"], row


def test_a_full_update_makes_both_right_again(found):
    assert all(row["healed"] for row in found.values())


def test_without_the_exchange_the_ranks_would_part(found):
    """The control: what every rank deciding alone does."""
    assert holds(found, "host", "alone") == ["new", "old"]
    assert found[0, "host", "alone"]["success"]


def test_a_rank_without_the_plugin_is_named_at_once(tmp_path):
    """Not after the group's timeout, which is half an hour here; the store is the one by which the ranks met."""
    ((row,), nothing) = two_ranks(tmp_path, "absent")
    assert nothing == [] and not row["success"] and row["old"]
    assert "rank 1 of all ranks does not ask the others about updates" in row["message"]
    assert row["seconds"] < 250


class Meeting:
    """A store and a group of four ranks, of which this is number 5 of all."""

    def __init__(self, monkeypatch, *announced):
        self.store = torch.distributed.HashStore()
        for rank, said in announced:
            self.store.set(ranks._key(rank), said)
        monkeypatch.setattr(ranks, "_store", lambda: self.store)
        monkeypatch.setattr(ranks, "WAIT", timedelta(milliseconds=200))
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
        monkeypatch.setattr(
            torch.distributed, "get_process_group_ranks", lambda group: [4, 5, 6, 7]
        )
        group = SimpleNamespace(world_size=4, rank_in_group=1, cpu_group=object())
        monkeypatch.setattr(ranks, "_tensor_parallel_group", lambda: group)
        self.group, self.gathered = group, []

        def gather(into, own, group):
            self.gathered.append(own)
            into[:] = [(own[0], None)] * 4

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)


ONE = ranks.TAKES_PART


def test_ranks_that_have_announced_themselves_exchange(monkeypatch):
    meeting = Meeting(monkeypatch, (4, ONE), (6, ONE), (7, ONE))
    ranks.announce()
    assert ranks.failure_elsewhere("here") is None and meeting.gathered == [(1, "here")]


def test_a_group_that_was_complete_needs_its_store_no_more(monkeypatch):
    """A store that fails for one rank would make it refuse alone."""
    meeting = Meeting(monkeypatch, (4, ONE), (6, ONE), (7, ONE))
    ranks.announce()
    assert ranks.failure_elsewhere(None) is None
    meeting.store = BrokenStore(check=1)
    assert ranks.failure_elsewhere(None) is None and len(meeting.gathered) == 2


class BrokenStore:
    """A store in which everybody has announced himself, and that fails from a method's n-th call on."""

    def __init__(self, **broken):
        self.broken, self.calls = broken, []

    def __getattr__(self, name):
        def call(*_):
            self.calls.append(name)
            if self.calls.count(name) >= self.broken.get(name, 1000):
                raise torch.distributed.DistNetworkError("broken pipe")
            return ONE.encode() if name == "get" else True

        return call


@pytest.mark.parametrize("broken", [{"check": 1}, {"get": 1}, {"wait": 1, "check": 2}], ids=str)
def test_a_store_that_fails_is_a_failure_that_says_so(monkeypatch, broken):
    """Also when it is asked for another rank, which is not absent by that."""
    meeting = Meeting(monkeypatch)
    meeting.store = BrokenStore(**broken)
    told = ranks.failure_elsewhere(None)
    assert told.startswith("the store by which the ranks met does not answer")
    assert "DistNetworkError: broken pipe" in told and meeting.gathered == []


def test_a_rank_announces_itself_once_and_again_after_a_store_that_failed(monkeypatch, caplog):
    meeting = Meeting(monkeypatch)
    meeting.store = BrokenStore(set=1)
    ranks.announce()
    assert "broken pipe" in caplog.text and not ranks._Announced.done
    meeting.store = BrokenStore()
    ranks.announce()
    ranks.announce()
    assert meeting.store.calls == ["set"]


def test_a_rank_that_is_behind_fails_and_one_that_is_ahead_waits_for_it(monkeypatch):
    """Rank 1, here, has refused a step without asking."""
    meeting = Meeting(monkeypatch, (4, ONE), (6, ONE))
    ranks.announce()
    assert ranks.failure_elsewhere(None).startswith("rank 7 of all ranks")
    meeting.store.set(ranks._key(7), ONE)
    coming = [[(1, None), (2, "x"), (1, "an older step"), (2, None)], [(2, None)] * 4]

    def gather(into, own, group):
        meeting.gathered.append(own)
        into[:] = coming.pop(0)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert ranks.failure_elsewhere("x") is None
    assert meeting.gathered == [(2, "x")] * 2 and coming == []
    coming.append([(3, None), (3, None), (4, None), (3, None)])
    told = ranks.failure_elsewhere(None)
    assert "at different steps ([3, 3, 4, 3], by rank)" in told and "refused step 3" in told


def test_every_group_counts_its_own_steps(monkeypatch):
    meeting = Meeting(monkeypatch)
    ranks.failure_elsewhere(None)
    other = SimpleNamespace(world_size=4, rank_in_group=1, cpu_group=object())
    monkeypatch.setattr(ranks, "_tensor_parallel_group", lambda: other)
    ranks.failure_elsewhere(None)
    assert meeting.gathered == [(1, None), (1, None)]


def test_those_that_have_not_or_ask_otherwise_are_named_and_nothing_is_gathered(monkeypatch):
    meeting = Meeting(monkeypatch, (4, ONE), (6, "0"))
    ranks.announce()
    assert ranks.failure_elsewhere(None).startswith("rank 6, 7 of all ranks does not ask")
    assert meeting.gathered == []


def test_who_could_not_announce_itself_asks_as_before(monkeypatch):
    """As after a process group was made anew: nobody's word is in its store."""
    meeting = Meeting(monkeypatch)
    assert ranks.failure_elsewhere(None) is None and meeting.gathered == [(1, None)]
    monkeypatch.setattr(ranks, "_store", lambda: None)
    ranks.announce()
    assert ranks.failure_elsewhere(None) is None


def test_a_rank_that_has_gone_is_a_failure(monkeypatch):
    class Group:
        world_size, rank_in_group, cpu_group = 2, 0, object()

    def gone(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(ranks, "_tensor_parallel_group", Group)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gone)
    assert "Connection closed by peer" in ranks.failure_elsewhere(None)


@pytest.mark.parametrize(
    "said, answer",
    [
        ([None, None, None], None),
        ([None, "mine", None], None),
        (["first", "mine", "last"], "rank 0 of the tensor-parallel group: first"),
        ([None, None, "last"], "rank 2 of the tensor-parallel group: last"),
    ],
)
def test_the_first_failure_of_another_rank_is_the_answer(monkeypatch, said, answer):
    class Group:
        world_size, rank_in_group, cpu_group = 3, 1, object()

    def gather(into, own, group):
        assert own == (1, said[1]) and group is Group.cpu_group
        into[:] = [(1, reason) for reason in said]

    monkeypatch.setattr(ranks, "_tensor_parallel_group", Group)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert ranks.failure_elsewhere(said[1]) == answer


@pytest.mark.parametrize(
    "size, answer", [(2, "rank 1 of the tensor-parallel group: full"), (1, None)]
)
def test_sglangs_group_is_the_one_that_is_asked(monkeypatch, size, answer):
    """Of several ranks; a group of one (pipeline stages without tensor parallelism) has nobody to ask."""
    group = SimpleNamespace(world_size=size, rank_in_group=0, cpu_group=object())
    state = ModuleType("sglang.srt.distributed.parallel_state")
    state.get_tp_group = lambda: group
    monkeypatch.setitem(sys.modules, state.__name__, state)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    asked = []

    def gather(into, own, group):
        asked.append(group)
        into[:] = [own, (1, "full")]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert ranks.failure_elsewhere(None) == answer
    assert asked == ([group.cpu_group] if size == 2 else [])


class Peers:
    """torch.distributed as a rank of a process group sees it."""

    def __init__(self, monkeypatch, *, available=True, initialized=True, size=2):
        monkeypatch.setattr(torch.distributed, "is_available", lambda: available)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: initialized)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
        monkeypatch.setattr(torch.distributed, "all_gather_object", self.gather)
        ranks._say_alone.cache_clear()
        self.asked = 0

    def gather(self, into, own, group):
        self.asked += 1
        into[:] = [own, (1, "full")]


def sglangs_group(monkeypatch, get_tp_group):
    state = ModuleType("sglang.srt.distributed.parallel_state")
    state.get_tp_group = get_tp_group
    monkeypatch.setitem(sys.modules, state.__name__, state)


@pytest.mark.parametrize(
    "alone", [{"available": False}, {"initialized": False}, {"size": 1}], ids=str
)
def test_a_rank_that_is_alone_asks_nobody_and_says_nothing(monkeypatch, caplog, alone):
    peers = Peers(monkeypatch, **alone)
    group = SimpleNamespace(world_size=2, rank_in_group=0, cpu_group=object())
    sglangs_group(monkeypatch, lambda: group)
    assert ranks.failure_elsewhere("mine") is None
    assert peers.asked == 0 and not caplog.records


@pytest.mark.parametrize("error", [AssertionError, AttributeError, ValueError, None])
def test_every_way_in_which_sglang_says_that_it_has_no_group(monkeypatch, caplog, error):
    peers = Peers(monkeypatch)

    def get_tp_group():
        if error is not None:
            raise error
        return None

    sglangs_group(monkeypatch, get_tp_group)
    assert ranks.failure_elsewhere("mine") is None
    assert peers.asked == 0 and len(caplog.records) == 1


def test_another_error_of_sglangs_is_not_hidden(monkeypatch):
    Peers(monkeypatch)

    def get_tp_group():
        raise RuntimeError("NCCL")

    sglangs_group(monkeypatch, get_tp_group)
    with pytest.raises(RuntimeError, match="NCCL"):
        ranks.failure_elsewhere(None)


def test_a_group_that_cannot_talk_on_the_cpu_is_none(monkeypatch, caplog):
    peers = Peers(monkeypatch)
    sglangs_group(monkeypatch, lambda: SimpleNamespace(world_size=2, cpu_group=None))
    assert ranks.failure_elsewhere("mine") is None
    assert peers.asked == 0 and len(caplog.records) == 1


def test_a_group_of_one_says_nothing(monkeypatch, caplog):
    """Pipeline stages without tensor parallelism."""
    Peers(monkeypatch)
    sglangs_group(monkeypatch, lambda: SimpleNamespace(world_size=1, cpu_group=object()))
    assert ranks.failure_elsewhere(None) is None and not caplog.records


def test_ranks_without_a_group_say_once_that_they_decide_alone(monkeypatch, caplog):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.delitem(sys.modules, "sglang.srt.distributed.parallel_state", raising=False)
    ranks._say_alone.cache_clear()
    assert [ranks.failure_elsewhere("here") for _ in range(2)] == [None, None]
    assert [record.message for record in caplog.records if "decides alone" in record.message] == [
        "several ranks, but SGLang has no tensor-parallel group: each decides alone whether a weight "
        "update failed"
    ]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
