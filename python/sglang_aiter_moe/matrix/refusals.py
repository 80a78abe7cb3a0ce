"""The reasons of refusals, told apart by what the error says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang_aiter_moe.matrix.one_cell import Outcome


@dataclass(frozen=True)
class Refusal:
    """One reason.

    Attributes:
        key: in the JSON and the tables.
        pattern: of the error's text.
        although: why it is refused where SGLang alone computes the cell right; "" where that does not happen.
    """

    key: str
    pattern: str
    although: str = ""


#: In this order: a cell has the first reason whose pattern is found.
REFUSALS = (
    Refusal(
        "unclear spelling",
        r"is not a clean spelling",
        "the readers of a flag (two parsers of SGLang, several of AITER) do not agree on such spellings in general; "
        "where all of them read off, people mostly mean on",
    ),
    Refusal("no integer", r"is no integer"),
    Refusal(
        "changed after load",
        r"was loaded under another environment",
        "the bytes happen to fit the new mode too, but the sizes and kernels were decided for the old one",
    ),
    Refusal(
        "AITER too old",
        r"has not got",
        "the layout that this AITER assumes cannot be told to it",
    ),
    Refusal(
        "limit",
        r"^swiglu_limit is .* (built in|ignores it)",
        "right at this token count; at others AITER picks a kernel with another limit",
    ),
    Refusal("activation", r"which computes \S+ alone, without a word"),
    Refusal(
        "kernel that guesses the row order",
        r"CK-tile's split-k epilogue takes MXFP4 rows for interleaved",
    ),
    Refusal("no such kernel", r"CK 2-stage has no such kernel"),
    Refusal(
        "mode that the architecture has not got",
        r"has no A\d+W4 kernel; AITER picks it all the same|Current platform \S+ not support mxfp4",
        "right at this token count; at others AITER picks the mode that aborts",
    ),
    Refusal(
        "expert mask",
        r"with an expert mask|does not support expert-parallel yet|not supported: expert-parallel",
        "planned for the environment of the load; a flag that is set afterwards happens to lead to a kernel that "
        "takes the mask",
    ),
    Refusal("expert biases", r"drops or refuses them|per-expert bias|split-k bias"),
    Refusal("another layout", r"which reads w13 \S+, not"),
    Refusal("failed update", r"has no valid weights|[Ff]ailed to update"),
)
OTHER = Refusal("other", "")
BY_KEY = {reason.key: reason for reason in (*REFUSALS, OTHER)}


def reason_of(outcome: Outcome) -> Refusal:
    """The reason of a refusal."""
    found = (reason for reason in REFUSALS if re.search(reason.pattern, outcome.error))
    return next(found, OTHER)
