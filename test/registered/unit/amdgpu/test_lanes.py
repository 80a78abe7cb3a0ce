"""Moves between lanes, carries and lane masks, lane by lane in Python."""

import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import carry, lanes
from sglang_aiter_moe.amdgpu.errors import AssemblyError, Fault
from sglang_aiter_moe.testing.amdgpu_wave import Waves, bits
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
A = np.arange(64, dtype=np.uint32) * 3 + 100
B = np.arange(64, dtype=np.uint32) * 7 + 5000


def shifted(n):
    """row_shr by n (row_shl by -n): which lane of its row of 16 each lane reads, None outside."""
    return lambda lane: lane - n if 0 <= lane % 16 - n < 16 else None


CONTROLS = {
    "quad_perm:[1,0,3,2]": lambda lane: lane // 4 * 4 + (1, 0, 3, 2)[lane % 4],
    "quad_perm:[3,3,3,3]": lambda lane: lane // 4 * 4 + 3,
    "row_shr:1": shifted(1), "row_shr:15": shifted(15), "row_shl:1": shifted(-1), "row_shl:8": shifted(-8),
    "row_ror:8": lambda lane: lane // 16 * 16 + (lane % 16 - 8) % 16,
    "row_ror:3": lambda lane: lane // 16 * 16 + (lane % 16 - 3) % 16,
    "row_mirror": lambda lane: lane // 16 * 16 + 15 - lane % 16,
    "row_half_mirror": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "row_newbcast:5": lambda lane: lane // 16 * 16 + 5,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
    "wave_shl:1": lambda lane: lane + 1 if lane < 63 else None,
    "wave_shr:1": lambda lane: lane - 1 if lane else None,
    "wave_rol:1": lambda lane: (lane + 1) % 64,
    "wave_ror:1": lambda lane: (lane - 1) % 64,
}  # fmt: skip


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
@pytest.mark.parametrize("mask", [M64, 0x0FF0_FFFF_00FF_F0F1])
def test_dpp(control, bound, mask):
    w = Waves().set("v1", A).set("v2", B).set("v0", 9).exec(mask)
    w.do(f"v_add_u32_dpp v0, v1, v2 {control} row_mask:0xf bank_mask:0xf{bound}")
    want = []
    for lane in range(64):
        source = CONTROLS[control](lane)
        valid = source is not None and mask >> source & 1
        if not mask >> lane & 1 or not (valid or bound):
            want.append(9)
        else:
            want.append(int(B[lane]) + (int(A[source]) if valid else 0))
    assert w.v(0).tolist() == want


def test_dpp_masks_of_rows_and_banks():
    w = Waves().set("v1", A).set("v0", 9)
    w.do("v_mov_b32_dpp v0, v1 row_mirror row_mask:0xa bank_mask:0x6 bound_ctrl:1")
    for lane in range(64):
        enabled = 0xA >> lane // 16 & 1 and 0x6 >> lane % 16 // 4 & 1
        assert w.v(0)[lane] == (A[lane // 16 * 16 + 15 - lane % 16] if enabled else 9)


def test_dpp_takes_neg_and_abs_before_the_function():
    x = (np.arange(64) - 20).astype(np.float32)
    w = (
        Waves()
        .set("v1", x)
        .set("v2", bits(0.5))
        .do("v_add_f32_dpp v0, -v1, |v2| quad_perm:[0,0,0,0] row_mask:0xf bank_mask:0xf")
    )
    assert w.v(0, np.float32).tolist() == [0.5 - float(x[lane // 4 * 4]) for lane in range(64)]


def test_an_unknown_dpp_control_is_refused():
    with pytest.raises(AssemblyError, match="DPP control"):
        Waves().set("v1", A).do("v_mov_b32_dpp v0, v1 row_mask:0xf bank_mask:0xf")


def test_reading_and_writing_single_lanes():
    w = Waves(2).set("v1", np.stack([A, B])).set("s4", np.array([3, 60], np.uint32))
    w.do("v_readlane_b32 s0, v1, 17", "v_readlane_b32 s1, v1, s4", "v_readfirstlane_b32 s2, v1")
    assert [w.batch.s[i].tolist() for i in (0, 1, 2)] == [
        [A[17], B[17]],
        [A[3], B[60]],
        [A[0], B[0]],
    ]
    w.exec(1 << 40 | 1 << 50).do("v_readfirstlane_b32 s2, v1", "v_writelane_b32 v1, 77, s4")
    assert w.batch.s[2].tolist() == [A[40], B[40]]
    after = [A.copy(), B.copy()]
    after[0][3] = after[1][60] = 77
    np.testing.assert_array_equal(w.batch.v[1], after)
    w.exec(0).do("v_readfirstlane_b32 s2, v1")
    assert w.batch.s[2].tolist() == [A[0], B[0]]


@pytest.mark.parametrize("size", [16, 32])
def test_permlane_swaps(size):
    w = Waves().set("v1", A).set("v2", B).do(f"v_permlane{size}_swap_b32_e32 v1, v2")
    first, second = A.tolist(), B.tolist()
    for start in range(0, 64, 2 * size):
        # The odd block of the first register against the even block of the second.
        odd, even = slice(start + size, start + 2 * size), slice(start, start + size)
        first[odd], second[even] = B.tolist()[even], A.tolist()[odd]
    assert (w.v(1).tolist(), w.v(2).tolist()) == (first, second)
    with pytest.raises(Fault, match="switched off"):
        w.exec(1).do(f"v_permlane{size}_swap_b32_e32 v1, v2")


def test_swap():
    w = Waves().set("v1", A).set("v2", B).exec(0xFF).do("v_swap_b32 v1, v2")
    assert w.v(1).tolist() == B.tolist()[:8] + A.tolist()[8:]
    assert w.v(2).tolist() == A.tolist()[:8] + B.tolist()[8:]


RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 1 << 32, (2, 64), np.uint64).astype(np.uint32)
X[:4], Y[:4] = (M32, 0, M32, 5), (1, 0, M32, 5)
CARRIES = {
    "v_add_co_u32": (lambda x, y, c: x + y, False), "v_addc_co_u32": (lambda x, y, c: x + y + c, True),
    "v_sub_co_u32": (lambda x, y, c: x - y, False), "v_subb_co_u32": (lambda x, y, c: x - y - c, True),
    "v_subrev_co_u32": (lambda x, y, c: y - x, False), "v_subbrev_co_u32": (lambda x, y, c: y - x - c, True),
}  # fmt: skip


@pytest.mark.parametrize("opcode", CARRIES)
def test_carries(opcode):
    f, takes = CARRIES[opcode]
    carried = 0xF0F0_F0F0_1234_5677
    mask = 0xFFFF_0FFF_FFFF_FFFF
    w = Waves().set("v1", X).set("v2", Y).set("v0", 1).set("s6", carried).exec(mask)
    w.do(f"{opcode} v0, s[4:5], v1, v2" + (", s[6:7]" if takes else ""))
    exact = [f(int(x), int(y), carried >> i & 1) for i, (x, y) in enumerate(zip(X, Y, strict=True))]
    assert w.v(0).tolist() == [r & M32 if mask >> i & 1 else 1 for i, r in enumerate(exact)]
    assert w.s64(4) == sum(int(not 0 <= r <= M32) << i for i, r in enumerate(exact)) & mask


def test_selection():
    chosen = 0x8000_0000_0000_00F1
    w = Waves().set("v1", A).set("v2", B).set("s6", chosen)
    w.do(
        "v_cndmask_b32_e64 v0, v1, v2, s[6:7]",
        "s_mov_b64 vcc, s[6:7]",
        "v_cndmask_b32_e32 v3, 0, v2, vcc",
    )
    w.do("v_cndmask_b32_e64 v4, v1, -v2, vcc", "v_cndmask_b32_sdwa v5, v1, v2, vcc dst_sel:DWORD dst_unused:UNUSED_PAD "
         "src0_sel:DWORD src1_sel:BYTE_1")  # fmt: skip
    picked = [chosen >> i & 1 for i in range(64)]
    pairs = list(zip(picked, A.tolist(), B.tolist(), strict=True))
    assert w.v(0).tolist() == [b if p else a for p, a, b in pairs]
    assert w.v(3).tolist() == [b if p else 0 for p, a, b in pairs]
    assert w.v(4).tolist() == [b ^ 1 << 31 if p else a for p, a, b in pairs]
    assert w.v(5).tolist() == [b >> 8 & 255 if p else a for p, a, b in pairs]


def test_selection_reads_each_source_where_it_is_selected():
    """A masked load's lanes that were not loaded are selected away: that is no read of them."""
    w = (
        Waves()
        .set("v1", A)
        .set("s6", 0xFF | 1 << 60)
        .exec(0xFF | 1 << 60)
        .do("v_mov_b32_e32 v2, 3")
        .exec(M64)
    )
    w.do("v_cndmask_b32_e64 v0, v1, v2, s[6:7]")
    assert w.v(0).tolist() == [3 if i < 8 or i == 60 else int(a) for i, a in enumerate(A)]
    w.set("s6", 0x1FF | 1 << 60)
    with pytest.raises(Fault, match="v2 is read") as caught:
        w.do("v_cndmask_b32_e64 v0, v1, v2, s[6:7]")
    assert caught.value.lane == 8
    with pytest.raises(Fault, match="v2 is read"):
        w.set("s6", 0x7F | 1 << 60).do("v_cndmask_b32_e64 v0, v2, v1, s[6:7]")


@pytest.mark.parametrize("signed", [False, True])
def test_wide_multiply_add(signed):
    wide = RNG.integers(0, 1 << 64, 64, np.uint64)
    wide[:4] = 0, M64, 1 << 63, (1 << 63) - 1
    w = Waves().set("v1", X).set("v2", Y).set("v4", wide)
    w.do(f"v_mad_{'i64_i32' if signed else 'u64_u32'} v[6:7], s[4:5], v1, v2, v[4:5]")

    def s(x, n):
        return x - (1 << n) if signed and x >> (n - 1) else x

    exact = [
        s(int(x), 32) * s(int(y), 32) + s(int(z), 64) for x, y, z in zip(X, Y, wide, strict=True)
    ]
    assert w.v64(6).tolist() == [r & M64 for r in exact]
    assert w.s64(4) == sum((r >> 64 & 1) << i for i, r in enumerate(exact))


def test_every_opcode_of_the_tables_is_in_this_file():
    assert set(carry.TABLE) == set(CARRIES) | {"v_cndmask_b32", "v_mad_u64_u32", "v_mad_i64_i32"}
    assert set(lanes.TABLE) == {
        "v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32", "v_permlane16_swap_b32", "v_permlane32_swap_b32",
        "v_swap_b32",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
