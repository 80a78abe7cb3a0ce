"""What the oracle refuses, by name."""

import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.oracle_inputs import BIASED, IDS, WEIGHTS, H, I, X, run
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def raw(**changes):
    return replace(BIASED, **changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: raw(w13=BIASED.w13.float()), "w13 has dtype torch.float32"),
        (lambda: raw(w13=BIASED.w13[0]), r"w13 has shape \[128, 48\]"),
        (lambda: raw(w13=BIASED.w13[:, :-2]), r"w13 has shape \[5, 126, 48\]"),
        (lambda: raw(w13=BIASED.w13[:, :, :-8]), r"w13 has shape \[5, 128, 40\]"),
        (lambda: raw(w13_scale=BIASED.w13_scale[:, :, :-1]), r"w13_scale has shape \[5, 128, 2\]"),
        (lambda: raw(w13_scale=BIASED.w13_scale.float()), "w13_scale has dtype torch.float32"),
        (lambda: raw(w2=BIASED.w2[:-1]), r"w2 has shape \[4, 96, 32\]"),
        (lambda: raw(w2_scale=BIASED.w2_scale[:, :-1]), r"w2_scale has shape \[5, 95, 2\]"),
        (lambda: raw(b13=BIASED.b13[:, :I]), r"b13 has shape \[5, 64\]"),
        (lambda: raw(b2=BIASED.b2.int()), "b2 has dtype torch.int32"),
        (lambda: run(x=X[:, :-32]), r"x has shape \[7, 64\]"),
        (lambda: run(x=X.int()), "x has dtype torch.int32"),
        (lambda: run(x=X[0]), r"x has shape \[96\]"),
        (lambda: run(ids=IDS[:-1]), r"topk_ids has shape \[6, 3\]"),
        (lambda: run(ids=IDS[:-1], weights=WEIGHTS[:-1]), r"topk_ids has shape \[6, 3\]"),
        (lambda: run(weights=WEIGHTS[:, :-1]), r"topk_weights \[7, 2\]"),
        (lambda: run(ids=IDS.float()), "topk_ids has dtype torch.float32"),
        (lambda: run(ids=IDS + 1), "topk_ids holds ids from 1 to 5"),
        (lambda: run(ids=IDS - 2), "topk_ids holds ids from -2 to 2"),
        (
            lambda: run(expert_mask=torch.ones(4, dtype=torch.int32)),
            "topk_ids holds ids from 0 to 4",
        ),
        (lambda: run(expert_mask=torch.tensor([1, 1, 0, 1, 1])), "expert_mask marks 4 of 5"),
        (lambda: run(expert_mask=torch.tensor([0, 1, 2, 3, 4])), "expert_mask of shape"),
        (lambda: run(expert_mask=torch.tensor([0, 1, -1, 2, -1])), "global-to-local map"),
        (lambda: run(mode="a4w4"), "mode is 'a4w4'"),
        (lambda: run(requantization="even"), "requantization is 'even'"),
        (lambda: run(dtype=torch.bfloat16), "dtype is torch.bfloat16"),
        (lambda: run(hidden_pad=H), "hidden_pad is 96"),
        (lambda: run(intermediate_pad=-1), "intermediate_pad is -1"),
        (lambda: run(activation="relu"), "activation is 'relu'"),
        (lambda: run(beta=None), "beta is None"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ContractError, match=message):
        call()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
