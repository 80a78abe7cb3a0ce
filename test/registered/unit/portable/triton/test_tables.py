"""The tile tables: every arch and mode has a choice for every size, and bounds ascend."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources, PTXASError  # noqa: E402

from sglang_aiter_moe.portable.triton import table  # noqa: E402
from sglang_aiter_moe.portable.triton.hopper import whole_launch  # noqa: E402
from sglang_aiter_moe.portable.triton.hopper import (  # noqa: E402
    fp8_launch,
    prefill_launch,
    shared_prefill_launch,
)
from sglang_aiter_moe.portable.triton.hopper import table as hopper_table  # noqa: E402
from sglang_aiter_moe.portable.triton.hopper.table import wide_launch  # noqa: E402
from sglang_aiter_moe.portable.triton.launch import dispatch  # noqa: E402

MODES = ("A16W4", "A8W4", "A4W4")


@pytest.mark.parametrize("arch", ["cpu", "gfx942", "gfx950", "gfx1250", "sm80", "sm90", "sm100"])
@pytest.mark.parametrize("mode", MODES)
def test_every_arch_has_a_choice(arch, mode):
    bounds = [bound for bound, _ in table.load(arch)[mode]]
    assert bounds == sorted(bounds) and bounds[-1] == math.inf
    for rows in (0.01, 1, 20, 50, 1e6):
        config = table.choose(arch, mode, rows)
        assert config.m in (16, 32, 64, 128)
        for tile in (config.stage1, config.stage2):
            assert tile.n % 32 == 0 and tile.k % 32 == 0


def test_hopper_bounds_ascend_and_cover_each_mode():
    table_of = hopper_table.load()
    assert set(table_of) == {f"{mode} {size}" for mode in MODES for size in ("short", "long")}
    for group, rows in table_of.items():
        bounds = [bound for bound, _, _ in rows]
        if bounds[-2] == math.inf:  # the last one is for bytes that the one before cannot reach
            first, last = (
                hopper_table.ALIGNMENT.get(form, hopper_table.WORDS) for _, form, _ in rows[-2:]
            )
            assert first > last
        assert bounds == sorted(bounds) and bounds[-1] == math.inf, group
        for (bound, form, config), (next_bound, next_form, other) in itertools.pairwise(rows):
            # What takes a row's place where that cannot run has its bound, and is something else.
            assert bound < next_bound or form != next_form or config.most_tokens < other.most_tokens


def test_prefill_leaves_out_the_sizes_that_do_not_build():
    """A loop of a single step of 128 columns crashes Triton 3.6's compiler; such a layer takes the portable form."""
    request = KernelRequest(
        mode="A4W4", family="test", num_experts=4, hidden_size=128, intermediate_size=64, activation="silu",
        w13_layout="separated", w13_scale_layout="separated", w2_layout="separated", w2_scale_layout="separated",
        requantization="epilogue",
    )  # fmt: skip
    scales = torch.zeros(4 * 256 * 8, dtype=torch.uint8)
    assert hopper_table.choose(request, 5, 2, *[scales] * 4) is None
    wide = replace(request, hidden_size=160)
    assert hopper_table.choose(wide, 5, 2, *[scales] * 4)[0] is prefill_launch.run_prefill


def _layer(hidden: int, inter: int) -> KernelRequest:
    return KernelRequest(
        mode="A16W4", family="test", num_experts=2, hidden_size=hidden, intermediate_size=inter, activation="silu",
        w13_layout="separated", w13_scale_layout="separated", w2_layout="separated", w2_scale_layout="separated",
    )  # fmt: skip


def _scales(data: torch.Tensor) -> torch.Tensor:
    """As many bytes as any layer's scales have, all of them the first one of ``data``."""
    return data[:1].expand(1 << 28)


@pytest.mark.parametrize("hidden, inter", [(10240, 256), (10272, 256), (256, 10272)])
def test_fp8_takes_only_what_fits_an_sm(hidden, inter):
    scales = torch.zeros(2 * 2 * max(hidden, 512) * max(inter, 512) // 32, dtype=torch.uint8)
    fits = max(hidden, inter) <= fp8_launch.MOST_COLUMNS
    assert fp8_launch.supports(_layer(hidden, inter), scales, scales) == fits


@pytest.mark.parametrize("mode, parts", [("A16W4", 2), ("A8W4", 1)])
@pytest.mark.parametrize("size, hidden, inter", [("short", 3584, 384), ("long", 2880, 2880)])
def test_rings_of_the_table_fit(mode, parts, size, hidden, inter):
    """All programs of an SM beside each other for the layers they were chosen for, one for the widest allowed."""
    for _, form, config in hopper_table.load()[f"{mode} {size}"]:
        if form == "fp8":
            for ring, columns in ((config.one, hidden), (config.two, inter)):
                assert ring.w * ring.sb >= 64
                padded = -(-columns // 512) * 512
                assert ring.programs * (ring.shared(padded, config.n, parts) + 1024) <= 228 << 10
                assert ring.shared(fp8_launch.MOST_COLUMNS, config.n, parts) <= 227 << 10


@pytest.mark.parametrize("mode", ["A8W4", "A4W4"])
@pytest.mark.parametrize("size, inter", [("short", 512), ("long", 2880)])
def test_rings_of_shared_prefill_fit(mode, size, inter):
    """Beside 2 KB a program; and registers: what the other roles' warps give back is what consumers take more."""
    found = [c for _, form, c in hopper_table.load()[f"{mode} {size}"] if form == "shared_prefill"]
    assert found
    for config in found:
        assert not config.kept or -(-inter // 128) <= config.two.tokens
        for ring in (config.one, config.two):
            assert ring.tokens >= 3 and ring.words >= 2
            assert ring.shared(config.n) + 2048 <= 227 << 10
            others = (ring.warp_groups - ring.groups) * ring.loader_regs
            mine = ring.groups * ring.consumer_regs
            assert mine + others <= ring.maxnreg * ring.warp_groups
            assert ring.maxnreg * ring.warp_groups * 128 <= 65536 and ring.warp_groups <= 8
            assert ring.consumer_regs >= ring.maxnreg


@pytest.mark.parametrize("mode", ["A8W4", "A4W4"])
@pytest.mark.parametrize("size, hidden, inter", [("short", 3584, 384), ("long", 2880, 2880)])
def test_wide_rows_fit_and_are_left_out_where_they_do_not(monkeypatch, mode, size, hidden, inter):
    found = [c for _, form, c in hopper_table.load()[f"{mode} {size}"] if form == "wide"]
    assert found and all(c.one.sb == c.two.sb == 16 and (c.n1 + c.n2) % 8 == 0 for c in found)
    monkeypatch.setattr(wide_launch, "OVERLAPS", wide_launch.OVERLAPS.__class__(True))
    assert all(c.fits(_layer(hidden, inter), 4) for c in found)
    assert not any(c.fits(_layer(7168, 384), 4) or c.fits(_layer(2880, 7168), 4) for c in found)
    monkeypatch.setattr(wide_launch, "OVERLAPS", wide_launch.OVERLAPS.__class__(False))
    assert [c.fits(_layer(hidden, inter), 4) for c in found] == [c.n2 == 0 for c in found]


@pytest.mark.parametrize("columns, form", [(2880, "wide"), (7168, "prefill")])
def test_wide_is_chosen_only_where_its_tokens_fit(columns, form):
    layer = replace(_layer(columns, 1024), mode="A8W4", requantization="epilogue", num_experts=128)
    data = torch.zeros((1 << 20) + 16, dtype=torch.uint8)
    data = data[-data.data_ptr() % 16 :]
    runner, _ = hopper_table.choose(layer, 512, 4, data, data, _scales(data), _scales(data))
    assert runner is hopper_table.FORMS[form][2]


@pytest.mark.parametrize(
    "runner",
    [fp8_launch.run_fp8, shared_prefill_launch.run_shared_prefill, wide_launch.run_wide],
)
@pytest.mark.parametrize("which", range(4))
def test_bytes_that_bulk_copies_cannot_read_are_refused(which, runner):
    odd = torch.zeros(1 << 16, dtype=torch.uint8)
    weights = [odd[16 - odd.data_ptr() % 16 :] for _ in range(4)]
    weights[which] = weights[which][4:]
    names = ("w1", "w2", "w1_scale", "w2_scale")
    with pytest.raises(ContractError, match=f"{names[which]} begins at address"):
        runner(_layer(256, 64), torch.zeros(1, 256), *weights, None, torch.zeros(1, 2), None, None)


@pytest.mark.parametrize("tokens, mode, form, by_4, by_1", [
    (1, "A16W4", "whole", "prefill", "prefill"),
    (64, "A16W4", "fp8", "prefill", "prefill"),
    (64, "A8W4", "fp8", "prefill", "prefill"),
    (512, "A8W4", "wide", "prefill", "prefill"),
    (1024, "A8W4", "wide" if wide_launch.OVERLAPS else "mx_prefill", "mx_prefill", "prefill"),
    (16384, "A8W4", "shared_prefill", "mx_prefill", None),
])  # fmt: skip
@pytest.mark.parametrize("which", range(4))
def test_a_form_that_cannot_reach_the_bytes_is_left_out(
    monkeypatch, caplog, which, tokens, mode, form, by_4, by_1
):
    """Bulk copies need multiples of 16, words of weights (in fp8 prefill of scales, too) multiples of 4, and the scales
    of the bf16 forms nothing. ``by_1``: what takes scales that begin anywhere."""
    monkeypatch.setattr(hopper_table, "fragments_stay_in_registers", lambda: False)
    hopper_table._say_unaligned.cache_clear()
    layer = replace(_layer(2880, 1024), mode=mode, num_experts=128)
    layer = replace(layer, requantization="none" if mode == "A16W4" else "epilogue")
    operands = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(4)]
    operands = [t[-t.data_ptr() % 16 :] for t in operands]

    def chosen(moved: int) -> str | None:
        begins = [moved if i == which else 0 for i in range(4)]
        moved_one = [_scales(t[b:]) for t, b in zip(operands, begins, strict=True)]
        found = hopper_table.choose(layer, tokens, 4, *moved_one)
        return next(n for n, f in hopper_table.FORMS.items() if f[2] is found[0]) if found else None

    assert chosen(0) == form and not caplog.text
    assert chosen(4) == by_4
    assert chosen(1) == chosen(1) == (by_1 if which >= 2 else None)
    assert caplog.text.count(f"form {form} cannot read") == 1
    hopper_table._say_unaligned.cache_clear()


@pytest.mark.parametrize(
    "problem", [PTXASError("`ptxas` failed\nlog"), OutOfResources(300, 227, "shared memory")]
)
def test_a_form_that_cannot_be_built_is_left_out_from_then_on(monkeypatch, caplog, problem):
    """Run with runners that stand in for a compiler that fails: the row's, then the next one's that works."""
    layer = replace(_layer(3584, 384), mode="A8W4", requantization="epilogue")
    weights = [torch.zeros((1 << 20) + 16, dtype=torch.uint8) for _ in range(4)]
    weights = [t[-t.data_ptr() % 16 :] for t in weights]
    tokens = 4096
    rows = hopper_table.load()["A8W4 short"]
    first, second = [form for bound, form, _ in rows if bound >= tokens * 16][:2]
    assert first == second == "shared_prefill"
    tried = []

    def run_shared_prefill(r, x, *operands):
        tried.append((r.hidden_size, operands[-1].n))
        if (r.hidden_size, operands[-1].n) == (3584, 96):
            raise problem
        operands[-2].fill_(1.0)

    forms = (*hopper_table.FORMS[first][:2], run_shared_prefill)
    monkeypatch.setitem(hopper_table.FORMS, first, forms)
    monkeypatch.setattr(hopper_table, "_unbuilt", set())

    def call(r) -> torch.Tensor:
        out = torch.zeros(tokens, 8)
        ids = torch.zeros(tokens, 16, dtype=torch.int32)
        dispatch(r, torch.zeros(tokens, 8), *weights, None, ids, out, arch="sm90")
        return out

    assert call(layer).all() and tried == [(3584, 96), (3584, 160)]
    assert call(layer).all() and tried[2:] == [(3584, 160)]
    reason = str(problem).split("\n")[0]
    assert (
        caplog.text.count("no Hopper kernel for H 3584, I 384, A8W4") == 1 and reason in caplog.text
    )
    assert "log" not in caplog.text.split(reason)[1].split("Another form")[0]
    # Another layer has code of its own.
    assert call(replace(layer, hidden_size=4096)).all() and tried[3:] == [(4096, 96)]


@pytest.mark.parametrize(
    "hidden, inter, topk", [(3584, 384, 16), (2880, 2880, 4), (7168, 256, 8), (1024, 2560, 4)]
)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_the_whole_layers_ring_fits_an_sm(hidden, inter, topk, apart, narrow):
    """Words, scales and barriers of the slots beside a token's columns, or the activations of all its slots."""
    slots = whole_launch.fitting_slots(hidden, inter, topk, apart, narrow)
    assert slots >= whole_launch.LEAST_SLOTS
    columns = 1024 * 2 ** math.ceil(math.log2(hidden / 128))
    chunks = math.ceil(inter / 1024) * 2 if narrow else math.ceil(inter / 512)
    wide = 2 ** math.ceil(
        math.log2(chunks)
    )  # what is kept in registers while it is converted is a power of two
    activations = topk * 2 * 512 * (wide if topk * wide <= 32 else chunks)
    ring = slots * (128 * 256 + 128 * (32 if apart or narrow else 16) + 16)
    assert max(columns, activations) + ring <= 227 << 10


def test_the_whole_layer_leaves_masks_and_wide_layers_to_others():
    """With a mask most slots have no expert; a row of 20480 columns leaves no room for a ring."""
    scales = torch.zeros(2 * 2 * 20480 * 640, dtype=torch.uint8)
    narrow = _layer(256, 64)
    assert whole_launch.supports(narrow, scales, scales)
    for refused in (
        replace(narrow, expert_mask=torch.ones(2, dtype=torch.int32)),
        replace(narrow, num_local_tokens=torch.ones(1, dtype=torch.int32)),
        replace(narrow, mode="A8W4", requantization="epilogue"),
        _layer(20480, 256),
    ):
        assert not whole_launch.supports(refused, scales, scales)
        chosen = hopper_table.choose(refused, 1, 2, *[scales] * 4)
        assert chosen is None or chosen[0] is not whole_launch.run_whole
    for taken in (narrow, _layer(2880, 2880)):
        assert hopper_table.choose(taken, 1, 2, *[scales] * 4)[0] is whole_launch.run_whole


def test_the_whole_layer_takes_four_tokens_at_most():
    """More were not timed, whatever the pairs: top-4 has as many with 4 tokens as top-16 with 1. A single token of
    up to 22 pairs is faster without halves (K3), in a long layer with them (gpt-oss)."""
    scales = torch.zeros(2 * 2 * 2880 * 96, dtype=torch.uint8)
    for hidden, inter, topk, plain in (3584, 384, 16, 1), (2880, 384, 4, 1), (2880, 2880, 4, 0):
        layer = _layer(hidden, inter)
        chosen = [hopper_table.choose(layer, n, topk, *[scales] * 4) for n in range(1, 12)]
        took = [config.halves for run, config in chosen if run is whole_launch.run_whole]
        assert took == [False] * plain + [True] * (4 - plain)


@pytest.mark.parametrize(
    "inter, topk, tokens", [(2880, 4, (2, 3)), (1536, 4, ()), (2880, 5, ()), (384, 4, ())]
)
def test_tiles_of_16_rows_where_they_were_faster(inter, topk, tokens):
    """Two and three tokens of gpt-oss. Not where a half of K ends within a slot, and of up to four experts a token."""
    layer, scales = _layer(2880, inter), torch.zeros(2 * 2 * 2880 * 96, dtype=torch.uint8)
    chosen = [hopper_table.choose(layer, n, topk, *[scales] * 4) for n in range(1, 5)]
    assert all(run is whole_launch.run_whole for run, _ in chosen)
    assert tuple(n for n, (_, config) in enumerate(chosen, 1) if config.narrow) == tokens


@pytest.mark.parametrize(
    "hidden, inter, topk, columns",
    [
        (3584, 384, 16, {1: None, 2: 8, 32: 8, 128: 8, 256: 8, 512: 16}),
        (2880, 2880, 4, {1: None, 2: None, 4: 8, 64: 8, 128: 8, 256: 16}),
    ],
)
def test_one_scale_a_row_where_it_was_faster(hidden, inter, topk, columns):
    layer = replace(_layer(hidden, inter), mode="A8W4", requantization="epilogue")
    scales = torch.zeros(2 * 2 * max(hidden * 96, inter * 112), dtype=torch.uint8)
    for tokens, n in columns.items():
        runner, config = hopper_table.choose(layer, tokens, topk, *[scales] * 4)
        assert runner is fp8_launch.run_fp8
        assert (config.n if config.by_row else None) == n


@pytest.mark.parametrize(
    "hidden, inter, topk, tokens", [(4096, 6144, 10, 1), (3584, 8192, 16, 1), (2880, 4640, 9, 2)]
)
def test_more_experts_a_token_than_fit_one_launch_go_to_others(hidden, inter, topk, tokens):
    layer = replace(_layer(hidden, inter), num_experts=32)
    data = torch.zeros((1 << 20) + 16, dtype=torch.uint8)
    data = data[-data.data_ptr() % 16 :]
    scales = _scales(data)
    found = hopper_table.choose(layer, tokens, topk, data, data, scales, scales)
    assert found is None or found[0] is not whole_launch.run_whole
    few = hopper_table.choose(layer, tokens, 4, data, data, scales, scales)
    assert few[0] is whole_launch.run_whole


@pytest.mark.parametrize("experts, form", [(896, "wide"), (128, "shared_prefill")])
def test_wide_runs_where_an_expert_has_a_block_of_tokens(experts, form):
    """K3's layer at 1024 tokens, and gpt-oss's at TP8 with as many pairs: 128 tokens an expert."""
    layer = replace(_layer(2880, 384), mode="A8W4", requantization="epilogue", num_experts=experts)
    data = torch.zeros((1 << 20) + 16, dtype=torch.uint8)
    data = data[-data.data_ptr() % 16 :]
    runner, _ = hopper_table.choose(layer, 4096, 4, data, data, _scales(data), _scales(data))
    assert runner is hopper_table.FORMS[form][2]


def test_a_wide_ring_of_other_slots_is_refused():
    ring = fp8_launch.Ring(8, 8, 3, 1)
    with pytest.raises(ContractError, match="slots of 8 K blocks"):
        wide_launch.WideConfig(32, 0, ring, ring)


def test_a_wide_ring_with_a_queue_is_refused():
    ring = fp8_launch.Ring(8, 16, 3, 1, tail=4)
    with pytest.raises(ContractError, match="has a queue"):
        wide_launch.WideConfig(32, 0, ring, ring)


@pytest.mark.parametrize("queue", [{"tail": 4, "unit": 0}, {"tail": -1}])
def test_a_queue_that_never_ends_is_refused(queue):
    with pytest.raises(ContractError, match="would never end"):
        fp8_launch.Ring(4, 16, 3, 2, **queue)


@pytest.mark.parametrize("groups", [1, 5])
def test_groups_of_consumers_that_nobody_starts_are_refused(groups):
    with pytest.raises(ContractError, match=f"a ring of {groups} groups"):
        shared_prefill_launch.Rings(groups=groups)


@pytest.mark.parametrize("combine", [32, 96])
def test_a_sum_of_parts_of_lines_is_refused(combine):
    ring = fp8_launch.Ring(4, 16, 3, 2)
    with pytest.raises(ContractError, match="whole lines"):
        fp8_launch.Fp8Config(8, ring, ring, combine=combine)


@pytest.mark.parametrize(
    "config, topk",
    [(whole_launch.WholeConfig(), 256), (whole_launch.WholeConfig(halves=True, narrow=True), 5)],
)
def test_the_whole_layer_refuses_more_experts_a_token_than_fit(config, topk):
    aligned = [torch.zeros(64, dtype=torch.uint8) for _ in range(4)]
    aligned = [t[-t.data_ptr() % 16 :] for t in aligned]
    with pytest.raises(ContractError, match=f"topk_ids names {topk} experts a token of 64 columns"):
        whole_launch.run_whole(
            _layer(256, 64), torch.zeros(1, 256), *aligned, None, torch.zeros(1, topk), None, config
        )  # fmt: skip


@pytest.mark.parametrize("which", range(4))
def test_the_whole_layer_refuses_bytes_that_bulk_copies_cannot_read(which):
    odd = torch.zeros(1 << 16, dtype=torch.uint8)
    weights = [odd[16 - odd.data_ptr() % 16 :] for _ in range(4)]
    weights[which] = weights[which][4:]
    name = ("w1", "w2", "w1_scale", "w2_scale")[which]
    with pytest.raises(ContractError, match=f"{name} begins at address"):
        whole_launch.run_whole(
            _layer(256, 64), torch.zeros(1, 256), *weights, None, torch.zeros(1, 2), None, whole_launch.WholeConfig()
        )  # fmt: skip


def test_prefill_blocks_hold_every_count():
    """Each block size has its choices of columns in ascending order, the last one the whole block."""
    from sglang_aiter_moe.portable.triton.hopper.prefill_blocks import column_choices

    sizes = {
        config.n
        for rows in hopper_table.load().values()
        for _, form, config in rows
        if form.endswith("prefill")
    }
    for size in sizes | {8, 16, 32, 64, 96, 128, 160}:
        sums = [first + second for first, second in column_choices.fn(size)]
        assert sums == sorted(set(sums)) and sums[-1] == size


def test_the_tuner_times_every_row_of_the_table(monkeypatch):
    folder = Path(__file__).parents[5] / "benchmark"
    monkeypatch.syspath_prepend(str(folder))
    tuner = importlib.import_module("tune_kernels")
    for name in ("tune_kernels", "kernels", "moe_layers"):
        sys.modules.pop(name)
    for group, rows in hopper_table.load().items():
        for bound, form, config in rows:
            assert config in tuner.CANDIDATES[group.split()[1]], (group, bound, form)


def test_a_row_survives_the_file():
    for rows in hopper_table.load().values():
        for bound, form, config in rows:
            row = hopper_table.row_json(None if bound == math.inf else int(bound), form, config)
            assert hopper_table.FORMS[row["form"]][0](**row["config"]) == config


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
