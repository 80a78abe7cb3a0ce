"""All or nothing: interrupted at every step, out of room, read-only, and two runs at once."""

import os
import stat
import sys

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.intree import transaction
from sglang_aiter_moe.intree.manifest import JOURNAL
from sglang_aiter_moe.intree.transaction import Change
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.stand_in_tree import content

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

BEFORE = {"a.py": b"a\n", "b.py": b"b\r\n", "gone/c.py": b"c"}
AFTER = {"a.py": b"A\n", "b.py": b"B\r\n", "new/folder/d.py": b"d"}


@pytest.fixture
def package(tmp_path):
    for name, data in BEFORE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def changes(package):
    return [
        Change(package / name, BEFORE.get(name), AFTER.get(name))
        for name in sorted(BEFORE.keys() | AFTER.keys())
    ]


def interrupt(monkeypatch, step):
    """The process ends at its ``step``-th call of what changes the disk."""
    calls = []
    real = {name: getattr(transaction.os, name) for name in ("replace", "unlink")}

    def once(name):
        def call(*arguments, **options):
            calls.append(name)
            if len(calls) == step:
                raise KeyboardInterrupt
            return real[name](*arguments, **options)

        return call

    for name in real:
        monkeypatch.setattr(transaction.os, name, once(name))
    return calls


def test_it_writes_everything_and_leaves_nothing_behind(package):
    transaction.carry_out(package, "apply", changes(package))
    assert content(package) == AFTER
    assert not (package / "gone").exists()


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("step", range(1, 8))
def test_interrupted_at_any_step_it_can_be_finished_or_undone(package, monkeypatch, step, forward):
    with monkeypatch.context() as patched:
        interrupt(patched, step)
        try:
            transaction.carry_out(package, "apply", changes(package))
            ended = True
        except KeyboardInterrupt:
            ended = False
    found = content(package)
    for name in BEFORE.keys() | AFTER.keys():  # no file is half-written
        assert found.get(name) in (BEFORE.get(name), AFTER.get(name))
    if ended:
        assert found == AFTER
        return
    transaction.drop_leftovers(package)
    if transaction.unfinished(package) is None:  # before the journal was complete, or after it all
        assert content(package) in (BEFORE, AFTER)
        return
    assert transaction.unfinished(package) == "apply"
    transaction.resume(package, forward=forward)
    assert content(package) == (AFTER if forward else BEFORE)


def test_the_steps_above_reach_the_journal_every_file_and_the_end(package, monkeypatch):
    calls = interrupt(monkeypatch, 0)
    transaction.carry_out(package, "apply", changes(package))
    # The journal appears, three files are written and one goes, the journal goes.
    assert calls[:6].count("replace") == 5 and "unlink" in calls[:5]


def test_a_file_that_was_changed_in_between_is_not_overwritten(package, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            transaction.carry_out(package, "apply", changes(package))
    (package / "b.py").write_text("mine")
    for forward in (True, False):
        with pytest.raises(ContractError, match=r"b\.py was changed after an interrupted run"):
            transaction.resume(package, forward=forward)
    assert (package / "b.py").read_text() == "mine"


def test_when_the_disk_is_full_everything_is_taken_back(package, monkeypatch):
    real, calls = transaction._write, []

    def write(path, data):
        calls.append(path)
        if path.name == ".b.py.aiter_moe" and len(calls) < 12:
            raise OSError(28, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(transaction, "_write", write)
    with pytest.raises(
        ContractError, match="No space left on device; what had been written is taken back"
    ):
        transaction.carry_out(package, "apply", changes(package))
    assert content(package) == BEFORE


def test_when_the_journal_does_not_fit_nothing_was_changed(package, monkeypatch):
    def write(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(transaction, "_write", write)
    with pytest.raises(ContractError, match="nothing was changed"):
        transaction.carry_out(package, "apply", changes(package))
    assert content(package) == BEFORE and not (package / f"{JOURNAL}.tmp").exists()


@pytest.mark.parametrize("name", ["b.py", "gone"])
def test_read_only_files_and_directories_are_refused_before_the_first_write(package, name):
    path = package / name
    mode = path.stat().st_mode
    path.chmod(mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    try:
        with pytest.raises(ContractError, match=f"{name} is read-only"):
            transaction.carry_out(package, "apply", changes(package))
        assert content(package) == BEFORE
    finally:
        path.chmod(mode)


def test_links_are_refused(package):
    (package / "b.py").unlink()
    (package / "elsewhere").write_bytes(BEFORE["b.py"])
    (package / "b.py").symlink_to("elsewhere")
    with pytest.raises(ContractError, match=r"b\.py is a link to elsewhere"):
        transaction.carry_out(package, "apply", changes(package))


def test_the_mode_of_a_file_stays(package):
    (package / "a.py").chmod(0o750)
    transaction.carry_out(package, "apply", changes(package))
    assert stat.S_IMODE((package / "a.py").stat().st_mode) == 0o750


def test_one_run_at_a_time(package):
    inner = transaction.locked(package)
    with (
        transaction.locked(package),
        pytest.raises(ContractError, match="another run"),
        inner,
    ):
        pass
    with transaction.locked(package):
        pass
    assert os.listdir(package)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
