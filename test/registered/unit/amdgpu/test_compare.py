"""Comparisons and classes of the vector ALU, against Python's."""

import math
import operator
import sys

import numpy as np
import pytest

from sglang_aiter_moe.testing.amdgpu_floats import lanes
from sglang_aiter_moe.testing.amdgpu_wave import Waves
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

FLOAT_RELATIONS = {
    "f": lambda a, b: False, "lt": operator.lt, "eq": operator.eq, "le": operator.le, "gt": operator.gt,
    "lg": lambda a, b: a < b or a > b, "ge": operator.ge, "o": lambda a, b: not (math.isnan(a) or math.isnan(b)),
    "u": lambda a, b: math.isnan(a) or math.isnan(b), "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b), "ngt": lambda a, b: not a > b, "nle": lambda a, b: not a <= b,
    "neq": operator.ne, "nlt": lambda a, b: not a < b, "tru": lambda a, b: True,
}  # fmt: skip
INTEGER_RELATIONS = {
    "f": lambda a, b: False, "lt": operator.lt, "eq": operator.eq, "le": operator.le, "gt": operator.gt,
    "ne": operator.ne, "ge": operator.ge, "t": lambda a, b: True,
}  # fmt: skip


def compared(kind):
    size = int(kind[1:]) // 8
    rng = np.random.default_rng(size)
    if kind[0] == "f":
        with np.errstate(all="ignore"):
            return np.concatenate([lanes(2, 20)[:, :62], [[0, 1], [-0.0, 1]]], 1).astype(f"f{size}")
    raw = rng.integers(0, 1 << (8 * size), (2, 64), np.uint64).astype(f"u{size}")
    raw[1, :20] = raw[0, :20]
    raw[0, 20:24] = (1 << (8 * size)) - 1
    return raw.view(f"{'i' if kind[0] == 'i' else 'u'}{size}")


@pytest.mark.parametrize("kind", ["f16", "f32", "f64", "i16", "u16", "i32", "u32", "i64", "u64"])
@pytest.mark.parametrize("also", ["cmp", "cmpx"])
def test_comparisons(kind, also):
    data = compared(kind)
    size = data.dtype.itemsize
    before = 0xFFFF_FFFF_0FFF_FFF0
    for relation, f in (FLOAT_RELATIONS if kind[0] == "f" else INTEGER_RELATIONS).items():
        w = Waves()
        for register, row in (("v2", data[0]), ("v4", data[1])):
            w.set(register, row.view(np.uint16).astype(np.uint32) if size == 2 else row)
        names = "v[2:3], v[4:5]" if size == 8 else "v2, v4"
        w.exec(before).do(f"v_{also}_{relation}_{kind} s[6:7], {names}")
        want = (
            sum(int(f(a, b)) << i for i, (a, b) in enumerate(zip(*data.tolist(), strict=True)))
            & before
        )
        assert w.s64(6) == want, relation
        assert w.s64(126) == (want if also == "cmpx" else before), relation


def test_comparisons_with_byte_selection_and_constants():
    a = np.arange(64, dtype=np.uint32) * 0x01020304
    w = Waves().set("v1", a).set("v2", 0).set("s4", 7)
    w.do(
        "v_cmp_ne_u16_sdwa s[0:1], v1, v2 src0_sel:BYTE_1 src1_sel:DWORD",
        "v_cmp_gt_u32_e32 vcc, s4, v1",
    )
    assert w.s64(0) == sum(int((int(x) >> 8 & 255) != 0) << i for i, x in enumerate(a))
    assert w.s64(106) == sum(int(int(x) < 7) << i for i, x in enumerate(a))
    wide = np.arange(-32, 32).astype(np.int64)
    w = (
        Waves()
        .set("v2", wide)
        .do("v_cmp_gt_i64_e32 vcc, -1, v[2:3]", "v_cmp_eq_u64_e32 vcc, 3, v[2:3]")
    )
    assert w.s64(106) == 1 << 35


CLASSES = [0x7F800001, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000001, 0x80000000, 0x00000000, 0x00000001, 0x3F800000,
           0x7F800000]  # fmt: skip


def test_classes():
    """Bits 0 to 9: signalling and quiet NaN, then from -infinity to +infinity."""
    for kind, values in {
        "f32": CLASSES,
        "f16": [0x7C01, 0x7E00, 0xFC00, 0xBC00, 0x8001, 0x8000, 0, 1, 0x3C00, 0x7C00],
    }.items():
        for k in range(10):
            w = Waves().set("v1", np.resize(np.array(values, np.uint32), 64)).set("v2", 1 << k)
            w.do(f"v_cmp_class_{kind} s[0:1], v1, v2")
            assert w.s64(0) & 0x3FF == 1 << k, (kind, k)
    doubles = np.array(
        [
            0x7FF0000000000001,
            0x7FF8000000000000,
            0xFFF0000000000000,
            0xBFF0000000000000,
            0x8000000000000001,
            1 << 63,
            0,
            1,
            0x3FF0000000000000,
            0x7FF0000000000000,
        ],
        np.uint64,
    )
    for k in range(10):
        w = (
            Waves()
            .set("v2", np.resize(doubles, 64))
            .set("v4", 1 << k)
            .do("v_cmp_class_f64 s[0:1], v[2:3], v4")
        )
        assert w.s64(0) & 0x3FF == 1 << k, k
    w = Waves().set("v1", np.resize(np.array(CLASSES, np.uint32), 64)).set("v2", 3)
    w.do("v_cmpx_class_f32 s[0:1], v1, v2")
    assert w.s64(126) & 0x3FF == 3


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
