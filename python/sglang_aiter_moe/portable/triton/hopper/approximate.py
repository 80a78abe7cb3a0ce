"""Single instructions of the float32 unit for epilogues (Gluon), results below 2**-126 taken as 0.

Without the care that Triton's own ``exp2`` and division take of such results: three instructions less each, where what
follows is rounded to E4M3 or E2M1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def exp2(v):
    """2**v, float32, to two units in the last place (PTX ISA, ``ex2.approx.ftz.f32``)."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def divide(a, b):
    """``a / b``, float32, to two units in the last place; 0 where b is above 2**126 (``rcp.approx.ftz.f32``)."""
    return a * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=gl.float32, is_pure=True, pack=1
    )
