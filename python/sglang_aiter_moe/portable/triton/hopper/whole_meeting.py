"""Where the programs of the one-launch form wait for each other (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_aiter_moe.portable.triton.hopper.fp8 import barrier

MEETING = gl.constexpr(1024)
"""What a meeting adds to its counter, and the most programs that can meet: a power of two."""

MEET = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra MET;"
    "red.release.gpu.global.add.u32 [$1], $3;"
    "WAIT: ld.acquire.gpu.global.u32 t, [$1]; xor.b32 t, t, $2;"
    f"setp.lt.u32 p, t, {MEETING.value}; @p bra WAIT;"
    "MET: mov.b32 $0, 0; }"
)


@gluon.jit
def meet(counter_ptr, before):
    """Waits until all programs of the grid are here; what they wrote to device memory before is visible after.

    ``counter_ptr``: int32 which wraps, a multiple of MEETING between launches. ``before``: its value at any time
    before this program came. All programs together add MEETING, the first one what the others leave, so that the
    part of the counter above MEETING changes when the last one comes and not before: no program has to know where it
    started.

    Two launches at once, which must not be (they also share ``a``), may let each other pass too early. But each of
    their programs still adds its part, so the counter is a multiple of MEETING again when both have ended, and none
    waits for ever: with all of it added, the counter's upper part differs from what any program saw before it came.
    """
    p = gl.program_id(0)
    mine = gl.where(p == 0, MEETING + 1 - gl.num_programs(0), 1)
    barrier()
    gl.inline_asm_elementwise(
        MEET,
        "=r,l,r,r",
        [counter_ptr.to(gl.int64, bitcast=True), before, mine],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    barrier()
