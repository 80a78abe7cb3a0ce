"""Reading packed bytes, against the source maps of AITER's own layout functions (test/golden)."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe import portable
from sglang_aiter_moe.portable.backends.decode import (
    expert_scales,
    expert_weight_bytes,
    flat_bytes,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

GOLDEN = Path(__file__).parents[4] / "golden"
U8 = torch.uint8
WEIGHTS = {"sep": "separated", "a16w4_gu0": "separated", "a16w4_gu1": "gu_interleaved"}
SCALES = {
    "gui_gu0": "separated",
    "gui_gu1": "gu_interleaved",
    "n32k4_gu0": "n32k4",
    "n32k4_gu1": "n32k4_gu",
}


def golden_cases(name, forms):
    with np.load(GOLDEN / f"{name}.npz") as golden:
        return [c for c in json.loads(str(golden["_cases"])) if c["form"] in forms]


@pytest.mark.parametrize(
    "case", golden_cases("weight_layouts", WEIGHTS), ids=lambda c: f"{c['name']}-{c['form']}"
)
def test_weights_read_back_through_golden_positions(case):
    name, form = case["name"], case["form"]
    rows, k_bytes = case["N"], case["Kbytes"]
    with np.load(GOLDEN / "weight_layouts.npz") as golden:
        pos = torch.from_numpy(golden[f"{name}__{form}__pos"]).long()
        src = torch.from_numpy(golden[f"{name}__{form}__src"]).long()
    # A buffer that holds at each known packed position a number that tells where it came from.
    raw = torch.randint(0, 256, (case["E"] * rows * k_bytes,), dtype=U8)
    packed = torch.zeros_like(raw)
    packed[pos] = raw[src]
    for expert in range(case["E"]):
        size = rows * k_bytes
        got = expert_weight_bytes(packed, expert, rows, k_bytes, WEIGHTS[form]).reshape(-1)
        mine = (src >= expert * size) & (src < (expert + 1) * size)
        assert mine.any()
        assert torch.equal(got[src[mine] - expert * size], raw[src[mine]])


@pytest.mark.parametrize(
    "case",
    [c for c in golden_cases("scale_layouts", SCALES) if c["name"] in ("tiny", "kpad6")],
    ids=lambda c: f"{c['name']}-{c['form']}",
)
def test_scales_read_back(case):
    with np.load(GOLDEN / "scale_layouts.npz") as golden:
        raw = torch.from_numpy(golden[f"{case['name']}__raw"])
        packed = torch.from_numpy(golden[f"{case['name']}__{case['form']}__out_undef_zeroed"])
    rows, k = case["N"], case["k"]
    for expert in range(case["E"]):
        got = expert_scales(packed.reshape(-1), expert, rows, k, SCALES[case["form"]])
        assert torch.equal(got, raw[expert * rows : (expert + 1) * rows])


@pytest.mark.parametrize("experts, rows, k", [(3, 64, 8), (2, 96, 12), (1, 32, 1)])
def test_separated_scales_by_the_closed_form(experts, rows, k):
    padded = -(-k // 8) * 8
    flat = torch.randint(0, 256, (experts * rows * padded,), dtype=U8)
    for e in range(experts):
        got = expert_scales(flat, e, rows, k, "separated")
        for row in range(rows):
            for j in range(k):
                r = e * rows + row
                at = (r // 32) * 32 * padded + (j // 8) * 256 + (j % 4) * 64 + (r % 16) * 4
                at += ((j % 8) // 4) * 2 + (r % 32) // 16
                assert got[row, j] == flat[at]


def test_interleaved_scales_by_the_closed_form():
    inter, k, padded = 48, 12, 16
    flat = torch.randint(0, 256, (2 * inter * padded,), dtype=U8)
    got = expert_scales(flat, 0, 2 * inter, k, "gu_interleaved")
    for row in range(2 * inter):
        for j in range(k):
            half, q = divmod(row, inter)
            at = ((q // 16 * (padded // 8) + j // 8) * 4 + j % 4) * 16 + q % 16
            assert got[row, j] == flat[(at * 2 + (j % 8) // 4) * 2 + half]


def test_gfx1250_rows_alternate():
    rows, k_bytes = 64, 32
    flat = torch.randint(0, 256, (rows * k_bytes,), dtype=U8)
    got = expert_weight_bytes(flat, 0, rows, k_bytes, "gu_interleaved_gfx1250")
    for tile in range(rows // 16):
        for lane in range(16):
            r = 16 * tile + lane
            row = (r % 2) * (rows // 2) + r // 2
            for byte in range(k_bytes):
                at = ((tile * (k_bytes // 16) + byte // 16) * 16 + lane) * 16 + byte % 16
                assert got[row, byte] == flat[at]


LEGAL = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31 - 1)
)


@settings(max_examples=40, deadline=None)
@given(LEGAL, st.sampled_from(["separated", "gu_interleaved", "gfx1250"]))
def test_reading_undoes_packing(shape, form):
    experts, row_units, k_units, seed = shape
    rows, k = 32 * row_units, 128 * k_units
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (experts, rows, k // 2), dtype=U8, generator=g)
    scale = torch.randint(0, 256, (experts, rows, k // 32), dtype=U8, generator=g)
    flat_scale = scale.view(experts * rows, -1)
    with portable.installed(arch="gfx1250" if form == "gfx1250" else "gfx950"):
        mixed = form != "separated"
        packed = portable.moe_shuffle_weight(raw, experts, mixed, mixed)
        packed_scale = portable.moe_shuffle_scale(flat_scale, experts, mixed, mixed)
    layouts = {"gfx1250": ("gu_interleaved_gfx1250", "n32k4_gu")}.get(form, (form, form))
    for e in range(experts):
        got = expert_weight_bytes(packed.view(-1), e, rows, k // 2, layouts[0])
        assert torch.equal(got, raw[e])
        got = expert_scales(packed_scale.reshape(-1), e, rows, k // 32, layouts[1])
        assert torch.equal(got, scale[e])


def test_raw():
    flat = torch.randint(0, 256, (2 * 5 * 6,), dtype=U8)
    assert torch.equal(expert_weight_bytes(flat, 1, 5, 6, "raw"), flat[30:].view(5, 6))
    assert torch.equal(expert_scales(flat, 1, 5, 6, "raw"), flat[30:].view(5, 6))


def test_a_view_at_an_odd_address():
    data = torch.randint(0, 256, (32 * 32 + 3,), dtype=U8)
    shifted = data[3:]
    want = expert_weight_bytes(shifted.clone(), 0, 32, 32, "gu_interleaved")
    assert torch.equal(expert_weight_bytes(shifted, 0, 32, 32, "gu_interleaved"), want)


def test_scales_past_the_end_are_nan():
    short = torch.full(
        (32 * 12,), 127, dtype=U8
    )  # 12 columns stored where the kernel strides over 16
    got = expert_scales(short, 0, 32, 12, "separated")
    assert got.shape == (32, 12) and (got == 0xFF).any() and (got == 127).any()


@pytest.mark.parametrize("layout", ["interleaved", "n32k4"])
def test_unknown_weight_layout(layout):
    with pytest.raises(ValueError, match=layout):
        expert_weight_bytes(torch.zeros(32 * 32, dtype=U8), 0, 32, 32, layout)


def test_flat_bytes_makes_no_copy_of_contiguous_tensors():
    w = torch.zeros(2, 32, 16, dtype=U8).view(torch.float4_e2m1fn_x2)
    assert flat_bytes(w).data_ptr() == w.data_ptr() and flat_bytes(w).shape == (1024,)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
