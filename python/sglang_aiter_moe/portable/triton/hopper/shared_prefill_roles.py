"""The roles of a program of the shared prefill form, side by side (Gluon): two to four groups of consumers,
and those who load for them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def loader(load: gl.constexpr, arguments):
    load(*arguments)


@gluon.jit
def group(consume: gl.constexpr, arguments, g: gl.constexpr):
    consume(*arguments, g)


@gluon.jit
def start_roles(
    consume: gl.constexpr, arguments, token_loader: gl.constexpr, tokens, weight_loader: gl.constexpr, weights,
    fact_finder: gl.constexpr, facts, G: gl.constexpr, LW: gl.constexpr, CREGS: gl.constexpr, LREGS: gl.constexpr,
):  # fmt: skip
    """A stage's functions with their arguments. Each group of consumers is code of its own, which knows its number."""
    if G == 2:
        gl.warp_specialize(
            [
                (group, (consume, arguments, gl.constexpr(0))), (group, (consume, arguments, gl.constexpr(1))),
                (loader, (token_loader, tokens)), (loader, (weight_loader, weights)), (loader, (fact_finder, facts)),
            ],
            [4, LW, 1, 1],
            [CREGS, LREGS, LREGS, LREGS],
        )  # fmt: skip
    elif G == 3:
        gl.warp_specialize(
            [
                (group, (consume, arguments, gl.constexpr(0))), (group, (consume, arguments, gl.constexpr(1))),
                (group, (consume, arguments, gl.constexpr(2))),
                (loader, (token_loader, tokens)), (loader, (weight_loader, weights)), (loader, (fact_finder, facts)),
            ],
            [4, 4, LW, 1, 1],
            [CREGS, CREGS, LREGS, LREGS, LREGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (group, (consume, arguments, gl.constexpr(0))), (group, (consume, arguments, gl.constexpr(1))),
                (group, (consume, arguments, gl.constexpr(2))), (group, (consume, arguments, gl.constexpr(3))),
                (loader, (token_loader, tokens)), (loader, (weight_loader, weights)), (loader, (fact_finder, facts)),
            ],
            [4, 4, 4, LW, 1, 1],
            [CREGS, CREGS, CREGS, LREGS, LREGS, LREGS],
        )  # fmt: skip
