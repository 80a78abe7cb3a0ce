"""The last row tiles of a stage, which whoever is free takes (Gluon).

Programs with equal shares do not end together: some get their bytes faster. So TAIL row tiles a program are left out of
the shares; a program that has copied its share takes UNIT of them at a time from a queue. Its copying warp takes them,
some slots ahead of the others, and leaves word beside a run's first slot where the run begins.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def make_words(SLOTS: gl.constexpr):
    """A word beside each slot."""
    return gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def shared_out(total, TAIL: gl.constexpr):
    """How many of ``total`` row tiles are shares; the others are the queue."""
    return total - gl.minimum(total, gl.num_programs(0) * TAIL)


@gluon.jit
def take_run(
    queue_ptr,  # int32: runs that are taken
    begins,
    full,
    empty,
    slot,
    phase,
    total,
    TAIL: gl.constexpr,
    UNIT: gl.constexpr,
):
    """The copying warp: a run's first and end, which the next slot's word tells; both ``total`` where none is left."""
    taken = gl.atomic_add(queue_ptr, 1, sem="relaxed")
    lo = gl.minimum(shared_out(total, TAIL) + taken * UNIT, total)
    mbarrier.wait(empty.index(slot), phase)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    begins.index(slot).store(gl.full([1], lo, gl.int32, layout=ONE))
    if lo == total:  # nothing is copied, which would complete the slot
        mbarrier.arrive(full.index(slot), count=1)
    return lo, gl.minimum(lo + UNIT, total)


@gluon.jit
def next_run(begins, full, slot, phase, total, UNIT: gl.constexpr, W: gl.constexpr):
    """The W multiplying warps: first and end of the run that begins in the next slot."""
    mbarrier.wait(full.index(slot), phase)
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    lo = gl.max(begins.index(slot).load(ALL), axis=0)
    return lo, gl.minimum(lo + UNIT, total)
