"""Text that FlyDSL wrote runs through `execute` (test/golden/flydsl): pointers, and the sizes that FlyDSL passes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import spec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

TEXT = (Path(__file__).parents[3] / "golden" / "flydsl" / "square_plus.s").read_text()
# A fx.Tensor is a pointer and a struct of its sizes that are not known when it is compiled.
SPEC = """
grid = [3]

[[arguments]]
name = "x"
in = "x.npy"
[[arguments]]
name = "x_sizes"
value = [192]
type = "i32"
[[arguments]]
name = "out"
reserve = 768
out = "out.npy"
dtype = "float32"
shape = [192]
[[arguments]]
name = "out_sizes"
value = [192]
type = "i32"
"""


@pytest.fixture
def folder(tmp_path):
    x = np.random.default_rng(1).standard_normal(192).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    return tmp_path


def run(folder, text):
    (folder / "spec.toml").write_text(text)
    return spec.execute(TEXT, spec.load(folder / "spec.toml"))


def test_result(folder):
    ran = run(folder, SPEC)
    x = np.load(folder / "x.npy")
    assert ran.kernel == "square_plus_0"
    np.testing.assert_array_equal(ran.outputs[folder / "out.npy"], x * x + x)


def test_a_size_that_is_left_out_is_refused(folder):
    without = SPEC.replace('[[arguments]]\nname = "x_sizes"\nvalue = [192]\ntype = "i32"\n', "")
    with pytest.raises(ContractError, match="square_plus_0 is given 3 arguments"):
        run(folder, without)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
