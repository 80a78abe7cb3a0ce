"""The fp8 form's listing, split of x and clearing of counters under Triton's interpreter, against plain torch.

``TRITON_INTERPRET=1 python -m sglang_aiter_moe.testing.fp8_prepare_cases`` prints one JSON object a case.
"""

from __future__ import annotations

import json
import sys

import torch
import triton

from sglang_aiter_moe.numerics.e8m0 import decode_e8m0
from sglang_aiter_moe.numerics.mxfp8 import quantize_mxfp8
from sglang_aiter_moe.portable.triton.hopper.prepare import combine_hopper, prepare_fp8
from sglang_aiter_moe.testing.prefill_prepare_cases import CASES

HIDDEN, STRIDE, UNUSED = 160, 256, -7


def routing(
    *,
    tokens: int,
    topk: int,
    experts: int,
    one: bool = False,
    holes: bool = False,
    mask: tuple[int, ...] = (),
    local: int | None = None,
) -> tuple[torch.Tensor, dict[int, set[int]]]:
    """Ids ``[tokens, topk]`` int32, and local expert -> its pairs."""
    g = torch.Generator().manual_seed(tokens)
    groups = len(mask) or experts
    ids = torch.stack([torch.randperm(groups, generator=g)[:topk] for _ in range(tokens)]).int()
    if one:
        ids[:] = 1
    if holes:
        ids[torch.rand(ids.shape, generator=g) < 0.4] = -1
    here = [g for g in range(groups) if not mask or mask[g]]
    wanted: dict[int, set[int]] = {}
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert in here and pair // topk < (tokens if local is None else local):
            wanted.setdefault(here.index(expert), set()).add(pair)
    return ids, wanted


def in_order(x8: torch.Tensor) -> torch.Tensor:
    """A row's blocks of [16 even][16 odd] columns to columns."""
    return x8.unflatten(1, (-1, 2, 16)).transpose(2, 3).flatten(1)


def by_row(spread: float) -> dict:
    """MXFP8 values coded again with one scale a row; ``spread``: powers of two between the blocks of a row."""
    M = 5
    x = torch.randn(M, HIDDEN, generator=torch.Generator().manual_seed(3))
    x = (x * torch.exp2(-spread * torch.arange(HIDDEN) // 32)).bfloat16()
    x[3], x[4, 40] = 0, float("nan")
    x8, scale = torch.full((M, STRIDE), 255, dtype=torch.uint8), torch.zeros(M)
    ids, mask = torch.zeros(M, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    listed, starts, counter = (torch.zeros(n, dtype=torch.int32) for n in (M, M, 2))
    prepare_fp8[(1 + M,)](
        x, x8, scale, ids, mask, mask, listed, starts, counter, M, 1, 1, 1,
        H=HIDDEN, X_STRIDE=STRIDE, PARTS=1, RULE="roundup", HAS_MASK=False, HAS_TOKENS=False, PDL=False, T=8,
        BLOCK=32, WIDTH=STRIDE, BY_ROW=True,
    )  # fmt: skip
    value = in_order(x8.view(torch.float8_e4m3fn).float()) * scale[:, None]
    codes, scales = quantize_mxfp8(x)
    wanted = codes.float() * decode_e8m0(scales).repeat_interleave(32, 1)
    wanted = torch.nn.functional.pad(wanted, (0, STRIDE - HIDDEN))
    error = (value - wanted).abs()[:4]
    largest = wanted[:4].abs().amax(1, keepdim=True)
    exact = error[(wanted[:4].abs() >= largest * 2.0**-13)]
    return {
        "case": f"by-row-{spread:g}",
        "exact": not exact.any().item(),
        "small": bool((error <= largest * 2.0**-17).all()),
        "lossless": not error.any().item(),
        "nan": bool(value[4, 32:64].isnan().all()) and not value[:4].isnan().any().item(),
    }


def run(name: str, T: int) -> dict:
    case = CASES[name]
    ids, wanted = routing(**case)
    M, topk, E, mask = case["tokens"], case["topk"], case["experts"], case.get("mask", ())
    pairs, groups = M * topk, len(mask) or E
    mask_t = torch.tensor(mask or [0], dtype=torch.int32)
    tokens = torch.tensor([case.get("local", M)], dtype=torch.int32)
    x = torch.randn(M, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    x8, scale = torch.full((M, 2, STRIDE), 255, dtype=torch.uint8), torch.zeros(M)
    listed = torch.full((E * pairs,), UNUSED, dtype=torch.int32)
    starts = torch.full((min(pairs, (pairs + E * (T - 1)) // T),), UNUSED, dtype=torch.int32)
    counter = torch.zeros(1 + E, dtype=torch.int32)
    flags = {"HAS_MASK": bool(mask), "HAS_TOKENS": "local" in case, "PDL": False}
    prepare_fp8[(triton.cdiv(pairs, 32) + M,)](
        x, x8, scale, ids, mask_t, tokens, listed, starts, counter, M, topk, groups, E,
        H=HIDDEN, X_STRIDE=STRIDE, PARTS=2, RULE="none", **flags, T=T, BLOCK=32, WIDTH=STRIDE,
        BY_ROW=True,
    )  # fmt: skip
    used = starts[: int(counter[0])].tolist()
    found: dict[int, list[int]] = {}
    for start in used:
        e = start // pairs
        end = min(start + T, e * pairs + int(counter[1 + e]))
        found.setdefault(e, []).extend(listed[start:end].tolist())
    parts = x8.view(torch.float8_e4m3fn).float()
    value = (parts[:, 0] + parts[:, 1] / 16) * scale[:, None]
    value = in_order(value)
    wide = torch.nn.functional.pad(x.float(), (0, STRIDE - HIDDEN))
    many = torch.full(
        (601,), 3, dtype=torch.int32
    )  # more than the programs clear in one go, and one beyond
    part = torch.randn(pairs, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = torch.full((M, HIDDEN), float("nan"), dtype=torch.bfloat16)
    combine_hopper[(M, triton.cdiv(HIDDEN, 128))](
        part, ids, mask_t, tokens, many, scale, out, out.stride(0), M, groups,
        H=HIDDEN, H_USED=HIDDEN, WEIGHTED=False, TOPK=topk, SLOTS=triton.next_power_of_2(topk), **flags, BLOCK_H=128,
        DOT="f32", COUNTERS=600,
    )  # fmt: skip
    return {
        "case": f"{name}-{T}",
        "blocks": {e: set(v) for e, v in found.items()} == wanted
        and all(len(v) == len(set(v)) for v in found.values())
        and len(used) == sum(-(-len(v) // T) for v in wanted.values()),
        "columns": bool((value - wide).abs().max() <= 2.0**-16 * wide.abs().max()),
        "cleared": not many[:600].any().item()
        and many[600].item() == 3
        and not out.isnan().any().item(),
    }


def main() -> None:
    for name in CASES:
        for rows in (4, 8):
            print(json.dumps(run(name, rows)), flush=True)
    for spread in (0.5, 4):
        print(json.dumps(by_row(spread)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
