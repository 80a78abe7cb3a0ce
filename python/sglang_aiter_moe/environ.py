"""Every environment variable of the MXFP4 MoE path: who reads it, when, with which parser.

Source: docs/contract.md section b.5.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_aiter_moe.environ_parsers import (
    Parser,
    exactly_one,
    integer,
    lowered,
    sglang_bool,
    sglang_env_bool,
    substring_of_one,
    trimmed_and_lowered,
    truthy_list,
    verbatim,
)


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: its name.
        meaning: what it does, in one sentence.
        default: what holds when it is not set, as text.
        when: when its readers read it.
        aiter: AITER's parser, None if AITER does not read it.
        sglang: SGLang's parser, None if SGLang does not read it.
        ours: this project's parser, None if it is not one of ours.
        accepted: the spellings to use.
    """

    name: str
    meaning: str
    default: str
    when: str
    aiter: Parser | None = None
    sglang: Parser | None = None
    ours: Parser | None = None
    accepted: str = "0, 1"
    source: str = ""
    tags: frozenset[str] = field(default_factory=frozenset)

    @property
    def readers(self) -> tuple[str, ...]:
        """The names of those who read it."""
        pairs = (("SGLang", self.sglang), ("AITER", self.aiter), ("sglang-aiter-moe", self.ours))
        return tuple(name for name, parser in pairs if parser)

    def sglang_reads(self, value: str | None) -> Any:
        """What SGLang understands by a raw value; None if SGLang does not read the variable."""
        return self.sglang(value) if self.sglang else None

    def aiter_reads(self, value: str | None) -> Any:
        """What AITER understands by a raw value; None if AITER does not read the variable."""
        return self.aiter(value) if self.aiter else None


_TABLE = (
    Variable(
        "AITER_SITUV2_A8W4",
        "Runs SiTUv2 layers in A8W4; wins over AITER_SITUV2_A4W4. No effect on gfx1250.",
        "0",
        "SGLang: at weight load. AITER: at every call.",
        aiter=exactly_one(),
        sglang=sglang_bool(),
    ),
    Variable(
        "AITER_SITUV2_A4W4",
        "Runs SiTUv2 layers in A4W4 unless A8W4 is on. AITER before v0.1.19.post1 ignores it.",
        "0",
        "SGLang: at weight load. AITER: at every call.",
        aiter=exactly_one(),
        sglang=sglang_bool(),
    ),
    Variable(
        "AITER_FORCE_A8W4",
        "On gfx1250: A8W4 instead of A4W4, for every activation.",
        "0",
        "SGLang: at import. AITER: at every call, on gfx1250 only.",
        aiter=substring_of_one(),
        sglang=sglang_bool(),
    ),
    Variable(
        "AITER_BF16_FP8_MOE_BOUND",
        "From this many tokens on, gfx950 gives interleaved layers MXFP8 activations; below, bf16. Junk "
        "is a ValueError in every MoE call.",
        "256",
        "AITER: at every call.",
        aiter=integer(256),
        accepted="an integer",
    ),
    Variable(
        "GPTOSS_SWIGLU_MXFP4_BF16_BOUND",
        "From this many tokens on, separated SwiGLU layers get MXFP4 activations; below, bf16.",
        "256",
        "AITER: at import.",
        aiter=integer(256),
        accepted="an integer",
    ),
    Variable(
        "AITER_FLYDSL_FORCE",
        "Shapes without a tuned row run on FlyDSL's heuristic kernels. GELU is then computed as SiLU.",
        "1",
        "AITER: at the first call of a shape.",
        aiter=exactly_one("1"),
    ),
    Variable(
        "AITER_CONFIG_FMOE",
        "CSV files of tuned shapes in place of those that AITER ships.",
        "",
        "AITER: at the first call of a shape.",
        aiter=verbatim(None),
        accepted="paths",
    ),
    Variable(
        "AITER_BYPASS_TUNE_CONFIG",
        "Ignores the tuned shapes.",
        "0",
        "AITER: at the first call of a shape.",
        aiter=integer(0),
    ),
    Variable(
        "AITER_KSPLIT",
        "Split-k of stage 1 for shapes that are not tuned; 0 leaves it to AITER.",
        "0",
        "AITER: at the first call of a shape.",
        aiter=integer(0),
        accepted="an integer",
    ),
    Variable(
        "AITER_USE_NT",
        "Non-temporal loads of weights; -1 leaves it to AITER.",
        "-1",
        "AITER: at the first call of a shape.",
        aiter=integer(-1),
        accepted="-1, 0, 1",
    ),
    Variable(
        "AITER_MOE_A8W4_BYPASS_QUANT",
        "Skips the activation quantisation of A8W4, for measuring.",
        "0",
        "AITER: at import.",
        aiter=exactly_one(),
    ),
    Variable(
        "AITER_USE_CK_MOE_SORTING",
        "Sorts tokens by expert with the CK kernel.",
        "0",
        "AITER: at import.",
        aiter=exactly_one(),
    ),
    Variable(
        "AITER_USE_FLYDSL_MOE_SORTING",
        "Sorts tokens by expert with the FlyDSL kernel.",
        "0",
        "AITER: at import.",
        aiter=exactly_one(),
    ),
    Variable(
        "AITER_MOE_SORT_BACKEND",
        "Which kernel sorts tokens by expert.",
        "auto",
        "AITER: at import.",
        aiter=lowered("auto"),
        accepted="auto, or a backend's name",
    ),
    Variable(
        "AITER_FLYDSL_STAGE2_FP8",
        "FlyDSL's stage 2 takes MXFP8 activations.",
        "0",
        "AITER: at every call.",
        aiter=exactly_one(),
    ),
    Variable(
        "AITER_MXFP4_INTERMEDIATE",
        "MXFP4 between the two stages.",
        "0",
        "AITER: at every call.",
        aiter=exactly_one(),
    ),
    Variable(
        "AITER_FLYDSL_FORCE_REDUCE",
        "FlyDSL's stage 2 sums rows per routed expert in place of atomic adds.",
        "0",
        "AITER: at every call.",
        aiter=exactly_one(),
    ),
    Variable(
        "AITER_USE_GROUPED_GEMM",
        "gfx1250's grouped path; not set, it is on where the GPU is a gfx1250.",
        "",
        "AITER: at every call.",
        aiter=truthy_list,
    ),
    Variable(
        "AITER_FORCE_GFX1250",
        "Takes the gfx1250 path on any GPU.",
        "0",
        "AITER: at every call.",
        aiter=truthy_list,
    ),
    Variable(
        "AITER_DISABLE_GROUPED_A8W4",
        "On gfx1250: leaves the grouped path, the only one that reads its layout.",
        "0",
        "AITER: at every call, on gfx1250 only.",
        aiter=exactly_one(),
    ),
    Variable(
        "AITER_GROUPED_STAGE1_WEIGHT_LAYOUT",
        "On gfx1250: makes the grouped kernels read w13 separated (gguu) or interleaved (gugu).",
        "",
        "AITER: at every call, on gfx1250 only.",
        aiter=trimmed_and_lowered,
        accepted="not needed",
    ),
    Variable(
        "SGLANG_USE_AITER",
        "SGLang's ROCm kernels come from AITER; without it this path is not used.",
        "false",
        "SGLang: at import.",
        sglang=sglang_bool(),
    ),
    Variable(
        "SGLANG_AITER_K3_OPT",
        "Pads Kimi K3's expert width to a multiple of 128 in place of 256: 384 stays 384, a quarter less "
        "expert memory than 512, and AITER's tuned A4W4 shapes can match. The patch set does so either way. "
        "Hands the router strided logits, without a copy.",
        "false",
        "SGLang: at import.",
        sglang=sglang_bool(),
    ),
    Variable(
        "SGLANG_USE_AITER_MOE_GU_ITLV",
        "Layers other than SiTUv2 load w13 interleaved, and say so in each call. SGLang's runner also reads it with "
        "a parser that takes only `true` and `1` for on: a spelling that the two read differently is refused.",
        "true",
        "SGLang: at weight load, and at every call of a layer with a limit.",
        sglang=sglang_env_bool(True),
    ),
    Variable(
        "SGLANG_ROCM_SMALLM_MOE",
        "On gfx950 SiLU layers with few tokens bypass AITER's fused_moe (SGLang 0.5.21 on), with a kernel "
        "that reads the layout as loaded.",
        "true",
        "SGLang: at import.",
        sglang=sglang_bool("true"),
    ),
    Variable(
        "SGLANG_K3_FLYDSL_AR_NORM",
        "Nothing: it is in the server command of SGLang #33838, but 0.5.23 has no reader for it.",
        "",
        "never",
        accepted="not needed",
    ),
    Variable(
        "SGLANG_PLUGINS",
        "Which plugins SGLang loads, separated by commas; this one is aiter_moe. Not set: all.",
        "",
        "SGLang: at server start.",
        sglang=verbatim(None),
        accepted="names",
    ),
    Variable(
        "SGLANG_AITER_MOE_ENABLE",
        "Switches the whole patch set on or off.",
        "1",
        "At plugin registration; in a tree that it was applied to, when a layer is built and at each call.",
        ours=verbatim("1"),
    ),
    Variable(
        "SGLANG_AITER_MOE_BACKEND",
        "What executes the AITER path.",
        "auto",
        "At plugin registration.",
        ours=verbatim("auto"),
        accepted="auto, aiter, portable",
    ),
    Variable(
        "SGLANG_AITER_MOE_A16W4_KERNEL",
        "States which w13 layout this AITER's SiTUv2 A16W4 kernel is built to read.",
        "separated",
        "At weight load.",
        ours=verbatim("separated"),
        accepted="separated, gu_interleaved",
    ),
    Variable(
        "SGLANG_USE_CPU_ENGINE",
        "Runs SGLang's engine on a CPU; there the portable backend also takes over AITER's routing.",
        "0",
        "SGLang: at import. Here: at plugin registration.",
        sglang=exactly_one(),
        ours=exactly_one(),
    ),
    Variable(
        "SGLANG_AITER_MOE_RELOAD_STAGING",
        "host: a weight update first copies what it replaces to host memory, and a failed one is undone; "
        "none: layers that a failed update wrote refuse calls until a full update.",
        "none",
        "At each weight update.",
        ours=verbatim("none"),
        accepted="none, host",
    ),
    Variable(
        "SGLANG_AITER_MOE_ALLOW_UNTESTED",
        "Lets the patch set run on an SGLang release outside the tested range.",
        "0",
        "At plugin registration.",
        ours=verbatim("0"),
    ),
)

VARIABLES: Mapping[str, Variable] = {v.name: v for v in _TABLE}


def snapshot(names: tuple[str, ...], env: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """The raw values of some variables, None for each that is not set."""
    env = os.environ if env is None else env
    return {name: env.get(name) for name in names}


@contextlib.contextmanager
def exactly(values: Mapping[str, str], names: Iterable[str] = VARIABLES) -> Iterator[None]:
    """Inside the block these variables have exactly ``values``: of ``names``, what is not in them is not set.

    Afterwards all of them, and further ones in ``values``, are what they were before.
    """
    before = snapshot((*names, *values))
    try:
        for name in before:
            os.environ.pop(name, None)
        os.environ.update(values)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# --- A quick look at the environment, for checks at every call. -----------------------------------


def encoded(variables: Iterable[tuple[str, str | None]]) -> tuple[tuple[Any, Any], ...]:
    """Names and values as :func:`holds` takes them; a value of None means not set."""
    return tuple(
        (os.fsencode(name), None if value is None else os.fsencode(value))
        for name, value in variables
    )


def holds(variables: tuple[tuple[Any, Any], ...]) -> bool:
    """Whether the process environment still says exactly this (variables from :func:`encoded`).

    ``os.environ.get`` encodes and decodes at each look and raises inside for a variable that is not
    set, about 1 us each; on POSIX the bytes behind it are compared instead. False means "look
    closely", also where those are not to be had.
    """
    data = getattr(os.environ, "_data", None)
    if data is None:
        return False
    for name, value in variables:  # noqa: SIM110, all() takes twice as long
        if data.get(name) != value:
            return False
    return True
