"""Triton's own programs for a matrix product, executed: operands go by LDS, transposed reads, loads into LDS."""

import struct
import sys

import numpy as np
import pytest
import torch

from sglang_aiter_moe.amdgpu import assembly, machine
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.testing.registration import register_cpu_ci

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    """a [M, K] times b [K, N], one program."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
    acc = tl.zeros([M, N], tl.float32)
    for start in range(0, K, STEP):
        a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * N + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc)


DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2, "fp8e4b8": torch.float8_e4m3fnuz, "fp8e5b16": torch.float8_e5m2fnuz,
}  # fmt: skip


def compiled(arch, dtype, m, n, step, warps, stages):
    attributes = {(i,): [["tt.divisibility", 16], ["tt.pointer_range", 32]] for i in range(3)}
    source = ASTSource(
        fn=product_kernel,
        signature={
            "a_ptr": "*" + dtype, "b_ptr": "*" + dtype, "c_ptr": "*fp32", "K": "i32", "M": "constexpr",
            "N": "constexpr", "STEP": "constexpr",
        },
        constexprs={(4,): m, (5,): n, (6,): step},
        attrs=attributes | {(3,): [["tt.divisibility", 16]]},
    )  # fmt: skip
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("hip", arch, 64), options=options)


CASES = [
    # arch, dtype, M, N, STEP, warps, stages, what the text has to contain
    ("gfx950", "bf16", 64, 64, 64, 4, 2, ("ds_read_b64_tr_b16", "v_mfma_f32_32x32x16_bf16")),
    ("gfx950", "fp16", 16, 32, 64, 2, 2, ("v_mfma_f32_16x16x32_f16",)),
    ("gfx950", "fp8e4nv", 64, 64, 128, 4, 2, ("ds_read_b64_tr_b8", "v_mfma_f32_32x32x64_f8f6f4")),
    ("gfx950", "fp8e5", 16, 32, 128, 2, 1, ("v_mfma_f32_16x16x128_f8f6f4",)),
    ("gfx950", "fp32", 32, 32, 32, 2, 1, ("v_mfma_f32_32x32x2_f32",)),
    ("gfx942", "bf16", 32, 64, 64, 4, 1, ("v_mfma_f32_32x32x8_bf16",)),
    ("gfx942", "fp16", 16, 16, 32, 1, 2, ("v_mfma_f32_16x16x16_f16",)),
    ("gfx942", "fp8e4b8", 64, 64, 64, 4, 2, ("v_mfma_f32_32x32x16_fp8_fp8",)),
    ("gfx942", "fp8e5b16", 16, 32, 64, 2, 1, ("v_mfma_f32_16x16x32_bf8_bf8",)),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "dtype", "m", "n", "step", "warps", "stages", "wanted"), CASES)
def test_products(arch, dtype, m, n, step, warps, stages, wanted):
    depth = 2 * step
    binary = compiled(arch, dtype, m, n, step, warps, stages)
    text = binary.asm["amdgcn"]
    assert all(w in text for w in wanted), [w for w in wanted if w not in text]
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(shape, generator=generator).to(DTYPES[dtype])
        for shape in ((m, depth), (depth, n))
    )
    memory = Memory()
    pointers = [memory.place(t.view(torch.uint8).numpy(), name) for t, name in ((a, "a"), (b, "b"))]
    pointers.append(memory.reserve(4 * m * n, "c"))
    program = assembly.parse(text)
    arguments = struct.pack("<QQQi", *pointers, depth).ljust(
        program.kernels["product_kernel"].kernarg_size, b"\0"
    )
    machine.run(
        program, "product_kernel", memory, arguments, (1, 1, 1), lds_bytes=binary.metadata.shared
    )
    got = memory.read(pointers[2], np.float32, (m, n))
    want = (a.double() @ b.double()).numpy()
    # One rounding to float32 for each matrix instruction along K.
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="older Triton loads by registers here",
)
def test_loads_into_lds_are_among_what_was_executed():
    assert " offen lds" in compiled(*CASES[0][:-1]).asm["amdgcn"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
