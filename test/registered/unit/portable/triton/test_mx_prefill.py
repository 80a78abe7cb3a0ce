"""The fp8 prefill forms without a GPU: what their weights decode to, and their scales' folding, run by Triton's
interpreter, against the oracle's quantisation."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch

from sglang_aiter_moe.numerics.mxfp4 import decode_e2m1
from sglang_aiter_moe.testing import interpreted
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.portable.triton.hopper import mx_prefill  # noqa: E402


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return interpreted.rows("mx_prefill_cases")


@pytest.mark.parametrize("what", ["x", "a", "x-rows", "a-rows"])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("spread", ["alike", "spread", "wide"])
def test_folded_scales(results, what, fmt, spread):
    """2**-17 of a group's largest value, and nothing at all where scales are alike, or within 14 binades for E2M1. A
    group is 128 columns, or a row."""
    row = results[f"{what}-{fmt}-{spread}"]
    assert row["finite"] and row["counted"], row
    exact = spread == "alike" or (fmt, spread) == ("e2m1", "spread")
    assert row["error"] <= (0.0 if exact else 2.0**-17), row


def prmt(a: int, b: int, selector: int) -> int:
    """PTX ISA, prmt.b32, default mode."""
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    found = 0
    for k in range(4):
        s = selector >> 4 * k & 15
        byte = pool[s & 7]
        found |= (byte if s < 8 else 255 * (byte >> 7)) << 8 * k
    return found


def run_ptx(text: str, values: dict[str, int]) -> dict[str, int]:
    """The few instructions of ``DECODE``, one after the other."""
    operations = {
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "shr.u32": lambda a, b: a >> b,
        "prmt.b32": prmt,
        "lop3.b32": lambda a, b, c, table: (a & b) | c if table == 0xEA else pytest.fail(),
    }
    for line in re.findall(r"([a-z0-9.]+) ([^;{]*);", text.partition(";")[2]):
        name, (target, *sources) = line[0], [v.strip() for v in line[1].split(",")]
        values[target] = operations[name](
            *(values[v] if v in values else int(v, 0) for v in sources)
        )
    return values


class Eager:
    """What ``tables`` takes from Gluon, on numpy arrays."""

    where = staticmethod(np.where)
    SliceLayout = staticmethod(lambda *_: None)
    constexpr = object
    convert_layout = staticmethod(lambda v, *_, **__: v)


@pytest.mark.parametrize("below", [0, 1, 13, 25, 26, 27, 60, 254])
def test_codes_become_e5m2_at_their_scale(monkeypatch, below):
    """Exact down to 26 binades below the row's largest scale, 0 beyond: all codes at each of 8 places."""
    monkeypatch.setattr(mx_prefill, "gl", Eager)
    monkeypatch.setattr(mx_prefill, "lane_layout", lambda *_: None)
    monkeypatch.setattr(mx_prefill, "SPAN", mx_prefill.SPAN.value)
    low, high = mx_prefill.tables.fn(
        np.array([[254 - below]], np.int64), np.array([254], np.int64), 16, 1
    )
    tables = {"$3": int(low[0, 0]) & 0xFFFFFFFF, "$4": int(high[0, 0]) & 0xFFFFFFFF}
    for first in range(16):
        codes = [(first + 5 * n) % 16 for n in range(8)]
        word = sum(code << 4 * n for n, code in enumerate(codes))
        out = run_ptx(mx_prefill.DECODE.value, {"$2": word, **tables})
        bytes_ = out["$0"].to_bytes(4, "little") + out["$1"].to_bytes(4, "little")
        got = torch.tensor(list(bytes_), dtype=torch.uint8).view(torch.float8_e5m2).float()
        expected = decode_e2m1(torch.tensor(codes, dtype=torch.uint8)) * 2.0 ** (13 - below)
        assert torch.equal(got, expected if below <= 26 else torch.zeros(8)), (first, got)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
