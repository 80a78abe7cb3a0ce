"""Our gfx950 kernels, executed, against what AITER's gfx950 kernels computed (test/golden/executed)."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.testing import executed_vectors as vectors
from sglang_aiter_moe.testing.packing import pack_scale, pack_weight
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=80, suite="base-a-test-cpu")

pytest.importorskip("triton")

GOLDEN = Path(__file__).parents[3] / "golden" / "executed"
CASES = vectors.CASES


@functools.cache
def executed(shape: str, mode: str):
    """The layer's output, and the operands and results of stage 1."""
    from sglang_aiter_moe.amdgpu.layer import run_layer

    raw, arrays = vectors.load(GOLDEN, shape, mode)
    form = vectors.FORM[mode]
    request = KernelRequest(
        mode=mode.upper(), family="test", num_experts=raw.w13.shape[0], hidden_size=vectors.HIDDEN,
        intermediate_size=vectors.INTER, w13_layout=form, w13_scale_layout=form, w2_layout="separated",
        w2_scale_layout="separated", activation="situv2", requantization="none" if mode == "a16w4" else "epilogue",
    )  # fmt: skip
    x = vectors.bf16(arrays["x"])
    out = torch.empty_like(x)
    launches = run_layer(
        "gfx950",
        request,
        x,
        pack_weight(raw.w13, form),
        pack_weight(raw.w2, "separated"),
        pack_scale(raw.w13_scale, form),
        pack_scale(raw.w2_scale, "separated"),
        torch.from_numpy(arrays["topk_weights"]),
        torch.from_numpy(arrays["topk_ids"]),
        out,
    )
    (stage1,) = (launch for launch in launches if launch.kernel == "stage1_kernel")
    return out, {n: a.clone() for n, a in stage1.arguments.items() if torch.is_tensor(a)}, arrays


@pytest.mark.parametrize("shape, mode", CASES)
def test_output(shape, mode):
    out, _, arrays = executed(shape, mode)
    assert not vectors.output_faults(out, arrays)
    # Both round each expert's weighted result to bf16 and add two of them: the same bits, but for rare last ones.
    assert (out == vectors.bf16(arrays["out"])).double().mean() >= 0.999


@pytest.mark.parametrize("shape, mode", CASES)
def test_stage_1(shape, mode):
    """Codes and scales as AITER's kernels wrote them; bf16 within a unit in the last place, or 1e-4."""
    _, stage1, arrays = executed(shape, mode)
    if mode == "a16w4":
        want = vectors.bf16(arrays["s1_bf16"]).view_as(stage1["y_ptr"])
        got = stage1["y_ptr"]
        ulps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
        close = (ulps <= 1) | ((got.float() - want.float()).abs() <= 1e-4)
        assert close.all(), int((~close).sum())
        return
    scales = torch.from_numpy(arrays["s1_scales"]).view_as(stage1["y_scale_ptr"])
    assert torch.equal(stage1["y_scale_ptr"], scales)
    want = torch.from_numpy(arrays["s1_codes"]).view_as(stage1["y_ptr"])
    different = (stage1["y_ptr"] != want).sum()
    # The kernels' exp and tanh differ by units in the last place: codes at a tie may fall to the other side, and
    # -0 stands for 0.
    assert different <= 5e-4 * want.numel(), int(different)


@pytest.mark.parametrize("mode", ["a8w4", "a4w4"])
def test_quantised_input(mode):
    _, stage1, arrays = executed("full", mode)
    assert torch.equal(stage1["x_ptr"], torch.from_numpy(arrays["xq"]))
    assert torch.equal(stage1["x_scale_ptr"], torch.from_numpy(arrays["xq_scales"]))


def test_tolerance_bites():
    """One token's output replaced by its neighbour's is no longer within the tolerance."""
    out, _, arrays = executed("full", "a8w4")
    wrong = out.clone()
    wrong[3] = out[4]
    assert len(vectors.output_faults(wrong, arrays)) == 4
    assert not np.array_equal(arrays["out"][3], arrays["out"][4])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
