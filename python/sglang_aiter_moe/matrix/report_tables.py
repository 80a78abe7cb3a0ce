"""The page's tables of refusals by reason, and of patches that are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_aiter_moe.matrix.classes import Class
from sglang_aiter_moe.matrix.refusals import BY_KEY
from sglang_aiter_moe.matrix.stored import Stored, class_of, reason_for

_TITLES = {
    Class.RIGHT: "right",
    Class.SILENT_WRONG: "silently wrong",
    Class.CRASHED: "crashed",
    Class.REFUSED_LATE: "refused late",
    Class.REFUSED: "refused",
}


def refusals(stored: Stored, release: str) -> str:
    """The plugin's refusals by reason, and the classes of SGLang alone in the same cells."""
    sides = stored.letters[release]
    counted = Counter(
        (reason_for(own), class_of(alone))
        for own, alone in zip(sides["patched"], sides["unpatched"], strict=True)
        if class_of(own) is Class.REFUSED
    )
    reasons = [key for key in BY_KEY if any(reason == key for reason, _ in counted)]
    lines = _head(
        ["the plugin refuses: reason", "cells", *(f"alone: {t}" for t in _TITLES.values())]
    )
    for key in reasons:
        numbers = [counted[key, kind] for kind in _TITLES]
        lines.append(_row([key, sum(numbers), *numbers]))
    totals = [sum(counted[key, kind] for key in reasons) for kind in _TITLES]
    return "\n".join([*lines, _row(["all", sum(totals), *totals])]) + "\n"


def stricter(stored: Stored, only: Iterable[int]) -> str:
    """Of these cells, those that the plugin refuses and SGLang alone computes right, by reason and release."""
    only, releases = list(only), list(stored.letters)
    counted = {
        release: Counter(
            reason_for(sides["patched"][i])
            for i in only
            if class_of(sides["patched"][i]) is Class.REFUSED
            and class_of(sides["unpatched"][i]) is Class.RIGHT
        )
        for release, sides in stored.letters.items()
    }
    lines = _head(["reason", "why it is refused all the same", *releases])
    for key, reason in BY_KEY.items():
        numbers = [counted[release][key] for release in releases]
        if any(numbers):
            lines.append(_row([key, reason.although, *numbers]))
    lines.append(_row(["all", "", *(counted[release].total() for release in releases)]))
    return "\n".join(lines) + "\n"


def patches(controls: Mapping[str, Any]) -> str:
    """Every patch: how many of the control cells change without it, or which test fails without it."""
    from sglang_aiter_moe.testing.matrix_controls import OUTSIDE

    behind = controls["behind"]
    lines = [
        f"Each patch is taken out alone, and the same {controls['cells']} cells run again on {controls['release']} "
        "(`python -m sglang_aiter_moe.testing.matrix_controls docs/matrix_controls.json`): those that changed are "
        "exactly those that `testing/matrix_controls.py` says, for the reason written there. `right` in the last "
        "column: cells that are refused with the patch (see the tables above).\n",
        *_head(["patch", "cells that change", "and become"]),
    ]
    for name, found in controls["patches"].items():
        if name not in behind:
            lines.append(_row([name, found["cells"], _classes(found["become"])]))
    for name, found in behind.items():
        many = (
            f"0; {found['cells']} more if `{found['front']}` is out too, which makes it unnecessary"
        )
        lines.append(_row([name, many, _classes(found["become"])]))
    lines.append(
        "\nNo cell shows the others: other ways to update, captured graphs, NVIDIA's kernels, the portable backend's "
        "own patches, speed. What they do is tested in these files below `test/registered`, not all of which see "
        "that a patch is not applied: that each is in force, every process checks before its first MoE layer "
        "(`unit/test_plugin.py`, `e2e/test_releases.py`), and a patch that goes missing from the table is noticed by "
        "`unit/testing/test_matrix_controls.py`.\n"
    )
    tests: dict[str, list[str]] = {}
    for name, test in OUTSIDE.items():
        path = test.removeprefix("../") if test.startswith("../") else f"unit/{test}"
        tests.setdefault(path, []).append(name)
    lines += [f"- `{path}`: {'; '.join(names)}" for path, names in tests.items()]
    return "\n".join(lines) + "\n"


def _classes(names: Iterable[str]) -> str:
    return ", ".join(_TITLES[Class(name)] for name in names)


def _head(titles: Sequence[str]) -> list[str]:
    return [_row(titles), "|" + "---|" * len(titles)]


def _row(values: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, values)) + " |"
