"""Triton kernels on an interpreted Hopper GPU: calls as the launch code makes them, results as torch computes them."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from sglang_aiter_moe.errors import ContractError  # noqa: E402
from sglang_aiter_moe.nvptx import launch, triton_driver  # noqa: E402
from sglang_aiter_moe.nvptx.errors import ExecutionError  # noqa: E402
from sglang_aiter_moe.nvptx.launch import Device, pack, program_of  # noqa: E402
from sglang_aiter_moe.testing import hopper_cases  # noqa: E402
from sglang_aiter_moe.testing.triton_cases import run_case  # noqa: E402


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, x + y, mask=at < n)


@triton.jit
def product(
    a_ptr,
    b_ptr,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    if B_BY_ROWS:
        b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    else:
        b = tl.trans(tl.load(b_ptr + n[:, None] * K + k[None, :]))
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, out_dtype=tl.float32))


@triton.jit
def functions(
    x_ptr, floor_ptr, ceil_ptr, root_ptr, erf_ptr, all_ptr, clamp_ptr, BLOCK: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(floor_ptr + at, tl.floor(x))
    tl.store(ceil_ptr + at, tl.ceil(x))
    tl.store(root_ptr + at, tl.sqrt_rn(tl.abs(x)))
    tl.store(erf_ptr + at, tl.erf(x))
    tl.store(all_ptr + at, tl.floor(x) + tl.sqrt(tl.abs(x)) + tl.erf(x))
    tl.store(clamp_ptr + at, tl.clamp(x, -1.0, 1.0))


@triton.jit
def histogram(x_ptr, out_ptr, N: tl.constexpr, BINS: tl.constexpr):
    counts = tl.histogram(tl.load(x_ptr + tl.arange(0, N)), BINS)
    tl.store(out_ptr + tl.arange(0, BINS), counts)


def run_add(n: int = 300, **options):
    x, y, out = torch.randn(n), torch.randn(n), torch.full((n,), float("nan"))
    with Device(**options) as device:
        add[(triton.cdiv(n, 128),)](x, y, out, n, BLOCK=128, num_warps=2)
    return x, y, out, device


def test_result_and_record():
    x, y, out, device = run_add()
    assert torch.equal(out, x + y)
    (record,) = device.launches
    assert (record.kernel, record.grid, record.threads) == ("add", (3, 1, 1), 64)
    assert record.arguments["n"] == 300 and record.arguments["x_ptr"] is x
    assert record.statistics.warp_instructions > 0 and ".entry add" in record.assembly


def test_an_edited_text_is_what_runs():
    x, y, out, _ = run_add(
        edit=lambda name, text: text.replace("add.f32", "sub.f32").replace(
            "add.rn.f32", "sub.rn.f32"
        )
    )
    assert torch.equal(out, x - y)


def test_functions_of_libdevice():
    """The PTX of these declares an array that nothing uses and rounds with ``cvt.rmi.f32.f32``."""
    x = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 3
    x[:4] = torch.tensor([0.5, -0.5, -0.0, -3.0])
    floor, ceil, root, erf, together, clamped = (torch.full_like(x, float("nan")) for _ in range(6))
    with Device() as device:
        functions[(1,)](x, floor, ceil, root, erf, together, clamped, BLOCK=128)
    assert torch.equal(floor, x.floor()) and torch.equal(ceil, x.ceil())
    assert torch.equal(torch.signbit(ceil), torch.signbit(x.ceil()))
    assert torch.equal(root, x.double().abs().sqrt().float())
    assert torch.equal(clamped, x.clamp(-1, 1))
    exact = x.double().erf()
    assert ((erf - exact).abs() <= 2**-22 * exact.abs()).all()
    exact = exact + x.double().floor() + x.double().abs().sqrt()
    assert ((together - exact).abs() <= 2**-22 * (1 + x.double().abs())).all()
    assert ".global .align 1 .b8" in device.launches[0].assembly


DOTS = {
    "bf16": (torch.bfloat16, False), "fp16": (torch.float16, False), "e4m3": (torch.float8_e4m3fn, False),
    "e5m2": (torch.float8_e5m2, False), "bf16 by rows": (torch.bfloat16, True), "fp16 by rows": (torch.float16, True),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(64, 16, 64), (16, 16, 32), (128, 64, 128)], ids=str)
@pytest.mark.parametrize("name", DOTS)
def test_triton_s_own_products(name, shape):
    """What Triton generates for ``tl.dot``: other layouts, swizzles and instructions than the forms'."""
    dtype, by_rows = DOTS[name]
    M, N, K = shape
    g = torch.Generator().manual_seed(3)
    a = torch.randn(M, K, generator=g).to(dtype)
    b = torch.randn(K, N, generator=g).to(dtype)
    out = torch.full((M, N), float("nan"))
    stored = b if by_rows else b.float().T.contiguous().to(dtype)
    with Device() as device:
        product[(1,)](a, stored, out, M=M, N=N, K=K, B_BY_ROWS=by_rows, num_warps=4)
    expected = a.double() @ b.double()
    assert ((out - expected).abs() <= 2e-6 * expected.abs().max()).all()
    used = {name.split(".")[0] for name in device.launches[0].statistics.opcodes}
    assert ("wgmma" if M >= 64 else "mma") in used


def test_triton_s_histogram():
    """Four warps count in shared memory by atomic operations."""
    x, out = torch.randint(0, 16, (256,), dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    with Device() as device:
        histogram[(1,)](x, out, 256, 16, num_warps=4)
    assert torch.equal(out, torch.bincount(x, minlength=16).int())
    names = device.launches[0].statistics.opcodes
    assert any(re.match(r"(atom|red)\b.*\.shared", name) for name in names), sorted(names)


def test_arguments_that_cannot_be_placed():
    x = torch.randn(300)
    out = torch.empty(300)
    with Device(), pytest.raises(ContractError, match="overlaps another argument in part"):
        add[(3,)](x, x[:200], out, 200, BLOCK=128)
    with Device(), pytest.raises(ContractError, match="strides"):
        add[(3,)](torch.randn(600)[::2], x, out, 300, BLOCK=128)


def test_past_the_end_names_the_source():
    x, out = torch.randn(100), torch.empty(100)
    with Device(), pytest.raises(ExecutionError, match=r"past the end of (x|y)_ptr") as error:
        add[(1,)](x, torch.randn(100), out, 9999, BLOCK=16384)
    assert "test_launch.py" in error.value.source


def test_the_driver_that_was_is_put_back():
    before = triton.runtime.driver._active
    with Device():
        target = triton.runtime.driver.active.get_current_target()
        assert (target.backend, target.arch, target.warp_size) == ("cuda", 90, 32)
    assert triton.runtime.driver._active is before


def calls(name: str, multiprocessors: int = 132) -> list[triton_driver.Call]:
    """A layer's launches, none of which is executed."""
    form, case = hopper_cases.layers()[name]
    runner, config = hopper_cases.FORMS[form]
    found: list[triton_driver.Call] = []
    driver = triton_driver.Driver(found.append, multiprocessors)
    with triton_driver.active(driver):
        run_case(case, "cpu", 1, lambda r, *o: runner(r, *o, config))
    return found


def test_what_a_launch_hands_over():
    """K3's layouts at H 192, I 64, three experts, as docs/contract.md sections a.1 and a.3 lay them out."""
    _, stage1, stage2, combine = calls("fp8/A16W4/small")[:4]
    assert [c.name for c in (stage1, stage2, combine)] == [
        "stage1_fp8",
        "stage2_fp8",
        "combine_hopper",
    ]
    assert stage1.threads == 256  # 4 warps multiply, and the one that copies takes a warp group
    assert stage1.dependent and not stage1.cooperative
    arguments = dict(stage1.arguments)
    words, scales = arguments["desc_w"].map, arguments["desc_s"].map
    assert (words.sizes, words.strides) == ((128, 12, 4, 6), (128, 1536, 6144))
    assert (words.box, words.element_bytes, words.swizzle) == ((128, 32, 2, 2), 1, 128)
    assert (scales.sizes, scales.strides) == ((32, 2, 2, 6), (128, 256, 512))
    assert (scales.box, scales.element_bytes, scales.swizzle) == ((32, 4, 1, 2), 4, 128)
    assert [arguments[f"desc_w.size{i}"].value for i in range(4)] == [6, 4, 12, 128]
    kernel = program_of(stage1.assembly)[0].kernels["stage1_fp8"]
    assert len(kernel.params) == len(stage1.arguments) + 2


def test_a_cooperative_launch_and_few_multiprocessors():
    (whole, *_) = calls("whole/A16W4/one-token", multiprocessors=7)
    assert whole.cooperative and whole.grid == (7, 1, 1) and not whole.dependent


def test_other_parameters_are_refused():
    kernel = program_of(calls("fp8/A16W4/small")[0].assembly)[0].kernels["prepare_fp8"]
    good = [bytes(p.size) for p in kernel.params]
    assert len(pack(kernel, good)) == kernel.param_bytes == len(pack(kernel, good[:-2]))
    with pytest.raises(ContractError, match="is given 3 arguments"):
        pack(kernel, good[:3])
    with pytest.raises(ContractError, match="is given 5 bytes"):
        pack(kernel, [bytes(5), *good[1:]])


def test_a_missing_fence_is_refused_before_the_launch():
    text = next(c for c in calls("fp8/A16W4/small") if c.name == "stage1_fp8").assembly
    with pytest.raises(ContractError, match=r"since the last wgmma\.fence"):
        launch.program_of(text.replace("wgmma.fence.sync.aligned;", ""))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
