"""Which form and tiles a Hopper GPU runs: tables/hopper.json, chosen among the configurations that
``benchmark/tune_kernels.py`` times (it writes such a table for the GPU that it runs on).

Rows are grouped by mode and shape class: "short" if stage 2 reduces over at most 512 columns (a tensor-parallel
slice), else "long".
Within a group the first row is taken whose ``pairs`` (M * topk) bound is not exceeded and whose form computes the
request; the forms differ in what they can do (``supports`` in each launch module), and the one-launch form's rows
also bound M: with few experts a token the same pairs are more tokens, which it takes one by one. Two rows may have
the same bound: the second one is for layers that the first one does not take.
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import asdict

import torch
import triton

from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.portable.triton.hopper import (
    fp8_launch,
    launch,
    mx_prefill_launch,
    prefill_launch,
    shared_prefill_launch,
    whole_launch,
    wide_launch,
)
from sglang_aiter_moe.portable.triton.table import TABLES

logger = logging.getLogger(__name__)

SHORT = 512
FRAGMENTS_UP_TO = (3, 6)
"""The last Triton that keeps the bf16 fragments of "tokens" and "list" out of shared memory; layouts are its choice,
and ``test_hopper_code.py`` looks at what it generates. Later ones stage them, so other forms run instead."""
FORMS = {
    "whole": (whole_launch.WholeConfig, whole_launch.supports, whole_launch.run_whole),
    "tokens": (launch.TokenConfig, launch.supports_tokens, launch.run_tokens),
    "list": (launch.ListConfig, launch.supports, launch.run_list),
    "fp8": (fp8_launch.Fp8Config, fp8_launch.supports, fp8_launch.run_fp8),
    "prefill": (prefill_launch.PrefillConfig, prefill_launch.supports, prefill_launch.run_prefill),
    "mx_prefill": (
        mx_prefill_launch.MxPrefillConfig,
        mx_prefill_launch.supports,
        mx_prefill_launch.run_mx_prefill,
    ),
    "wide": (wide_launch.WideConfig, wide_launch.supports, wide_launch.run_wide),
    "shared_prefill": (
        shared_prefill_launch.SharedPrefillConfig,
        shared_prefill_launch.supports,
        shared_prefill_launch.run_shared_prefill,
    ),
}


@functools.cache
def load(name: str = "hopper") -> dict[str, list[tuple[float, str, object]]]:
    """Group -> (most pairs, form, configuration) in ascending order of pairs."""
    table = json.loads((TABLES / f"{name}.json").read_text())
    return {
        group: [
            (row["pairs"] or float("inf"), row["form"], FORMS[row["form"]][0](**row["config"]))
            for row in rows
        ]
        for group, rows in table["groups"].items()
    }


def row_json(pairs: int | None, form: str, config) -> dict:
    """A row as the table's file holds it."""
    return {"pairs": pairs, "form": form, "config": asdict(config)}


def group(r: KernelRequest) -> str:
    return f"{r.mode} {'short' if r.intermediate_size <= SHORT else 'long'}"


ALIGNMENT = {
    "whole": (16, 16),
    "fp8": (16, 16),
    "mx_prefill": (4, 4),
    "shared_prefill": (16, 16),
    "wide": (16, 16),
}
"""Bytes that a form needs the addresses of weights and of scales to be multiples of: bulk copies 16, words 4."""
WORDS = (4, 1)
"""The others'."""


@functools.cache
def _say_unaligned(forms: str) -> None:
    logger.warning(
        "expert weights or scales begin at addresses that the Hopper form %s cannot read (multiples of 16 bytes suit "
        "all forms): another form runs in its place",
        forms,
    )


def reach(form: str, weights: tuple, scales: tuple) -> bool:
    """Whether ``form`` can read these tensors where they are; says once if not."""
    of_weights, of_scales = ALIGNMENT.get(form, WORDS)
    fits = not any(w.data_ptr() % of_weights for w in weights)
    fits = fits and not any(s.data_ptr() % of_scales for s in scales)
    if not fits:
        _say_unaligned(form)
    return fits


@functools.cache
def fragments_stay_in_registers() -> bool:
    """Whether this Triton compiles the bf16 forms as they were measured; says once if not."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version <= FRAGMENTS_UP_TO:
        return True
    logger.warning(
        "Triton %s stages bf16 weight fragments through shared memory (checked up to %d.%d): fp8 and wgmma forms run "
        "in place of the 'tokens' and 'list' forms",
        triton.__version__,
        *FRAGMENTS_UP_TO,
    )
    return False


def _built_for(r: KernelRequest, config) -> tuple:
    """What the code of ``config``'s kernels depends on."""
    flags = r.limit is None, r.bias13 is None, r.bias2 is None, r.expert_mask is None
    return (
        config, r.mode, r.hidden_size, r.intermediate_size, r.w13_layout, r.activation, r.requantization, *flags,
        r.num_local_tokens is None,
    )  # fmt: skip


_unbuilt: set[tuple] = set()


def give_up(r: KernelRequest, config, problem: Exception) -> None:
    """Keeps ``config`` from layers like ``r``'s, whose kernels could not be built; says so once.

    ptxas of CUDA 12.8 ends with a signal for some widths of some configurations of many tokens; none of K3's or
    gpt-oss's (docs/kernel-notes.md).
    """
    _unbuilt.add(_built_for(r, config))
    logger.warning(
        "no Hopper kernel for H %d, I %d, %s with %s: %s. Another form runs in its place",
        r.hidden_size,
        r.intermediate_size,
        r.mode,
        config,
        str(problem).strip().split("\n")[0],
    )


def choose(
    r: KernelRequest,
    tokens: int,
    topk: int,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
):
    """(runner, configuration), or None where the portable form is the one to run."""
    pairs = tokens * topk
    for bound, form, config in load().get(group(r), ()):
        _, supports, runner = FORMS[form]
        if form in ("tokens", "list") and not fragments_stay_in_registers():
            continue
        if tokens > getattr(config, "most_tokens", tokens):
            continue
        if pairs > bound or not supports(r, w1_scale, w2_scale):
            continue
        if hasattr(config, "fits") and not config.fits(r, topk):
            continue
        if form == "wide" and pairs > r.num_experts * (config.n1 + config.n2):
            continue  # more than a block an expert on average: their weights would be read again and again
        if _unbuilt and _built_for(r, config) in _unbuilt:
            continue
        if reach(form, (w1, w2), (w1_scale, w2_scale)):
            return runner, config
    return None
