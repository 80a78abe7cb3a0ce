"""Builds the layouts' GPU kernels for gfx950 and an H200, at K3's sizes, and reads the code. Nothing is executed."""

from __future__ import annotations

import json
import re
from collections import Counter

from triton.backends.compiler import GPUTarget

from sglang_aiter_moe.contract import device_moves as moves
from sglang_aiter_moe.testing.triton_compile import build

TARGETS = {"gfx950": GPUTarget("hip", "gfx950", 64), "sm_90": GPUTarget("cuda", 90, 32)}
_ARGUMENTS = {
    "raw_ptr": "i32",
    "packed_ptr": "i32",
    "rows_ptr": "i32",
    "counters_ptr": "i32",
}
_APART = {"IN_ORDER": False, "MEET": False, "AHEAD": False}
#: K3 at TP8: w13 has 112 pieces of 16 bytes and 112 scales a row, w2 12 scales a row.
_TILES = {"ITEMS": 2048, "WIDE": 128} | _APART
_SWIZZLED = {"ITEMS": 1024, "WIDE": 16, "EVEN": True, "PAD": 0x7F7F7F7F} | _APART
_N32K4 = _SWIZZLED | {"ITEMS": 2048}


def _together(constants: dict, kind: int, item_bytes: int) -> dict:
    limits = moves.TOGETHER[kind]
    return constants | {
        "ITEMS": limits.held // item_bytes,
        "MEET": True,
        "AHEAD": limits.ahead,
    }


def kernels() -> dict[str, tuple]:
    """Name -> kernel, constants, warps."""
    found = {}
    for way, unpack in (("pack", False), ("unpack", True)):
        for name, kernel, constants, warps in (
            ("tiles", moves.move_tiles, _TILES, moves.PACK[16].warps),
            (
                "tiles, together",
                moves.move_tiles,
                _together(_TILES, 16, 16),
                moves.TOGETHER[16].warps,
            ),
            ("swizzled", moves.move_swizzled, _SWIZZLED, moves.PACK[4].warps),
            (
                "swizzled, odd",
                moves.move_swizzled,
                _SWIZZLED | {"EVEN": False},
                moves.PACK[4].warps,
            ),
            (
                "swizzled, together",
                moves.move_swizzled,
                _together(_SWIZZLED, 4, 16),
                moves.TOGETHER[4].warps,
            ),
            ("n32k4", moves.move_n32k4, _N32K4, moves.PACK[4].warps),
        ):
            more = {"UNPACK": unpack, "LANES": 32 * warps}
            found[f"{name}, {way}"] = kernel, constants | more, warps
    return found


def read(arch: str, name: str) -> dict:
    """What the code of one kernel has."""
    kernel, constants, warps = kernels()[name]
    types = _ARGUMENTS | ({"raw_ptr": "i64"} if constants.get("EVEN") else {})
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
        "shared": compiled.metadata.shared,
        "barrier_before_store": bool(re.search(barrier, text[:first_store])),
    }


if __name__ == "__main__":
    for arch in TARGETS:
        for name in kernels():
            print(json.dumps(read(arch, name)))
