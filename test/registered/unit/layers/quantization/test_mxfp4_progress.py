"""Progress of laying out a model: a bar on a terminal, few lines without one, one for each rank."""

import io
import logging
import sys

import pytest
import torch

from sglang_aiter_moe.srt.layers.quantization.mxfp4_progress import EVERY, Progress
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def layers(count):
    made = []
    for _ in range(count):
        layer = torch.nn.Module()
        layer.w = torch.nn.Parameter(torch.zeros(1 << 20, dtype=torch.uint8), requires_grad=False)
        made.append(layer)
    return made


def run(stream, count=30, seconds=1.0, rank=2, rounds=1):
    clock = Clock()
    progress = Progress(stream, clock)
    model = layers(count)
    for layer in model:
        progress.planned(layer)
    for _ in range(rounds):
        for layer in model:
            progress.done(layer, rank)
            clock.now += seconds
    return progress


def test_without_a_terminal_a_line_every_few_seconds_and_one_at_the_end(caplog):
    caplog.set_level(logging.INFO)
    stream = io.StringIO()
    run(stream)
    assert stream.getvalue() == ""
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 + int(29 // EVERY)
    assert lines[0] == "rank 2: 11/30 MoE layers laid out, 0.0 GiB, 10 s, about 17 s left"
    assert lines[-1] == "rank 2: 30/30 MoE layers laid out, 0.0 GiB, 29 s"


def test_a_quick_load_says_one_line(caplog):
    caplog.set_level(logging.INFO)
    run(io.StringIO(), seconds=0.01)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("rank", [0, 3])
def test_a_terminal_gets_one_bar_for_each_rank(caplog, rank):
    caplog.set_level(logging.INFO)
    stream = Terminal()
    run(stream, count=4, rank=rank)
    drawn = stream.getvalue()
    assert drawn.count("[") - drawn.count("\x1b[") == 4
    assert "[######------------------] rank" in drawn and "[########################]" in drawn
    assert drawn.count("\n") == 4 * rank + 1  # goes down to its own line each time, and back up
    assert drawn.count(f"\x1b[{rank}A") == (4 if rank else 0)
    assert len(caplog.records) == 1


def test_an_update_of_all_layers_is_counted_from_the_start(caplog):
    caplog.set_level(logging.INFO)
    run(io.StringIO(), count=3, rounds=2)
    assert [r.getMessage().split()[2] for r in caplog.records] == ["3/3", "3/3"]


def test_a_partial_round_does_not_count_a_layer_twice(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(io.StringIO(), Clock())
    model = layers(3)
    for layer in model:
        progress.planned(layer)
    for _ in range(5):
        progress.done(model[0], 0)
    assert not caplog.records
    for layer in model[1:]:
        progress.done(layer, 0)
    assert "3/3" in caplog.records[-1].getMessage()


def test_the_numbers_of_a_line(caplog):
    """Bytes of the layer's own parameters, and the time left at the pace so far."""
    caplog.set_level(logging.INFO)
    clock, model = Clock(), []
    progress = Progress(io.StringIO(), clock)
    for _ in range(4):
        layer = torch.nn.Module()
        layer.w = torch.nn.Parameter(torch.empty(3 << 29, dtype=torch.int16, device="meta"), False)
        layer.child = torch.nn.Linear(1 << 15, 1 << 15, device="meta")
        model.append(layer)
        progress.planned(layer)
    clock.now = 100.0
    for layer in model:
        progress.done(layer, 1)
        clock.now += EVERY
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1: 2/4 MoE layers laid out, 6.0 GiB, 10 s, about 10 s left",
        "rank 1: 3/4 MoE layers laid out, 9.0 GiB, 20 s, about 7 s left",
        "rank 1: 4/4 MoE layers laid out, 12.0 GiB, 30 s",
    ]


def test_the_bytes_and_the_time_of_an_update_are_its_own(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = Progress(io.StringIO(), clock)
    layer = torch.nn.Module()
    layer.w = torch.nn.Parameter(torch.empty(1 << 30, dtype=torch.uint8, device="meta"), False)
    progress.planned(layer)
    for clock.now in (5.0, 1000.0):
        progress.done(layer, 0)
        assert caplog.records[-1].getMessage().endswith("1/1 MoE layers laid out, 1.0 GiB, 0 s")


def test_a_layer_that_comes_again_begins_a_new_round(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = Progress(io.StringIO(), clock)
    model = layers(3)
    for layer in model:
        progress.planned(layer)
    for now, layer in enumerate([model[0], model[0], model[1], model[2]]):
        clock.now = 3.0 * now
        progress.done(layer, 0)
    (record,) = caplog.records
    assert record.getMessage().endswith("3/3 MoE layers laid out, 0.0 GiB, 6 s")


def test_a_round_that_was_broken_off_counts_for_nothing(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(io.StringIO(), Clock())
    model = layers(3)
    for layer in model:
        progress.planned(layer)
    for layer in (model[0], model[1], model[0], model[2]):
        progress.done(layer, 0)
    assert not caplog.records
    progress.done(model[1], 0)
    assert "3/3" in caplog.records[0].getMessage()


def test_a_layer_that_nobody_planned_is_done_at_once():
    stream = Terminal()
    progress = Progress(stream, Clock())
    progress.done(layers(1)[0], 0)
    assert "1/0 MoE layers" in stream.getvalue() and stream.getvalue().endswith("\n")


def test_a_terminal_gets_no_lines_in_between(caplog):
    caplog.set_level(logging.INFO)
    stream = Terminal()
    run(stream, count=3, seconds=2 * EVERY)
    assert len(caplog.records) == 1
    assert stream.getvalue().count("\r\x1b[K[") == 3 and stream.getvalue().endswith("\r\n")


def test_layers_that_are_gone_are_not_waited_for(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(io.StringIO(), Clock())
    model = layers(2)
    for layer in model:
        progress.planned(layer)
    del layer, model[1]
    progress.done(model[0], 0)
    assert "1/1" in caplog.records[0].getMessage()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
