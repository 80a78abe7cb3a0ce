import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_aiter_moe.numerics import quantize_mxfp4
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.mark.parametrize("mode", range(4))
def test_special_blocks_match_golden(mode):
    with np.load(GOLDEN / "quant.npz") as golden:
        x = torch.from_numpy(golden["sp_f32bits"]).view(torch.float32)
        packed, scales = quantize_mxfp4(x, mode)
        assert torch.equal(packed, torch.from_numpy(golden[f"sp_f4_mode{mode}"]))
        assert torch.equal(scales, torch.from_numpy(golden[f"sp_f4s_mode{mode}"]))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
