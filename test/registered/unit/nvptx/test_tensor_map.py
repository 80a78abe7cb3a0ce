"""Boxes of tensors, element by element, and what the driver would refuse."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import numpy as np
import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.nvptx.tensor_map import TensorMap, destination, fill_bytes, pieces
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

MAP = TensorMap(
    address=0x1000,
    element_bytes=4,
    sizes=(32, 6, 3, 5),
    strides=(128, 1024, 8192),
    box=(32, 4, 1, 2),
    element_strides=(1, 1, 1, 1),
    swizzle=128,
)


def copied(tensor: TensorMap, coordinates: tuple[int, ...]) -> dict[int, int | None]:
    """Offset in the box -> address of the element that goes there, None for one outside; by the definition."""
    found = {}
    for at, index in enumerate(itertools.product(*(range(b) for b in reversed(tensor.box)))):
        place = [
            c + i * s
            for c, i, s in zip(coordinates, reversed(index), tensor.element_strides, strict=True)
        ]
        inside = all(0 <= p < n for p, n in zip(place, tensor.sizes, strict=True))
        steps = (tensor.element_bytes, *tensor.strides)
        address = tensor.address + sum(p * s for p, s in zip(place, steps, strict=True))
        found[at * tensor.element_bytes] = address if inside else None
    return found


CASES = {
    "inside": (MAP, (0, 1, 2, 3)),
    "past two ends": (MAP, (0, 4, 2, 4)),
    "before the first": (MAP, (0, -2, 0, -1)),
    "innermost past its end": (dataclasses.replace(MAP, sizes=(28, 6, 3, 5)), (8, 0, 0, 0)),
    "not whole pieces": (
        dataclasses.replace(MAP, sizes=(30, 6, 3, 5), strides=(128, 1024, 8192)),
        (1, 0, 0, 0),
    ),
    "every other element": (dataclasses.replace(MAP, element_strides=(2, 1, 1, 3)), (0, 0, 0, 0)),
    "one dimension": (TensorMap(64, 2, (100,), (), (8,), (1,), 0), (96,)),
    "five": (TensorMap(0, 1, (16, 2, 2, 2, 2), (16, 32, 64, 128), (16, 2, 2, 2, 2), (1,) * 5, 0), (0,) * 5),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_box(name):
    tensor, coordinates = CASES[name]
    expected = copied(tensor, coordinates)
    found = pieces(tensor, coordinates)
    size = tensor.element_bytes
    got = {}
    for address, inside, offset in zip(found.address, found.inside, found.offset, strict=True):
        for i in range(0, found.width, size):
            got[int(offset) + i] = int(address) + i if inside else None
    assert got == expected
    assert tensor.box_bytes == len(expected) * size


def test_rows_are_swizzled_where_they_land():
    rows = np.arange(16)[:, None] * 128 + np.arange(8) * 16
    at = destination(MAP, 2048, rows)
    for row in range(16):
        assert sorted(at[row]) == list(2048 + rows[row])
        assert [int(a - 2048 - 128 * row) // 16 for a in at[row]] == [c ^ row % 8 for c in range(8)]
    assert list(destination(MAP, 2048, np.array([128 + 4]))) == [2048 + 128 + 16 + 4]


@pytest.mark.parametrize("name", CASES)
def test_encoded_and_back(name):
    tensor = CASES[name][0]
    assert len(tensor.encode()) == 128 and TensorMap.decode(tensor.encode()) == tensor


def test_other_bytes_are_no_tensor_map():
    with pytest.raises(ValueError, match="no tensor map"):
        TensorMap.decode(bytes(128))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"address": 8}, "the address 0x8"),
        ({"strides": (120, 1024, 8192)}, r"strides \[120"),
        ({"sizes": (0, 1, 1, 1)}, r"sizes \[0"),
        ({"box": (3, 4, 1, 2)}, r"the box \[3"),
        ({"box": (32, 257, 1, 2)}, "257"),
        ({"swizzle": 64}, "a swizzle of 64 bytes for rows of 128"),
        ({"element_strides": (1, 9, 1, 1)}, r"element strides \[1, 9"),
    ],
)
def test_what_a_driver_refuses(change, said):
    MAP.check("desc")
    with pytest.raises(ContractError, match=said):
        dataclasses.replace(MAP, **change).check("desc")


def test_what_is_outside():
    assert fill_bytes(MAP).tobytes() == bytes(4)
    nan = fill_bytes(dataclasses.replace(MAP, fill_nan=True)).view(np.float32)
    assert np.isnan(nan).all()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
