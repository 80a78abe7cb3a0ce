"""The memory arena: what is where, what may be read and written, what is reported."""

import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.amdgpu.memory import BASE, Memory
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

DATA = np.arange(1000, dtype=np.int32).reshape(10, 100)


def test_arrays_come_back_as_they_were_placed():
    memory = Memory()
    big = np.random.default_rng(0).integers(0, 256, 5 << 20).astype(np.uint8)
    addresses = [memory.place(DATA, "a"), memory.place(big, "b"), memory.place(DATA.T, "c")]
    np.testing.assert_array_equal(memory.read(addresses[0], np.int32, (10, 100)), DATA)
    np.testing.assert_array_equal(memory.read(addresses[1], np.uint8, big.size), big)
    np.testing.assert_array_equal(memory.read(addresses[2], np.int32, (100, 10)), DATA.T)
    np.testing.assert_array_equal(memory.read(addresses[0] + 40, np.int32, 3), [10, 11, 12])
    assert all(a % 256 == 0 for a in addresses)
    assert addresses[1] - (addresses[0] + 4000) >= 4096  # a gap


def test_the_first_allocations_lie_on_both_sides_of_a_multiple_of_4_gib():
    memory = Memory()
    address = memory.place(np.zeros(1 << 16, np.uint8), "a")
    assert address >> 32 != (address + (1 << 16)) >> 32


def test_a_copy_is_placed_and_a_copy_is_read():
    memory, array = Memory(), DATA.copy()
    address = memory.place(array, "a")
    array[:] = 0
    read = memory.read(address, np.int32, (10, 100))
    np.testing.assert_array_equal(read, DATA)
    read[:] = 0
    np.testing.assert_array_equal(memory.read(address, np.int32, (10, 100)), DATA)


def test_writing_from_outside():
    memory = Memory()
    address = memory.reserve(64, "out")
    memory.write(address + 8, np.arange(4, dtype=np.int32))
    assert memory.read(address + 8, np.int32, 4).tolist() == [0, 1, 2, 3]
    assert memory.written(address, 64).tolist() == [8 <= i < 24 for i in range(64)]
    with pytest.raises(ContractError, match="past the end of out"):
        memory.write(address + 60, np.zeros(2, np.int32))


@pytest.mark.parametrize(
    ("offset", "count", "message"),
    [
        (-4, 1, "before every allocation"),
        (3996, 2, "0 bytes past the end of a"),
        (1 << 40, 1, "past the end of"),
        (8192, 4, "of b, which nothing has written"),
    ],
)
def test_reads_from_outside(offset, count, message):
    memory = Memory()
    address = memory.place(DATA, "a")
    b = memory.reserve(64, "b")
    if offset == 8192:
        offset = b - address
    with pytest.raises(ContractError, match=message):
        memory.read(address + offset, np.int32, count)


def test_uninitialised_memory_may_be_asked_for():
    memory = Memory()
    assert (
        memory.read(memory.reserve(8, "a"), np.uint8, 8, allow_uninitialised=True).tolist()
        == [0xA5] * 8
    )
    placed = memory.place(np.arange(8, dtype=np.uint8), "b", initialised=False)
    assert memory.read(placed, np.uint8, 8, allow_uninitialised=True).tolist() == list(range(8))
    with pytest.raises(ContractError, match="nothing has written"):
        memory.read(placed, np.uint8, 8)


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 12, 16])
def test_gathers_and_scatters(nbytes):
    memory = Memory()
    source, target = memory.place(DATA, "a"), memory.reserve(4000, "b")
    raw = DATA.reshape(-1).view(np.uint8)
    offsets = np.random.default_rng(1).permutation(200)[:64].astype(np.uint64) * np.uint64(16)
    got = memory.gather(offsets + np.uint64(source), nbytes)
    for lane, offset in enumerate(offsets.tolist()):
        piece = raw[offset : offset + nbytes].tobytes().ljust(-(-nbytes // 4) * 4, b"\0")
        assert got[:, lane].tobytes() == piece
    memory.scatter(offsets + np.uint64(target), list(got), nbytes)
    written = memory.written(target, 4000)
    for offset in offsets.tolist():
        np.testing.assert_array_equal(
            memory.read(target + offset, np.uint8, nbytes), raw[offset : offset + nbytes]
        )
    assert written.sum() == 64 * nbytes


def test_lanes_that_may_not():
    memory = Memory()
    a = memory.place(DATA, "a", writable=False)
    b = memory.reserve(64, "b")
    lanes = np.full(8, a, np.uint64)

    def at(lane, address, nbytes=4, store=False):
        lanes_ = lanes.copy()
        if store:
            lanes_[:] = b
        lanes_[lane] = address
        with pytest.raises(Fault) as caught:
            memory.scatter(
                lanes_, [np.zeros(8, np.uint32)] * (nbytes // 4), nbytes
            ) if store else memory.gather(lanes_, nbytes)
        assert caught.value.lane == lane
        return caught.value.what

    assert "4 bytes past the end of a" in at(3, a + 4004)
    assert "0 bytes past the end of a" in at(2, a + 3992, 16)
    assert "byte 16 of 64 of b, which nothing has written" in at(5, b + 16)
    assert "not a multiple of 4" in at(6, a + 2)
    assert "read-only" in at(1, a + 8, store=True)
    assert "past the end of b" in at(7, b + 64, 16, store=True)
    assert "before every allocation" in at(0, 64)
    assert "before every allocation" in at(3, BASE - 4, 8)  # its end is behind BASE
    assert "before every allocation" in at(3, BASE - 4, 8, store=True)
    assert "past the end of b" in at(4, a + (1 << 50))


def test_allocations_that_a_kernel_filled_are_known_to_be_whole():
    memory = Memory()
    address = memory.reserve(16, "a")
    memory.settle()
    assert not memory.allocations[0].initialised
    memory.scatter(
        np.uint64(address) + np.arange(0, 16, 4, dtype=np.uint64),
        [np.arange(4, dtype=np.uint32)],
        4,
    )
    memory.settle()
    assert memory.allocations[0].initialised


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
