"""Tensor maps: what a bulk copy of a box of a tensor reads, and where it puts it.

The hardware's 128 bytes are opaque; ours have the same size and the same content (CUDA driver API,
"cuTensorMapEncodeTiled", which also states the rules that :func:`TensorMap.check` checks): address, element type, up to
five dimensions with the innermost first, strides in bytes, a box, element strides, swizzle, fill. Not modelled: im2col,
interleaving.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.nvptx.matrix_layout import swizzled

SIZE = 128
SWIZZLE_BYTES = (0, 32, 64, 128)
"""By CUtensorMapSwizzle."""
_MAGIC = 0x4D544D54
_LAYOUT = struct.Struct("<I4BQ5I4Q5H5B")


@dataclass(frozen=True)
class TensorMap:
    """A tensor of ``sizes`` elements of ``element_bytes`` at ``address``, and the box that one copy moves.

    Attributes:
        sizes, box, element_strides: innermost dimension first.
        strides: bytes, of every dimension but the innermost.
        swizzle: bytes, 0 for none.
        fill_nan: elements outside read as NaN and not as 0.
    """

    address: int
    element_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    fill_nan: bool = False

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def box_bytes(self) -> int:
        """What one copy adds to the transaction count, elements outside the tensor included."""
        return int(np.prod(self.box)) * self.element_bytes

    def check(self, name: str) -> None:
        """Refuses what the driver refuses to encode, and what is not modelled.

        Raises:
            ContractError: with ``name`` of the argument.
        """
        inner = self.box[0] * self.element_bytes
        rules = {
            f"the address {self.address:#x}": (self.address % 16 == 0, "a multiple of 16"),
            f"strides {list(self.strides)}": (
                all(s % 16 == 0 and 0 < s < 1 << 40 for s in self.strides),
                "multiples of 16 bytes below 2**40",
            ),
            f"sizes {list(self.sizes)}": (
                all(0 < s <= 1 << 32 for s in self.sizes),
                "1 to 2**32 elements",
            ),
            f"the box {list(self.box)}": (
                all(0 < b <= 256 for b in self.box) and inner % 16 == 0,
                "1 to 256 elements, the innermost a multiple of 16 bytes",
            ),
            f"a swizzle of {self.swizzle} bytes for rows of {inner}": (
                not self.swizzle or inner == self.swizzle,
                "none, or as many bytes as a row of the box (narrower rows are not modelled)",
            ),
            f"element strides {list(self.element_strides)}": (
                all(1 <= s <= 8 for s in self.element_strides),
                "1 to 8",
            ),
        }
        for what, (holds, allowed) in rules.items():
            if not holds:
                raise ContractError(
                    f"{name}: a tensor map has {what}",
                    allowed=allowed,
                    fix="correct the descriptor",
                )

    def encode(self) -> bytes:
        """The 128 bytes that a kernel's parameter holds."""

        def five(values: tuple[int, ...]) -> list[int]:
            return [*values, *[0] * (5 - len(values))]

        packed = _LAYOUT.pack(
            _MAGIC,
            self.rank,
            self.element_bytes,
            self.swizzle,
            self.fill_nan,
            self.address,
            *five(tuple(s - 1 for s in self.sizes)),  # 2**32 must fit
            *five(self.strides)[:4],
            *five(self.box),
            *five(self.element_strides),
        )
        return packed.ljust(SIZE, b"\0")

    @staticmethod
    def decode(raw: bytes) -> TensorMap:
        """The reverse of :meth:`encode`.

        Raises:
            ValueError: bytes that are no tensor map.
        """
        magic, rank, size, swizzle, nan, address, *rest = _LAYOUT.unpack(raw[: _LAYOUT.size])
        if magic != _MAGIC or not 1 <= rank <= 5:
            raise ValueError("the bytes are no tensor map")
        return TensorMap(
            address,
            size,
            tuple(s + 1 for s in rest[0:5][:rank]),
            tuple(rest[5:9][: rank - 1]),
            tuple(rest[9:14][:rank]),
            tuple(rest[14:19][:rank]),
            swizzle,
            bool(nan),
        )


@dataclass(frozen=True)
class Pieces:
    """A box in pieces of ``width`` bytes: addresses to read (those that are ``inside``), and offsets from the copy's
    destination, where a swizzle is still to be applied to the address that comes out. All flat arrays."""

    width: int
    address: np.ndarray
    inside: np.ndarray
    offset: np.ndarray


def pieces(tensor: TensorMap, coordinates: tuple[int, ...]) -> Pieces:
    """What a copy of the box at ``coordinates`` (innermost first, may be outside) moves: 16 bytes at a time where the
    innermost dimension allows, else elements."""
    size = tensor.element_bytes
    whole = (
        tensor.element_strides[0] == 1
        and coordinates[0] * size % 16 == 0
        and tensor.sizes[0] * size % 16 == 0
    )
    width = 16 if whole else size
    per = width // size
    address = np.full(1, tensor.address, np.int64)
    inside = np.ones(1, bool)
    strides = (size, *tensor.strides)
    for d in range(tensor.rank - 1, -1, -1):
        count = tensor.box[d] // (per if d == 0 else 1)
        steps = np.arange(count) * (per if d == 0 else tensor.element_strides[d])
        at = coordinates[d] + (steps if d or whole else steps * tensor.element_strides[0])
        address = (address[:, None] + at * strides[d]).reshape(-1)
        inside = (inside[:, None] & (at >= 0) & (at < tensor.sizes[d])).reshape(-1)
    return Pieces(width, address, inside, np.arange(address.size) * width)


def destination(tensor: TensorMap, start: int, offset: np.ndarray) -> np.ndarray:
    """Addresses in shared memory of pieces at ``offset`` of a copy to ``start``."""
    at = start + offset
    return (swizzled(at & ~15, tensor.swizzle) | at & 15) if tensor.swizzle else at


def fill_bytes(tensor: TensorMap) -> np.ndarray:
    """The bytes of one element outside the tensor."""
    value = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: (1 << 63) - 1}.get(tensor.element_bytes, 0)
    raw = value if tensor.fill_nan else 0
    return np.frombuffer(raw.to_bytes(tensor.element_bytes, "little"), np.uint8)
