"""The vectors of test/golden/executed: layers as AITER's own gfx950 kernels computed them (README.md there)."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from sglang_aiter_moe.numerics.metrics import cosine
from sglang_aiter_moe.numerics.oracle import RawExperts

HIDDEN, INTER = 3584, 384
MODES = ("a16w4", "a8w4", "a4w4")
CASES = [(shape, mode) for shape in ("full", "ragged") for mode in MODES]
FORM = {"a16w4": "separated", "a8w4": "gu_interleaved", "a4w4": "separated"}
"""The layout of w13 and its scales that AITER's kernels of each mode were given."""


def bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@functools.cache
def experts(seed: int, count: int) -> RawExperts:
    """The weights that the README of the vectors describes."""
    rng = np.random.Generator(np.random.PCG64(seed))
    w13 = rng.integers(0, 256, (count, 2 * INTER, HIDDEN // 2), dtype=np.uint8)
    s13 = rng.integers(117, 123, (count, 2 * INTER, HIDDEN // 32), dtype=np.uint8)
    w2 = rng.integers(0, 256, (count, HIDDEN, INTER // 2), dtype=np.uint8)
    s2 = rng.integers(117, 123, (count, HIDDEN, INTER // 32), dtype=np.uint8)
    return RawExperts(*(torch.from_numpy(a) for a in (w13, s13, w2, s2)))


@functools.cache
def load(folder: Path, shape: str, mode: str) -> tuple[RawExperts, dict[str, np.ndarray]]:
    """The weights and the arrays of one file; checks that the weights are those it was made with."""
    with np.load(folder / f"{shape}_{mode}.npz") as golden:
        arrays = {k: golden[k] for k in golden}
    meta = json.loads(str(arrays.pop("meta")))
    raw = experts(meta["seed_weights"], meta["E"])
    for name, tensor in (("w13", raw.w13), ("w2_scale", raw.w2_scale)):
        if hashlib.sha256(tensor.numpy().tobytes()).hexdigest() != meta["sha256"][name]:
            raise RuntimeError(f"{name} of {shape}_{mode} is not what the vectors were made with")
    return raw, arrays


def rms(got: torch.Tensor, want: torch.Tensor, dim: int | None = None):
    """Root mean square of the difference over that of ``want``; with ``dim`` for each row."""
    difference, want = (got.double() - want.double()).square(), want.double().square()
    if dim is None:
        return float((difference.sum() / want.sum()).sqrt())
    return (difference.sum(dim) / want.sum(dim)).sqrt()


def output_faults(got: torch.Tensor, arrays: dict[str, np.ndarray]) -> list[str]:
    """What of the README's tolerances for ``out`` does not hold."""
    want = bf16(arrays["out"])
    largest = float((got.double() - want.double()).abs().max() / want.double().abs().max())
    checks = {
        f"rms {rms(got, want):.2e} > 4e-3": rms(got, want) <= 4e-3,
        f"rms of a token {float(rms(got, want, 1).max()):.2e} > 5e-3": float(
            rms(got, want, 1).max()
        )
        <= 5e-3,
        f"cosine {cosine(got, want)} < 0.99999": cosine(got, want) >= 0.99999,
        f"difference {largest:.2e} of the largest output > 1e-2": largest <= 1e-2,
    }
    return [text for text, holds in checks.items() if not holds]
