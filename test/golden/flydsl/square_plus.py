"""The FlyDSL kernel behind square_plus.s: ``out[i] = x[i] * x[i] + x[i]`` for float32, 64 work-items a workgroup.

Compiled without a GPU (flydsl 0.3.1; docs/amd-execution.md says what else it takes):

    COMPILE_ONLY=1 ARCH=gfx950 FLYDSL_DUMP_IR=1 FLYDSL_DUMP_DIR=dump python square_plus.py
    cp dump/square_plus_0/21_final_isa.s square_plus.s

This file is no part of the tests, which need no FlyDSL.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch

ITEMS = 64
DEFAULT_STREAM = fx.Stream(None)


@flyc.kernel
def square_plus(x: fx.Tensor, out: fx.Tensor):
    here = fx.block_idx.x, fx.thread_idx.x

    def element(tensor):
        blocks = fx.slice(fx.logical_divide(tensor, fx.make_layout(ITEMS, 1)), (None, here[0]))
        return fx.slice(fx.logical_divide(blocks, fx.make_layout(1, 1)), (None, here[1]))

    one = fx.make_layout(1, 1)
    kind = fx.MemRefType.get(fx.T.f32, fx.LayoutType.get(1, 1), fx.AddressSpace.Register)
    register = fx.memref_alloca(kind, one)
    load = fx.make_copy_atom(fx.rocdl.BufferCopy32b(), fx.Float32)
    store = fx.make_copy_atom(fx.UniversalCopy32b(), fx.Float32)
    fx.copy_atom_call(load, element(fx.rocdl.make_buffer_tensor(x)), register)
    value = fx.memref_load_vec(register)
    fx.memref_store_vec(fx.arith.addf(fx.arith.mulf(value, value), value), register)
    fx.copy_atom_call(store, register, element(out))


@flyc.jit
def run(x: fx.Tensor, out: fx.Tensor, n: fx.Int32, stream: fx.Stream = DEFAULT_STREAM):
    grid = ((n + ITEMS - 1) // ITEMS, 1, 1)
    square_plus(x, out).launch(grid=grid, block=[ITEMS, 1, 1], stream=stream)


if __name__ == "__main__":
    run(torch.zeros(192), torch.zeros(192), 192)
