"""Instructions that a warp executes together: lanes that come early wait for the others.

``.aligned`` instructions need all lanes of a warp that have not ended, ``.sync`` ones those of their membership mask.
Compilers make a warp come together again behind a branch, and here it does where its paths meet at such an instruction.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.nvptx import decode
from sglang_aiter_moe.nvptx.decode import Operation, Read, full
from sglang_aiter_moe.nvptx.state import LANES, Group

_BIT = np.uint32(1) << np.arange(LANES, dtype=np.uint32)
EVERYBODY = 0xFFFFFFFF


def named(g: Group, mask) -> np.ndarray:
    """bool [n, 32]: the lanes that a warp's membership mask names, as its first acting lane gives it."""
    first = g.lanes.argmax(1)
    lanes = (full(g, mask)[np.arange(g.n), first][:, None] & _BIT) != 0
    lanes[~g.lanes.any(1)] = False
    return lanes


def here(g: Group, lanes: np.ndarray) -> np.ndarray:
    """bool [n]: the warps of which all of ``lanes`` [n, 32] are at this instruction."""
    return (g.lanes | ~lanes).all(1)


def together(place: tuple, mask: Read, run: Operation) -> Operation:
    """``run`` for warps whose named lanes have all come; the others wait."""

    def meet(g: Group):
        given = mask(g)
        if g.mask is None and np.ndim(given) == 0 and int(given) == EVERYBODY:
            return run(g)
        lanes = named(g, given)
        gone = lanes & ~g.state.live[g.rows]
        if gone.any():
            raise decode.fault(
                "the membership mask names lanes that have ended",
                "lanes that execute this instruction",
                lane=int(np.flatnonzero(gone)[0]),
            )
        ready = here(g, lanes)
        if ready.all():
            return run(g)
        g.state.reasons[place] = lambda: "lanes that the membership mask names do not come"
        if ready.any():
            run(g.subset(ready))
        return np.broadcast_to(ready[:, None], (g.n, LANES))

    return meet
