"""``python -m sglang_aiter_moe.testing.device_moves_cases``: the GPU moves against the index maps of the layouts.

With ``TRITON_INTERPRET=1`` on CPU tensors, else on the GPU. Prints one JSON line per case.
"""

from __future__ import annotations

import json
import os

import torch

from sglang_aiter_moe.contract import SCALE_LAYOUTS, WEIGHT_LAYOUTS, _bytes, device_moves
from sglang_aiter_moe.contract.layouts import interleaved_row

#: (experts, rows, bytes a row): one tile, several cycles, a row of no power of two.
WEIGHTS = ((1, 32, 64), (3, 96, 64), (2, 160, 192))
SCALES = ((2, 64, 8), (3, 96, 12), (1, 32, 4))


def weight_cases(device: str) -> list[dict]:
    """Each layout, order of raw rows and direction, in place and not."""
    found = []
    for name, layout in WEIGHT_LAYOUTS.items():
        for shape in WEIGHTS:
            for alternating in (False, True):
                raw = torch.randint(0, 256, shape, dtype=torch.uint8)
                index = layout.index_map(shape, gate_up_interleaved=alternating)
                want = raw.view(-1)[index].view(
                    shape
                )  # by contract.md's closed forms, golden-tested
                rows = layout.source_rows(shape[1])
                if alternating:
                    rows = interleaved_row(rows, shape[1])
                for in_place in (False, True):
                    given = raw.clone().to(device)
                    out = given if in_place else torch.zeros_like(given)
                    device_moves.move_weights(given, out, rows, packing=True)
                    packed = torch.equal(out.cpu(), want)
                    back = out if in_place else torch.zeros_like(given)
                    device_moves.move_weights(out, back, rows, packing=False)
                    case = f"{name}-{shape}-{'alternating' if alternating else 'halves'}-{in_place}"
                    restored = torch.equal(back.cpu(), raw)
                    found.append({"case": case, "packed": packed, "restored": restored})
    return found


def scale_cases(device: str) -> list[dict]:
    """Each layout by a gather with padding; in place where a block only moves within itself."""
    found = []
    for name, layout in SCALE_LAYOUTS.items():
        for shape in SCALES:
            raw = torch.randint(0, 255, shape, dtype=torch.uint8)
            one = layout.index_map((1, *shape[1:]))
            blocks = shape[1] * layout.columns(shape[2])
            one = one[:blocks]  # without the tail after the last expert
            size = shape[1] * shape[2]
            index = torch.where(one < 0, size, one).int()
            out = torch.zeros(shape[0] * blocks, dtype=torch.uint8, device=device)
            device_moves.gather_bytes(
                raw.view(-1).to(device), out, index.to(device), experts=shape[0], pad=0x7F
            )
            want = torch.cat([raw.view(-1), torch.tensor([0x7F], dtype=torch.uint8)])
            full = layout.index_map(shape)[: shape[0] * blocks]
            packed = torch.equal(out.cpu(), want[full])
            found.append({"case": f"{name}-{shape}", "packed": packed, "restored": True})
            if blocks == size and not name.endswith("gate_up"):
                data = raw.view(-1).clone().to(device)
                block = layout.index_map((1, 32, shape[2]))[: 32 * shape[2]].int().to(device)
                device_moves.permute_blocks(data, block)
                packed = torch.equal(data.cpu(), want[full])
                found.append(
                    {"case": f"{name}-{shape}-in place", "packed": packed, "restored": True}
                )
    return found


def layout_cases(device: str) -> list[dict]:
    """``pack`` and ``unpack`` on GPU tensors, as everybody calls them, against the same on the CPU."""
    found = []
    shapes = {"weight": (3, 96, 64), "scale": (3, 96, 8), "padded scale": (3, 96, 12)}
    for kind, shape in shapes.items():
        for name, layout in (WEIGHT_LAYOUTS if kind == "weight" else SCALE_LAYOUTS).items():
            for alternating in (False, True):
                raw = torch.randint(0, 255, shape, dtype=torch.uint8)
                want = layout.pack(raw, gate_up_interleaved=alternating)
                given = raw.to(device)
                got = layout.pack(given, gate_up_interleaved=alternating)
                packed = torch.equal(got.cpu(), want)
                extra = () if kind == "weight" else (shape,)
                back = layout.unpack(got, *extra, gate_up_interleaved=alternating)
                restored = torch.equal(back.cpu(), raw)
                if want.numel() == raw.numel():
                    out = given.view(want.shape)
                    layout.pack(given, out, gate_up_interleaved=alternating)
                    packed = packed and torch.equal(out.cpu(), want)
                case = f"{kind} {name} {alternating} by pack"
                found.append({"case": case, "packed": packed, "restored": restored})
    return found


if __name__ == "__main__":
    _bytes.GPU_KERNELS = True
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    torch.manual_seed(0)
    for row in weight_cases(device) + scale_cases(device) + layout_cases(device):
        print(json.dumps(row))
