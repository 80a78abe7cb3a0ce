"""Layers and timing for the kernel benchmarks: random weights larger than L2, routing redrawn for each input set.

A timing is one CUDA graph that holds the layer once for each of several independent input sets (own x, own random
experts); replay time over sets, median of the replays.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_aiter_moe.numerics.activations import apply_gate_up
from sglang_aiter_moe.numerics.mxfp4 import dequantize_mxfp4
from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.testing.packing import pack_scale, pack_weight

DEVICE = "cuda"


@dataclass(frozen=True)
class Shape:
    hidden: int
    inter: int
    experts: int
    topk: int
    activation: str
    limit: float | None = None
    bias: bool = False


SHAPES = {
    "k3": Shape(3584, 384, 896, 16, "situv2"),  # Kimi K3, TP8
    "oss": Shape(2880, 2880, 128, 4, "swiglu", 7.0),  # gpt-oss-120b, TP1, unpadded
    "oss3072": Shape(3072, 3072, 128, 4, "swiglu", 7.0),  # as interleaved bytes need it
    "oss-tp2": Shape(3072, 1536, 128, 4, "swiglu", 7.0),
    "oss-tp4": Shape(3072, 768, 128, 4, "swiglu", 7.0),
    "oss-tp8": Shape(3072, 512, 128, 4, "swiglu", 7.0),
    "silu": Shape(7168, 256, 256, 8, "silu", 10.0),  # DeepSeek-V4's form at TP8, SiLU with a limit
}


class Layer:
    """Raw and packed weights of one shape on the GPU. Scales keep the output near 1."""

    def __init__(self, name: str, layout: str = "separated", seed: int = 0, bias: bool = False):
        self.name, self.shape, self.layout = name, SHAPES[name], layout
        s = self.shape
        g = torch.Generator(device=DEVICE).manual_seed(seed)

        def r(lo, hi, *size):
            return torch.randint(lo, hi, size, dtype=torch.uint8, device=DEVICE, generator=g)

        E, H, I = s.experts, s.hidden, s.inter
        self.w13, self.s13 = r(0, 256, E, 2 * I, H // 2), r(120, 123, E, 2 * I, H // 32)
        self.w2, self.s2 = r(0, 256, E, H, I // 2), r(118, 121, E, H, I // 32)
        self.b13 = torch.randn(E, 2 * I, device=DEVICE, generator=g) if bias else None
        self.b2 = torch.randn(E, H, device=DEVICE, generator=g) if bias else None
        self.packed = (
            pack_weight(self.w13, layout),
            pack_weight(self.w2, "separated"),
            pack_scale(self.s13, layout).view(-1),
            pack_scale(self.s2, "separated").view(-1),
        )

    def request(self, mode: str = "A16W4") -> KernelRequest:
        s = self.shape
        return KernelRequest(
            mode=mode,
            family="bench",
            num_experts=s.experts,
            hidden_size=s.hidden,
            intermediate_size=s.inter,
            w13_layout=self.layout,
            w13_scale_layout=self.layout,
            w2_layout="separated",
            w2_scale_layout="separated",
            activation=s.activation,
            limit=s.limit,
            bias13=self.b13,
            bias2=self.b2,
            requantization="none" if mode == "A16W4" else "epilogue",
        )

    def inputs(self, tokens: int, seed: int):
        s = self.shape
        g = torch.Generator(device=DEVICE).manual_seed(7919 * seed + tokens)
        x = torch.randn(tokens, s.hidden, device=DEVICE, generator=g).bfloat16()
        scores, ids = torch.randn(tokens, s.experts, device=DEVICE, generator=g).topk(
            s.topk, dim=-1
        )
        return x, ids.int().contiguous(), torch.softmax(scores, -1).contiguous()

    def reference(self, x, ids, weights, quantize=None) -> torch.Tensor:
        """float32 on dequantised weights; ``quantize(v, stage)`` stands for a mode's activation rounding."""
        s = self.shape
        quantize = quantize or (lambda v, stage: v)
        out = torch.zeros(x.shape[0], s.hidden, device=DEVICE)
        xf = quantize(x.float(), 1)
        for e in torch.unique(ids).tolist():
            tok, slot = (ids == e).nonzero(as_tuple=True)
            h = xf[tok] @ dequantize_mxfp4(self.w13[e], self.s13[e]).T
            if self.b13 is not None:
                h = h + self.b13[e]
            y = apply_gate_up(s.activation, h[:, : s.inter], h[:, s.inter :], limit=s.limit)
            y = quantize(y, 2) @ dequantize_mxfp4(self.w2[e], self.s2[e]).T
            if self.b2 is not None:
                y = y + self.b2[e]
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out

    def bytes_and_flops(self, tokens: int, unique: float) -> tuple[float, float]:
        s = self.shape
        per_expert = 3 * s.hidden * s.inter * (1 / 2 + 1 / 32)
        return (
            unique * per_expert + 4 * tokens * s.hidden,
            6 * s.hidden * s.inter * tokens * s.topk,
        )


def number_of_sets(tokens: int) -> int:
    return 16 if tokens <= 64 else 8 if tokens <= 256 else 4


def time_graph(calls: list, budget_s: float = 0.25, least: int = 10, most: int = 100) -> dict:
    """Microseconds a call: all ``calls`` in one graph, replayed; median, 10th and 90th percentile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for call in calls:
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for call in calls:
                call()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    times, start = [], time.time()
    while len(times) < most and (len(times) < least or time.time() - start < budget_s):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(5)]
        for a, b in events:
            a.record()
            graph.replay()
            b.record()
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) * 1000 / len(calls) for a, b in events]
    times.sort()
    pick = lambda q: times[min(len(times) - 1, math.floor(q * len(times)))]  # noqa: E731
    return {"us": pick(0.5), "p10": pick(0.1), "p90": pick(0.9), "replays": len(times)}


@triton.jit
def _read(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], tl.int32)
    for i in range(STEPS):
        total ^= tl.load(x + first + i * BLOCK + tl.arange(0, BLOCK))
    if tl.max(total) == 123456789:
        tl.store(out, 1)


def ceilings() -> dict[str, float]:
    """Copy (bytes read + written), read-only and bf16 8192^3 rates of this card, per second."""

    def median_s(f, n=15):
        for _ in range(3):
            f()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        for a, b in events:
            a.record()
            f()
            b.record()
        torch.cuda.synchronize()
        return sorted(a.elapsed_time(b) for a, b in events)[n // 2] / 1000

    words = 1 << 30
    a = torch.randint(0, 1 << 30, (words,), dtype=torch.int32, device=DEVICE)
    b = torch.empty_like(a)
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    copy = 8 * words / median_s(lambda a=a, b=b: b.copy_(a))
    read = (
        4
        * words
        / median_s(lambda a=a: _read[(words // 32768,)](a, flag, BLOCK=4096, STEPS=8, num_warps=8))
    )
    del a, b
    x, y = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
    return {"copy": copy, "read": read, "bf16": 2 * 8192**3 / median_s(lambda: x @ y)}
