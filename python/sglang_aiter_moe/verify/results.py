"""What verify finds out about a case or a control, and the JSON of both."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

# logits_diff against the oracle with the same activation quantisation.
SAME_QUANTISATION = {"A16W4": 1e-4, "A8W4": 1e-3, "A4W4": 1e-3}

# logits_diff against the oracle without any. A relative error r of the output is a logits_diff of
# about r*r/2. Two roundings (the input, the stage-1 output) that are each off by at most half a unit
# in the last place, u, give r*r <= 2*u*u and so u*u: e4m3 has 3 bits of mantissa (u = 2^-4), e2m1 one
# (u = 2^-2). bf16 (u = 2^-9) is far below what summation order may do; its bound stays the strict one.
UNQUANTISED = {"A16W4": 1e-4, "A8W4": 2.0**-8, "A4W4": 2.0**-4}

# A control has collapsed when it is this far off: a thousand times the strict threshold. AITER's own
# tests give up at 1e-2.
COLLAPSED = 1e-1


@dataclass(frozen=True)
class CaseResult:
    """One case. `error` says why a case failed that did not come to numbers, or decided otherwise.

    Attributes:
        cosine, logits_diff, rel_err: against the oracle with the same activation quantisation.
        unquantised_logits_diff: against the oracle without any.
        family: the kernel family that the plan expects.
        seconds: of preparing nothing and running once, on this machine.
    """

    name: str
    activation: str
    mode: str
    layout: str
    gate_mode: str
    tokens: int
    experts: int
    cosine: float = math.nan
    logits_diff: float = math.nan
    rel_err: float = math.nan
    unquantised_logits_diff: float = math.nan
    family: str = ""
    seconds: float = math.nan
    error: str = ""

    @property
    def passed(self) -> bool:
        """Within both bounds; NaN and errors do not pass."""
        return (
            not self.error
            and self.logits_diff < SAME_QUANTISATION[self.mode]
            and self.unquantised_logits_diff < UNQUANTISED[self.mode]
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class ControlResult:
    """One deliberate mistake.

    Attributes:
        name: which mistake, in which mode.
        cosine, logits_diff: against the oracle of what was asked for.
        refused: what the runner says about it, empty where it cannot know.
        must_be_refused: whether the runner has to see it.
        error: why the control did not come to numbers.
    """

    name: str
    cosine: float = 1.0
    logits_diff: float = 0.0
    refused: str = ""
    must_be_refused: bool = False
    error: str = ""

    @property
    def collapsed(self) -> bool:
        """Far off (or NaN), and refused where it has to be."""
        if self.error or (self.must_be_refused and not self.refused):
            return False
        return not self.logits_diff <= COLLAPSED

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "collapsed": self.collapsed}


@dataclass(frozen=True)
class Report:
    """Everything that one run found out.

    Attributes:
        backend: who executed.
        cases, controls: the results.
        not_run: names of cases and controls that this backend cannot run: a real AITER has one
            architecture and one release.
    """

    backend: str
    cases: tuple[CaseResult, ...]
    controls: tuple[ControlResult, ...]
    not_run: tuple[str, ...] = ()

    @property
    def passed(self) -> int:
        return sum(case.passed for case in self.cases)

    @property
    def failed(self) -> int:
        return len(self.cases) - self.passed

    @property
    def holds(self) -> bool:
        """All cases passed, all controls collapsed, and there was something to check."""
        some = bool(self.cases or self.controls)
        return some and not self.failed and all(c.collapsed for c in self.controls)

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "passed": self.passed,
            "failed": self.failed,
            "cases": [case.to_json() for case in self.cases],
            "controls": [control.to_json() for control in self.controls],
            "not_run": list(self.not_run),
        }
