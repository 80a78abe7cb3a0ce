"""What one kernel family computes and which bytes it reads: the seam between dispatch and backends.

``dispatch`` resolves a call of ``fused_moe`` to a :class:`KernelRequest`; a backend (torch on CPU,
Triton on a GPU) executes it and knows nothing of AITER's rules. Every known defect of a family is
already resolved here: a bias that the family drops is ``None``, a limit that it is not given is
``None``, an activation that it mistakes for another *is* the other one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_aiter_moe.errors import check_integer, check_number
from sglang_aiter_moe.portable.sorting import check_local_tokens

# Activation modes: what the first matrix product takes as its left operand.
A16W4 = "A16W4"  # bf16 activations, bf16 intermediate
A8W4 = "A8W4"  # MXFP8 (e4m3fn, one E8M0 scale per 32)
A4W4 = "A4W4"  # MXFP4 (e2m1, one E8M0 scale per 32)

# Weight layouts (docs/contract.md section a.1). RAW: row-major [N, K/2]. The others are, per
# expert, [N/16][K/32][16 rows][16 bytes] over a row order.
RAW = "raw"
SEPARATED = "separated"  # rows in order
GU_INTERLEAVED = "gu_interleaved"  # 16-row tiles alternate gate and up
GU_INTERLEAVED_GFX1250 = "gu_interleaved_gfx1250"  # single rows alternate gate and up

# Scale layouts (docs/contract.md section a.3): RAW [N, K/32]; SEPARATED and GU_INTERLEAVED as
# above with the columns padded to 8; N32K4 blocks of 32 rows x 4 columns over plain rows, N32K4_GU
# the same over single rows that alternate gate and up.
N32K4 = "n32k4"
N32K4_GU = "n32k4_gu"

# How the stage-1 result y becomes the left operand of stage 2 (docs/contract.md section d). Where it
# says bf16, it is fp16 if the output is.
REQUANT_NONE = "none"  # y rounded to bf16 (A16W4)
REQUANT_EPILOGUE = "epilogue"  # fp32 y; e8m0 = ((bits(amax) + 0x400000) >> 23) - headroom, min 0
REQUANT_ROUNDUP_FP32 = "roundup_fp32"  # fp32 y; ceil_pow2(amax / max_element)
REQUANT_ROUNDUP_BF16 = "roundup_bf16"  # y rounded to bf16 first, then the same
REQUANT_EVEN_BF16 = "even_bf16"  # y rounded to bf16 first, then scale mode Even (before 0.1.16)


_SIZES = (
    "num_experts", "hidden_size", "intermediate_size",
    "hidden_skip_k", "intermediate_skip_n", "intermediate_skip_k", "hidden_skip_n",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class KernelRequest:
    """One resolved call: everything that a backend needs besides the operands.

    Shapes: ``E`` local experts, ``H`` hidden, ``I`` intermediate (both *including* their pads),
    ``M`` tokens, ``K`` top-k. The operands are ``w1`` ``E*2I*H/2`` bytes, ``w2`` ``E*H*I/2`` bytes
    and flat E8M0 scale bytes; a backend reads them flat, by the layouts below, whatever the
    tensors' shapes say. Scale columns are padded to a multiple of 8 in every layout but RAW, N32K4
    and N32K4_GU; expert ``e`` starts at byte ``e * rows * columns``. A scale byte past the end of
    its tensor reads as 0xFF (NaN).

    Attributes:
        mode: A16W4, A8W4 or A4W4.
        family: kernel family, for messages ("flydsl_a16w4", "flydsl_a4w4", "ck2stages", ...).
        num_experts, hidden_size, intermediate_size: ``E``, ``H``, ``I``.
        w13_layout, w13_scale_layout, w2_layout, w2_scale_layout: the layout that the kernel reads.
        activation: "silu", "gelu", "swiglu" or "situv2", as the kernel computes it. swiglu is
            ``g * sigmoid(alpha * g) * (u + 1)``.
        limit: gate is clamped above by it, up on both sides, before any activation; None: no clamp
            (swiglu always has one).
        alpha, beta, linear_beta: constants of swiglu and situv2.
        input_rounding: "roundup" or "even": scale rule for quantising ``hidden_states``.
        requantization: one of the REQUANT_* rules, for ``y`` between the stages.
        bias13, bias2: fp32 ``[E, 2I]`` (gate half, then up half, whatever the layout) and
            ``[E, H]``, or None.
        hidden_skip_k, intermediate_skip_n: stage 1 leaves out the last columns of
            ``hidden_states``, the last gate rows and the last up rows (those results are 0).
        intermediate_skip_k, hidden_skip_n: stage 2 leaves out the last columns of ``y`` and the
            last columns of the output (0).
        expert_mask: ``[global E]`` int, 1 where the expert is here; the local index is the prefix
            count of ones. Other experts contribute nothing. None: all experts are local.
        weight_on_input: the routing weight multiplies gate and up before bias and activation.
        weight_on_output: the routing weight multiplies the expert's output.
        num_local_tokens: tensor of one element or int: tokens from there on contribute nothing.
            None: all tokens count.

    Raises:
        ContractError: a size, a skip or a constant that is no number; each backend checks what it needs of them.
    """

    mode: str
    family: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    w13_layout: str
    w13_scale_layout: str
    w2_layout: str
    w2_scale_layout: str
    activation: str
    limit: float | None = None
    alpha: float = 1.702
    beta: float = 4.0
    linear_beta: float = 25.0
    input_rounding: str = "roundup"
    requantization: str = REQUANT_NONE
    bias13: torch.Tensor | None = None
    bias2: torch.Tensor | None = None
    hidden_skip_k: int = 0
    intermediate_skip_n: int = 0
    intermediate_skip_k: int = 0
    hidden_skip_n: int = 0
    expert_mask: torch.Tensor | None = None
    weight_on_input: bool = False
    weight_on_output: bool = True
    num_local_tokens: torch.Tensor | int | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_integer(name, getattr(self, name), fix=f"pass {name} of this layer")
        for name in ("limit", "alpha", "beta", "linear_beta"):
            if name != "limit" or self.limit is not None:
                check_number(name, getattr(self, name), fix=f"take {name} from the model's config")
        if self.num_local_tokens is not None:
            check_local_tokens(self.num_local_tokens)
