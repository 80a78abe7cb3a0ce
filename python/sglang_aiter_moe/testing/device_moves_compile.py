"""Builds the layouts' GPU kernels for gfx950 and an H200, at K3's sizes, and reads the code. Nothing is executed."""

from __future__ import annotations

import json
import re
from collections import Counter

from triton.backends.compiler import GPUTarget

from sglang_aiter_moe.contract import device_moves as moves
from sglang_aiter_moe.testing.triton_compile import build

TARGETS = {"gfx950": GPUTarget("hip", "gfx950", 64), "sm_90": GPUTarget("cuda", 90, 32)}
#: K3's w13 at TP8: 112 pieces of 16 bytes a row; 112 scales a row.
KERNELS = {
    "rotate": (
        moves._rotate_tiles,
        {"PADDED": 2048, "UNPACK": False},
        {"data_ptr": "i32", "tiles_ptr": "i32", "starts_ptr": "i32"},
        moves.WARPS,
    ),
    "rotate back": (
        moves._rotate_tiles,
        {"PADDED": 2048, "UNPACK": True},
        {"data_ptr": "i32", "tiles_ptr": "i32", "starts_ptr": "i32"},
        moves.WARPS,
    ),
    "copy": (
        moves._copy_tiles,
        {"PADDED": 2048, "UNPACK": False},
        {"raw_ptr": "i32", "packed_ptr": "i32", "rows_ptr": "i32"},
        moves.WARPS,
    ),
    "gather": (
        moves._gather_bytes,
        {"PAD": 127, "BLOCK": 4096},
        {"source_ptr": "u8", "target_ptr": "u8", "index_ptr": "i32"},
        moves.WARPS,
    ),
    "permute": (
        moves._permute_blocks,
        {"PADDED": 4096},
        {"data_ptr": "u8", "index_ptr": "i32"},
        4,
    ),
}


def read(arch: str, name: str) -> dict:
    """What the code of one kernel has."""
    kernel, constants, types, warps = KERNELS[name]
    compiled = build(kernel, constants, types, TARGETS[arch], num_warps=warps)
    if arch == "sm_90":
        text = compiled.asm["ptx"]
        loads, stores = r"^.*\bld\.global\S*", r"^.*\bst\.global\S*"
        barrier, spills = r"bar\.sync", len(re.findall(r"\b(?:ld|st)\.local", text))
    else:
        text = compiled.asm["amdgcn"]
        loads, stores = r"^\s+(?:global|buffer)_load\S*", r"^\s+(?:global|buffer)_store\S*"
        barrier = r"s_barrier"
        spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text).group(1))
    found_loads = Counter(m.split()[-1] for m in re.findall(loads, text, re.M))
    found_stores = Counter(m.split()[-1] for m in re.findall(stores, text, re.M))
    first_store = re.search(stores, text, re.M).start()
    return {
        "arch": arch,
        "kernel": name,
        "loads": found_loads,
        "stores": found_stores,
        "spills": spills,
        "barrier_before_store": bool(re.search(barrier, text[:first_store])),
    }


if __name__ == "__main__":
    for arch in TARGETS:
        for name in KERNELS:
            print(json.dumps(read(arch, name)))
