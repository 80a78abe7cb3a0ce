"""Instructions that a warp executes together: lanes that come early wait for the others.

``.aligned`` instructions need all lanes of a warp that have not ended, ``.sync`` ones those of their membership mask,
each with the same mask.
Compilers make a warp come together again behind a branch, and here it does where its paths meet at such an instruction.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.nvptx import decode
from sglang_aiter_moe.nvptx.decode import Operation, Read, full
from sglang_aiter_moe.nvptx.state import LANES, Group

_BIT = np.uint32(1) << np.arange(LANES, dtype=np.uint32)
EVERYBODY = 0xFFFFFFFF


def here(g: Group, lanes: np.ndarray) -> np.ndarray:
    """bool [n]: the warps of which all of ``lanes`` [n, 32] are at this instruction."""
    return (g.lanes | ~lanes).all(1)


def together(place: tuple, mask: Read, run: Operation) -> Operation:
    """``run`` for lanes whose membership mask's lanes have all come with that mask; the others wait.

    Lanes of a warp may stand here with different masks: each set exchanges among itself. A lane that its own mask does
    not name is a Fault (PTX ISA 8.7: undefined).
    """

    def meet(g: Group):
        given = mask(g)
        if g.mask is None and np.ndim(given) == 0 and int(given) == EVERYBODY:
            return run(g)
        given, lanes, state = full(g, given), g.lanes, g.state
        stray = lanes & (given & _BIT == 0)
        if stray.any():
            raise decode.fault(
                "a lane executes this with a membership mask that does not name it",
                "lanes that the mask names",
                lane=int(np.flatnonzero(stray)[0]),
            )
        unknown, done = state.unknown, np.zeros(lanes.shape, bool)
        for value in np.unique(given[lanes]):
            bits = value & _BIT != 0
            same = lanes & (given == value)
            gone = same.any(1)[:, None] & bits & ~state.live[g.rows]
            if gone.any():
                raise decode.fault(
                    "the membership mask names lanes that have ended",
                    "lanes that execute this instruction",
                    lane=int(np.flatnonzero(gone)[0]),
                )
            ready = (same == bits).all(1)
            if not ready.any():
                continue
            state.unknown = None if unknown is None else unknown[ready]
            run(g.subset(ready).narrow(same[ready]))
            done |= same & ready[:, None]
        if (done | ~lanes).all():
            return None
        state.reasons[place] = lambda: "lanes that the membership mask names do not come"
        return done

    return meet
