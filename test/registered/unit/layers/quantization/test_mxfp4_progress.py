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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
