"""Global, flat, buffer and scalar memory instructions, against the bytes that they should touch."""

import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import memory_ops, scalar_memory
from sglang_aiter_moe.amdgpu.errors import AssemblyError, Fault
from sglang_aiter_moe.testing.amdgpu_wave import ATOMICS, Waves, atomic_words, signed
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
BYTES = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def word(at, size=4):
    return int.from_bytes(BYTES[at : at + size].tobytes(), "little")


# name -> (bytes, register after the load, given the loaded number and the register before)
NARROW = {
    "ubyte": (1, lambda x, old: x), "sbyte": (1, lambda x, old: signed(x, 8)), "ushort": (2, lambda x, old: x),
    "sshort": (2, lambda x, old: signed(x, 16)), "short_d16": (2, lambda x, old: old & 0xFFFF0000 | x),
    "short_d16_hi": (2, lambda x, old: old & 0xFFFF | x << 16), "ubyte_d16": (1, lambda x, old: old & 0xFFFF0000 | x),
    "ubyte_d16_hi": (1, lambda x, old: old & 0xFFFF | x << 16),
}  # fmt: skip


def waves(count=1, **options):
    w = Waves(count, **options)
    w.base = w.memory.place(BYTES, "data")
    w.memory.settle()
    return w


def addressed(w, offsets):
    """v[2:3]: the addresses of ``offsets``."""
    return w.set("v2", np.uint64(w.base) + np.asarray(offsets, np.uint64))


OFFSETS = np.random.default_rng(1).permutation(200)[:64] * 16


@pytest.mark.parametrize("space", ["global", "flat"])
@pytest.mark.parametrize("name", [*WIDTHS, *NARROW])
def test_loads(space, name):
    size = WIDTHS.get(name) or NARROW[name][0]
    w = addressed(waves(), OFFSETS + (16 if space == "global" else 0))
    target = f"v[8:{7 + size // 4}]" if size > 4 else "v8"
    w.set("v8", 0x89ABCDEF)
    tail = ", off offset:-16" if space == "global" else ""
    w.do(f"{space}_load_{name} {target}, v[2:3]{tail}")
    if name in WIDTHS:
        for i in range(size // 4):
            assert w.v(8 + i).tolist() == [word(o + 4 * i) for o in OFFSETS]
    else:
        assert w.v(8).tolist() == [NARROW[name][1](word(o, size), 0x89ABCDEF) for o in OFFSETS]


def test_a_scalar_base_and_a_vector_offset():
    w = waves().set("v1", OFFSETS.astype(np.uint32))
    w.set("s4", w.base).do("global_load_dword v8, v1, s[4:5] offset:4")
    assert w.v(8).tolist() == [word(o + 4) for o in OFFSETS]


def test_wide_loads_need_dwords_alone_to_be_aligned():
    w = addressed(waves(), OFFSETS + 4).do("global_load_dwordx4 v[8:11], v[2:3], off")
    assert w.v(11).tolist() == [word(o + 16) for o in OFFSETS]
    with pytest.raises(Fault, match="not a multiple of 4"):
        addressed(waves(), OFFSETS + 2).do("global_load_dwordx4 v[8:11], v[2:3], off")


STORES = {"byte": (1, 0), "short": (2, 0), "byte_d16_hi": (1, 16), "short_d16_hi": (2, 16)} | {
    k: (v, 0) for k, v in WIDTHS.items()
}


@pytest.mark.parametrize("space", ["global", "flat", "buffer"])
@pytest.mark.parametrize("name", STORES)
def test_stores(space, name):
    size, shift = STORES[name]
    w = addressed(waves(), OFFSETS)
    mask = 0xFFFF_0FF0_F00F_1234
    values = np.random.default_rng(5).integers(0, 1 << 32, (4, 64), np.uint64).astype(np.uint32)
    for i in range(4):
        w.set(f"v{8 + i}", values[i])
    source = f"v[8:{7 + size // 4}]" if size > 4 else "v8"
    w.exec(mask)
    if space == "buffer":
        resource(w).set("v1", OFFSETS.astype(np.uint32)).do(
            f"buffer_store_{name} {source}, v1, s[4:7], 0 offen"
        )
    else:
        w.do(f"{space}_store_{name} v[2:3], {source}" + (", off" if space == "global" else ""))
    want = BYTES.copy()
    for lane in range(64):
        if mask >> lane & 1:
            raw = b"".join(int(v[lane]).to_bytes(4, "little") for v in values)
            want[OFFSETS[lane] : OFFSETS[lane] + size] = np.frombuffer(
                raw[shift // 8 : shift // 8 + size], np.uint8
            )
    np.testing.assert_array_equal(w.memory.read(w.base, np.uint8, BYTES.size), want)


def resource(w, size=BYTES.size, base=None, flags=0x27000):
    base = w.base if base is None else base
    return w.set("s4", base).set("s6", size).set("s7", flags)


@pytest.mark.parametrize("name", [*WIDTHS, *NARROW])
def test_buffer_loads(name):
    size = WIDTHS.get(name) or NARROW[name][0]
    w = resource(waves()).set("v1", OFFSETS.astype(np.uint32)).set("s8", 32)
    target = f"v[10:{9 + size // 4}]" if size > 4 else "v10"
    w.set("v10", 0x89ABCDEF).do(f"buffer_load_{name} {target}, v1, s[4:7], s8 offen offset:16")
    at = [o + 48 for o in OFFSETS.tolist()]
    if name in WIDTHS:
        for i in range(size // 4):
            assert w.v(10 + i).tolist() == [word(o + 4 * i) for o in at]
    else:
        assert w.v(10).tolist() == [NARROW[name][1](word(o, size), 0x89ABCDEF) for o in at]


def test_buffer_loads_without_a_register_offset():
    w = resource(waves()).set("s8", 8).do("buffer_load_dword v10, off, s[4:7], s8 offset:4")
    assert w.v(10).tolist() == [word(12)] * 64


def test_out_of_range_buffer_loads_give_zero_dword_by_dword():
    """The limit is number of bytes less scalar offset, and each dword is compared with it."""
    limit = 100
    offsets = np.array(
        [0, 80, 84, 88, 92, 96, 100, 104, 0x7FFFFFF0, 0x80000000, 0xFFFFFFF0] + [0] * 53, np.uint32
    )
    w = resource(waves(), limit + 8).set("v1", offsets).set("s8", 8)
    w.do(
        "buffer_load_dwordx4 v[10:13], v1, s[4:7], s8 offen",
        "buffer_load_ubyte v14, v1, s[4:7], s8 offen offset:3",
    )
    for i in range(4):
        at = [int(o) + 4 * i for o in offsets]
        assert w.v(10 + i).tolist() == [word(o + 8) if o + 4 <= limit else 0 for o in at]
    assert w.v(14).tolist() == [word(int(o) + 11, 1) if int(o) + 4 <= limit else 0 for o in offsets]


def test_out_of_range_buffer_stores_are_dropped_dword_by_dword():
    offsets = np.array([0, 76, 96, 112, 0x80000000] + [256] * 59, np.uint32)
    w = resource(waves(), 104).set("v1", offsets)
    for i in range(4):
        w.set(f"v{10 + i}", 0xAAAAAAA0 + i)
    w.do("buffer_store_dwordx4 v[10:13], v1, s[4:7], 0 offen")
    words = w.memory.read(w.base, np.uint32, BYTES.size // 4)
    want = BYTES.view(np.uint32).copy()
    want[0:4] = [0xAAAAAAA0 + i for i in range(4)]
    want[19:23] = [0xAAAAAAA0 + i for i in range(4)]
    want[24:26] = 0xAAAAAAA0, 0xAAAAAAA1
    np.testing.assert_array_equal(words, want)


def test_in_range_of_the_resource_but_outside_every_allocation():
    w = resource(waves(), 1 << 20).set("v1", np.full(64, 5000, np.uint32))
    with pytest.raises(Fault, match="904 bytes past the end of data"):
        w.do("buffer_load_dword v10, v1, s[4:7], 0 offen")


@pytest.mark.parametrize(
    "words", [{"high": 1 << 16}, {"high": 1 << 31}, {"flags": 0x27000 | 1 << 23}, {"flags": 0}]
)
def test_resources_that_are_not_raw_are_refused(words):
    w = resource(waves()).set("v1", 0)
    if "high" in words:
        w.set("s5", w.s(5) | words["high"])
    else:
        w.set("s7", words["flags"])
    with pytest.raises(Fault, match="stride, swizzle, thread ids or another format"):
        w.do("buffer_load_dword v10, v1, s[4:7], 0 offen")


def test_a_scalar_offset_beyond_the_buffer_is_refused():
    w = resource(waves(), 64).set("v1", 0).set("s8", 65)
    with pytest.raises(Fault, match="scalar offset"):
        w.do("buffer_load_dword v10, v1, s[4:7], s8 offen")


@pytest.mark.parametrize(
    ("name", "size"), [("dword", 4), ("dwordx3", 12), ("dwordx4", 16), ("ubyte", 1), ("ushort", 2)]
)
def test_buffer_loads_into_lds(name, size):
    """LDS address: M0[17:0] + instruction offset + lane times the bytes of a lane (a dword at least)."""
    w = resource(waves(lds=4096), 2000).set("v1", OFFSETS.astype(np.uint32) % 2048)
    w.set("s124", 0xFFF40100)  # bits from 18 on do not count
    mask = 0xFFFF_FFFF_FFFF_FFF7
    w.exec(mask).do(f"buffer_load_{name} v1, s[4:7], 0 offen offset:32 lds")
    step = max(size, 4)
    for lane in range(64):
        at = 0x100 + 32 + lane * step
        got = w.batch.lds[at : at + step]
        if not mask >> lane & 1:
            assert (got == 0xA5).all()
            continue
        offset = int(OFFSETS[lane]) % 2048 + 32
        if size >= 4:
            parts = [
                BYTES[offset + 4 * i : offset + 4 * i + 4] * (offset + 4 * i + 4 <= 2000)
                for i in range(size // 4)
            ]
            want = np.concatenate(parts)
        else:
            value = word(offset, size) if offset + size <= 2000 else 0
            want = np.frombuffer(value.to_bytes(4, "little"), np.uint8)
        assert got.tolist() == want.tolist(), lane


@pytest.mark.parametrize(("name", "size"), [("dword", 4), ("dwordx3", 12), ("dwordx4", 16)])
def test_global_loads_into_lds(name, size):
    w = addressed(waves(lds=4096), OFFSETS).set("s124", 64)
    w.do(f"global_load_lds_{name} v[2:3], off offset:16")
    for lane in range(64):
        at = 64 + 16 + lane * size
        offset = int(OFFSETS[lane]) + 16
        assert w.batch.lds[at : at + size].tolist() == BYTES[offset : offset + size].tolist()


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_loads(count):
    w = waves(2)
    w.set("s4", np.array([w.base, w.base + 256], np.uint64)).set("s6", 12)
    name = f"s_load_dword{'x' + str(count) if count > 1 else ''}"
    target = f"s[16:{15 + count}]" if count > 1 else "s16"
    for offset, at in (("0x40", 64), ("s6", 12), ("s6 offset:0x8", 20)):
        w.do(f"{name} {target}, s[4:5], {offset}")
        for i in range(count):
            assert w.batch.s[16 + i].tolist() == [word(at + 4 * i), word(256 + at + 4 * i)]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_buffer_loads(count):
    """Dwords beyond the number of bytes are 0."""
    w = waves(2)
    w.set("s4", w.base).set("s6", np.array([108, 84], np.uint32)).set("s7", 0x27000).set("s8", 40)
    name = f"s_buffer_load_dword{'x' + str(count) if count > 1 else ''}"
    target = f"s[16:{15 + count}]" if count > 1 else "s16"
    for offset, at in (("0x48", 72), ("s8", 40), ("s8 offset:0x20", 72)):
        w.do(f"{name} {target}, s[4:7], {offset}")
        for i in range(count):
            got = [word(at + 4 * i) if at + 4 * i + 4 <= size else 0 for size in (108, 84)]
            assert w.batch.s[16 + i].tolist() == got


def test_a_scalar_load_may_overwrite_its_own_address():
    w = waves().set("s4", 0)
    w.set("s4", w.base).do("s_load_dwordx4 s[4:7], s[4:5], 0x10")
    assert [w.s(4 + i) for i in range(4)] == [word(16 + 4 * i) for i in range(4)]


@pytest.mark.parametrize("space", ["global", "flat", "buffer"])
@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("returns", [False, True])
def test_atomics(space, name, returns):
    """Several lanes at one address, in ascending order."""
    words = atomic_words(name, 72)
    values, memory = words[:64], words[64:]
    w = Waves()
    w.base = w.memory.place(memory, "sums")
    where = np.random.default_rng(8).integers(0, 8, 64)
    mask = 0xFFFF_FFFE_FFFF_FFFF
    w.set("v1", values).set("v9", 77).exec(mask)
    sc0 = " sc0" if returns else ""
    if space == "buffer":
        resource(w, 28).set("v4", (4 * where).astype(np.uint32))
        w.do(f"buffer_atomic_{name} v1, v4, s[4:7], 0 offen{sc0}")
    else:
        target, base = "v9, " if returns else "", ", off" if space == "global" else ""
        addressed(w, 4 * where).do(f"{space}_atomic_{name} {target}v[2:3], v1{base}{sc0}")
    want, before = memory.tolist(), [0] * 64
    for lane in range(64):
        if mask >> lane & 1 and not (space == "buffer" and where[lane] == 7):
            before[lane] = want[where[lane]]
            want[where[lane]] = ATOMICS[name](want[where[lane]], int(values[lane]))
    assert w.memory.read(w.base, np.uint32, 8).tolist() == want
    register, other = ("v1", values) if space == "buffer" else ("v9", np.full(64, 77))
    kept = other.tolist()
    got = [b if mask >> i & 1 and returns else kept[i] for i, b in enumerate(before)]
    assert w.v(int(register[1:])).tolist() == got


def test_lanes_that_are_switched_off_touch_nothing():
    offsets = OFFSETS.astype(np.uint64)
    offsets[1:] = 1 << 45
    w = addressed(waves(), offsets).set("v8", 3).exec(1)
    w.do("global_load_dword v8, v[2:3], off", "global_store_byte v[2:3], v8, off")
    assert w.v(8).tolist() == [word(int(offsets[0]))] + [3] * 63
    w.exec(0).do("global_load_dword v8, v[2:3], off", "global_store_dword v[2:3], v8, off")


def test_reads_of_memory_that_nothing_wrote():
    w = Waves()
    w.base = w.memory.reserve(256, "scratch")
    offsets = np.arange(64) * 4
    addressed(w, offsets).set("v8", 5).exec(M64 ^ 1 << 33).do("global_store_dword v[2:3], v8, off")
    w.do("global_load_dword v9, v[2:3], off")
    with pytest.raises(
        Fault, match=r"byte 132 of 256 of scratch, which nothing has written"
    ) as caught:
        w.exec(M64).do("global_load_dword v9, v[2:3], off")
    assert caught.value.lane == 33
    unchecked = Waves(checked=False)
    unchecked.base = unchecked.memory.reserve(256, "scratch")
    addressed(unchecked, offsets).do("global_load_dword v9, v[2:3], off")


def test_stores_to_what_is_read_only():
    w = Waves()
    w.base = w.memory.place(BYTES, "weights", writable=False)
    with pytest.raises(Fault, match="read-only"):
        addressed(w, OFFSETS).set("v8", 0).do("global_store_dword v[2:3], v8, off")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("buffer_load_dword v10, v1, s[4:7], 0 idxen", "idxen"),
        ("buffer_load_dword v10, v1, s[4:7], 0", "without offen"),
        ("buffer_load_dword v10, v1, s[4:5], 0 offen", "2 registers where 4"),
        ("buffer_load_dwordx2 v1, s[4:7], 0 offen lds", "width"),
        ("global_atomic_cmpswap v5, v[2:3], v[8:9], off sc0", "global_atomic_cmpswap"),
        ("global_load_dword v8, v2, off", "1 registers where 2"),
        ("buffer_load_format_x v10, v1, s[4:7], 0 offen", "buffer_load_format_x"),
    ],
)
def test_what_is_not_modelled_is_named(line, named):
    with pytest.raises(AssemblyError, match=named):
        Waves().do(line)


def test_every_opcode_of_the_table_is_in_this_file():
    here = {f"{s}_load_{n}" for s in ("global", "flat", "buffer") for n in (*WIDTHS, *NARROW)}
    here |= {f"{s}_store_{n}" for s in ("global", "flat", "buffer") for n in STORES}
    here |= {f"{s}_atomic_{n}" for s in ("global", "flat", "buffer") for n in ATOMICS}
    here |= {f"global_load_lds_{n}" for n in ("dword", "dwordx3", "dwordx4")}
    assert set(memory_ops.TABLE) == here
    scalar = {f"s_{b}load_dword{n}" for b in ("", "buffer_") for n in ("", "x2", "x4", "x8", "x16")}
    assert set(scalar_memory.TABLE) == scalar


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
