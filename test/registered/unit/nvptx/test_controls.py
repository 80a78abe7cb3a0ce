"""Faults that are put into the PTX of a layer's kernels are noticed: by an error that names them, or by the result."""

from __future__ import annotations

import re
import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.errors import ContractError  # noqa: E402
from sglang_aiter_moe.testing import hopper_cases  # noqa: E402

LAYERS = hopper_cases.layers()
SEED = 1


def mutated(layer: str, kernel: str, change, **options) -> dict:
    """The layer's row with ``change`` made to the text of one kernel, which it must change."""
    form, case = LAYERS[layer]
    changed = []

    def edit(name: str, text: str) -> str:
        if name != kernel:
            return text
        new = change(text)
        changed.append(new != text)
        return new

    try:
        return hopper_cases.execute(form, case, SEED, edit=edit, **options)
    finally:
        assert changed and all(changed), "the change found nothing to change"


def replaced(pattern: str, by: str, which: int = 0):
    """Puts ``by`` in place of one match of ``pattern``; the last for -1."""

    def change(text: str) -> str:
        found = list(re.finditer(pattern, text))
        if not found:
            return text
        match = found[which]
        return text[: match.start()] + match.expand(by) + text[match.end() :]

    return change


def without_all(pattern: str):
    return lambda text: re.sub(pattern, "", text)


def without(pattern: str, which: int = 0):
    return replaced(pattern, "", which)


ERRORS = {
    "no wait for products": (
        "fp8/A16W4/small", "stage1_fp8", without(r"wgmma\.wait_group\.sync\.aligned \d+;"), "in flight",
    ),
    "a wait that lets one product more be pending": (
        "fp8/A16W4/small", "stage1_fp8", replaced(r"(wgmma\.wait_group\.sync\.aligned) 0;", r"\1 1;"), "in flight",
    ),
    "products not committed": (
        "fp8/A16W4/small", "stage1_fp8", without(r"wgmma\.commit_group\.sync\.aligned;", -1), "in flight",
    ),
    "no fence before a product": (
        "fp8/A16W4/small", "stage1_fp8", without(r"wgmma\.fence\.sync\.aligned;", 3),
        r"written since the last wgmma\.fence",
    ),
    "no proxy fence for the tokens": (
        "fp8/A16W4/small", "stage2_fp8", without(r"fence\.proxy\.async\.shared::cta;", 1), r"no fence\.proxy\.async",
    ),
    "no proxy fence for the barriers": (
        "fp8/A16W4/small", "stage1_fp8", without_all(r"fence\.proxy\.async\.shared::cta;"), r"no fence\.proxy\.async",
    ),
    "no wait for the tokens' copies": (
        "fp8/A16W4/small", "stage1_fp8", without(r"cp\.async\.wait_group\s+0;"), "in flight",
    ),
    "no wait for a slot": (
        "fp8/A16W4/small", "stage1_fp8",
        without_all(r"mbarrier\.try_wait\.parity\.[^;]*;\s*@!complete bra\.uni waitLoop;"),
        "in flight|nothing has written|given to a copy",
    ),
    "more bytes expected than come": (
        "fp8/A16W4/small", "stage1_fp8",
        replaced(r"(expect_tx\.shared(?:::cta)?\.b64 _, \[%r\d+\], )\d+", r"\g<1>17424"), "waits",
    ),
    "a slot that is never released": (
        "fp8/A16W4/one-expert", "stage1_fp8", without(r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 [^;]*;"), "waits",
    ),
    "a result that is not stored": (
        "fp8/A16W4/small", "stage1_fp8", without(r"@%p\d+ st\.global\.[^;]*;"), "nothing has",
    ),
    "no wait for a step's copies in prefill": (
        "prefill/A16W4/small", "stage1_prefill", without(r"cp\.async\.wait_group\s+\d+;"), "in flight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_raises(name):
    layer, kernel, change, said = ERRORS[name]
    with pytest.raises(ContractError, match=said):
        mutated(layer, kernel, change, multiprocessors=1)  # programs take several turns


def released_early(text: str) -> str:
    """Moves a slot's release in front of the first read from it (kernel notes, version 20)."""
    release = re.search(r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 [^;]*;", text)
    text = text[: release.start()] + text[release.end() :]
    read = text.index("ldmatrix.sync")
    return text[:read] + release.group() + "\n" + text[read:]


def test_a_slot_that_is_released_before_it_is_read():
    """Whoever waits for the slot goes first: the next copy is on its way before the slot has been read."""
    with pytest.raises(
        ContractError, match=r"ldmatrix.*still in flight|given to a copy, which warp \d+ read"
    ):
        mutated("fp8/A16W4/one-expert", "stage1_fp8", released_early, multiprocessors=1)


WRONG = {
    "weights read with another swizzle": (
        "fp8/A16W4/small", "stage1_fp8", replaced(r"4611686018427387904", "9223372036854775808"),
    ),
    "two registers of a fragment exchanged": (
        "fp8/A16W4/small", "stage1_fp8",
        replaced(r"\{(%r\d+),(%r\d+),(%r\d+),(%r\d+)\}, (%rd\d+), 0, 1, 1;", r"{\2,\1,\3,\4}, \5, 0, 1, 1;"),
    ),
    "a bit of the decoding's mask": (
        "fp8/A16W4/small", "stage1_fp8", replaced("0x1C1C1C1C", "0x1C1C0C1C", 5),
    ),
    "rows of ldmatrix at another place": (
        "fp8/A16W4/small", "stage1_fp8", replaced(r"(ldmatrix[^;]*\+)1024\]", r"\g<1>1536]"),
    ),
    "a coordinate of a bulk copy": (
        "fp8/A16W4/small", "stage2_fp8",
        replaced(r"\{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}\], ", r"{\1, \3, \2, \4}], "),
    ),
    "a fragment of mma.sync": (
        "list/A16W4/small", "stage1_hopper",
        replaced(r"(mma\.sync[^;]*?\}, \{ %r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2"),
    ),
    "another accumulator is added in prefill": (
        "prefill/A16W4/small", "stage1_prefill",
        replaced(r"(wgmma\.mma_async[^;]*), (%p\d+|true|1), 1, 1, 0;", r"\1, 0, 1, 1, 0;", 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_changes_the_result(name):
    """Or raises, where the change leads to what nothing wrote."""
    layer, kernel, change = WRONG[name]
    try:
        row = mutated(layer, kernel, change)
    except ContractError:
        return
    assert not row["right"], row


def test_early_effects_are_right_as_well():
    """Data that lands at once is right too, so that the errors above are the waits', and not the layer's."""
    for layer in ("fp8/A16W4/small", "prefill/A16W4/small"):
        form, case = LAYERS[layer]
        assert hopper_cases.execute(form, case, SEED, late=False)["right"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
