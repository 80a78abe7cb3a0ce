"""The file that `execute` takes: what it gives the kernel, and what it refuses."""

from __future__ import annotations

import itertools
import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_aiter_moe.amdgpu import machine, spec
from sglang_aiter_moe.cli import app
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

ROWS, COLUMNS = 24, 64
SPEC = """
grid = [2]
block = [256]

[[arguments]]
name = "x"
in = "x.npy"
read_only = true

[[arguments]]
name = "y"
reserve = 6144
out = "y.npy"
dtype = "float32"
shape = [24, 64]

[[arguments]]
name = "factor"
value = 0.5
type = "f32"

[[arguments]]
name = "rows"
value = 24
type = "i32"
"""


@pytest.fixture(scope="module")
def assembly() -> str:
    pytest.importorskip("triton")
    import torch

    from sglang_aiter_moe.amdgpu.triton_driver import Driver, active
    from sglang_aiter_moe.testing.amd_kernels import scale_rows

    calls = []
    tensor = torch.zeros(ROWS, COLUMNS)
    with active(Driver("gfx950", calls.append)):
        scale_rows[(2,)](tensor, tensor, 0.5, ROWS, COLUMNS=COLUMNS)
    return calls[0].assembly


@pytest.fixture
def folder(tmp_path):
    x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def command(folder, assembly, *more):
    (folder / "kernel.s").write_text(assembly)
    arguments = ["execute", str(folder / "kernel.s"), "--args", str(folder / "spec.toml"), *more]
    return CliRunner().invoke(app, arguments)


def test_runs_and_writes(folder, assembly):
    result = command(folder, assembly, "--json", str(folder / "report.json"))
    assert result.exit_code == 0, result.output
    assert "2 pointers at the end are not in" in result.output.replace("\n", " ")
    x = np.load(folder / "x.npy")
    np.testing.assert_array_equal(np.load(folder / "y.npy"), x * np.float32(0.5))
    report = json.loads((folder / "report.json").read_text())
    assert report["kernel"] == "scale_rows" and report["wave_instructions"] > 100
    assert report["outputs"] == [str(folder / "y.npy")]


@pytest.mark.parametrize("option, value", [("--max-seconds", "1"), ("--max-instructions", "3")])
def test_a_kernel_that_takes_too_long_says_how_to_allow_more(
    folder, assembly, option, value, monkeypatch
):
    ticks = (
        itertools.count()
    )  # a second passes from look to look: how fast this machine is does not matter
    monkeypatch.setattr(machine.time, "perf_counter", lambda: float(next(ticks)))
    result = command(folder, assembly, option, value)
    said = " ".join(result.output.split())
    assert result.exit_code == 1 and "the kernel has not ended" in said and option in said
    assert not (folder / "y.npy").exists()


def test_json_is_the_same(folder, assembly):
    import tomllib

    (folder / "spec.json").write_text(json.dumps(tomllib.loads(SPEC)))
    assert spec.load(folder / "spec.json") == spec.load(folder / "spec.toml")
    ran = spec.execute(assembly, spec.load(folder / "spec.json"))
    (output,) = ran.outputs.values()
    np.testing.assert_array_equal(output, np.load(folder / "x.npy") * np.float32(0.5))


def test_files_that_cannot_be_read(folder, assembly):
    for old, new in (("kernel.s", "none.s"), ("spec.toml", "none.toml")):
        (folder / "kernel.s").write_text(assembly)
        arguments = ["execute", str(folder / "kernel.s"), "--args", str(folder / "spec.toml")]
        result = CliRunner().invoke(app, [a.replace(old, new) for a in arguments])
        assert result.exit_code == 2 and new in result.output


def test_a_kernel_that_leaves_its_array(folder, assembly):
    (folder / "spec.toml").write_text(SPEC.replace("reserve = 6144", "reserve = 6000"))
    result = command(folder, assembly)
    assert result.exit_code == 2  # the file that would be written is larger than the bytes
    text = SPEC.replace("reserve = 6144", "reserve = 6000").replace("[24, 64]", "[10, 64]")
    (folder / "spec.toml").write_text(text)
    result = command(folder, assembly, "--json", str(folder / "report.json"))
    assert result.exit_code == 1, result.output
    assert not (folder / "y.npy").exists()
    report = json.loads((folder / "report.json").read_text())
    assert report["line"] > 0 and "store" in report["opcode"]


@pytest.mark.parametrize(
    "old, new, named",
    [
        ("grid = [2]", "", "no grid"),
        ("grid = [2]", "grid = [0]", "grid is"),
        ("grid = [2]", "grid = [2]\nwaves = 4", "key 'waves'"),
        ("grid = [2]", 'grid = [2]\nkernel = "other"', "kernel is 'other'"),
        ("block = [256]", 'block = "x"', "block is"),
        ('in = "x.npy"', 'in = "z.npy"', "z.npy cannot be read"),
        ('in = "x.npy"', 'in = "x.npy"\nzeros = 4', "in and zeros"),
        ('in = "x.npy"', "", "argument x has no source"),
        ('in = "x.npy"', 'in = "x.npy"\nfile = "y"', "key 'file'"),
        ('in = "x.npy"\nread_only = true', 'same_as = "y"', "argument x is the same as 'y'"),
        ("reserve = 6144", "reserve = 0", "reserve of argument y"),
        ('in = "x.npy"', "in = 3", "in of argument x is 3"),
        ('in = "x.npy"', 'in = "x.npy"\noffset = 4', "argument x has the key 'offset'"),
        ("value = 24", "value = 24\nshape = [2]", "argument rows has the key 'shape'"),
        ('name = "rows"', 'name = "factor"', "two arguments are named 'factor'"),
        ("shape = [24, 64]", "shape = 24", "shape of argument y is 24"),
        ("shape = [24, 64]", "shape = [24, -1]", "shape of argument y is [24, -1]"),
        ('dtype = "float32"', "", "without dtype and shape"),
        ('dtype = "float32"', 'dtype = "bf16"', "dtype 'bf16'"),
        ('type = "f32"', 'type = "float"', "type 'float'"),
        ("value = 24", "value = 2.5", "argument rows is 2.5"),
        ("value = 24", "value = 99999999999", "argument rows is 99999999999"),
        ('type = "i32"', 'type = "i64"', "argument rows of scale_rows is given 8 bytes"),
        ('name = "rows"\nvalue = 24\ntype = "i32"', 'name = "rows"\nnull = true', "argument rows of scale_rows"),
        ('\n[[arguments]]\nname = "rows"\nvalue = 24\ntype = "i32"\n', "", "given 3 arguments"),
        ("grid = [2]", "grid = [2", "cannot be read"),
        ("grid = [2]", "grid = [4294967296]", "grid of scale_rows is [4294967296, 1, 1]"),
        ("grid = [2]", "grid = [1]", "left 2048 bytes of argument y unwritten, the first is byte 4096"),
        ("block = [256]", "block = [257]", "257 work-items"),
        ("block = [256]", "block = [256]\nlds_bytes = 1000000", "1000000 bytes of LDS"),
        ("reserve = 6144", f"reserve = {1 << 60}", "argument y does not fit into this machine's memory"),
        ('in = "x.npy"\nread_only = true', "null = false", "null of argument x is false"),
        ("read_only = true", 'out = "y.npy"', "two arguments are written to 'y.npy'"),
    ],
)  # fmt: skip
def test_refuses(folder, assembly, old, new, named):
    assert old in SPEC
    (folder / "spec.toml").write_text(SPEC.replace(old, new, 1))
    with pytest.raises(ContractError) as refused:
        spec.execute(assembly, spec.load(folder / "spec.toml"))
    assert named in str(refused.value)


def test_another_argument_plus_bytes(folder, assembly):
    text = SPEC.replace('in = "x.npy"\nread_only = true', 'in = "x.npy"\nout = "x2.npy"')
    text = text.replace(
        'reserve = 6144\nout = "y.npy"\ndtype = "float32"\nshape = [24, 64]',
        'same_as = "x"\noffset = 0',
    )
    (folder / "spec.toml").write_text(text)
    ran = spec.execute(assembly, spec.load(folder / "spec.toml"))
    (output,) = ran.outputs.values()
    np.testing.assert_array_equal(output, np.load(folder / "x.npy") * np.float32(0.5))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
