"""Weight layouts against the golden vectors, and their inverses over random legal shapes."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.contract import _bytes, layouts
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

GOLDEN = Path(__file__).parents[3] / "golden"
LAYOUT_OF_FORM = {
    "sep": "separated",
    "a16w4_gu0": "separated",
    "a16w4_gu1": "gu_interleaved",
    "gfx1250_f4_2d": "separated",
    "gfx1250_wmma_2d": "separated",
}
ALL = list(layouts.WEIGHT_LAYOUTS)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "weight_layouts.npz") as data:
        return {name: data[name] for name in data.files}


def cases():
    with np.load(GOLDEN / "weight_layouts.npz") as data:
        return json.loads(str(data["_cases"]))


def raw_of(case):
    shape = (case["E"], case["N"], case["Kbytes"])
    generator = np.random.Generator(np.random.PCG64(case["seed"]))
    return torch.from_numpy(generator.integers(0, 256, shape, dtype=np.uint8))


def sha256(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("case", cases(), ids=lambda c: f"{c['name']}-{c['form']}")
def test_golden(case, golden):
    raw = raw_of(case)
    if case["form"] == "gate_up_rows_interleaved":
        packed = layouts.interleave_gate_up_rows(raw)
        rows = layouts.interleaved_row(torch.arange(case["N"]), case["N"])
        source = torch.arange(raw.numel()).view(raw.shape)
        index = torch.empty_like(source)
        index[:, rows] = source
        index = index.reshape(-1)
    else:
        layout = layouts.weight_layout(LAYOUT_OF_FORM[case["form"]])
        packed = layout.pack(raw)
        index = layout.index_map(raw.shape)
        assert torch.equal(layout.unpack(packed), raw)
    assert sha256(packed.numpy()) == case["sha256_out"]
    assert sha256(index.numpy().astype(np.int32)) == case["sha256_map_i32"]
    key = f"{case['name']}__{case['form']}__"
    np.testing.assert_array_equal(index.numpy()[golden[key + "pos"]], golden[key + "src"])
    if key + "map" in golden:
        np.testing.assert_array_equal(index.numpy(), golden[key + "map"])


def test_gfx1250_is_row_interleaving_then_tiles():
    """docs/contract.md section a.1: interleave_gate_up_rows first, then the separated tiles."""
    for case in cases():
        if case["form"] != "gate_up_rows_interleaved":
            continue
        raw = raw_of(case)
        rows = layouts.interleave_gate_up_rows(raw)
        assert sha256(rows.numpy()) == case["sha256_out"]
        assert torch.equal(layouts.GU_INTERLEAVED_GFX1250.pack(raw), layouts.SEPARATED.pack(rows))


def test_layouts_differ():
    raw = torch.randint(0, 256, (2, 64, 64), dtype=torch.uint8)
    packed = [layouts.weight_layout(name).pack(raw) for name in ALL]
    for i, one in enumerate(packed):
        for other in packed[i + 1 :]:
            assert not torch.equal(one, other)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ALL), shapes, st.booleans(), st.booleans(), st.integers(0, 15), st.integers(0)
)
def test_inverse(name, shape, interleaved, in_place, offset, seed):
    """unpack(pack(x)) == x, in place or not, at any alignment, for either row order of the checkpoint."""
    layout = layouts.weight_layout(name)
    experts, tiles, columns = shape
    rows = tiles * 32
    k_bytes = columns * layout.k_bytes_multiple
    size = experts * rows * k_bytes
    generator = torch.Generator().manual_seed(seed % 2**63)
    memory = torch.randint(0, 256, (size + 16,), dtype=torch.uint8, generator=generator)
    raw = memory[offset : offset + size].view(experts, rows, k_bytes)
    original = raw.clone()
    out = raw if in_place else None
    packed = layout.pack(raw, out=out, gate_up_interleaved=interleaved)
    index = layout.index_map(raw.shape, gate_up_interleaved=interleaved)
    assert torch.equal(packed.reshape(-1), original.reshape(-1)[index])
    again = layout.unpack(packed, out=packed if in_place else None, gate_up_interleaved=interleaved)
    assert torch.equal(again, original)
    if in_place:
        assert packed is raw and again is raw


def test_interleaved_checkpoint_packs_like_its_deinterleaved_self():
    raw = torch.randint(0, 256, (2, 96, 128), dtype=torch.uint8)
    mixed = layouts.interleave_gate_up_rows(raw)
    assert torch.equal(mixed[:, 0], raw[:, 0]) and torch.equal(mixed[:, 1], raw[:, 48])
    assert torch.equal(layouts.deinterleave_gate_up_rows(mixed), raw)
    for name in ALL:
        layout = layouts.weight_layout(name)
        assert torch.equal(layout.pack(mixed, gate_up_interleaved=True), layout.pack(raw))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_threads_share_the_experts(name, in_place, monkeypatch):
    monkeypatch.setattr("sglang_aiter_moe.contract._bytes._WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    layout = layouts.weight_layout(name)
    raw = torch.randint(0, 256, (7, 64, 128), dtype=torch.uint8)
    expected = raw.reshape(-1)[layout.index_map(raw.shape)]
    packed = layout.pack(raw.clone(), out=None)
    if in_place:
        packed = raw.clone()
        layout.pack(packed, out=packed)
    assert torch.equal(packed.reshape(-1), expected)
    assert torch.equal(layout.unpack(packed), raw)


@pytest.mark.parametrize("size, parts", [(99, 1), (100, 2), (250, 3), (10**6, 3)])
def test_a_thread_more_for_so_many_bytes_each(size, parts, monkeypatch):
    monkeypatch.setattr(_bytes, "_WORTH_A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    taken = []
    _bytes.for_each(7, taken.append, torch.zeros(size, dtype=torch.uint8))
    assert len(taken) == parts
    assert sorted(expert for part in taken for expert in part) == list(range(7))


def test_in_place_two_threads_at_most(monkeypatch):
    """Each needs a copy of an expert (field W3)."""
    monkeypatch.setattr(_bytes, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    raw = torch.randint(0, 256, (7, 64, 128), dtype=torch.uint8)
    copies, copy = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like: copies.append(1) or copy(like))
    layouts.SEPARATED.pack(raw, out=raw)
    assert len(copies) == 2


@pytest.mark.parametrize("name", ALL)
def test_no_expert_is_copied_on_the_way_to_other_memory(name, monkeypatch):
    raw = torch.randint(0, 256, (7, 64, 128), dtype=torch.uint8)
    target = torch.empty(7, 64, 128, dtype=torch.uint8)
    layout = layouts.weight_layout(name)
    expected = raw.reshape(-1)[layout.index_map(raw.shape)]
    monkeypatch.setattr(torch, "empty_like", lambda like: pytest.fail("memory that is not needed"))
    layout.pack(raw, out=target)
    assert torch.equal(target.reshape(-1), expected)


def test_sixteen_bytes_at_a_time_where_that_is_possible():
    """One dtype has 16 bytes; a view of it needs every offset and stride to be a multiple of 16."""
    memory = torch.zeros(4096 + 64, dtype=torch.uint8)
    assert memory.data_ptr() % 16 == 0
    whole = memory[:4096].view(2, 32, 64)
    words = {16: torch.uint8, 1: torch.complex128}
    for tensor, width in (
        (whole, 1),
        (whole[1], 1),
        (memory[16:4112].view(2, 32, 64), 1),
        (memory[17:4113].view(2, 32, 64), 16),
        (memory[8:4104].view(2, 32, 64), 16),
        (memory[:1024].as_strided((8, 16), (17, 1)), 16),
        (torch.from_numpy(memory.numpy()[8:4104]).view(2, 32, 64), 16),
        (memory[:2048].as_strided((8, 64), (64, 2)), 16),
    ):
        (split,) = _bytes.words16(tensor)
        assert split.shape[-1] == width and split.dtype is words[width]
        assert split.shape[:-1] == (*tensor.shape[:-1], tensor.shape[-1] // 16)
    both = _bytes.words16(whole, memory[8:4104].view(2, 32, 64))
    assert [split.shape[-1] for split in both] == [16, 16]


def test_gpu_kernels_move_between_two_gpu_tensors_only(monkeypatch):
    kernels = object()
    monkeypatch.setattr(_bytes, "_kernels", lambda: kernels)
    gpu, cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    assert _bytes.gpu_moves(gpu, gpu) is kernels
    for source, target in ((gpu, cpu), (cpu, gpu), (cpu, cpu)):
        assert _bytes.gpu_moves(source, target) is None
    monkeypatch.setattr(_bytes, "GPU_KERNELS", False)
    assert _bytes.gpu_moves(gpu, gpu) is None


def test_what_the_gpu_kernels_are_told(monkeypatch):
    """The rows' order by the layout's definition, and the result in the tensor and dtype that was asked for."""
    told = []

    class Kernels:
        takes = True

        def takes_weights(self, source, target):
            return self.takes

        def move_weights(self, source, target, order, *, packing):
            told.append((source.data_ptr(), target.data_ptr(), order.tolist(), packing))

    kernels = Kernels()
    monkeypatch.setattr(_bytes, "gpu_moves", lambda source, target: kernels)
    raw = torch.randint(0, 256, (2, 64, 64), dtype=torch.uint8)
    out = torch.zeros_like(raw)
    gate_up = [
        row + 32 * half + 16 * tile for tile in (0, 1) for half in (0, 1) for row in range(16)
    ]
    assert layouts.GU_INTERLEAVED.pack(raw, out=out) is out
    assert told.pop() == (raw.data_ptr(), out.data_ptr(), gate_up, True)
    alternating = [2 * (row % 32) + row // 32 for row in gate_up]
    assert layouts.GU_INTERLEAVED.unpack(out, out=raw, gate_up_interleaved=True) is raw
    assert told.pop() == (out.data_ptr(), raw.data_ptr(), alternating, False)
    assert layouts.SEPARATED.pack(raw).shape == raw.shape
    assert told.pop()[2:] == (list(range(64)), True)
    kernels.takes = False
    packed = layouts.SEPARATED.pack(raw)
    assert not told and torch.equal(layouts.SEPARATED.unpack(packed), raw)


def resident(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", ALL)
def test_in_place_needs_at_most_two_experts(name):
    """field W3: upstream permutes the whole tensor at once. Eight experts of 8 MiB here."""
    raw = torch.zeros(8, 2048, 4096, dtype=torch.uint8)
    layout = layouts.weight_layout(name)
    layout.pack(raw[:2], out=raw[:2])  # thread pools and code pages are not the point
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    layout.pack(raw, out=raw)
    assert resident("VmHWM") - before <= 2 * raw[0].numel() + (2 << 20)


def test_dtype_is_kept():
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no float4_e2m1fn_x2")
    raw = torch.randint(0, 256, (1, 32, 64), dtype=torch.uint8)
    packed = layouts.SEPARATED.pack(raw.view(torch.float4_e2m1fn_x2))
    assert packed.dtype == torch.float4_e2m1fn_x2
    assert torch.equal(packed.view(torch.uint8), layouts.SEPARATED.pack(raw))


# Each error that AITER raises for a weight (golden/manifest.json), with our layout and a fragment.
OPAQUE = {
    "shuffle_weight rows%16": ("separated", (1, 24, 64), {}, "24 rows"),
    "shuffle_weight Kbytes%32": ("separated", (1, 16, 48), {}, "48 bytes"),
    "shuffle_weight_a16w4 gu0 rows%16": (
        "separated",
        (1, 24, 64),
        {"a16w4_form": True},
        "24 rows",
    ),
    "shuffle_weight_a16w4 gu0 Kbytes%64 (=32)": (
        "separated",
        (1, 32, 32),
        {"a16w4_form": True},
        "32 bytes",
    ),
    "shuffle_weight_a16w4 gu1 rows=48 (inter 24)": (
        "gu_interleaved",
        (1, 48, 64),
        {},
        "48 rows",
    ),
    "shuffle_weight_a16w4 2D input": ("gu_interleaved", (32, 64), {}, "2 dimensions"),
}


# The size to pad to, by hand: the next multiple of 16 rows (32 for both halves), of 32 or 64 bytes.
FIXES = {
    "shuffle_weight rows%16": "to 32 rows",
    "shuffle_weight Kbytes%32": "from 96 to 128",
    "shuffle_weight_a16w4 gu0 rows%16": "to 32 rows",
    "shuffle_weight_a16w4 gu0 Kbytes%64 (=32)": "from 64 to 128",
    "shuffle_weight_a16w4 gu1 rows=48 (inter 24)": "to 64 rows",
    "shuffle_weight_a16w4 2D input": "",
}


def test_opaque_errors_are_the_manifests():
    with open(GOLDEN / "manifest.json") as file:
        listed = {e["call"] for e in json.load(file)["errors"] if e["raises"]}
    # pad_k_to is an argument that our layouts do not have: K is padded when the layer is created.
    ours = set(OPAQUE) | {"shuffle_weight pad_k_to + guinterleave"}
    assert {call for call in listed if call.startswith("shuffle_weight")} == ours


@pytest.mark.parametrize("call", OPAQUE)
def test_opaque_errors_are_clear(call):
    name, shape, options, fragment = OPAQUE[call]
    layout = layouts.weight_layout(name)
    with pytest.raises(ContractError, match="w13") as caught:
        layout.check(shape, what="w13", **options)
    assert fragment in str(caught.value)
    assert FIXES[call] in caught.value.fix
    if not options:
        with pytest.raises(ContractError):
            layout.pack(torch.zeros(shape, dtype=torch.uint8))


def test_gptoss_unpadded():
    """docs/contract.md section a.2: K = 2880 fits the separated form and not the interleaved one."""
    layouts.SEPARATED.check((32, 5760, 1440))
    with pytest.raises(ContractError, match="1440 bytes"):
        layouts.GU_INTERLEAVED.check((32, 5760, 1440))
    layouts.GU_INTERLEAVED.check((32, 6144, 1536))


@pytest.mark.parametrize(
    "bad, fragment",
    [
        (torch.zeros(1, 16, 32), "float32"),
        (np.zeros((1, 16, 32), np.uint8), "ndarray"),
        (torch.zeros(0, 16, 32, dtype=torch.uint8), "empty"),
    ],
)
def test_bad_input(bad, fragment):
    with pytest.raises(ContractError, match=fragment):
        layouts.SEPARATED.pack(bad, what="w2")


def test_bad_out():
    raw = torch.zeros(1, 16, 64, dtype=torch.uint8)
    with pytest.raises(ContractError, match="shape"):
        layouts.SEPARATED.pack(raw, out=torch.zeros(1, 16, 32, dtype=torch.uint8))
    with pytest.raises(ContractError, match="contiguous"):
        layouts.SEPARATED.pack(raw, out=torch.zeros(1, 64, 16, dtype=torch.uint8).mT)


@pytest.mark.parametrize(
    "shape, fragment",
    [
        ((15, 32), "15 rows"),
        ((2, 15, 32), "15 rows"),
        ((16, 31), "31 bytes"),
        ((16, 0), "empty"),
        ((16,), r"shape \(1, 16\)"),
    ],
)
def test_an_index_map_is_of_sizes_that_can_be_packed(shape, fragment):
    with pytest.raises(ContractError, match=fragment):
        layouts.SEPARATED.index_map(shape)


def test_unknown_name():
    with pytest.raises(ContractError, match="'interleaved'"):
        layouts.weight_layout("interleaved")


def test_interleaved_rows_that_do_not_fill_tiles():
    raw = torch.zeros(1, 48, 64, dtype=torch.uint8)
    layouts.SEPARATED.pack(raw)
    with pytest.raises(ContractError, match="48 rows that alternate"):
        layouts.SEPARATED.pack(raw, gate_up_interleaved=True)
    assert layouts.SEPARATED.packed_shape((2, 48, 64)) == (2, 48, 64)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
