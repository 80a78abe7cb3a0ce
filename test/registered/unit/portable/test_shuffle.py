import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_aiter_moe.portable.machine import Machine
from sglang_aiter_moe.portable.shuffle import Shuffles
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

GOLDEN = Path(__file__).parents[3] / "golden"


def shuffles(arch="gfx950", aiter="0.1.20"):
    machine = Machine.make(arch, aiter)
    return Shuffles(machine.arch, machine.release)


def sha(t):
    return hashlib.sha256(np.ascontiguousarray(t.numpy()).tobytes()).hexdigest()


def cases(name):
    with np.load(GOLDEN / f"{name}.npz") as golden:
        return json.loads(str(golden["_cases"]))


WEIGHT_FORMS = {
    "sep": lambda s, w: s.shuffle_weight(w, (16, 16)),
    "a16w4_gu0": lambda s, w: s.shuffle_weight_a16w4(w, 16, False),
    "a16w4_gu1": lambda s, w: s.shuffle_weight_a16w4(w, 16, True),
    "gate_up_rows_interleaved": lambda s, w: s.interleave_gate_up_rows(w),
    # gfx1250's 2-D forms have the bytes of the separated one
    "gfx1250_f4_2d": lambda s, w: s.shuffle_weight(w, (16, 16)),
    "gfx1250_wmma_2d": lambda s, w: s.shuffle_weight(w, (16, 16)),
}


@pytest.mark.parametrize("case", cases("weight_layouts"), ids=lambda c: f"{c['name']}-{c['form']}")
def test_weight_bytes_match_golden(case):
    rng = np.random.Generator(np.random.PCG64(case["seed"]))
    shape = (case["E"], case["N"], case["Kbytes"])
    raw = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))
    out = WEIGHT_FORMS[case["form"]](shuffles(), raw)
    assert out.shape == raw.shape and out.dtype == raw.dtype
    assert sha(out) == case["sha256_out"]
    if "gfx1250" not in case["form"]:
        assert getattr(out, "is_shuffled", False) is case["is_shuffled"]


@pytest.mark.parametrize(
    "case",
    cases("scale_layouts"),
    ids=lambda c: f"{c['name']}-{c['form']}",
)
def test_scale_bytes_match_golden(case):
    s, name, form = shuffles(), case["name"], case["form"]
    with np.load(GOLDEN / "scale_layouts.npz") as golden:
        if f"{name}__raw" in golden:
            raw = torch.from_numpy(golden[f"{name}__raw"])
        else:
            rng = np.random.Generator(np.random.PCG64(int(golden[f"{name}__raw_seed"])))
            rows = case["E"] * case["N"]
            raw = torch.from_numpy(rng.integers(1, 255, (rows, case["k"]), dtype=np.uint8))
        gate_up = form.endswith("gu1")
        if form == "sep":
            out = s.shuffle_scale(raw)
            assert torch.equal(s.e8m0_shuffle(raw), out)
        elif form.startswith("gui"):
            out = s.shuffle_scale_a16w4(raw, case["E"], gate_up)
        else:
            out = s.shuffle_scale_n32k4(raw, case["E"], gate_up, gate_up)
        assert list(out.shape) == case["out_shape"]
        undefined = case["n_undefined"]
        if f"{name}__{form}__undef" in golden:
            bits = np.unpackbits(golden[f"{name}__{form}__undef"])[: out.numel()]
            mask = torch.from_numpy(bits.astype(bool)).view(out.shape)
            assert int(mask.sum()) == undefined
            # what AITER leaves uninitialised is NaN here, and nothing else is touched
            assert torch.all(out[mask] == 0xFF)
            zeroed = torch.from_numpy(golden[f"{name}__{form}__out_undef_zeroed"])
            assert torch.equal(out.masked_fill(mask, 0), zeroed)
        elif undefined == 0:
            assert sha(out) == case["sha256_defined"]
        else:
            # raw scales are 1..254, so 0xFF can only be padding
            assert int((out == 0xFF).sum()) == undefined
            defined = out.masked_fill(out == 0xFF, 0)
            assert sha(defined) == case["sha256_defined"]


U8 = torch.uint8
ERROR_CALLS = {
    "shuffle_scale_n32k4 E=2 rows=64 k=6 gui=False": lambda s: s.shuffle_scale_n32k4(
        torch.zeros(2, 64, 6, dtype=U8)
    ),
    "shuffle_scale_n32k4 E=2 rows=64 k=6 gui=True": lambda s: s.shuffle_scale_n32k4(
        torch.zeros(2, 64, 6, dtype=U8), 2, True, True
    ),
    "shuffle_scale_a16w4 E=3 rows=80 k=5 gate_up=False": lambda s: s.shuffle_scale_a16w4(
        torch.zeros(240, 5, dtype=U8), 3, False
    ),
    "shuffle_scale_a16w4 E=3 rows=80 k=5 gate_up=True": lambda s: s.shuffle_scale_a16w4(
        torch.zeros(240, 5, dtype=U8), 3, True
    ),
    "shuffle_scale_n32k4 E=3 rows=80 k=5 gui=False": lambda s: s.shuffle_scale_n32k4(
        torch.zeros(240, 5, dtype=U8), 3
    ),
    "shuffle_scale_n32k4 E=3 rows=80 k=5 gui=True": lambda s: s.shuffle_scale_n32k4(
        torch.zeros(240, 5, dtype=U8), 3, True, True
    ),
    "shuffle_scale_n32k4 E=1 rows=5760 k=90 gui=False": lambda s: s.shuffle_scale_n32k4(
        torch.zeros(5760, 90, dtype=U8), 1
    ),
    "shuffle_scale_n32k4 E=1 rows=5760 k=90 gui=True": lambda s: s.shuffle_scale_n32k4(
        torch.zeros(5760, 90, dtype=U8), 1, True, True
    ),
    "shuffle_weight rows%16": lambda s: s.shuffle_weight(torch.zeros(1, 24, 64, dtype=U8)),
    "shuffle_weight Kbytes%32": lambda s: s.shuffle_weight(torch.zeros(1, 32, 48, dtype=U8)),
    "shuffle_weight_a16w4 gu0 rows%16": lambda s: s.shuffle_weight_a16w4(
        torch.zeros(1, 24, 64, dtype=U8), 16, False
    ),
    "shuffle_weight_a16w4 gu0 Kbytes%64 (=32)": lambda s: s.shuffle_weight_a16w4(
        torch.zeros(1, 32, 32, dtype=U8), 16, False
    ),
    "shuffle_weight_a16w4 gu1 rows=48 (inter 24)": lambda s: s.shuffle_weight_a16w4(
        torch.zeros(1, 48, 64, dtype=U8), 16, True
    ),
    "shuffle_weight_a16w4 2D input": lambda s: s.shuffle_weight_a16w4(
        torch.zeros(32, 64, dtype=U8), 16, False
    ),
    "shuffle_weight pad_k_to + guinterleave": lambda s: s.shuffle_weight(
        torch.zeros(1, 32, 64, dtype=U8), is_guinterleave=True, pad_k_to=128
    ),
    "shuffle_scale 3D": lambda s: s.shuffle_scale(torch.zeros(1, 32, 8, dtype=U8)),
    "shuffle_scale None": lambda s: s.shuffle_scale(None),
    "shuffle_scale gui without experts_cnt": lambda s: s.shuffle_scale(
        torch.zeros(32, 8, dtype=U8), is_guinterleave=True
    ),
    "shuffle_scale_a16w4 rows/E%32 (=48)": lambda s: s.shuffle_scale_a16w4(
        torch.zeros(48, 8, dtype=U8), 1, False
    ),
    "shuffle_scale_a16w4 rows not divisible by E": lambda s: s.shuffle_scale_a16w4(
        torch.zeros(65, 8, dtype=U8), 2, False
    ),
    "shuffle_scale sep rows=20 k=3 (padded)": lambda s: s.shuffle_scale(
        torch.zeros(20, 3, dtype=U8)
    ),
    "shuffle_scale_n32k4 rows%32": lambda s: s.shuffle_scale_n32k4(torch.zeros(1, 48, 8, dtype=U8)),
    "shuffle_scale_n32k4 k%4": lambda s: s.shuffle_scale_n32k4(torch.zeros(1, 32, 6, dtype=U8)),
    "shuffle_scale_n32k4 2D no experts": lambda s: s.shuffle_scale_n32k4(
        torch.zeros(32, 8, dtype=U8)
    ),
}
RECORDED = [
    e
    for e in json.loads((GOLDEN / "manifest.json").read_text())["errors"]
    if not e["call"].startswith("per_1x32_f4_quant")  # numerics, not a layout function
]


@pytest.mark.parametrize("entry", RECORDED, ids=lambda e: e["call"])
def test_errors_match_manifest(entry):
    call = ERROR_CALLS[entry["call"]]
    if entry["raises"] is None:
        call(shuffles())
        return
    with pytest.raises(Exception) as info:
        call(shuffles())
    assert type(info.value).__name__ == entry["raises"]
    assert str(info.value) == entry["msg"]


def test_the_attribute_is_lost_as_in_torch():
    w = torch.zeros(1, 32, 64, dtype=U8).view(torch.float4_e2m1fn_x2)
    out = shuffles().shuffle_weight(w)
    assert out.dtype == torch.float4_e2m1fn_x2 and out.is_shuffled
    for copy in (out.view(U8), out.clone(), torch.nn.Parameter(out, requires_grad=False)):
        assert not hasattr(copy, "is_shuffled")


def test_pad_k_to():
    raw = torch.randint(0, 256, (1, 32, 96), dtype=U8)
    out = shuffles().shuffle_weight(raw, pad_k_to=128)
    padded = torch.nn.functional.pad(raw, (0, 32))
    assert torch.equal(out, shuffles().shuffle_weight(padded))
    assert (out.aiter_original_k, out.aiter_padded_k) == (96, 128)
    with pytest.raises(NotImplementedError):
        shuffles().shuffle_weight(raw, use_int4=True, pad_k_to=128)


def test_fp32_scales_come_back():
    scale = torch.ones(3, 5, 7)
    assert shuffles().shuffle_scale(scale) is scale


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_moe_functions_off_gfx1250(arch):
    s = shuffles(arch)
    w = torch.randint(0, 256, (2, 64, 64), dtype=U8)
    scale = torch.randint(0, 255, (128, 8), dtype=U8)
    assert torch.equal(s.moe_shuffle_weight(w), s.shuffle_weight(w))
    assert torch.equal(s.moe_shuffle_weight(w, 2, True, True), s.shuffle_weight_a16w4(w, 16, True))
    assert torch.equal(s.moe_shuffle_scale(scale), s.shuffle_scale(scale))
    assert torch.equal(
        s.moe_shuffle_scale(scale, 2, True, True), s.shuffle_scale_a16w4(scale, 2, True)
    )


def test_moe_functions_on_gfx1250():
    s = shuffles("gfx1250")
    w = torch.randint(0, 256, (2, 64, 64), dtype=U8)
    scale = torch.randint(0, 255, (128, 8), dtype=U8)
    rows = s.interleave_gate_up_rows(w)
    assert torch.equal(s.moe_shuffle_weight(w, 2, True, True), s.shuffle_weight(rows))
    assert torch.equal(s.moe_shuffle_weight(w, 2), s.shuffle_weight(w))
    # is_guinterleave alone means nothing for w2
    assert torch.equal(s.moe_shuffle_weight(w, 2, True, False), s.shuffle_weight(w))
    assert torch.equal(
        s.moe_shuffle_scale(scale, 2, True, True), s.shuffle_scale_n32k4(scale, 2, True, True)
    )
    assert not torch.equal(rows, w)
    assert torch.equal(rows[:, 0], w[:, 0]) and torch.equal(rows[:, 1], w[:, 32])


def test_before_0_1_18():
    s = shuffles(aiter="0.1.17")
    assert not hasattr(s, "moe_shuffle_weight") and "moe_shuffle_scale" not in s.names
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        s.shuffle_scale_a16w4(torch.zeros(64, 12, dtype=U8), 1, False)
    padded = shuffles(aiter="0.1.18").shuffle_scale_a16w4(torch.zeros(64, 12, dtype=U8), 1, False)
    assert padded.shape == (64, 16) and int((padded == 0x7F).sum()) == 64 * 4


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
