"""``fused_moe`` as AITER has it, executed by both backends: prints a JSON object for each SiTUv2 mode.

Run with TRITON_INTERPRET=1 on a machine without a GPU (see ``triton_cases``).
"""

from __future__ import annotations

import json
import os

import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.environ import exactly
from sglang_aiter_moe.numerics.metrics import relative_error
from sglang_aiter_moe.portable import backends

MODES = {"A16W4": {}, "A8W4": {"AITER_SITUV2_A8W4": "1"}, "A4W4": {"AITER_SITUV2_A4W4": "1"}}
E, H, I, M, K = 3, 256, 128, 3, 2


def main() -> None:
    g = torch.Generator().manual_seed(int.from_bytes(os.urandom(3), "big"))

    def codes(*shape: int) -> torch.Tensor:
        raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)
        return raw.view(torch.float4_e2m1fn_x2)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(117, 122, shape, dtype=torch.uint8, generator=g)

    w1, w2, s1, s2 = (
        codes(E, 2 * I, H // 2),
        codes(E, H, I // 2),
        scales(E * 2 * I, H // 32),
        scales(E * H, I // 32),
    )
    x = torch.randn(M, H, generator=g).bfloat16()
    ids = torch.tensor([[0, 1], [2, 1], [1, 0]], dtype=torch.int32)
    weights = torch.rand(M, K, generator=g)
    for mode, flags in MODES.items():
        with exactly(flags), portable.installed(arch="gfx950", aiter="0.1.20", force=True):
            import aiter
            from aiter.fused_moe import fused_moe
            from aiter.ops.shuffle import shuffle_scale_a16w4, shuffle_weight_a16w4

            interleaved = mode == "A8W4"
            arguments = {
                "hidden_states": x,
                "w1": shuffle_weight_a16w4(w1, 16, interleaved),
                "w2": shuffle_weight_a16w4(w2, 16, False),
                "topk_weight": weights,
                "topk_ids": ids,
                "activation": aiter.ActivationType.Situv2,
                "quant_type": aiter.QuantType.per_1x32,
                "w1_scale": shuffle_scale_a16w4(s1, E, interleaved),
                "w2_scale": shuffle_scale_a16w4(s2, E, False),
                "beta": 4.0,
                "linear_beta": 25.0,
            }
            expected = fused_moe(**arguments)
            with backends.forced("triton"):
                got = fused_moe(**arguments)
        print(json.dumps({"mode": mode, "rel_err": relative_error(got, expected)}), flush=True)


if __name__ == "__main__":
    main()
