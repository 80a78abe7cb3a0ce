"""Small layers for the Triton backend, each compared with the oracle; run on a CPU or a GPU.

``python -m sglang_aiter_moe.testing.triton_cases [PATTERN ...]`` prints one JSON object a line. With
``TRITON_INTERPRET=1`` in the environment it runs on CPU tensors, else on the GPU. Triton reads that variable when a
kernel is defined, so interpreted cases need a process of their own.

Every operand and the output lie between guard bytes; the output starts as NaN.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
from dataclasses import dataclass, field
from functools import partial

import torch

from sglang_aiter_moe.numerics.metrics import logits_diff, relative_error
from sglang_aiter_moe.numerics.oracle import RawExperts, routed_moe
from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.testing.hostile import TOGETHER, Layer, needs, spoiled
from sglang_aiter_moe.testing.packing import pack_scale, pack_weight
from sglang_aiter_moe.testing.ties import moved_by_ties

GUARD = 0xA5
GUARD_BYTES = 4096


@dataclass(frozen=True)
class Case:
    """A layer and a call.

    ``routing``: "random", "one" (all tokens on the same experts) or "holes" (-1 slots). ``spread``: tokens are of sizes
    from 2**-6 to 2**2 times a standard normal one, so that an activation works in all its ranges. ``spoil``: names of
    ``hostile.SPOILS``.
    """

    name: str
    mode: str = "A16W4"
    activation: str = "situv2"
    tokens: int = 4
    experts: int = 3
    topk: int = 2
    hidden: int = 192
    inter: int = 64
    w13: str = "separated"
    w13_scale: str = "separated"
    w2: str = "separated"
    w2_scale: str = "separated"
    bias: bool = False
    mask: tuple[int, ...] = ()
    routing: str = "random"
    requantization: str = ""
    pad: int = 0
    twice: bool = False
    per_slot: bool = False
    spread: bool = False
    spoil: str = ""
    request: dict = field(default_factory=dict)


def _cases() -> list[Case]:
    gui = {"w13": "gu_interleaved", "w13_scale": "gu_interleaved"}
    raw = {"w13": "raw", "w13_scale": "raw", "w2": "raw", "w2_scale": "raw"}
    n32 = {"w13": "gu_interleaved_gfx1250", "w13_scale": "n32k4_gu", "w2_scale": "n32k4"}
    n32 |= {"hidden": 128, "inter": 128}  # columns in fours
    cases = []
    for mode in ("A16W4", "A8W4", "A4W4"):
        for form, layout in (("separated", {}), ("gui", gui), ("n32k4", n32), ("raw", raw)):
            cases.append(Case(f"{mode}-{form}-situv2", mode, **layout))
        for act in ("silu", "gelu", "swiglu"):
            cases.append(Case(f"{mode}-{act}", mode, act, tokens=3))
        cases.append(Case(f"{mode}-bias-limit", mode, "swiglu", bias=True, request={"limit": 7.0}))
        cases.append(Case(f"{mode}-situv2-limit", mode, request={"limit": 0.7}, tokens=3))
        cases.append(Case(f"{mode}-mask", mode, mask=(0, 1, 1, 0, 1), topk=3))
        cases.append(Case(f"{mode}-ragged-k", mode, hidden=160, inter=96, tokens=3))
        cases.append(Case(f"{mode}-one-expert", mode, tokens=19, routing="one", twice=True))
        cases.append(Case(f"{mode}-holes", mode, routing="holes", tokens=6))
        cases.append(Case(f"{mode}-one-token", mode, tokens=1))
        cases.append(
            Case(
                f"{mode}-weight-on-input",
                mode,
                request={"weight_on_input": True, "weight_on_output": False},
            )
        )
        cases.append(Case(f"{mode}-pad", mode, pad=32))
        cases.append(Case(f"{mode}-per-slot", mode, routing="holes", per_slot=True))
        cases.append(Case(f"{mode}-no-tokens", mode, tokens=0))
    small = {"hidden": 160, "inter": 96, "tokens": 6, "experts": 6, "bias": True}
    for mode, name in (*((m, n) for m in ("A16W4", "A8W4", "A4W4") for n in ("tokens", "experts")),
                       ("A16W4", "slots"), ("A16W4", "columns"), ("A4W4", "columns"), ("A8W4", "after")):  # fmt: skip
        spoil = TOGETHER[name]
        options = small | needs(spoil) | {"spoil": spoil}
        cases.append(Case(f"{mode}-hostile-{name}", mode, **options))
    for mode in ("A8W4", "A4W4"):
        cases.append(Case(f"{mode}-roundup-bf16", mode, requantization="roundup_bf16"))
        cases.append(Case(f"{mode}-roundup-fp32", mode, requantization="roundup_fp32"))
    return cases


CASES = {case.name: case for case in _cases()}


def guarded(t: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``t`` on ``device`` between guard bytes, and the bytes around and under it."""
    size = t.numel() * t.element_size()
    arena = torch.full((GUARD_BYTES * 2 + size,), GUARD, dtype=torch.uint8, device=device)
    inner = arena[GUARD_BYTES : GUARD_BYTES + size].view(t.dtype).view(t.shape)
    inner.copy_(t)
    return inner, arena


def guards_intact(arena: torch.Tensor) -> bool:
    edges = torch.cat((arena[:GUARD_BYTES], arena[-GUARD_BYTES:]))
    return bool((edges == GUARD).all())


def raw_experts(case: Case, g: torch.Generator) -> RawExperts:
    def r(lo, hi, *shape):
        return torch.randint(lo, hi, shape, dtype=torch.uint8, generator=g)

    E, H, I = case.experts, case.hidden, case.inter
    biases = (torch.randn(E, 2 * I, generator=g), torch.randn(E, H, generator=g))
    return RawExperts(
        r(0, 256, E, 2 * I, H // 2),
        r(118, 123, E, 2 * I, H // 32),
        r(0, 256, E, H, I // 2),
        r(118, 123, E, H, I // 32),
        *(biases if case.bias else (None, None)),
    )


def routing(case: Case, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    total = len(case.mask) or case.experts
    rows = [torch.randperm(total, generator=g)[: case.topk] for _ in range(case.tokens)]
    if case.routing == "one":
        rows = [rows[0]] * case.tokens
    ids = torch.stack(rows).int() if rows else torch.zeros(0, case.topk, dtype=torch.int32)
    if case.routing == "holes":
        ids[torch.rand(ids.shape, generator=g) < 0.4] = -1
    return ids, torch.rand(ids.shape, generator=g)


def request(
    case: Case, experts: RawExperts, device: str, layer: Layer | None = None
) -> KernelRequest:
    default = "none" if case.mode == "A16W4" else "epilogue"
    mask = torch.tensor(case.mask, dtype=torch.int32, device=device) if case.mask else None
    pads = {}
    if case.pad:
        pads = {"hidden_skip_k": case.pad, "hidden_skip_n": case.pad}
        pads |= {"intermediate_skip_n": case.pad, "intermediate_skip_k": case.pad}
    if layer is not None and layer.tokens is not None:
        pads["num_local_tokens"] = torch.tensor([layer.tokens], dtype=torch.int32, device=device)
    return KernelRequest(
        mode=case.mode,
        family="test",
        num_experts=case.experts,
        hidden_size=case.hidden,
        intermediate_size=case.inter,
        w13_layout=case.w13,
        w13_scale_layout=case.w13_scale,
        w2_layout=case.w2,
        w2_scale_layout=case.w2_scale,
        activation=case.activation,
        requantization=case.requantization or default,
        bias13=None if experts.b13 is None else experts.b13.to(device),
        bias2=None if experts.b2 is None else experts.b2.to(device),
        expert_mask=mask,
        **pads,
        **case.request,
    )


def oracle(case: Case, experts: RawExperts, x, ids, weights) -> torch.Tensor:
    rule = {"": "epilogue", "roundup_bf16": "roundup"}
    mask = torch.tensor(case.mask, dtype=torch.int32) if case.mask else None
    return routed_moe(
        x,
        experts,
        ids,
        weights,
        activation=case.activation,
        mode=case.mode,
        limit=case.request.get("limit"),
        expert_mask=mask,
        weight_on_input=case.request.get("weight_on_input", False),
        requantization=rule.get(case.requantization, case.requantization),
        hidden_pad=case.pad,
        intermediate_pad=case.pad,
    )


def run_case(case: Case, device: str, seed: int, runner=None) -> dict:
    """Errors against the oracle, what ties may add to them, and whether guards held; with ``case.twice`` also whether
    bits repeat."""
    from sglang_aiter_moe.portable import triton as backend
    from sglang_aiter_moe.portable.backends import cpu
    from sglang_aiter_moe.portable.triton import workspace

    runner = runner or backend.run
    g = torch.Generator().manual_seed(seed)
    experts = raw_experts(case, g)
    x = torch.randn(case.tokens, case.hidden, generator=g)
    if case.spread:
        x *= 2.0 ** torch.randint(-6, 3, (case.tokens, 1), generator=g)
    ids, weights = routing(case, g)
    layer = spoiled(case.spoil, experts, x.bfloat16(), ids, weights, case.pad)
    x = layer.x
    w1_scale = pack_scale(experts.w13_scale, case.w13_scale, layer.scale_pad)
    w2_scale = pack_scale(experts.w2_scale, case.w2_scale, layer.scale_pad)
    shape = (case.tokens, case.topk, case.hidden) if case.per_slot else x.shape
    out = torch.full(shape, float("nan"), dtype=torch.bfloat16)
    operands = [x, pack_weight(experts.w13, case.w13), pack_weight(experts.w2, case.w2)]
    operands += [w1_scale, w2_scale, weights, ids, out]
    inner, arenas = zip(*(guarded(t, device) for t in operands), strict=True)
    r = request(case, experts, device, layer)
    workspace.carve(inner[0].device, {"all": ((1 << 20,), torch.uint8)})
    workspace.poison(inner[0].device)
    runner(r, *inner)
    first = inner[-1].clone()
    if case.twice:
        inner[-1].fill_(float("nan"))
        runner(r, *inner)

    def exact() -> torch.Tensor:
        out = oracle(case, experts, x, ids, weights)
        out[case.tokens if layer.tokens is None else layer.tokens :] = 0.0
        return out

    expected = exact()
    got = inner[-1].cpu()
    other = torch.empty(shape, dtype=torch.bfloat16)
    if (
        case.routing == "holes" or case.spoil
    ):  # the CPU backend refuses unused slots, as AITER would read out of bounds
        other.copy_(got)
    else:
        cpu.run(request(case, experts, "cpu"), *operands[:-1], other)
    if case.per_slot:
        got, other = got.sum(1, dtype=torch.float32), other.sum(1, dtype=torch.float32)
        first = first.sum(1, dtype=torch.float32)
    bits = bool(((first.cpu() == got) | (first.cpu().isnan() & got.isnan())).all())
    # NaN and Inf count as one: a kernel may find the one where the oracle has the other.
    same = bool(torch.equal(got.isfinite(), expected.to(got.dtype).isfinite()))
    numbers = got.isfinite() & expected.isfinite()
    got, other, expected = (torch.where(numbers, v, 0.0) for v in (got, other, expected))
    empty = not (expected.any() or got.any())
    return {
        "case": case.name,
        "seed": seed,
        "rel_err": 0.0 if empty else relative_error(got, expected),
        "ties": 0.0
        if empty or case.mode == "A16W4"
        else moved_by_ties(lambda: exact().where(numbers, 0.0)),
        "logits_diff": 0.0 if empty else logits_diff(got, expected),
        "cpu_err": 0.0 if empty else relative_error(got, other),
        "finite": same,
        "same_bits": bits,
        "guards": all(guards_intact(a) for a in arenas),
    }


def forms() -> dict:
    """The Hopper bf16 forms as Triton's interpreter can run them, without inline assembly: name -> (case, runner)."""
    from sglang_aiter_moe.portable.triton.hopper import launch as hopper

    tokens, blocks = (
        hopper.TokenConfig(16, 2, 2, 16, 2, 2, 4),
        hopper.ListConfig(32, 1, 1, 32, 2, 1),
    )
    oai = {
        "activation": "swiglu",
        "bias": True,
        "hidden": 160,
        "inter": 96,
        "request": {"limit": 7.0},
    }
    return {
        "form-tokens": (Case("form-tokens", tokens=1, **oai), partial(hopper.run_tokens, config=tokens, asm=False)),
        "form-list": (
            Case("form-list", mask=(0, 1, 1, 0, 1), tokens=3, hidden=160, inter=32),
            partial(hopper.run_list, config=blocks, asm=False),
        ),
    }  # fmt: skip


def main(patterns: list[str]) -> None:
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    seed = int(os.environ.get("CASE_SEED", "0")) or int.from_bytes(os.urandom(3), "big")
    for name, case in CASES.items():
        if not patterns or any(fnmatch.fnmatch(name, p) for p in patterns):
            print(json.dumps(run_case(case, device, seed)), flush=True)
    for name, (case, runner) in forms().items() if device == "cpu" else ():
        if not patterns or any(fnmatch.fnmatch(name, p) for p in patterns):
            print(json.dumps(run_case(case, device, seed, runner)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
