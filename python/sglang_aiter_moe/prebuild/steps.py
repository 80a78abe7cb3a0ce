"""Which builds a plan needs, and how each is made.

Two ways. ``compile``: AITER's own ahead-of-time compiler (``aiter.aot.flydsl``, in it FlyDSL's
``COMPILE_ONLY``) on a table that holds this plan's tuned rows and nothing else; needs AITER, no GPU. ``call``:
one call of the planned layer at one token count, after which everything that a server would build there is
built; needs the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_aiter_moe.aiter_files import tables
from sglang_aiter_moe.contract.families import FAMILIES
from sglang_aiter_moe.contract.plan import MoePlan
from sglang_aiter_moe.contract.tuned import padded_tokens, tier_starts
from sglang_aiter_moe.errors import ContractError

#: AITER's ahead-of-time compilers of MoE kernels, by the file that says whether a release has one.
AOT_MODULES = {
    "aiter.aot.flydsl.moe": "aot/flydsl/moe.py",
    "aiter.aot.flydsl.mxfp4_moe": "aot/flydsl/mxfp4_moe.py",
}
#: Seconds a build takes: 633 s for 16 modules (sglang#34586); 2 to 18 s for a FlyDSL kernel, measured by
#: compiling AITER's without a GPU on two cores. A call has two stages.
MODULE_S, FLYDSL_KERNEL_S = 40, 18
#: A server's largest batch: SGLang's chunked prefill on a GPU of this size.
MAX_TOKENS = 16384


@dataclass(frozen=True)
class Step:
    """One build.

    Attributes:
        kind: "compile" or "call".
        tokens: padded token counts that it is for.
        mode, family: as the plan has them at these counts.
        tuned: whether a tuned row decides; None if that is not known here.
        kernels: names of the kernels, where a table gives them.
        how: one sentence.
        seconds: how long it takes at most where nothing is built yet.
    """

    kind: str
    tokens: tuple[int, ...]
    mode: str
    family: str
    tuned: bool | None
    kernels: tuple[str, ...]
    how: str
    seconds: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def token_counts(plan: MoePlan, max_tokens: int = MAX_TOKENS) -> list[int]:
    """Every padded token count up to ``max_tokens``: AITER chooses a kernel for each.

    Raises:
        ContractError: ``max_tokens`` is below 1 or above what the plan covers.
    """
    last = plan.ranges[-1].last
    if not 1 <= max_tokens <= last:
        raise ContractError(
            f"--max-tokens {max_tokens}",
            allowed=f"1 to {last}",
            fix="give the server's --chunked-prefill-size",
        )
    starts = {*tier_starts(), *(part.first for part in plan.ranges)}
    return sorted({padded_tokens(count) for count in starts if count <= max_tokens})


def compile_step(covered: Sequence[tables.Coverage]) -> Step | None:
    """The ahead-of-time build of a plan's tuned FlyDSL kernels; None where no row names one."""
    hits = [c for c in covered if c.row is not None and any(map(_is_flydsl, c.row.kernels))]
    if not hits:
        return None
    kernels = dict.fromkeys(k for c in hits for k in c.row.kernels if _is_flydsl(k))
    return Step(
        "compile",
        tuple(c.tokens for c in hits),
        " ".join(dict.fromkeys(str(c.mode) for c in hits)),
        "flydsl",
        True,
        tuple(kernels),
        "AITER's ahead-of-time compiler on the plan's rows alone, without running a kernel",
        FLYDSL_KERNEL_S * len(kernels),
    )


def call_steps(
    plan: MoePlan, counts: Sequence[int], covered: Sequence[tables.Coverage] | None
) -> list[Step]:
    """One call for each token count.

    Args:
        plan: of one layer.
        counts: of :func:`token_counts`.
        covered: what the installed tables have; None without an AITER.
    """
    rows = {c.tokens: c for c in covered or ()}
    steps = []
    for count in counts:
        part = plan.range_for(count)
        found = rows.get(count)
        tuned = part.tuned if found is None else found.row is not None
        kernels = found.row.kernels if found is not None and found.row is not None else ()
        flydsl = FAMILIES[part.family].flydsl
        if tuned:
            how = "a tuned row names its kernels"
        elif tuned is None:
            how = "whether a row is tuned for it only AITER's own table knows"
        else:
            how = f"no tuned row: {'FlyDSL heuristic' if flydsl else part.family} kernels"
        seconds = 2 * FLYDSL_KERNEL_S if flydsl else MODULE_S
        steps.append(
            Step("call", (count,), str(part.mode), part.family, tuned, kernels, how, seconds)
        )
    return steps


def aot_commands(package: Path, python: str, table: Path) -> list[list[str]]:
    """The command lines of the ahead-of-time compilers that an AITER has."""
    return [
        [python, "-m", module, "--csv", str(table)]
        for module, file in AOT_MODULES.items()
        if (package / file).is_file()
    ]


def aot_environment(arch: str) -> dict[str, str]:
    """Variables for them: the light import, the target, and no launch of anything."""
    return {"AITER_AOT_IMPORT": "1", "ARCH": arch, "GPU_ARCHS": arch, "COMPILE_ONLY": "1"}


def _is_flydsl(kernel: str) -> bool:
    return kernel.startswith("flydsl_")
