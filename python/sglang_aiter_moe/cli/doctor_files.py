"""What `doctor` says about a cold start and about AITER's files: kernels, locks, tuned tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_aiter_moe.aiter_files import locks, tables
from sglang_aiter_moe.cli.finding import BAD, OK, WARN, Finding
from sglang_aiter_moe.contract.plan import MoePlan
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.prebuild import steps

# SGLang gives up on a server that is silent for this long; 16 kernel modules took 633 s to build
# (sglang#34586).
WATCHDOG_SECONDS = 300
_LOCK_LEVELS = {
    locks.LockState.HELD: OK,
    locks.LockState.UNKNOWN: WARN,
    locks.LockState.STALE: BAD,  # the next build waits for it without end
}


def examine_files(aiter: Path | None, plan: MoePlan | None, prebuild: str) -> Iterator[Finding]:
    """Findings about a cold start and AITER's files.

    Args:
        aiter: AITER's package, None without one.
        plan: of the layer that is to be served, None where it was refused.
        prebuild: the command line that builds this plan's kernels.
    """
    section = "kernels and tuned tables"
    counts = [] if plan is None else steps.token_counts(plan)
    covered, problem = None, None
    if aiter is not None and plan is not None:
        try:
            rows = tables.read_rows(tables.table_files(aiter))
            covered = tables.coverage(plan, rows, counts)
        except ContractError as error:
            problem = Finding(section, BAD, error.what, error.fix)
    if plan is not None:
        yield _cold_start(section, aiter, steps.call_steps(plan, counts, covered), prebuild)
    if aiter is None:
        yield Finding(section, WARN, "AITER is not installed: no kernels and no tuned tables")
        return
    folders = locks.build_folders(aiter)
    built = sum(len(list(folder.glob("*.so"))) for folder in folders)
    flydsl = flydsl_cache()
    text = f"{built} kernel modules are built, {flydsl} kernels in FlyDSL's cache"
    yield Finding(section, OK if built or flydsl else WARN, text)
    for lock in locks.find_locks(folders):
        fix = f"rm {lock.path}" if lock.state is not locks.LockState.HELD else ""
        if lock.state is locks.LockState.UNKNOWN:
            fix += ", if no build is running"
        text = f"lock {lock.path.name} is {lock.state}: {lock.reason}"
        yield Finding(section, _LOCK_LEVELS[lock.state], text, fix)
    if problem is not None:
        yield problem
    elif covered is not None and plan is not None:
        yield _coverage(section, plan, covered)


def flydsl_cache() -> int:
    """How many compiled kernels FlyDSL keeps (FLYDSL_RUNTIME_CACHE_DIR, else ~/.flydsl/cache)."""
    folder = Path(os.environ.get("FLYDSL_RUNTIME_CACHE_DIR") or Path.home() / ".flydsl" / "cache")
    return sum(1 for path in folder.rglob("*.pkl")) if folder.is_dir() else 0


def _cold_start(
    section: str, aiter: Path | None, calls: Sequence[steps.Step], prebuild: str
) -> Finding:
    seconds = sum(step.seconds for step in calls)
    longer = seconds > WATCHDOG_SECONDS
    text = (
        f"a cold start builds kernels for {len(calls)} token counts, at most {seconds} s in all: "
        f"{'longer than' if longer else 'within'} SGLang's watchdog of {WATCHDOG_SECONDS} s"
    )
    fix = f"type `{prebuild}` before the server, or start it with --watchdog-timeout 1800 once"
    return Finding(
        section, WARN if longer and aiter is not None else OK, text, fix if longer else ""
    )


def _coverage(section: str, plan: MoePlan, covered: Sequence[tables.Coverage]) -> Finding:
    missing = [c for c in covered if c.row is None]
    shape = f"H {plan.padded_hidden_size}, I {plan.padded_intermediate_size}"
    text = (
        f"{len(covered) - len(missing)} of {len(covered)} token counts have a tuned row ({shape})"
    )
    if not missing:
        return Finding(section, OK, text)
    text += f"; none: {', '.join(str(c.tokens) for c in missing)}"
    others = sorted({c.other.activation for c in missing if c.other is not None})
    if others:
        text += f"; AITER's second lookup finds rows of {', '.join(others)} there"
    fix = "right, but slower: AITER logs `no tuned FlyDSL config` and takes heuristic tiles"
    return Finding(section, WARN, text, fix)
