"""`layout` shows the closed forms of docs/contract.md section a, byte by byte."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from sglang_aiter_moe.cli import app
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def run(*arguments):
    return CliRunner().invoke(app, ["layout", *arguments])


# 64 rows of 128 elements: 64 weight bytes (4 scale bytes) a row, one tile of 16 rows = 1024 bytes.
# Each entry: packed byte -> (raw row, raw byte in the row), worked out by hand from the formulas.
WEIGHTS = {
    "separated": {0: (0, 0), 16: (1, 0), 256: (0, 16), 1024: (16, 0), 2048: (32, 0)},
    "gu_interleaved": {0: (0, 0), 16: (1, 0), 256: (0, 16), 1024: (32, 0), 2048: (16, 0)},
    "gu_interleaved_gfx1250": {0: (0, 0), 16: (32, 0), 32: (1, 0), 256: (0, 16), 1024: (8, 0)},
}
# 64 rows of 256 elements: 8 scale bytes a row.
SCALES = {
    "separated": {0: (0, 0), 1: (16, 0), 2: (0, 4), 4: (1, 0), 64: (0, 1), 256: (32, 0)},
    "a16w4": {0: (0, 0), 1: (16, 0), 2: (0, 4), 4: (1, 0), 64: (0, 1), 256: (32, 0)},
    "a16w4_gate_up": {0: (0, 0), 1: (32, 0), 2: (0, 4), 4: (1, 0), 64: (0, 1), 256: (16, 0)},
    "n32k4": {0: (0, 0), 1: (0, 1), 4: (1, 0), 128: (0, 4), 256: (32, 0)},
    "n32k4_gate_up": {0: (0, 0), 1: (0, 1), 4: (32, 0), 8: (1, 0), 128: (0, 4), 256: (16, 0)},
}


@pytest.mark.parametrize("form", WEIGHTS)
def test_weights(form):
    result = run(form, "--rows", "64", "--cols", "128", "--json", "-")
    assert result.exit_code == 0, result.stderr
    source = json.loads(result.stdout)["source"]
    assert sorted(source) == list(range(64 * 64))
    assert {byte: divmod(source[byte], 64) for byte in WEIGHTS[form]} == WEIGHTS[form]


@pytest.mark.parametrize("form", SCALES)
def test_scales(form):
    result = run(form, "--scales", "--rows", "64", "--cols", "256", "--json", "-")
    assert result.exit_code == 0, result.stderr
    source = json.loads(result.stdout)["source"]
    assert sorted(byte for byte in source if byte >= 0) == list(range(64 * 8))
    assert {byte: divmod(source[byte], 8) for byte in SCALES[form]} == SCALES[form]


def test_padding_is_shown():
    # K3's w2 at TP8: 12 columns of scales are padded to 16.
    result = run("a16w4", "--rows", "32", "--cols", "384", "--lines", "0", "--json", "-")
    source = json.loads(result.stdout)["source"]
    assert len(source) == 32 * 16
    assert source.count(-1) == 32 * 4
    assert "padding" in result.stderr


def test_text_names_row_byte_and_half():
    result = run("gu_interleaved", "--rows", "64", "--cols", "128", "--lines", "0")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["1024-1039", "32", "0-15", "up"] in lines
    assert ["2048-2063", "16", "0-15", "gate"] in lines


def test_svg_has_a_cell_for_each_chunk(tmp_path):
    picture = tmp_path / "layout.svg"
    result = run("gu_interleaved", "--rows", "32", "--cols", "128", "--svg", str(picture))
    assert result.exit_code == 0
    root = ElementTree.parse(picture).getroot()
    cells = root.findall("{http://www.w3.org/2000/svg}g")
    assert len(cells) == 2 * 32 * 64 // 16  # raw and packed
    tips = [cell.find("{http://www.w3.org/2000/svg}title").text for cell in cells]
    assert "packed 1024: row 16, byte 0" in tips


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("zigzag", "--rows", "32", "--cols", "128"), "FORM is 'zigzag'"),
        (("separated", "--rows", "24", "--cols", "128"), "24 rows"),
        (("gu_interleaved", "--rows", "32", "--cols", "2880"), "1440 bytes"),
        (("separated", "--rows", "0", "--cols", "128"), "--rows is 0"),
        (("n32k4", "--rows", "32", "--cols", "96"), "3 columns"),
    ],
)
def test_sizes_that_aiter_cannot_lay_out_are_refused(arguments, named):
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert "to fix:" in result.stderr


def test_too_big_a_picture_is_refused(tmp_path):
    picture = tmp_path / "layout.svg"
    result = run("separated", "--rows", "1024", "--cols", "4096", "--svg", str(picture))
    assert result.exit_code == 2
    assert not picture.exists()


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    options = ["layout", "separated", "--rows", "16", "--cols", "64", "--svg"]
    result = CliRunner().invoke(app, [*options, str(tmp_path / "none" / "a.svg")])
    # The message stands in a box, which may break the path anywhere.
    words = "".join(c for c in result.stderr if c.isalnum() or c in "/.")
    assert result.exit_code == 2 and "none/a.svg" in words


def test_a_matrix_that_no_memory_holds_is_refused():
    arguments = ["layout", "separated", "--rows", "100000000000", "--cols", "6400000000"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "the pattern repeats" in result.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
