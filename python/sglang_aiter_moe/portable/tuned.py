"""Tuned rows: for which calls AITER's configuration names a kernel (docs/contract.md sections b.2, b.4, f).

AITER looks a call up by (arch, CUs, padded M, H, I, experts, topk, activation, dtypes, doweight). The kernel's name
decides the family. ``AITER_CONFIG_FMOE`` names CSV files to take instead of the built-in knowledge below.
"""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_aiter_moe.portable.enums import ACTIVATION_NAMES, GELU, SILU, SITUV2, SWIGLU
from sglang_aiter_moe.portable.releases import Release

PADDED_M_TIERS = (32768, 131072)
BF16, FP8, FP4 = "bf16", "fp8", "fp4"

_A16W4 = ("flydsl_moe1_abf16_wfp4_bf16", "flydsl_moe2_abf16_wfp4_bf16")
_A8W4 = ("flydsl_moe1_afp8_wfp4_bf16_gui_fp8", "flydsl_moe2_afp8_wfp4_bf16")
_A8W4_LAYOUT = ("flydsl_moe1_afp8_wfp4_bf16_gui_fp8", "flydsl_moe2_layout_afp8_wfp4_bf16")
_A4W4_LAYOUT = ("flydsl_moe1_afp4_wfp4_bf16_fp4", "flydsl_moe2_layout_afp4_wfp4_bf16")
_A4W4 = ("flydsl_moe1_afp4_wfp4_bf16", "flydsl_moe2_afp4_wfp4_bf16")
_MARKS = ("swiglu_mxfp4_bf16", "swiglu_mxfp4_bf16")
_MXMOE = ("flydsl_mxmoe_g1_a4w4", "flydsl_mxmoe_g2_a4w4")


@dataclass(frozen=True)
class TunedRow:
    """One row, or a class of rows that differ only in tile sizes.

    Attributes:
        activation: ActivationType value.
        a_dtype: "bf16", "fp8" or "fp4".
        hidden, inter: H, I; ``inter`` None where the contract does not name it.
        kernel1, kernel2: names of the stage kernels (of a class: what its names have in common).
        experts, topk: E and routed top-k; ``topk`` None where the contract does not name it.
        tokens: padded M values; None for every power of two up to 32768.
        slices: a layer with fewer experts or a smaller top-k counts as this one, unless it has an
            expert mask. AITER matches both exactly, but neither changes what the kernels do with a row
            of tokens, and a slice of the layer is to run what the layer runs.
        arch: gfx name.
        since: the property of ``Release`` that a release needs to have it.
    """

    activation: int
    a_dtype: str
    hidden: int
    inter: int | None
    kernel1: str
    kernel2: str
    experts: int
    topk: int | None
    tokens: frozenset[int] | None = None
    slices: bool = False
    arch: str = "gfx950"
    since: str = "gate_mode_decides"
    ksplit: int = 0
    run_1stage: bool = False

    def covers(self, experts: int, topk: int, masked: bool) -> bool:
        """Whether the row is for a layer of that many experts and top-k."""
        if self.slices and not masked:
            return experts <= self.experts and topk <= self.topk
        return experts == self.experts and self.topk in (None, topk)


def _pow2(low: int, high: int) -> frozenset[int]:
    return frozenset(1 << i for i in range(20) if low <= 1 << i <= high)


def _rows(names, activation, a_dtype, hidden, inters, experts_topk, **more):
    return [
        TunedRow(activation, a_dtype, hidden, inter, *names, *pair, **more)
        for inter in inters
        for pair in experts_topk
    ]


_K3 = {"experts_topk": ((896, 16),), "slices": True}
_GPT_OSS = {"experts_topk": ((128, 4),)}
_ANY = (None,)

BUILTIN: tuple[TunedRow, ...] = (
    # Kimi K3 (kimik3_*)
    *_rows(
        _A16W4, SITUV2, BF16, 3584, (384, 512), **_K3, tokens=_pow2(1, 16384), since="has_situv2"
    ),
    *_rows(_A8W4_LAYOUT, SITUV2, FP8, 3584, (384, 512), **_K3, since="has_situv2"),
    *_rows(_A8W4, SITUV2, FP8, 3584, (3072,), **_K3, tokens=frozenset({4096}), since="has_situv2"),
    *_rows(_A4W4_LAYOUT, SITUV2, FP4, 3584, (384,), **_K3, since="has_situv2_a4w4"),
    # gpt-oss-120b (gptoss_*); the A16W4 names are marks, the order of section b.3 decides there
    *_rows(_MARKS, SWIGLU, BF16, 3072, (512, 1536, 3072), **_GPT_OSS, tokens=_pow2(1, 256)),
    *_rows(_A4W4, SWIGLU, FP4, 3072, (512, 1536, 3072), **_GPT_OSS),
    *_rows(_A8W4, SWIGLU, FP8, 3072, (3072,), **_GPT_OSS),
    # DeepSeek-V4 (dsv4_fp8fp4)
    *_rows(_A8W4, SILU, FP8, 7168, (256, 384, 512, 768, 1536), ((384, 6), (385, 7), (48, 6))),
    *_rows(_A8W4, SILU, FP8, 4096, (256,), ((256, 6),)),
    # MiniMax-M3 (minimax_m3_fp4)
    *_rows(_A4W4_LAYOUT, SWIGLU, FP4, 6144, (384, 768), ((129, 5),), since="has_mxmoe"),
    # SiLU on the mxmoe port: Qwen3.5, GLM5, Kimi K2. Found whatever the activation, on a miss.
    *_rows(_MXMOE, SILU, FP4, 4096, (256, 512), ((512, None), (513, None)), since="has_mxmoe"),
    *_rows(_MXMOE, SILU, FP4, 6144, (512,), ((257, None),), since="has_mxmoe"),
    *_rows(_MXMOE, SILU, FP4, 7168, _ANY, ((384, None), (385, None)), since="has_mxmoe"),
)


def padded_tokens(tokens: int) -> int:
    """M as AITER looks it up: the next power of two below 32768, then the tier below (fm:1336-1345)."""
    if tokens < PADDED_M_TIERS[0]:
        return 1 if tokens <= 1 else 1 << (tokens - 1).bit_length()
    return max(tier for tier in PADDED_M_TIERS if tokens >= tier)


class TunedTable:
    """Rows to look calls up in; read once."""

    def __init__(self, rows: Iterable[TunedRow], release: Release, arch: str) -> None:
        self._rows = tuple(r for r in rows if r.arch == arch and getattr(release, r.since))

    @classmethod
    def from_environment(cls, env, release: Release, arch: str) -> TunedTable:
        """The files that AITER_CONFIG_FMOE names (joined by ``os.pathsep``), else the built-in rows."""
        files = env.get("AITER_CONFIG_FMOE", "")
        if not files:
            return _builtin(release, arch)
        return cls([row for f in files.split(os.pathsep) for row in read_csv(f)], release, arch)

    def lookup(
        self,
        *,
        tokens: int,
        hidden: int,
        inter: int,
        experts: int,
        topk: int,
        activation: int,
        a_dtype: str,
        doweight_stage1: bool,
        masked: bool,
    ) -> TunedRow | None:
        """The row for a call: exact activation first, then any; above 32768 tokens the tier below as well.

        Args:
            tokens: padded M.
            topk: without the always-masked slot that an expert-parallel caller appends.
            masked: there is an expert mask.
        """
        if doweight_stage1:
            return None
        tiers = [tokens] + [t for t in reversed(PADDED_M_TIERS) if t < tokens]
        if tokens <= PADDED_M_TIERS[0]:
            tiers = tiers[:1]
        matching = [
            r
            for r in self._rows
            if (r.hidden, r.a_dtype) == (hidden, a_dtype)
            and r.inter in (None, inter)
            and r.covers(experts, topk, masked)
        ]
        for tier in tiers:
            at_tier = [
                r for r in matching if (tier in r.tokens if r.tokens else tier <= PADDED_M_TIERS[0])
            ]
            exact = [r for r in at_tier if r.activation == activation]
            # The fallback ignores the activation, so that another one can land on a kernel without it.
            for candidates in (exact, at_tier):
                if candidates:
                    return candidates[0]
        return None


@functools.cache
def _builtin(release: Release, arch: str) -> TunedTable:
    return TunedTable(BUILTIN, release, arch)


_ACTIVATIONS = {name: value for value, name in ACTIVATION_NAMES.items()}
_A_DTYPES = {"bfloat16": BF16, "float8_e4m3fn": FP8, "float4_e2m1fn_x2": FP4}
_ARCH_OF_CUS = {256: "gfx950", 304: "gfx942", 80: "gfx942"}


def read_csv(path: str) -> list[TunedRow]:
    """The MXFP4 rows of an AITER tuned_fmoe CSV; rows tagged ``flydsl_fallback`` are left out, as AITER does.

    Raises:
        OSError: the file cannot be read. KeyError, ValueError: a column is missing or no number.
    """
    rows = []
    with open(path, newline="") as f:
        for line in csv.DictReader(f):
            if (line.get("_tag") or "") == "flydsl_fallback":
                continue
            a_dtype = _A_DTYPES.get(line["q_dtype_a"].rpartition(".")[2])
            activation = _ACTIVATIONS.get(line["act_type"].rpartition(".")[2].lower())
            if a_dtype is None or activation is None or "float4" not in line["q_dtype_w"]:
                continue
            if int(line["doweight_stage1"]) or not int(line["use_g1u1"]):
                continue
            rows.append(
                TunedRow(
                    activation,
                    a_dtype,
                    int(line["model_dim"]),
                    int(line["inter_dim"]),
                    (line["kernelName1"] or "").strip(),
                    (line["kernelName2"] or "").strip(),
                    experts=int(line["expert"]),
                    topk=int(line["topk"]),
                    tokens=frozenset({int(line["token"])}),
                    arch=line.get("gfx") or _ARCH_OF_CUS.get(int(line["cu_num"]), ""),
                    since="has_gate_mode",
                    ksplit=int(float(line.get("ksplit") or 0)),
                    run_1stage=bool(int(float(line.get("run_1stage") or 0))),
                )
            )
    return rows


__all__ = ["BUILTIN", "GELU", "TunedRow", "TunedTable", "padded_tokens", "read_csv"]
