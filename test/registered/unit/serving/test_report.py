"""Medians, spreads and deltas by hand; what cannot be told is not told."""

import sys
import xml.etree.ElementTree as ET

import pytest

from sglang_aiter_moe.serving import report
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def run(side, number, concurrency, tok_s, ms=100.0):
    times = dict.fromkeys(("e2el_ms", "ttft_ms", "tpot_ms", "itl_ms"), ms)
    return {
        "side": side,
        "round": number,
        "concurrency": concurrency,
        "total_tok_s": tok_s,
        **times,
    }


RUNS = [
    run("A", 0, 2, 100.0),
    run("B", 0, 2, 130.0, ms=80.0),
    run("B", 1, 2, 120.0, ms=90.0),
    run("A", 1, 2, 110.0),
    run("A", 2, 2, 102.0),
    run("B", 2, 2, 126.0, ms=85.0),
    run("A", 0, 4, 200.0),
    run("A", 1, 4, 220.0),
    run("B", 0, 4, 210.0),
    run("B", 1, 4, 230.0),
]


def test_medians_spread_and_delta_by_hand():
    two, four = report.summarise(RUNS, gpus=8)
    a, b = two["A"]["total_tok_s"], two["B"]["total_tok_s"]
    assert (a.median, a.low, a.high, a.rounds) == (102.0, 100.0, 110.0, 3)
    assert a.spread == pytest.approx(10 / 102)
    assert b.median == 126.0
    assert two["delta"]["total_tok_s"] == pytest.approx(126 / 102 - 1)
    assert two["delta"]["ttft_ms"] == pytest.approx(-0.15)
    assert two["A"]["tok_s_gpu"].median == pytest.approx(102 / 8)
    assert report.clear(two, "total_tok_s") is True  # 110 < 120
    assert report.clear(four, "total_tok_s") is False  # 210 lies within 200 to 220


def test_the_table_has_the_columns_of_the_pull_request_and_marks_what_is_not_clear():
    header, *lines = report.table(report.summarise(RUNS, gpus=8))
    assert header[2:] == ["total tok/s", "tok/s/GPU", "E2EL ms", "TTFT ms", "TPOT ms", "ITL ms"]
    assert [line[:2] for line in lines] == [[c, s] for c in "24" for s in ("A", "B", "B/A")]
    assert lines[0][2] == "102.0 (±4.9%)"
    assert lines[2][2] == "+23.5%"
    assert lines[5][2] == "+4.8% ~"
    text = report.markdown(report.summarise(RUNS, gpus=8))
    assert {line.count("|") for line in text.splitlines()} == {9}


def test_one_round_shows_no_spread_and_no_verdict():
    rows = report.summarise([run("A", 0, 2, 100.0), run("B", 0, 2, 130.0)], gpus=1)
    assert rows[0]["A"]["total_tok_s"].spread is None
    assert report.clear(rows[0], "total_tok_s") is None
    assert report.table(rows)[3][2] == "+30.0% ?"


def test_one_side_alone_has_no_delta():
    rows = report.summarise([run("A", 0, 2, 100.0)], gpus=1)
    assert rows[0]["delta"] == {} and len(report.table(rows)) == 2
    assert report.to_json(rows)[0]["B"] == {}


def test_the_plot_is_svg_with_every_point():
    picture = report.plot(report.summarise(RUNS, gpus=1), {"A": "<off>", "B": "on"})
    tree = ET.fromstring(picture)
    kinds = [element.tag.rpartition("}")[2] for element in tree.iter()]
    assert kinds.count("circle") == 4 and kinds.count("polyline") == 2
    heights = [float(e.get("cy")) for e in tree.iter() if e.tag.endswith("circle")]
    assert heights[0] > heights[1]  # A: 102 lies below 210
    assert "&lt;off&gt;" in picture


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
