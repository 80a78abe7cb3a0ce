"""On a GPU: every case of the portable form, and every Hopper form, against the oracle; guard bytes, repeatability,
graphs."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from sglang_aiter_moe.testing.registration import register_cuda_ci
from sglang_aiter_moe.testing.triton_cases import CASES, Case, run_case

register_cuda_ci(est_time=500, stage="base-a", runner_config="1-gpu-small")

pytest.importorskip("triton")

from sglang_aiter_moe.testing.hopper_cases import (  # noqa: E402
    FEW_TOKENS,
    FORMS,
    FP8_SUMS,
    LIMIT,
    ROUNDED_ELSEWHERE,
    ROUNDS_ELSEWHERE,
    SHAPES,
    layers,
    modes,
    takes,
)
from sglang_aiter_moe.testing.hostile import TOGETHER  # noqa: E402

LAYERS = layers()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def check(case: Case, row: dict, least: float = 0.0, fp8: bool = False) -> None:
    """``fp8``: of a form that adds fp8 products, for which ties count; it is allowed ``least`` in any case."""
    assert row["finite"] and row["guards"] and row["same_bits"], row
    assert row["rel_err"] < max(LIMIT[case.mode] + fp8 * row["ties"], least), row


@pytest.mark.parametrize("name", CASES)
def test_portable_form(name):
    from sglang_aiter_moe.portable.triton.launch import run_portable

    case = dataclasses.replace(CASES[name], twice=True)
    check(case, run_case(case, "cuda", torch.seed() % 1000003, run_portable))


@hopper
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("mode", ["A16W4", "A8W4", "A4W4"])
def test_hopper_forms(mode, name, case):
    runner, config = FORMS[name]
    if mode not in modes(name):
        pytest.skip(f"this form does not compute {mode}")
    if not takes(name, case):
        pytest.skip("this form takes no mask, or fewer experts a token")
    case = dataclasses.replace(case, mode=mode)
    row = run_case(case, "cuda", torch.seed() % 1000003, lambda r, *o: runner(r, *o, config))
    least = ROUNDED_ELSEWHERE if name.startswith(ROUNDS_ELSEWHERE) else 0.0
    check(case, row, least, fp8=name.startswith(FP8_SUMS))


@hopper
@pytest.mark.parametrize("spoil", [*TOGETHER, "bias13_inf"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("mode", ["A16W4", "A8W4", "A4W4"])
def test_hopper_forms_of_hostile_values(mode, name, spoil):
    """NaN, Inf, 0 and 255 in tokens, scales, biases and paddings."""
    form, case = LAYERS.get(f"{name}/{mode}/hostile-{spoil}", (None, None))
    if form is None:
        pytest.skip(f"this form does not compute {mode}, or not this")
    if (mode, spoil) == ("A4W4", "bias13_inf"):
        pytest.skip("the oracle saturates Inf in E2M1, under a scale of its own")
    runner, config = FORMS[name]
    row = run_case(case, "cuda", torch.seed() % 1000003, lambda r, *o: runner(r, *o, config))
    least = ROUNDED_ELSEWHERE if name.startswith(ROUNDS_ELSEWHERE) else 0.0
    check(case, row, least, fp8=name.startswith(FP8_SUMS))


@hopper
@pytest.mark.parametrize("case", FEW_TOKENS, ids=lambda c: c.name)
@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("whole")])
def test_whole_layer_of_many_slots_or_steps(name, case):
    if not takes(name, case):
        pytest.skip("up to four experts a token")
    runner, config = FORMS[name]
    case = dataclasses.replace(case, twice=True)
    row = run_case(case, "cuda", torch.seed() % 1000003, lambda r, *o: runner(r, *o, config))
    check(case, row)


def whole_call() -> tuple:
    """A small one-launch layer: eight programs, so that two launches fit the GPU at once."""
    case = Case("meeting", hidden=512, inter=64, experts=9, topk=2, tokens=1)
    calls = []
    runner, config = FORMS["whole"]
    run_case(case, "cuda", 3, lambda r, *o: (calls.append((r, o)), runner(r, *o, config)))
    (r, operands), *_ = calls
    return (lambda: runner(r, *operands, config)), operands[-1], operands[-1].clone()


@hopper
@pytest.mark.parametrize("start", [2**31 - 1024, -(2**31), -1024])
def test_programs_meet_where_their_counter_wraps(start):
    from sglang_aiter_moe.portable.triton import workspace

    call, out, expected = whole_call()
    counter = workspace.state(out.device, 1, "meeting")
    counter.fill_(start)
    for n in range(1, 4):
        out.fill_(float("nan"))
        call()
        assert torch.equal(out, expected)
        assert (counter.item() - start - 1024 * n) % 2**32 == 0


@hopper
def test_two_graphs_at_once_leave_a_meeting_that_works():
    """They share scratch memory and the counter, so their results mean nothing. Nobody waits for ever, and what follows
    is right."""
    call, out, expected = whole_call()
    capture = torch.cuda.Stream()
    capture.wait_stream(torch.cuda.current_stream())
    graphs = []
    with torch.cuda.stream(capture):
        call()
        for _ in range(2):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=capture):
                for _ in range(50):
                    call()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    from sglang_aiter_moe.portable.triton import workspace

    for graph in graphs:
        out.fill_(float("nan"))
        with torch.cuda.stream(capture):
            workspace.poison(out.device)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@hopper
def test_a_capture_on_a_stream_that_never_ran_the_layer():
    """Its counters are zeros that were there: an eager call there before the first replay finds them so."""
    call, out, expected = whole_call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    for run in (lambda: call(), graph.replay):
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@hopper
@pytest.mark.parametrize(
    "config", [{}, {"halves": True}, {"halves": True, "narrow": True}], ids=lambda c: "-".join(c)
)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("layout", ["separated", "gu_interleaved"])
def test_whole_layer_replayed_a_thousand_times(layout, tokens, config):
    """The programs of the one-launch form wait for each other: each replay, with other ids and tokens, gives the bits
    of an eager call of that form, and the output is poisoned in between."""
    from sglang_aiter_moe.portable.triton import workspace
    from sglang_aiter_moe.portable.triton.hopper.whole_launch import WholeConfig, run_whole

    case = Case(
        "replay",
        w13=layout,
        w13_scale=layout,
        hidden=512,
        inter=384,
        experts=20,
        topk=4 if "narrow" in config else 8,
        tokens=tokens,
    )
    calls, config = [], WholeConfig(**config)
    run_case(case, "cuda", 3, lambda r, *o: (calls.append((r, o)), run_whole(r, *o, config)))
    r, operands = calls[0]
    x, ids, out = operands[0], operands[6], operands[-1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    g = torch.Generator(device="cuda").manual_seed(torch.seed() % 1000003)
    with torch.cuda.stream(stream):
        run_whole(r, *operands, config)
        with torch.cuda.graph(graph, stream=stream):
            run_whole(r, *operands, config)
            run_whole(r, *operands, config)
        for _ in range(1000):
            x.normal_(generator=g)
            ids.random_(-1, case.experts, generator=g)  # some of a token's alike, some slots empty
            out.fill_(float("nan"))
            run_whole(r, *operands, config)
            expected = out.clone()
            out.fill_(float("nan"))
            workspace.poison(
                x.device
            )  # or a replay that waits for nobody would read what the eager call left
            graph.replay()
            assert torch.equal(out, expected) and not expected.isnan().any()


@hopper
@pytest.mark.parametrize("tokens", [7, 20, 40, 90, 120, 158, 200, 333])
@pytest.mark.parametrize("tiles", [0, 1])
def test_prefill_block_sizes(tiles, tokens):
    """Every choice of columns, and experts that need two blocks of different sizes."""
    from sglang_aiter_moe.portable.triton.hopper.prefill_launch import PrefillConfig, run_prefill

    case = Case("sizes", routing="one", tokens=tokens, hidden=256, inter=128, twice=True)
    config = PrefillConfig(160, tiles=tiles)
    check(
        case,
        run_case(case, "cuda", torch.seed() % 1000003, lambda r, *o: run_prefill(r, *o, config)),
    )


@hopper
@pytest.mark.parametrize("tokens", [7, 40, 90, 120, 158, 200])
def test_mx_prefill_block_sizes(tokens):
    from sglang_aiter_moe.portable.triton.hopper.mx_prefill_launch import (
        MxPrefillConfig,
        run_mx_prefill,
    )

    case = Case("sizes", "A8W4", routing="one", tokens=tokens, hidden=256, inter=128, twice=True)
    config = MxPrefillConfig(160)
    row = run_case(
        case, "cuda", torch.seed() % 1000003, lambda r, *o: run_mx_prefill(r, *o, config)
    )
    check(case, row, ROUNDED_ELSEWHERE, fp8=True)


@hopper
@pytest.mark.parametrize("tokens", [7, 32, 40, 48, 49, 90, 200])
@pytest.mark.parametrize("mode", ["A8W4", "A4W4"])
def test_wide_block_sizes(mode, tokens):
    """Blocks that are full, half full and one too small, at widths at which a slot's quads are not all there."""
    from sglang_aiter_moe.portable.triton.hopper.fp8_launch import Ring
    from sglang_aiter_moe.portable.triton.hopper.wide_launch import WideConfig, run_wide

    case = Case("sizes", mode, routing="one", tokens=tokens, hidden=672, inter=416, twice=True)
    config = WideConfig(32, 16, Ring(8, 16, 2, 1), Ring(8, 16, 2, 1))
    row = run_case(case, "cuda", torch.seed() % 1000003, lambda r, *o: run_wide(r, *o, config))
    check(case, row, ROUNDED_ELSEWHERE, fp8=True)


@hopper
@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize("tokens", [7, 40, 90, 120, 158, 200])
@pytest.mark.parametrize("kept", [False, True])
def test_shared_prefill_block_sizes(kept, tokens, groups):
    """``kept``: three row tiles of stage 2 take a block's tokens in turn. Tiles of 192 and 256 rows: 384 and 128 are no
    multiples."""
    from sglang_aiter_moe.portable.triton.hopper.shared_prefill_launch import (
        Rings,
        SharedPrefillConfig,
        run_shared_prefill,
    )

    case = Case("sizes", "A8W4", routing="one", tokens=tokens, hidden=384, inter=128, twice=True)
    one, two = Rings(3, 3, steps=2), Rings()
    if groups > 2:
        one = Rings(3, 3, 2, 56 if groups == 3 else 64, 2, groups)
        two = dataclasses.replace(one, tokens=4, steps=4, looped=True)
    most = {2: 160, 3: 96, 4: 48}[groups]
    config = SharedPrefillConfig(most, one, two, tiles=3 if kept else 1, kept=kept)
    row = run_case(
        case, "cuda", torch.seed() % 1000003, lambda r, *o: run_shared_prefill(r, *o, config)
    )
    check(case, row, ROUNDED_ELSEWHERE, fp8=True)


@hopper
@pytest.mark.parametrize(
    "name",
    [
        "A16W4-separated-situv2",
        "A8W4-gui-situv2",
        "A4W4-roundup-bf16",
        "A16W4-mask",
        "A16W4-one-expert",
    ],
)
def test_dispatch(name):
    check(CASES[name], run_case(CASES[name], "cuda", 5))


def test_a_mask_with_too_many_experts_is_refused_and_its_later_content_too():
    from sglang_aiter_moe.errors import ContractError

    mask = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32, device="cuda")

    def runner(r, *operands):
        from sglang_aiter_moe.portable import triton as backend

        backend.run(dataclasses.replace(r, expert_mask=mask), *operands)

    run_case(CASES["A16W4-mask"], "cuda", 3, runner)
    mask[0] = 1
    with pytest.raises(ContractError, match="names 4 local experts"):
        run_case(CASES["A16W4-mask"], "cuda", 3, runner)


def test_graph_replay_allocates_nothing():
    from sglang_aiter_moe.portable import triton as backend

    case = dataclasses.replace(CASES["A16W4-separated-situv2"], tokens=6)
    calls = []
    run_case(case, "cuda", 3, lambda r, *o: (calls.append((r, o)), backend.run(r, *o)))
    r, operands = calls[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        backend.run(r, *operands)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        backend.run(r, *operands)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            backend.run(r, *operands)
    expected = operands[-1].clone()
    operands[-1].fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(operands[-1], expected)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
