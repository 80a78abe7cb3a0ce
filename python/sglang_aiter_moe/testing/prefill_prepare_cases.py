"""The prefill form's listing and reordering under Triton's interpreter, against plain torch.

``TRITON_INTERPRET=1 python -m sglang_aiter_moe.testing.prefill_prepare_cases`` prints one JSON object a case: whether
every expert's pairs are in its blocks, each once, whether unused places and rows are marked so, whether the counts
are zero again, and whether x came out in the operand's order.
"""

from __future__ import annotations

import json
import sys

import torch
import triton

from sglang_aiter_moe.portable.triton.hopper.prefill_prepare import (
    blocks_kernel,
    place_kernel,
    rank_kernel,
)

CASES = {
    "random": {"tokens": 37, "topk": 4, "experts": 6},
    "one-expert": {"tokens": 41, "topk": 1, "experts": 3, "one": True},
    "holes": {"tokens": 12, "topk": 3, "experts": 5, "holes": True},
    "mask": {"tokens": 19, "topk": 4, "experts": 3, "mask": (0, 1, 1, 0, 0, 1, 0)},
    "local-tokens": {"tokens": 19, "topk": 2, "experts": 4, "local": 7},
}


def stored_order(x: torch.Tensor) -> torch.Tensor:
    """128 columns [t][w][l][v][h] to [w][v][h][t][l]."""
    return x.unflatten(1, (-1, 4, 4, 2, 2, 2)).permute(0, 1, 3, 5, 6, 2, 4).flatten(1)


def run(
    name: str,
    *,
    tokens: int,
    topk: int,
    experts: int,
    one: bool = False,
    holes: bool = False,
    mask: tuple[int, ...] = (),
    local: int | None = None,
    T: int = 16,
) -> dict:
    g = torch.Generator().manual_seed(tokens)
    groups = len(mask) or experts
    ids = torch.stack([torch.randperm(groups, generator=g)[:topk] for _ in range(tokens)]).int()
    if one:
        ids[:] = 1
    if holes:
        ids[torch.rand(ids.shape, generator=g) < 0.4] = -1
    M, H, stride, chunk = tokens, 160, 256, 32
    pairs = M * topk
    x = torch.randn(M, H, generator=g).bfloat16()
    xp = torch.full((M, stride), float("nan"), dtype=torch.bfloat16)
    blocks = min(pairs, (pairs + experts * (T - 1)) // T)
    counts, first = torch.zeros(groups, dtype=torch.int32), torch.full((groups,), 99).int()
    ranks, listed = torch.full((pairs,), -7).int(), torch.full((blocks, T), -7).int()
    expert, rows, number = (torch.full((n,), -7).int() for n in (blocks, blocks, 1))
    mask_t = torch.tensor(mask or (0,), dtype=torch.int32)
    tokens_t = torch.tensor([local or 0], dtype=torch.int32)
    flags = {"HAS_TOKENS": local is not None}
    chunks = triton.cdiv(pairs, chunk)
    G = triton.next_power_of_2(groups)
    rank_kernel[(chunks + M,)](
        x, xp, ids, tokens_t, counts, ranks, M, topk, groups, H=H, X_STRIDE=stride, FORMAT="bf16", RULE="none",
        **flags, BLOCK=chunk, WIDTH=128,
    )  # fmt: skip
    blocks_kernel[(groups,)](
        mask_t, counts, first, listed, expert, rows, number, pairs, groups, experts, HAS_MASK=bool(mask), GROUPS=G,
        T=T, FILL=T,
    )  # fmt: skip
    place_kernel[(chunks,)](
        ids, tokens_t, counts, ranks, first, listed, M, topk, groups, **flags, GROUPS=G, BLOCK=chunk
    )
    used = ids[: local if local is not None else M].flatten()
    here = [e for e in range(groups) if not mask or mask[e]]
    right, at = True, 0
    for number_here, e in enumerate(here):
        expected = set((used == e).nonzero().flatten().tolist())
        need = -(-len(expected) // T)
        mine = listed[at : at + need].flatten().tolist()
        right &= set(mine[: len(expected)]) == expected
        right &= all(v == pairs for v in mine[len(expected) :])
        right &= expert[at : at + need].tolist() == [number_here] * need
        right &= int(rows[at : at + need].sum()) == len(expected)
        at += need
    padded = torch.nn.functional.pad(x, (0, stride - H))
    return {
        "case": name,
        "blocks": right and int(number) == at,
        "counts": bool((counts == 0).all()),
        "order": bool(torch.equal(xp, stored_order(padded))),
    }


def main() -> None:
    for name, case in CASES.items():
        print(json.dumps(run(name, **case)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
