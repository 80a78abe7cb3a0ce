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
_TILES_APART = {"ITEMS": 2048, "IN_ORDER": False}
_TILES = {"ITEMS": 4096, "WIDE": 128} | _APART
_SWIZZLED = {"ITEMS": 1024, "WIDE": 16, "EVEN": True, "PAD": 0x7F7F7F7F} | _APART
_EXPERT = _SWIZZLED | {"ITEMS": 8192}
_N32K4 = {k: v for k, v in _SWIZZLED.items() if k != "PAD"} | {"ITEMS": 2048}


def _meeting(constants: dict, kind: int) -> dict:
    return constants | {"MEET": True, "AHEAD": moves.TOGETHER[kind].ahead}


def kernels() -> dict[str, tuple]:
    """Name -> kernel, constants, warps."""
    found = {}
    apart, together = moves.PACK[4].warps, moves.TOGETHER
    for way, unpack in (("pack", False), ("unpack", True)):
        for name, kernel, constants, warps in (
            ("tiles", moves.move_tiles_apart, _TILES_APART, moves.PACK[16].warps),
            ("tiles, together", moves.move_tiles, _meeting(_TILES, 16), together[16].warps),
            ("swizzled", moves.move_swizzled, _SWIZZLED, apart),
            ("swizzled, odd", moves.move_swizzled, _SWIZZLED | {"EVEN": False}, apart),
            ("swizzled, expert", moves.move_swizzled, _EXPERT, together[4].warps),
            ("swizzled, together", moves.move_swizzled, _meeting(_SWIZZLED, 4), together[4].warps),
            ("n32k4", moves.move_n32k4, _N32K4, apart),
            ("n32k4, together", moves.move_n32k4, _meeting(_N32K4, 8), together[8].warps),
        ):
            more = {"UNPACK": unpack}
            if "WIDE" in constants:
                more["LANES"] = min(32 * warps, constants["ITEMS"])
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
