"""What a launch sets before the first instruction: the special registers."""

from __future__ import annotations

import math

import numpy as np

from sglang_aiter_moe.nvptx.state import LANES


def specials(ctas: range, grid, threads, shared_bytes: int) -> dict[str, np.ndarray]:
    """Special registers by name: scalars, or arrays [rows, 1] or [rows, 32]."""
    warps = math.prod(threads) // LANES
    made: dict[str, np.ndarray] = {}
    thread = np.arange(warps * LANES, dtype=np.uint32).reshape(warps, 1, LANES)
    x, y, _ = threads
    for axis, value in zip("xyz", (thread % x, thread // x % y, thread // (x * y)), strict=True):
        made[f"%tid.{axis}"] = np.repeat(value, len(ctas), 1).reshape(-1, LANES)
    cta = np.array(ctas, np.uint32)
    x, y, _ = grid
    for axis, value in zip("xyz", (cta % x, cta // x % y, cta // (x * y)), strict=True):
        made[f"%ctaid.{axis}"] = np.tile(value, warps)[:, None]
    for axis, n, blocks in zip("xyz", threads, grid, strict=True):
        made[f"%ntid.{axis}"] = np.uint32(n)
        made[f"%nctaid.{axis}"] = np.uint32(blocks)
        made[f"%cluster_ctaid.{axis}"] = np.uint32(0)
        made[f"%cluster_nctaid.{axis}"] = np.uint32(1)
        made[f"%clusterid.{axis}"] = made[f"%ctaid.{axis}"]
        made[f"%nclusterid.{axis}"] = np.uint32(blocks)
    lane = np.arange(LANES, dtype=np.uint32)
    each = np.broadcast_to(lane, (warps * len(ctas), LANES))
    one = np.uint32(1) << lane
    masks = {
        "eq": one,
        "lt": one - 1,
        "le": one - 1 | one,
        "ge": ~(one - 1),
        "gt": ~(one - 1 | one),
    }
    for name, value in masks.items():
        made[f"%lanemask_{name}"] = np.broadcast_to(value.astype(np.uint32), each.shape)
    made["%laneid"] = each
    made["%warpid"] = np.repeat(np.arange(warps, dtype=np.uint32), len(ctas))[:, None]
    made["%nwarpid"] = np.uint32(warps)
    # One CTA a multiprocessor, as far as a program can tell.
    made["%smid"] = np.tile(cta, warps)[:, None]
    made["%nsmid"] = np.uint32(math.prod(grid))
    made["%cluster_ctarank"], made["%cluster_nctarank"] = np.uint32(0), np.uint32(1)
    made["%dynamic_smem_size"] = made["%total_smem_size"] = np.uint32(shared_bytes)
    return made
