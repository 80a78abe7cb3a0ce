"""``python -m sglang_aiter_moe.testing.device_moves_cases``: the GPU moves against the index maps of the layouts.

With ``TRITON_INTERPRET=1`` on CPU tensors, else on the GPU. Prints one JSON line per case.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator

import torch

from sglang_aiter_moe.contract import SCALE_LAYOUTS, WEIGHT_LAYOUTS, _bytes, device_moves

#: (experts, rows, bytes a row): one tile, several programs an expert, a row of no power of two.
WEIGHTS = ((1, 32, 64), (3, 96, 64), (2, 160, 192))
#: Two blocks, padded columns, one word a row, an odd number of words.
SCALES = ((2, 64, 8), (3, 96, 12), (1, 32, 4), (2, 128, 28))
#: On a GPU also: many programs an expert, which have to wait for each other in place; more experts than groups;
#: an expert that no GPU holds in registers.
LARGE_WEIGHTS = ((40, 768, 1792), (2, 6144, 3584))
LARGE_SCALES = ((40, 768, 112), (3, 6144, 224))


def cases(device: str) -> Iterator[dict]:
    """``pack`` and ``unpack`` of each layout on the device, against its index map, in place and not."""
    weights, scales = WEIGHTS, SCALES
    if device != "cpu":
        weights, scales = WEIGHTS + LARGE_WEIGHTS, SCALES + LARGE_SCALES
    for layouts, shapes in ((WEIGHT_LAYOUTS, weights), (SCALE_LAYOUTS, scales)):
        for name, layout in layouts.items():
            for shape, alternating in itertools.product(shapes, (False, True)):
                yield from of_layout(name, layout, shape, alternating, device)


def of_layout(name, layout, shape, alternating, device) -> Iterator[dict]:
    raw = torch.randint(0, 255, shape, dtype=torch.uint8)
    # By contract.md's closed forms, which the golden vectors check; index -1 is padding.
    index = layout.index_map(shape, gate_up_interleaved=alternating)
    want = torch.where(index < 0, 0x7F, raw.view(-1)[index]).view(layout.packed_shape(shape))
    extra = () if layout in WEIGHT_LAYOUTS.values() else (shape,)
    for in_place in (False, True):
        if in_place and want.numel() != raw.numel():
            continue
        given = raw.clone().to(device)
        out = given.view(want.shape) if in_place else None
        got = layout.pack(given, out, gate_up_interleaved=alternating)
        packed = torch.equal(got.cpu(), want)
        target = got.view(shape) if in_place else None
        back = layout.unpack(got, *extra, target, gate_up_interleaved=alternating)
        yield {
            "case": f"{name}-{shape}-{'alternating' if alternating else 'halves'}-{in_place}",
            "packed": packed,
            "restored": torch.equal(back.cpu(), raw),
            "by_kernel": len(calls),
        }
        calls.clear()


calls = []


def counted(*tensors: torch.Tensor) -> object:
    """``_bytes.gpu_moves`` that counts, and takes the CPU tensors of the interpreter."""
    calls.append(tensors)
    return device_moves


if __name__ == "__main__":
    _bytes.gpu_moves = counted
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    torch.manual_seed(0)
    for row in cases(device):
        print(json.dumps(row), flush=True)
