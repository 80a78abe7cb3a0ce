"""Copies to shared memory: what lands, when, and what is refused."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx import copies, tensor_copy
from sglang_aiter_moe.nvptx.errors import PtxError
from sglang_aiter_moe.nvptx.shared import BASE
from sglang_aiter_moe.nvptx.tensor_map import TensorMap
from sglang_aiter_moe.testing.ptx_pieces import Piece
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

BULK = (
    ".reg .b32 %r<8>;\n.reg .b64 %rd<2>;\n"
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%rd0, {%r1, %r2, %r3}], [%r4];"
)
BARRIER = BASE + 4096


HINTED = BULK.replace("bytes [", "bytes.L2::cache_hint [").replace(
    "[%r4];", "[%r4], 0x12F0000000000000;"
)


def bulk(late: bool = True, text: str = BULK, **changes) -> tuple[Piece, np.ndarray, TensorMap]:
    """A piece whose first lane alone acts, the tensor that it copies from, and the map."""
    piece = Piece(text, tensor_copy.TABLE, ctas=2, warps=1, late=late)
    data = np.random.default_rng(1).integers(0, 256, (4, 6, 128), dtype=np.uint8)
    at = piece.state.memory.place(data, "w")
    tensor = TensorMap(at, 1, (128, 6, 4), (128, 768), (128, 3, 2), (1, 1, 1), 128)
    tensor = dataclasses.replace(tensor, **changes)
    where = piece.state.memory.place(np.frombuffer(tensor.encode(), np.uint8), "map")
    piece.set("%rd0", np.uint64(where))
    piece.set("%r0", np.uint32(BASE + 1024))
    piece.set("%r4", np.uint32(BARRIER))
    for i, place in enumerate((0, 4, 1)):
        piece.set(f"%r{1 + i}", np.uint32(place))
    for cta in range(2):
        mark = np.zeros((1, 8), np.uint8)
        piece.state.shared.store(cta, np.array([BARRIER]), mark, proxy="async")
        piece.state.barriers.init(cta, BARRIER, 1)
    return piece, data, tensor


def one_lane(piece: Piece):
    lanes = np.zeros((piece.state.rows, 32), bool)
    lanes[:, 5] = True
    return piece.everyone.narrow(lanes)


@pytest.mark.parametrize("text", [BULK, HINTED], ids=["plain", "cache hint"])
@pytest.mark.parametrize("late", [True, False])
def test_a_bulk_copy(late, text):
    piece, data, tensor = bulk(late, text)
    barriers = piece.state.barriers
    for cta in range(2):
        barriers.arrive(cta, BARRIER, 1, expect=tensor.box_bytes)
    piece.run(group=one_lane(piece))
    window = np.arange(BASE + 1024, BASE + 1024 + tensor.box_bytes, 16)
    if late:
        with pytest.raises(Fault, match="still in flight"):
            piece.state.shared.load(0, window, 16)
    for cta in range(2):
        assert barriers.complete(cta, BARRIER, 0) and not barriers.complete(cta, BARRIER, 1)
        got = piece.state.shared.load(cta, window, 16).reshape(2, 3, 8, 16)
        for outer in range(2):
            for row in range(3):
                line = outer * 3 + row
                inside = 4 + row < 6
                for p in range(8):
                    expected = data[1 + outer, 4 + row, 16 * p : 16 * p + 16] if inside else 0
                    assert (got[outer, row, p ^ line % 8] == expected).all()


def test_a_phase_lacks_what_a_smaller_box_does_not_bring():
    piece, _, tensor = bulk()
    piece.state.barriers.arrive(0, BARRIER, 1, expect=tensor.box_bytes + 16)
    piece.run(group=one_lane(piece))
    assert not piece.state.barriers.complete(0, BARRIER, 0)


def test_mistakes_of_a_bulk_copy():
    piece, *_ = bulk()
    piece.set("%r0", np.uint32(BASE + 64))
    with pytest.raises(Fault, match="a bulk copy goes to"):
        piece.run(group=one_lane(piece))
    piece, *_ = bulk()
    piece.set("%r4", np.uint32(BARRIER + 8))
    with pytest.raises(Fault, match=r"no mbarrier\.init made it"):
        piece.run(group=one_lane(piece))
    piece, *_ = bulk()
    piece.set("%rd0", np.uint64(piece.state.memory.place(np.zeros(128, np.uint8), "zeros")))
    with pytest.raises(Fault, match="no tensor map"):
        piece.run(group=one_lane(piece))


def test_a_bulk_copy_past_the_tensor_s_memory():
    """A map that says more than there is: the copy reads what nobody allocated."""
    piece, _, tensor = bulk(sizes=(128, 6, 400))
    piece.set("%r3", np.uint32(300))
    piece.state.barriers.arrive(0, BARRIER, 1, expect=tensor.box_bytes)
    piece.run(group=one_lane(piece))
    with pytest.raises(Fault, match="past the end of"):
        piece.state.barriers.complete(0, BARRIER, 0)


CP = ".reg .b32 %r<4>;\n.reg .b64 %rd<1>;\n{}\ncp.async.commit_group;\ncp.async.wait_group 0;"


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("kind", "width"), [("cg", 16), ("ca", 8), ("ca", 4)])
def test_copies_of_lanes(kind, width, late):
    """Sizes of the source from 0 to all: the rest is zero; lanes without bytes may point anywhere."""
    line = f"cp.async.{kind}.shared.global [%r0 + 0], [%rd0 + 0], {width}, %r1;"
    piece = Piece(CP.format(line), copies.TABLE, ctas=2, warps=2, late=late)
    data = np.random.default_rng(2).integers(0, 256, 32 * 16, dtype=np.uint8)
    at = piece.state.memory.place(data, "x")
    lane = np.arange(32)
    sizes = np.where(lane % 3 == 0, 0, np.where(lane % 3 == 1, width, width // 2))
    piece.set("%rd0", np.where(sizes, np.uint64(at) + (lane * 16).astype(np.uint64), np.uint64(16)))
    row = np.arange(piece.state.rows)[:, None]
    places = BASE + row // 2 * 1024 + lane * 16
    piece.set("%r0", places)
    piece.set("%r1", sizes)
    piece.run(0, 1)
    if late:
        with pytest.raises(Fault, match="still in flight"):
            piece.state.shared.load(1, places[1], width)
    piece.run(2)
    for r in range(piece.state.rows):
        got = piece.state.shared.load(r % 2, places[r], width, proxy="async")
        for i in lane:
            expected = np.zeros(width, np.uint8)
            expected[: sizes[i]] = data[16 * i : 16 * i + sizes[i]]
            assert np.array_equal(got[i], expected)


def test_an_uncommitted_copy_does_not_land():
    line = "cp.async.cg.shared.global [%r0 + 0], [%rd0 + 0], 0x10, 0x10;"
    piece = Piece(CP.format(line), copies.TABLE, ctas=1, warps=1)
    piece.set("%rd0", np.uint64(piece.state.memory.place(np.zeros(512, np.uint8), "x")))
    places = BASE + 16 * np.arange(32)
    piece.set("%r0", places)
    piece.run(0, 2)
    with pytest.raises(Fault, match="still in flight"):
        piece.state.shared.load(0, places, 16)


def test_a_copy_that_reads_past_an_array_names_its_lane():
    line = "cp.async.cg.shared.global [%r0 + 0], [%rd0 + 0], 0x10, 0x10;"
    piece = Piece(CP.format(line), copies.TABLE, ctas=1, warps=1)
    at = piece.state.memory.place(np.zeros(512, np.uint8), "x")
    lanes = np.uint64(at) + 16 * np.arange(32).astype(np.uint64)
    lanes[9] += 1024
    piece.set("%rd0", lanes)
    piece.set("%r0", BASE + 16 * np.arange(32))
    with pytest.raises(Fault) as error:
        piece.run()
    assert error.value.lane == 9


ARRIVE = """.reg .b32 %r<4>;\n.reg .b64 %rd<1>;
cp.async.cg.shared.global [%r0 + 0], [%rd0 + 0], 16;
cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r2 + 0];
cp.async.cg.shared.global [%r1 + 0], [%rd0 + 0], 16;
cp.async.commit_group;
cp.async.wait_group 0;"""


def arrivals(late: bool = True, count: int = 64) -> tuple[Piece, np.ndarray, np.ndarray]:
    """Two warps that each copy 16 bytes a lane and report to one mbarrier, the data, and where each row's go."""
    piece = Piece(ARRIVE, copies.TABLE, ctas=2, warps=2, late=late)
    data = np.random.default_rng(3).integers(0, 256, (32, 16), dtype=np.uint8)
    at = piece.state.memory.place(data, "x")
    piece.set("%rd0", np.uint64(at) + (16 * np.arange(32)).astype(np.uint64))
    row = np.arange(piece.state.rows)[:, None]
    places = BASE + row // 2 * 512 + 16 * np.arange(32)
    piece.set("%r0", places)
    piece.set("%r1", places + 1024)
    piece.set("%r2", np.uint32(BARRIER))
    for cta in range(2):
        mark = np.zeros((1, 8), np.uint8)
        piece.state.shared.store(cta, np.array([BARRIER]), mark, proxy="async")
        piece.state.barriers.init(cta, BARRIER, count)
    return piece, data, places


@pytest.mark.parametrize("late", [True, False])
def test_lanes_arrive_when_their_copies_have_landed(late):
    """Those before the instruction; the ones behind it belong to the next group."""
    piece, data, places = arrivals(late)
    barriers, shared = piece.state.barriers, piece.state.shared
    piece.run(0, 1, 2, 3)
    if late:
        for where in (places, places + 1024):
            with pytest.raises(Fault, match="still in flight"):
                shared.load(0, where[0], 16)
    for cta in range(2):
        assert barriers.complete(cta, BARRIER, 0) and not barriers.complete(cta, BARRIER, 1)
        for row in (cta, 2 + cta):
            assert np.array_equal(shared.load(cta, places[row], 16, proxy="async"), data)
            if late:
                with pytest.raises(Fault, match="still in flight"):
                    shared.load(cta, places[row] + 1024, 16)
    piece.run(4)
    assert np.array_equal(shared.load(0, places[0] + 1024, 16), data)


def test_a_phase_lacks_the_lanes_that_have_not_arrived():
    piece, _, places = arrivals(count=65)
    piece.run(0, 1)
    assert not piece.state.barriers.complete(0, BARRIER, 0)
    with pytest.raises(Fault, match="still in flight"):
        piece.state.shared.load(0, places[0], 16)
    piece.state.barriers.arrive(0, BARRIER, 1)
    assert piece.state.barriers.complete(0, BARRIER, 0)


def test_a_source_that_changes_before_the_copies_land_is_read_again():
    piece, data, places = arrivals()
    piece.run(0, 1)
    start = int(piece.get("%rd0")[0, 0])
    piece.state.memory.scatter(np.array([start], np.uint64), np.full((4, 1), 7, np.uint32), 16)
    piece.state.writes += 1
    assert piece.state.barriers.complete(0, BARRIER, 0)
    got = piece.state.shared.load(0, places[0], 16, proxy="async")
    assert (got[0].view(np.uint32) == 7).all() and np.array_equal(got[1:], data[1:])


def test_mistakes_of_copies_that_report():
    piece, *_ = arrivals(count=63)
    with pytest.raises(Fault, match="arrivals more than its phase expects"):
        piece.run(0, 1)
    piece, *_ = arrivals()
    piece.set("%r2", np.uint32(BARRIER + 8))
    with pytest.raises(Fault, match=r"no mbarrier\.init made it"):
        piece.run(0, 1)
    piece, *_ = arrivals()
    piece.set("%r2", BARRIER + 8 * (np.arange(32) == 7))
    with pytest.raises(Fault, match="different mbarriers") as error:
        piece.run(0, 1)
    assert error.value.lane == 7
    piece, *_ = arrivals()
    with pytest.raises(Fault, match="a part of a warp's lanes"):
        piece.run(1, group=one_lane(piece))
    piece, *_ = arrivals()
    with pytest.raises(Fault, match="while committed groups of them are pending"):
        piece.run(0, 3, 1)
    with pytest.raises(PtxError, match=r"this form of cp\.async"):
        Piece(ARRIVE.replace(".noinc", ""), copies.TABLE)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
