"""LDS instructions, against the bytes that they should touch."""

import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import lds_ops
from sglang_aiter_moe.amdgpu.errors import AssemblyError, Fault
from sglang_aiter_moe.testing.amdgpu_wave import ATOMICS, Waves, atomic_words, signed
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
SIZE = 8192
BYTES = np.random.default_rng(0).integers(0, 256, SIZE).astype(np.uint8)
WIDTHS = {"b32": 4, "b64": 8, "b96": 12, "b128": 16}


def word(at, size=4):
    return int.from_bytes(BYTES[at : at + size].tobytes(), "little")


OLD = 0x89ABCDEF
NARROW = {
    "u8": (1, lambda x: x),
    "i8": (1, lambda x: signed(x, 8)),
    "u16": (2, lambda x: x),
    "i16": (2, lambda x: signed(x, 16)),
    "u8_d16": (1, lambda x: OLD & 0xFFFF0000 | x),
    "u8_d16_hi": (1, lambda x: OLD & 0xFFFF | x << 16),
    "i8_d16": (1, lambda x: OLD & 0xFFFF0000 | signed(x, 8) & 0xFFFF),
    "i8_d16_hi": (1, lambda x: OLD & 0xFFFF | (signed(x, 8) & 0xFFFF) << 16),
    "u16_d16": (2, lambda x: OLD & 0xFFFF0000 | x),
    "u16_d16_hi": (2, lambda x: OLD & 0xFFFF | x << 16),
}
STORES = {"b8": (1, 0), "b16": (2, 0), "b8_d16_hi": (1, 16), "b16_d16_hi": (2, 16)} | {
    k: (v, 0) for k, v in WIDTHS.items()
}
OFFSETS = np.random.default_rng(1).permutation(256)[:64] * 16


def filled(count=1):
    """Waves of one workgroup whose LDS holds BYTES."""
    w = Waves(count, lds=SIZE)
    w.batch.lds[:SIZE] = BYTES
    w.batch.lds_known[:SIZE] = 1
    return w.set("v1", OFFSETS.astype(np.uint32))


@pytest.mark.parametrize("name", [*WIDTHS, *NARROW])
def test_loads(name):
    size = WIDTHS.get(name) or NARROW[name][0]
    w = filled().set("v8", OLD)
    w.do(f"ds_read_{name} {f'v[8:{7 + size // 4}]' if size > 4 else 'v8'}, v1 offset:160")
    at = [int(o) + 160 for o in OFFSETS]
    if name in WIDTHS:
        for i in range(size // 4):
            assert w.v(8 + i).tolist() == [word(o + 4 * i) for o in at]
    else:
        assert w.v(8).tolist() == [NARROW[name][1](word(o, size)) for o in at]


@pytest.mark.parametrize("name", STORES)
def test_stores(name):
    size, shift = STORES[name]
    mask = 0xFFFF_0FF0_F00F_1234
    values = np.random.default_rng(5).integers(0, 1 << 32, (4, 64), np.uint64).astype(np.uint32)
    w = filled()
    for i in range(4):
        w.set(f"v{8 + i}", values[i])
    w.exec(mask).do(
        f"ds_write_{name} v1, {f'v[8:{7 + size // 4}]' if size > 4 else 'v8'} offset:32"
    )
    want = BYTES.copy()
    for lane in range(64):
        if mask >> lane & 1:
            raw = b"".join(int(v[lane]).to_bytes(4, "little") for v in values)[shift // 8 :][:size]
            want[OFFSETS[lane] + 32 : OFFSETS[lane] + 32 + size] = np.frombuffer(raw, np.uint8)
    np.testing.assert_array_equal(w.batch.lds[:SIZE], want)


@pytest.mark.parametrize(
    ("name", "size", "step"),
    [("2_b32", 4, 4), ("2_b64", 8, 8), ("2st64_b32", 4, 256), ("2st64_b64", 8, 512)],
)
def test_two_at_once(name, size, step):
    count = size // 4
    w = filled().do(f"ds_read{name} v[8:{7 + 2 * count}], v1 offset0:1 offset1:7")
    for k, offset in enumerate((1, 7)):
        for i in range(count):
            assert w.v(8 + k * count + i).tolist() == [
                word(int(o) + offset * step + 4 * i) for o in OFFSETS
            ]
    w = filled()
    for i in range(4):
        w.set(f"v{8 + i}", 0xAAAAAAA0 + i)
    sources = [
        f"v[{8 + k * count}:{7 + (k + 1) * count}]" if count > 1 else f"v{8 + k}" for k in (0, 1)
    ]
    w.exec(1).do(f"ds_write{name} v1, {sources[0]}, {sources[1]} offset1:3")
    want = BYTES.copy()
    for k, offset in enumerate((0, 3)):
        at = int(OFFSETS[0]) + offset * step
        want[at : at + size] = np.array(
            [0xAAAAAAA0 + k * count + i for i in range(count)], np.uint32
        ).view(np.uint8)
    np.testing.assert_array_equal(w.batch.lds[:SIZE], want)


def test_workgroups_have_lds_of_their_own():
    from sglang_aiter_moe.amdgpu.state import Batch

    w = Waves()
    w.batch = Batch(4, 2, 16, 0, 256, True)
    w.set("v1", np.arange(64, dtype=np.uint32) * 4).set(
        "v2", np.arange(4, dtype=np.uint32)[:, None] * 1000
    )
    w.do("ds_write_b32 v1, v2", "ds_read_b32 v3, v1")
    # Two waves a workgroup: the second one's store stays.
    np.testing.assert_array_equal(w.batch.v[3], np.repeat([[1000], [1000], [3000], [3000]], 64, 1))


@pytest.mark.parametrize(
    ("line", "address", "message"),
    [
        ("ds_read_b32 v8, v1", SIZE, f"4 bytes of LDS at {SIZE} of {SIZE}"),
        ("ds_read_b32 v8, v1 offset:4", SIZE - 4, f"4 bytes of LDS at {SIZE} of {SIZE}"),
        ("ds_read_b128 v[8:11], v1", SIZE - 12, "multiples of 16|of 8192"),
        ("ds_read_b128 v[8:11], v1", 8, "16 bytes of LDS at 8, which is not a multiple of 16"),
        ("ds_read_b64 v[8:9], v1", 4, "which is not a multiple of 8"),
        ("ds_read_u16 v8, v1", 1, "which is not a multiple of 2"),
        ("ds_write_b32 v1, v1", SIZE + 4096, "LDS at 12288"),
        ("ds_write_b64 v1, v[2:3]", 12, "which is not a multiple of 8"),
        ("ds_write2_b32 v1, v1, v2 offset1:1", SIZE - 4, "4 bytes of LDS at 8192"),
        ("ds_add_u32 v1, v1", SIZE, "of 8192"),
    ],
)
def test_out_of_range_and_misaligned(line, address, message):
    w = filled()
    lanes = np.zeros(64, np.uint32)
    lanes[41] = address
    w.set("v1", lanes).set("v2", 0).set("v3", 0)
    with pytest.raises(Fault, match=message) as caught:
        w.do(line)
    assert caught.value.lane == 41
    if "write" not in line and "add" not in line:
        w.exec(M64 ^ 1 << 41).do(line)


@pytest.mark.parametrize(
    "line",
    [
        "ds_read_b32 v8, v1",
        "ds_read_u8 v8, v1 offset:2",
        "ds_read_b128 v[8:11], v2",
        "ds_add_u32 v1, v1",
    ],
)
def test_reads_of_lds_that_nothing_wrote(line):
    w = (
        Waves(lds=1024)
        .set("v1", np.arange(64, dtype=np.uint32) * 4)
        .set("v2", np.arange(64, dtype=np.uint32) // 4 * 16)
    )
    w.exec(M64 ^ 1 << 17).do("ds_write_b32 v1, v1").exec(M64)
    with pytest.raises(Fault, match="LDS is read, and nothing has written it") as caught:
        w.do(line)
    assert caught.value.lane == (16 if "b128" in line else 17)
    w.do("ds_write_b32 v1, v1", line)
    Waves(lds=1024, checked=False).set("v1", 0).set("v2", 0).do(line)


def test_transposed_read():
    """Four rows of 16 elements, four elements a lane: lane l of 16 receives column l."""
    w = (
        filled()
        .set("v1", np.arange(64, dtype=np.uint32) * 8)
        .do("ds_read_b64_tr_b16 v[8:9], v1 offset:64")
    )
    halves = BYTES[64 : 64 + 512].view(np.uint16)
    for lane in range(64):
        rows = halves[lane // 16 * 64 : lane // 16 * 64 + 64].reshape(4, 16)
        column = rows[:, lane % 16].tolist()
        assert w.v(8)[lane] == column[0] | column[1] << 16
        assert w.v(9)[lane] == column[2] | column[3] << 16
    with pytest.raises(Fault, match="switched off"):
        w.exec(3).do("ds_read_b64_tr_b16 v[8:9], v1")


def test_transposed_read_of_bytes():
    """Eight rows of 16 bytes, eight bytes a lane."""
    w = filled().set("v1", np.arange(64, dtype=np.uint32) * 8).do("ds_read_b64_tr_b8 v[8:9], v1")
    for lane in range(64):
        rows = BYTES[lane // 16 * 128 : lane // 16 * 128 + 128].reshape(8, 16)
        column = rows[:, lane % 16].tobytes()
        assert (int(w.v(8)[lane]), int(w.v(9)[lane])) == tuple(
            np.frombuffer(column, np.uint32).tolist()
        )


def test_permutes():
    rng = np.random.default_rng(3)
    source = rng.integers(0, 1 << 32, 64, np.uint64).astype(np.uint32)
    where = rng.permutation(64)
    address = (where * 4 + rng.integers(0, 4, 64) + 256 * rng.integers(0, 3, 64)).astype(np.uint32)
    w = (
        Waves()
        .set("v1", address)
        .set("v2", source)
        .do("ds_bpermute_b32 v0, v1, v2", "ds_permute_b32 v3, v1, v2")
    )
    assert w.v(0).tolist() == [source[i] for i in where]
    assert w.v(3)[where].tolist() == source.tolist()
    w.do("ds_bpermute_b32 v0, v1, v2 offset:8")
    assert w.v(0).tolist() == [
        source[(i + 2 + (int(a) % 4 + 0) // 4) % 64] for i, a in zip(where, address, strict=True)
    ]
    mask = 0x0F0F_FFFF_0000_FFFF
    w.set("v0", 5).exec(mask).do("ds_bpermute_b32 v0, v1, v2")
    on = [mask >> i & 1 for i in range(64)]
    assert w.v(0).tolist() == [
        (source[i] if on[i] else 0) if on[lane] else 5 for lane, i in enumerate(where)
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        0x8000 | 0b00_01_10_11,
        0x8000 | 0b11_11_00_00,
        0x041F,
        0x001F,
        0x401F,
        0x7C1F,
        0x0010,
        0x03E0,
    ],
)
def test_swizzle(pattern):
    source = np.arange(64, dtype=np.uint32) * 11
    w = Waves().set("v1", source).do(f"ds_swizzle_b32 v0, v1 offset:{pattern}")
    for lane in range(64):
        if pattern & 0x8000:
            chosen = lane // 4 * 4 + (pattern >> 2 * (lane % 4) & 3)
        else:
            chosen = lane // 32 * 32 + (
                (lane % 32 & (pattern & 31) | pattern >> 5 & 31) ^ pattern >> 10 & 31
            )
        assert w.v(0)[lane] == source[chosen]


NAMES = {
    "add_u32": "add", "sub_u32": "sub", "and_b32": "and", "or_b32": "or", "xor_b32": "xor", "max_u32": "umax",
    "min_u32": "umin", "max_i32": "smax", "min_i32": "smin", "add_f32": "add_f32", "pk_add_bf16": "pk_add_bf16",
    "pk_add_f16": "pk_add_f16",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("returns", [False, True])
def test_atomics(name, returns):
    values = atomic_words(NAMES[name], 72)
    where = np.random.default_rng(8).integers(0, 8, 64)
    w = Waves(lds=64).set("v1", (4 * where).astype(np.uint32)).set("v2", values[:64]).set("v3", 77)
    w.batch.lds[:32], w.batch.lds_known[:32] = values[64:].view(np.uint8), 1
    first, _, last = name.rpartition("_")
    w.exec(M64 ^ 2).do(f"ds_{first}_rtn_{last} v3, v1, v2" if returns else f"ds_{name} v1, v2")
    want, before = values[64:].tolist(), [77] * 64
    for lane in range(64):
        if lane != 1:
            before[lane] = want[where[lane]]
            want[where[lane]] = ATOMICS[NAMES[name]](want[where[lane]], int(values[lane]))
    assert w.batch.lds[:32].view(np.uint32).tolist() == want
    assert w.v(3).tolist() == (before if returns else [77] * 64)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("ds_read_b32 v8, v1 gds", "gds"),
        ("ds_swizzle_b32 v0, v1 offset:0xc001", "pattern"),
        ("ds_cmpst_b32 v0, v1, v2", "ds_cmpst_b32"),
        ("ds_read_b64 v8, v1", "1 registers where 2"),
    ],
)
def test_what_is_not_modelled_is_named(line, named):
    with pytest.raises(AssemblyError, match=named):
        filled().do(line)


def test_every_opcode_of_the_table_is_in_this_file():
    here = (
        {f"ds_read_{n}" for n in (*WIDTHS, *NARROW)}
        | {f"ds_write_{n}" for n in STORES}
        | {f"ds_{n}" for n in NAMES}
    )
    here |= {"ds_{}_rtn_{}".format(*n.rsplit("_", 1)) for n in NAMES}
    here |= {
        f"ds_{v}{n}"
        for v in ("read", "write")
        for n in ("2_b32", "2_b64", "2st64_b32", "2st64_b64")
    }
    here |= {
        "ds_bpermute_b32",
        "ds_permute_b32",
        "ds_swizzle_b32",
        "ds_read_b64_tr_b16",
        "ds_read_b64_tr_b8",
    }
    assert set(lds_ops.TABLE) == here


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
