"""Loads, stores, atomics and cp.async of the PTX interpreter; what nothing wrote; where accesses may go."""

import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.nvptx.errors import ExecutionError, PtxError
from sglang_aiter_moe.testing.ptx_snippets import module, run_lines, run_module
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

START = """mov.u32 %r0, %tid.x; ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
mad.wide.u32 %rd3, %r0, 16, %rd1; mad.wide.u32 %rd4, %r0, 16, %rd2; mov.b32 %r1, smem; mad.lo.u32 %r2, %r0, 16, %r1;
"""
"""%rd3, %rd4: 16 bytes a thread of input and output; %r2: of shared memory."""


def execute(
    lines: str, *, threads: int = 32, out=None, readable: int | None = None, **options
) -> np.ndarray:
    """Bytes of the output, uint8 [threads, 16], of a kernel given random input bytes."""
    memory = Memory()
    given = np.random.default_rng(1).integers(0, 256, (threads, 16), dtype=np.uint8)
    params = [
        memory.place(given[:readable], "given"),
        memory.place(np.zeros((threads, 16), np.uint8), "out"),
    ]
    options.setdefault("shared_bytes", 8192)
    run_module(module(START + lines + "\nret;", 2, threads=threads), params, memory, **options)
    return given, memory.read(params[1], np.uint8, (threads, 16))


@pytest.mark.parametrize(
    ("width", "count"), [(w, c) for w in (8, 16, 32, 64) for c in (1, 2, 4) if w * c <= 128]
)
@pytest.mark.parametrize("through", ["global", "shared"])
def test_vectors_of_all_widths(width, count, through):
    kind = "rs" if width <= 16 else "r" if width == 32 else "rd"
    listed = ", ".join(f"%{kind}{10 + i}" for i in range(count))
    vector, operand = (f".v{count}", f"{{{listed}}}") if count > 1 else ("", listed)
    lines = f"ld.global{vector}.b{width} {operand}, [%rd3];"
    if through == "shared":
        again = ", ".join(f"%{kind}{20 + i}" for i in range(count))
        target = f"{{{again}}}" if count > 1 else again
        lines += f"st.shared{vector}.b{width} [%r2], {operand}; ld.shared{vector}.b{width} {target}, [%r2];"
        operand = target
    given, out = execute(lines + f"st.global{vector}.b{width} [%rd4], {operand};")
    nbytes = width * count // 8
    assert np.array_equal(out[:, :nbytes], given[:, :nbytes])
    assert not out[:, nbytes:].any()


def test_narrow_loads_extend_and_offsets_count():
    given, out = execute(
        """ld.global.s8 %r10, [%rd3+3]; ld.global.u8 %r11, [%rd3+3]; ld.global.s16 %r12, [%rd3+2]; mov.b32 %r13, 0;
        st.global.v4.b32 [%rd4], {%r10, %r11, %r12, %r13};"""
    )
    words = out.view(np.int32)
    assert np.array_equal(words[:, 0], given[:, 3].view(np.int8))
    assert np.array_equal(words[:, 1], given[:, 3])
    assert np.array_equal(words[:, 2], given[:, 2:4].copy().view(np.int16)[:, 0])


def test_a_guard_keeps_lanes_from_memory():
    given, out = execute(
        """setp.lt.u32 %p1, %r0, 5; mov.b32 %r10, 77; @%p1 ld.global.b32 %r10, [%rd3]; st.global.b32 [%rd4], %r10;""",
        readable=5,
    )
    assert np.array_equal(out[:5, :4], given[:5, :4])
    assert set(out[5:].view(np.uint32)[:, 0].tolist()) == {77}


@pytest.mark.parametrize(
    ("lines", "message", "lane"),
    [
        (
            "add.s64 %rd3, %rd3, 16; ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3];",
            "past the end of given",
            31,
        ),
        ("ld.global.b64 %rd10, [%rd3+4];", "8 bytes at", 0),
        ("st.global.b32 [%rd4+-4], %r0;", "is before|past the end", 0),
        ("st.shared.b32 [%r2+8192], %r0;", "4 bytes of shared memory", 0),
        ("st.shared.b32 [%r2+2], %r0;", "4 bytes of shared memory", 0),
        ("mov.b32 %r9, 16; ld.shared.b32 %r10, [%r9];", "4 bytes of shared memory", 0),
        (
            "ld.param.u64 %rd9, [p0]; st.global.b32 [%rd9], %r40;",
            "%r40 is read, and nothing has written it",
            0,
        ),
    ],
)
def test_where_accesses_may_not_go(lines, message, lane):
    with pytest.raises(ExecutionError, match=message) as error:
        execute(lines)
    assert (error.value.cta, error.value.warp, error.value.lane) == ((0, 0, 0), 0, lane)


def test_global_memory_that_nothing_wrote():
    """Where it is followed it may be loaded and stored, as kernels do with slots that they drop; it stays unwritten."""
    memory = Memory()
    params = [memory.reserve(1024, "scratch"), memory.place(np.zeros(1024, np.uint8), "out")]
    load = START + "ld.global.v2.b32 {%r10, %r11}, [%rd3];"
    with pytest.raises(ExecutionError, match="scratch, which nothing has written"):
        run_module(module(load + "ret;", 2), params, memory)
    text = module(load + "st.global.b32 [%rd4], %r11; st.global.b32 [%rd4+4], 5; ret;", 2)
    run_module(text, params, memory, follow=True)
    written = memory.written(params[1], 512).reshape(32, 16)
    assert not written[:, :4].any()
    assert written[:, 4:].all()
    with pytest.raises(ExecutionError, match="%r11 is read, and nothing has written it"):
        run_module(module(load + "st.shared.b32 [%r11], 5; ret;", 2), params, memory, follow=True)


@pytest.mark.parametrize("priority", ["evict_first", "evict_last"])
def test_policies_change_nothing(priority):
    given, out = execute(
        f"createpolicy.fractional.L2::{priority}.b64 %rd5, 1.0; "
        f"ld.global.L1::{priority}.L2::cache_hint.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd3], %rd5; "
        f"st.global.L1::{priority}.L2::cache_hint.v4.b32 [%rd4], {{%r4, %r5, %r6, %r7}}, %rd5;"
    )
    assert (out == given).all()


DISCARD = "setp.eq.s32 %p1, %r0, 8; @%p1 discard.global.L2 [%rd4], 128;"


def test_a_line_that_is_discarded_counts_as_never_written():
    with pytest.raises(ContractError, match="byte 128 of 512 of out, which nothing has written"):
        execute(DISCARD)  # the second of four lines
    with pytest.raises(ExecutionError, match=r"out.*, which nothing has written") as error:
        execute(DISCARD + "ld.global.b32 %r10, [%rd4];")
    assert error.value.lane == 8
    given, out = execute(
        DISCARD + "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd3]; "
        "st.global.v4.b32 [%rd4], {%r4, %r5, %r6, %r7}; ld.global.b32 %r10, [%rd4];"
    )
    assert (out == given).all()
    with pytest.raises(ExecutionError, match="is discarded") as error:
        execute("setp.eq.s32 %p1, %r0, 9; @%p1 discard.global.L2 [%rd4], 128;")
    assert error.value.lane == 9
    for line in ("discard.global.L2 [%rd4], 64;", "discard.L2 [%rd4], 128;"):
        with pytest.raises(PtxError, match="discard"):
            execute(line)


def test_what_is_unknown_may_be_computed_with_and_not_used():
    """Of lanes 4 and up the register is unknown; a reduction over 4 lanes takes none of them."""
    lines = """setp.lt.u32 %p1, %r0, 4; @%p1 ld.global.b32 %r10, [%rd3]; shfl.sync.bfly.b32 %r11, %r10, 2, 31, -1;
    max.s32 %r12, %r10, %r11; add.s32 %r13, %r12, 1; setp.gt.s32 %p2, %r13, 0; selp.b32 %r14, %r13, 0, %p2;
    """
    given, out = execute(lines + "@%p1 st.global.b32 [%rd4], %r14;")
    first = given.view(np.int32)[:4, 0].astype(np.int64)
    pair = np.maximum(first, first[[2, 3, 0, 1]]) + 1
    assert (
        out.view(np.int32)[:4, 0].tolist() == np.where(pair > 0, pair, 0).astype(np.int32).tolist()
    )
    with pytest.raises(
        ExecutionError, match=r"%r14 is read, .* computed from what nothing has written"
    ) as error:
        execute(lines + "st.global.b32 [%rd4], %r14;")
    assert error.value.lane == 4
    with pytest.raises(ExecutionError, match="%p2 is read"):
        execute(lines + "@%p2 bra L; L: ret;")
    with pytest.raises(ExecutionError, match="%r14 is read"):
        execute(lines + "st.shared.b32 [%r14], %r0;")


def test_what_is_unknown_is_known_byte_by_byte():
    lines = """prmt.b32 %r11, %r0, %r10, 0x5410; mov.b32 {%rs1, %rs2}, %r11; cvt.u32.u16 %r12, %rs1;
    prmt.b32 %r13, %r11, %r0, 0x5410; """
    _, out = execute(lines + "st.global.v2.b32 [%rd4], {%r12, %r13};")
    number = np.arange(32, dtype=np.uint32)
    assert np.array_equal(out.view(np.uint32)[:, 0], number)
    assert np.array_equal(out.view(np.uint32)[:, 1], number | number << 16)
    with pytest.raises(ExecutionError, match="%rs2 is read"):
        execute(lines + "st.global.b16 [%rd4], %rs2;")


def test_unknown_bytes_pass_through_shared_memory():
    lines = "st.shared.b32 [%r2], %r10; st.shared.b16 [%r2], %r0; ld.shared.b32 %r11, [%r2]; "
    _, out = execute(lines + "st.global.b16 [%rd4], %r11;")
    assert np.array_equal(out.view(np.uint16)[:, 0], np.arange(32))
    with pytest.raises(ExecutionError, match="%r11 is read"):
        execute(lines + "st.global.b32 [%rd4], %r11;")


def test_unchecked_runs_do_not_report():
    execute("st.global.b32 [%rd4], %r10;", checked=False)


@pytest.mark.parametrize(
    ("name", "kind", "f"),
    [
        ("add", "u32", lambda a, b: a + b), ("max", "s32", max), ("min", "u32", min), ("or", "b32", lambda a, b: a | b),
        ("xor", "b32", lambda a, b: a ^ b), ("and", "b32", lambda a, b: a & b), ("exch", "b32", lambda a, b: b),
    ],
)  # fmt: skip
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_in_ascending_lanes(name, kind, f, space):
    """Lanes two by two on one word; each gets what was there before it."""
    signed = name == "max"
    where = "%rd5" if space == "global" else "%r5"
    lines = """shr.u32 %r3, %r0, 1; mul.lo.u32 %r4, %r0, 2654435761; mad.lo.u32 %r5, %r3, 16, %r1;
    ld.param.u64 %rd6, [p1]; mad.wide.u32 %rd5, %r3, 16, %rd6; st.shared.b32 [%r5], 7; st.global.b32 [%rd5], 7;
    """
    lines += f"atom.{space}.{name}.{kind} %r10, [{where}], %r4; ld.{space}.b32 %r11, [{where}]; add.s64 %rd7, %rd4, 8;"
    _, out = execute(lines + "st.global.v2.b32 [%rd7], {%r10, %r11};")
    number = (np.arange(32, dtype=np.uint64) * 2654435761 & 0xFFFFFFFF).astype(np.uint32)
    number = (number.view(np.int32) if signed else number).tolist()
    words = out.view(np.int32 if signed else np.uint32)
    for i in range(0, 32, 2):
        first = f(7, number[i]) & (0xFFFFFFFF if not signed else -1)
        second = f(first, number[i + 1]) & (0xFFFFFFFF if not signed else -1)
        assert words[i, 2] == 7
        assert words[i + 1, 2] == first
        assert words[i, 3] == words[i + 1, 3] == second


def test_compare_and_swap_and_red():
    lines = """ld.param.u64 %rd5, [p1]; add.u32 %r4, %r0, 1;
    atom.relaxed.gpu.global.cas.b32 %r10, [%rd5], %r0, %r4;
    red.release.gpu.global.add.u32 [%rd5+4], 2; red.global.add.f32 [%rd5+8], 0f3F000000;"""
    _, out = execute(lines)
    assert out.view(np.uint32)[0, :2].tolist() == [32, 64]
    assert out.view(np.float32)[0, 2] == 16.0


COPY = "cp.async.cg.shared.global [%r2], [%rd3], 16; cp.async.commit_group;"
READ = "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r2]; st.global.v4.b32 [%rd4], {%r10, %r11, %r12, %r13};"


@pytest.mark.parametrize("late", [True, False])
def test_a_copy_lands_with_its_wait(late):
    given, out = execute(COPY + "cp.async.wait_group 0;" + READ, late=late)
    assert np.array_equal(out, given)


@pytest.mark.parametrize("wait", ["", "cp.async.wait_group 1;"])
def test_a_copy_that_is_not_waited_for_is_in_flight(wait):
    with pytest.raises(ExecutionError, match="in flight") as error:
        execute(COPY + wait + READ)
    assert error.value.opcode == "ld.shared.v4.b32"
    execute(COPY + wait + READ, late=False)


def test_a_copy_without_commit_is_not_waited_for():
    lines = "cp.async.cg.shared.global [%r2], [%rd3], 16; cp.async.wait_group 0;"
    with pytest.raises(ExecutionError, match="in flight"):
        execute(lines + READ)
    given, out = execute(lines.replace("wait_group 0", "wait_all") + READ)
    assert np.array_equal(out, given)


def test_groups_land_oldest_first():
    two = COPY + COPY.replace("[%r2]", "[%r2+1024]")
    given, out = execute(two + "cp.async.wait_group 1;" + READ)
    assert np.array_equal(out, given)
    with pytest.raises(ExecutionError, match="in flight"):
        execute(two + "cp.async.wait_group 1;" + READ.replace("[%r2]", "[%r2+1024]"))


def test_a_source_that_is_overwritten_before_the_copy_lands():
    lines = COPY + "st.global.b32 [%rd3], 5; cp.async.wait_group 0;" + READ
    given, out = execute(lines)
    assert set(out.view(np.uint32)[:, 0].tolist()) == {5}
    given, out = execute(lines, late=False)
    assert np.array_equal(out, given)


def test_a_copy_of_fewer_bytes_fills_with_zeros():
    lines = """and.b32 %r9, %r0, 1; mul.lo.u32 %r9, %r9, 16; cp.async.cg.shared.global [%r2], [%rd3], 16, %r9;
    cp.async.ca.shared.global [%r2+1024], [%rd3], 8, 4; cp.async.wait_all;"""
    given, out = execute(lines + READ)
    assert np.array_equal(out[1::2], given[1::2])
    assert not out[::2].any()
    given, out = execute(lines + "ld.shared.b64 %rd10, [%r2+1024]; st.global.b64 [%rd4], %rd10;")
    assert np.array_equal(out[:, :4], given[:, :4])
    assert not out[:, 4:].any()
    # The source of a copy of no bytes is not read.
    execute(
        "mov.b64 %rd3, 64; mov.b32 %r9, 0; cp.async.cg.shared.global [%r2], [%rd3], 16, %r9; cp.async.wait_all;"
        + READ
    )


def test_the_size_of_a_copy_is_the_one_at_its_issue():
    lines = """and.b32 %r9, %r0, 1; mul.lo.u32 %r9, %r9, 16; cp.async.cg.shared.global [%r2], [%rd3], 16, %r9;
    cp.async.commit_group; sub.u32 %r9, 16, %r9; st.global.b32 [%rd4], 7; cp.async.wait_group 0;"""
    given, out = execute(lines + READ)
    assert np.array_equal(out[1::2], given[1::2])
    assert not out[::2].any()


def test_copies_of_lanes_that_do_not_act():
    lines = (
        "setp.lt.u32 %p1, %r0, 9; @%p1 "
        + COPY
        + "cp.async.wait_group 0; @%p1 "
        + READ.replace("st", "@%p1 st")
    )
    given, out = execute(lines, readable=9)
    assert np.array_equal(out[:9], given[:9])


@pytest.mark.parametrize(
    "line",
    ["ld.b32 %r10, [%rd3];", "ld.local.b32 %r10, [%rd3];", "atom.global.add.noftz.f16 %rs1, [%rd3], %rs1;",
     "cp.async.cg.shared.global [%r2], [%rd3], 8;", "cp.async.bulk.shared.global [%r2], [%rd3], 16;"],
)  # fmt: skip
def test_other_forms_are_refused(line):
    with pytest.raises(PtxError, match="not modelled"):
        execute(line)


def test_lines_of_text_and_parameters():
    got = run_lines(
        "ld.param.u64 %rd5, [p0+0]; cvt.u32.u64 %y, %rd5;",
        {"x": np.zeros(32, np.int32)},
        {"y": np.uint32},
    )
    assert len(set(got["y"].tolist())) == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
