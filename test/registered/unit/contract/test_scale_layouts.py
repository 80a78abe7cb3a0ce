"""Scale layouts against the golden vectors, their padding, and their inverses."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.contract import _bytes, layouts, scale_layouts
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

GOLDEN = Path(__file__).parents[3] / "golden"
LAYOUT_OF_FORM = {
    "sep": "separated",
    "gui_gu0": "a16w4",
    "gui_gu1": "a16w4_gate_up",
    "n32k4_gu0": "n32k4",
    "n32k4_gu1": "n32k4_gate_up",
}
ALL = list(scale_layouts.SCALE_LAYOUTS)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "scale_layouts.npz") as data:
        return {name: data[name] for name in data.files}


def cases():
    with np.load(GOLDEN / "scale_layouts.npz") as data:
        return json.loads(str(data["_cases"]))


def layout_of(case):
    if case["N"] % 32:  # AITER lays it out, two experts to a block
        return scale_layouts.SeparatedScale(allow_shared_rows=True)
    return scale_layouts.scale_layout(LAYOUT_OF_FORM[case["form"]])


def raw_of(case, golden):
    shape = (case["E"], case["N"], case["k"])
    generator = np.random.Generator(np.random.PCG64(int(golden[case["name"] + "__raw_seed"])))
    raw = generator.integers(1, 255, (shape[0] * shape[1], shape[2]), dtype=np.uint8)
    raw = golden.get(case["name"] + "__raw", raw)
    return torch.from_numpy(raw).view(shape)


@pytest.mark.parametrize("case", cases(), ids=lambda c: f"{c['name']}-{c['form']}")
def test_golden(case, golden):
    raw = raw_of(case, golden)
    layout = layout_of(case)
    packed = layout.pack(raw)
    assert list(packed.shape) == case["out_shape"]
    # Where AITER leaves memory uninitialised, the golden file has zeros and we have 0x7F.
    defined = packed.numpy().reshape(-1).copy()
    key = f"{case['name']}__{case['form']}__"
    if case["n_undefined"]:
        padding = layout.index_map(raw.shape).numpy() == -1
        assert padding.sum() == case["n_undefined"]
        assert (defined[padding] == 0x7F).all()
        if key + "undef" in golden:
            undefined = np.unpackbits(golden[key + "undef"])[: padding.size].astype(bool)
            np.testing.assert_array_equal(padding, undefined)
        defined[padding] = 0
    assert hashlib.sha256(defined.tobytes()).hexdigest() == case["sha256_defined"]
    if key + "out_undef_zeroed" in golden:
        np.testing.assert_array_equal(defined, golden[key + "out_undef_zeroed"].reshape(-1))
    assert torch.equal(layout.unpack(packed, raw.shape), raw)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 20))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(ALL), shapes, st.booleans(), st.integers(0))
def test_inverse(name, shape, interleaved, seed):
    layout = scale_layouts.scale_layout(name)
    experts, blocks, k = shape
    if name.startswith("n32k4"):
        k *= 4
    generator = torch.Generator().manual_seed(seed % 2**63)
    shape = (experts, blocks * 32, k)
    raw = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)
    out = torch.empty(layout.packed_shape(shape), dtype=torch.uint8)
    packed = layout.pack(raw, out=out, gate_up_interleaved=interleaved)
    assert packed is out
    index = layout.index_map(shape, gate_up_interleaved=interleaved)
    expected = raw.reshape(-1)[index.clamp(min=0)]
    expected[index < 0] = 0x7F
    assert torch.equal(packed.reshape(-1), expected)
    assert sorted(index[index >= 0].tolist()) == list(range(raw.numel()))
    again = layout.unpack(packed, shape, gate_up_interleaved=interleaved)
    assert torch.equal(again, raw)


def test_what_the_gpu_kernels_are_told(monkeypatch):
    """One block of bytes without what is added at the end, the rows' order, and 0x7F behind it."""
    told = []

    class Kernels:
        takes = True

        def takes_scales(self, raw, packed):
            return self.takes

        def move_scales(self, raw, flat, order, *, swizzled, pad, packing):
            told.append((raw.shape, flat.numel(), order.tolist(), swizzled, pad, packing))
            if packing:
                flat.fill_(1)

    kernels = Kernels()
    monkeypatch.setattr(_bytes, "gpu_moves", lambda raw, packed: kernels)
    raw = torch.randint(0, 255, (3, 32, 12), dtype=torch.uint8)
    gate_up = [*range(32)]
    by_half = [row % 16 * 2 + row // 16 for row in range(32)]
    one_by_one = [row // 2 + row % 2 * 16 for row in range(32)]
    for name, order, swizzled, columns in (
        ("separated", gate_up, True, 16),
        ("a16w4_gate_up", gate_up, True, 16),
        ("n32k4", gate_up, False, 12),
        ("n32k4_gate_up", one_by_one, False, 12),
    ):
        layout = scale_layouts.scale_layout(name)
        out = torch.zeros(layout.packed_shape(raw.shape), dtype=torch.uint8)
        assert layout.pack(raw, out=out) is out
        size = 3 * 32 * columns
        assert told.pop() == (raw.shape, size, order, swizzled, 0x7F, True)
        assert (out.view(-1)[:size] == 1).all() and (out.view(-1)[size:] == 0x7F).all()
        back = torch.zeros_like(raw)
        assert layout.unpack(out, raw.shape, out=back) is back
        assert told.pop() == (raw.shape, size, order, swizzled, 0x7F, False)
        assert (out.view(-1)[:size] == 1).all()
    layout.pack(raw, gate_up_interleaved=True)
    assert told.pop()[2] == [*range(32)]  # they alternate already
    scale_layouts.scale_layout("separated").pack(raw, gate_up_interleaved=True)
    assert told.pop()[2] == by_half
    kernels.takes = False
    packed = layout.pack(raw)
    assert not told and torch.equal(layout.unpack(packed, raw.shape), raw)


@pytest.mark.parametrize("name", ALL)
def test_what_is_kept_does_not_depend_on_the_default_device_at_the_first_call(name):
    """Models are built under ``torch.device("meta")``; an index without content would break every later call."""
    raw = torch.randint(0, 255, (2, 64, 12), dtype=torch.uint8)
    layout = scale_layouts.scale_layout(name)
    expected = layout.pack(raw)
    scale_layouts._index.cache_clear()
    scale_layouts._inverse.cache_clear()
    with torch.device("meta"):
        packed = layout.pack(raw, out=torch.empty_like(expected))
        again = layout.unpack(packed, raw.shape, out=torch.empty_like(raw))
    assert torch.equal(packed, expected) and torch.equal(again, raw)
    assert torch.equal(layout.unpack(layout.pack(raw), raw.shape), raw)


def test_two_threads_at_most(monkeypatch):
    """Each needs a buffer of an expert."""
    allowed, for_each = [], _bytes.for_each
    monkeypatch.setattr(
        _bytes, "for_each", lambda *given, most: allowed.append(most) or for_each(*given, most=most)
    )
    raw = torch.randint(0, 255, (3, 64, 8), dtype=torch.uint8)
    layout = scale_layouts.scale_layout("separated")
    assert torch.equal(layout.unpack(layout.pack(raw), raw.shape), raw)
    assert allowed == [2, 2]


def test_interleaved_checkpoint_packs_like_its_deinterleaved_self():
    raw = torch.randint(0, 255, (2, 64, 12), dtype=torch.uint8)
    mixed = layouts.interleave_gate_up_rows(raw)
    for name in ALL:
        layout = scale_layouts.scale_layout(name)
        assert torch.equal(layout.pack(mixed, gate_up_interleaved=True), layout.pack(raw))


def test_k3_w2_is_packed_with_16_columns():
    """docs/contract.md section a.3: K3 at TP8 has 12 columns of w2 scales, and AITER makes them 16."""
    raw = torch.randint(100, 140, (2, 3584, 12), dtype=torch.uint8)
    for name in ("separated", "a16w4", "a16w4_gate_up"):
        packed = scale_layouts.scale_layout(name).pack(raw)
        assert packed.shape == (2 * 3584, 16)
        assert (packed == 0x7F).sum() == 2 * 3584 * 4 + (raw == 0x7F).sum()
    with pytest.raises(ContractError, match=r"\(7168, 12\)"):
        scale_layouts.scale_layout("separated").unpack(raw.view(-1, 12), raw.shape)


def test_separated_and_a16w4_are_the_same_bytes():
    """docs/contract.md section a.3: equal when N is a multiple of 32, up to the rows added at the end."""
    raw = torch.randint(0, 255, (3, 96, 13), dtype=torch.uint8)
    one = scale_layouts.scale_layout("separated").pack(raw)
    other = scale_layouts.scale_layout("a16w4").pack(raw)
    assert one.shape == (512, 16) and other.shape == (288, 16)
    assert torch.equal(one[:288], other)
    assert (one[288:] == 0x7F).all()


def test_float8_e8m0fnu():
    raw = torch.randint(0, 255, (1, 32, 8), dtype=torch.uint8)
    layout = scale_layouts.scale_layout("a16w4")
    packed = layout.pack(raw.view(torch.float8_e8m0fnu))
    assert packed.dtype == torch.float8_e8m0fnu
    assert torch.equal(packed.view(torch.uint8), layout.pack(raw))


# Each error that AITER raises for a scale (golden/manifest.json): our layout, the shape, a fragment.
OPAQUE = {
    "shuffle_scale_n32k4 E=2 rows=64 k=6 gui=False": ("n32k4", (2, 64, 6), "6 columns"),
    "shuffle_scale_n32k4 E=2 rows=64 k=6 gui=True": ("n32k4_gate_up", (2, 64, 6), "6 columns"),
    "shuffle_scale_a16w4 E=3 rows=80 k=5 gate_up=False": ("a16w4", (3, 80, 5), "80 rows"),
    "shuffle_scale_n32k4 E=3 rows=80 k=5 gui=False": ("n32k4", (3, 80, 5), "80 rows"),
    "shuffle_scale_a16w4 E=3 rows=80 k=5 gate_up=True": ("a16w4_gate_up", (3, 80, 5), "80 rows"),
    "shuffle_scale_n32k4 E=3 rows=80 k=5 gui=True": ("n32k4_gate_up", (3, 80, 5), "80 rows"),
    "shuffle_scale_n32k4 E=1 rows=5760 k=90 gui=False": ("n32k4", (1, 5760, 90), "90 columns"),
    "shuffle_scale_n32k4 E=1 rows=5760 k=90 gui=True": (
        "n32k4_gate_up",
        (1, 5760, 90),
        "90 columns",
    ),
    "shuffle_scale_a16w4 rows/E%32 (=48)": ("a16w4", (1, 48, 8), "48 rows"),
    "shuffle_scale_n32k4 rows%32": ("n32k4", (1, 48, 8), "48 rows"),
    "shuffle_scale_n32k4 k%4": ("n32k4", (1, 64, 6), "6 columns"),
    # We take one matrix per expert, so that no row count can hide the experts.
    "shuffle_scale gui without experts_cnt": ("a16w4", (64, 8), r"\(64, 8\)"),
    "shuffle_scale_a16w4 rows not divisible by E": ("a16w4", (65, 8), r"\(65, 8\)"),
    "shuffle_scale_n32k4 2D no experts": ("n32k4", (64, 8), r"\(64, 8\)"),
}
# AITER refuses 3 dimensions here; for us they are the form to give.
TAKEN = {"shuffle_scale 3D"}


def test_opaque_errors_are_the_manifests():
    with open(GOLDEN / "manifest.json") as file:
        listed = {e["call"] for e in json.load(file)["errors"] if e["raises"]}
    assert {call for call in listed if call.startswith("shuffle_scale")} == set(OPAQUE) | TAKEN


@pytest.mark.parametrize("call", OPAQUE)
def test_opaque_errors_are_clear(call):
    name, shape, fragment = OPAQUE[call]
    with pytest.raises(ContractError, match="w13_scale.*" + fragment):
        scale_layouts.scale_layout(name).pack(
            torch.zeros(shape, dtype=torch.uint8), what="w13_scale"
        )


def test_experts_never_share_a_block():
    """N that is no multiple of 32 would put two experts into one block of 32 rows."""
    with pytest.raises(ContractError, match="no two experts share"):
        scale_layouts.scale_layout("separated").pack(torch.zeros(3, 80, 5, dtype=torch.uint8))


def test_unknown_name():
    with pytest.raises(ContractError, match="'swizzled'"):
        scale_layouts.scale_layout("swizzled")


def test_shared_rows_cannot_alternate():
    raw = torch.zeros(3, 80, 5, dtype=torch.uint8)
    layout = scale_layouts.SeparatedScale(allow_shared_rows=True)
    with pytest.raises(ContractError, match="alternate gate and up"):
        layout.pack(raw, gate_up_interleaved=True)


def test_unpack_into_a_given_tensor():
    raw = torch.randint(0, 255, (2, 32, 12), dtype=torch.uint8)
    layout = scale_layouts.scale_layout("a16w4")
    packed = layout.pack(raw)
    out = torch.empty_like(raw)
    assert layout.unpack(packed, raw.shape, out=out) is out and torch.equal(out, raw)
    back = layout.unpack(packed.view(torch.float8_e8m0fnu), raw.shape)
    assert back.dtype == torch.float8_e8m0fnu


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
