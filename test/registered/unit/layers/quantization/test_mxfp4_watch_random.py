"""A checksum of random bytes tells where they are."""

import sys

import pytest
import torch

pytest.importorskip("hypothesis", reason="SGLang's environments do not have it")

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.srt.layers.quantization.mxfp4_watch import checksum
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.integers(2, 40),
    swap=st.tuples(st.integers(0, 39), st.integers(0, 39)),
    seed=st.integers(0, 9),
)
def test_a_checksum_tells_where_bytes_are(pieces, swap, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, 256, (pieces, 16), dtype=torch.uint8, generator=generator)
    a, b = (i % pieces for i in swap)
    moved = tensor.clone()
    moved[[a, b]] = tensor[[b, a]]
    assert (checksum(moved) == checksum(tensor)) is torch.equal(moved, tensor)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
