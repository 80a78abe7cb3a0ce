"""What a call resolves to: one record per kernel family (docs/contract.md sections a.4, c and d)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_aiter_moe.portable.request import (
    A4W4,
    A8W4,
    A16W4,
    GU_INTERLEAVED,
    GU_INTERLEAVED_GFX1250,
    N32K4,
    N32K4_GU,
    RAW,
    REQUANT_EPILOGUE,
    REQUANT_EVEN_BF16,
    REQUANT_NONE,
    REQUANT_ROUNDUP_BF16,
    REQUANT_ROUNDUP_FP32,
    SEPARATED,
)

FLYDSL_A16W4 = "flydsl_a16w4"
FLYDSL_A8W4 = "flydsl_a8w4"
FLYDSL_A4W4 = "flydsl_a4w4"
MXMOE = "mxmoe"
OPUS = "opus_a8w4"
CKTILE = "cktile"
CKTILE_SPLITK = "cktile_splitk"
CK2STAGES = "ck2stages"
ASM = "asm"
GROUPED_GFX1250 = "grouped_gfx1250"

SWIGLU_BUILTIN_LIMIT = 7.0


@dataclass(frozen=True)
class Call:
    """The arguments of ``fused_moe`` that decide which kernel runs, without the tensors' contents.

    Attributes:
        tokens, topk: of ``topk_ids``.
        num_experts, hidden, inter: E, H, I of the weights, pads included.
        activation: ActivationType value.
        gate_mode: the string that the caller passed.
        w_dtype: "fp4x2", else the dtype's name.
        w1_shuffled, w2_shuffled: attribute ``is_shuffled`` of the weights.
        g1u1: w13 holds gate and up rows (2I), not gate alone.
        has_bias1, has_bias2, has_expert_mask, doweight_stage1, limit, beta, linear_beta, hidden_pad,
            intermediate_pad: as passed.
    """

    tokens: int
    topk: int
    num_experts: int
    hidden: int
    inter: int
    activation: int
    gate_mode: str | None = "separated"
    w_dtype: str = "fp4x2"
    w1_shuffled: bool = True
    w2_shuffled: bool = True
    g1u1: bool = True
    has_bias1: bool = False
    has_bias2: bool = False
    has_expert_mask: bool = False
    doweight_stage1: bool = False
    limit: float | None = None
    beta: float | None = None
    linear_beta: float | None = None
    hidden_pad: int = 0
    intermediate_pad: int = 0

    @property
    def shuffled(self) -> bool:
        return self.w1_shuffled or self.w2_shuffled


@dataclass(frozen=True)
class Resolution:
    """Which kernel family runs a call, what it reads and what it computes.

    ``mode`` is what the kernel multiplies with; ``q_dtype_a`` what AITER's dispatch chose, which differs
    where a family takes bf16 anyway. The other fields are those of ``KernelRequest``.
    """

    family: str
    mode: str
    q_dtype_a: str
    w13_layout: str
    w13_scale_layout: str
    w2_layout: str
    w2_scale_layout: str
    activation: str
    limit: float | None = None
    beta: float = 1.0
    linear_beta: float = 1.0
    input_rounding: str = "roundup"
    requantization: str = REQUANT_NONE
    uses_bias1: bool = True
    uses_bias2: bool = True
    hidden_skip_k: int = 0
    intermediate_skip_n: int = 0
    intermediate_skip_k: int = 0
    hidden_skip_n: int = 0
    weight_on_input: bool = False
    forwards_num_local_tokens: bool = True
    tuned: bool = False
    kernel1: str = ""
    kernel2: str = ""


MODE_OF_DTYPE = {"bf16": A16W4, "fp8": A8W4, "fp4": A4W4}
_SEPARATED = {"w13_layout": SEPARATED, "w13_scale_layout": SEPARATED}
_INTERLEAVED = {"w13_layout": GU_INTERLEAVED, "w13_scale_layout": GU_INTERLEAVED}
_TILED_W2 = {"w2_layout": SEPARATED, "w2_scale_layout": SEPARATED}


def _clamp(call: Call, activation: str, passed: bool) -> float | None:
    """The bound that a kernel clamps with, given whether AITER hands it ``swiglu_limit``."""
    if passed and call.limit:
        return float(call.limit)
    return SWIGLU_BUILTIN_LIMIT if activation == "swiglu" else None


def _flydsl_skips(call: Call) -> dict[str, int]:
    # A bias switches the skipping off, stage by stage; the pads must then hold zeros.
    skips = {}
    if not call.has_bias1:
        skips.update(hidden_skip_k=call.hidden_pad, intermediate_skip_n=call.intermediate_pad)
    if not call.has_bias2:
        skips.update(intermediate_skip_k=call.intermediate_pad, hidden_skip_n=call.hidden_pad)
    return skips


def flydsl(call: Call, activation: str, q_dtype_a: str, a16w4_kernel: str, **names) -> Resolution:
    """FlyDSL two-stage kernels; GELU runs as SiLU. A missing beta or linear_beta is 1."""
    kernel1, kernel2 = names.get("kernel1", ""), names.get("kernel2", "")
    family = {"bf16": FLYDSL_A16W4, "fp8": FLYDSL_A8W4, "fp4": FLYDSL_A4W4}[q_dtype_a]
    interleaved = q_dtype_a == "fp8" or (q_dtype_a == "bf16" and a16w4_kernel == GU_INTERLEAVED)
    if q_dtype_a == "bf16":
        requantization = REQUANT_NONE
    else:
        fused = any(f"_{t}" in kernel1.split("_wfp4")[-1] for t in ("fp4", "fp8"))
        fused = fused or kernel2.startswith("flydsl_moe2_layout_")
        requantization = REQUANT_EPILOGUE if fused else REQUANT_ROUNDUP_BF16
    activation = "silu" if activation == "gelu" else activation
    return Resolution(
        family,
        MODE_OF_DTYPE[q_dtype_a],
        q_dtype_a,
        **(_INTERLEAVED if interleaved else _SEPARATED),
        **_TILED_W2,
        activation=activation,
        limit=_clamp(call, activation, passed=True),
        beta=1.0 if call.beta is None else float(call.beta),
        linear_beta=1.0 if call.linear_beta is None else float(call.linear_beta),
        requantization=requantization,
        # The stage-2 kernel that reads the sorted layout has no bias.
        uses_bias2=not kernel2.startswith(("flydsl_moe2_layout_", "opus_")),
        # The A16W4 port uses the pads only to decide whether to zero its intermediate.
        **({} if q_dtype_a == "bf16" else _flydsl_skips(call)),
        tuned=bool(kernel1),
        **names,
    )


def opus(call: Call, activation: str, **names) -> Resolution:
    """Opus A8W4. A missing beta is 4, a missing linear_beta 25."""
    return replace(
        flydsl(call, activation, "fp8", SEPARATED, **names),
        family=OPUS,
        activation=activation,
        beta=4.0 if call.beta is None else float(call.beta),
        linear_beta=25.0 if call.linear_beta is None else float(call.linear_beta),
        requantization=REQUANT_EPILOGUE,
    )


def mxmoe(call: Call, interleave: bool, **names) -> Resolution:
    """The A4W4 port: SiLU whatever was asked for, no limit, bias, doweight or token count; follows gate_mode."""
    return Resolution(
        MXMOE,
        A4W4,
        "fp4",
        **(_INTERLEAVED if interleave else _SEPARATED),
        **_TILED_W2,
        activation="silu",
        requantization=REQUANT_ROUNDUP_FP32,
        uses_bias1=False,
        uses_bias2=False,
        forwards_num_local_tokens=False,
        tuned=True,
        **names,
    )


def cktile(call: Call, activation: str, q_dtype_a: str) -> Resolution:
    """CK-tile with the fused gate/up epilogue, which reads interleaved tiles; the limit is its own."""
    return Resolution(
        CKTILE,
        MODE_OF_DTYPE[q_dtype_a],
        q_dtype_a,
        **_INTERLEAVED,
        **_TILED_W2,
        activation=activation,
        limit=_clamp(call, activation, passed=False),
        requantization=REQUANT_NONE if q_dtype_a == "bf16" else REQUANT_ROUNDUP_BF16,
        weight_on_input=call.doweight_stage1,
        **_cktile_skips(call),
    )


def cktile_splitk(
    call: Call, activation: str, q_dtype_a: str, standard: bool, uses_bias: bool
) -> Resolution:
    """CK-tile split-k: bf16 activations, and the activation as a kernel of its own.

    That kernel takes the product for separated if ``standard``, else (post_activation_layout "auto") for
    interleaved, because the weights are FP4.
    """
    return replace(
        cktile(call, activation, "bf16"),
        family=CKTILE_SPLITK,
        q_dtype_a=q_dtype_a,
        **(_SEPARATED if standard else _INTERLEAVED),
        uses_bias1=uses_bias,
        uses_bias2=uses_bias,
    )


def _cktile_skips(call: Call) -> dict[str, int]:
    return {
        "hidden_skip_k": call.hidden_pad // 128 * 128,
        "intermediate_skip_n": call.intermediate_pad // 64 * 64,
        "intermediate_skip_k": call.intermediate_pad // 128 * 128,
        "hidden_skip_n": call.hidden_pad // 64 * 64,
    }


def ck2stages(call: Call, activation: str, family: str = CK2STAGES, **names) -> Resolution:
    """CK 2-stage (and one-stage assembly) A4W4: no limit, no bias, no pads; unshuffled weights are read raw."""
    layout = SEPARATED if call.shuffled else RAW
    return Resolution(
        family,
        A4W4,
        "fp4",
        w13_layout=layout,
        w13_scale_layout=SEPARATED,
        w2_layout=layout,
        w2_scale_layout=SEPARATED,
        activation=activation,
        limit=_clamp(call, activation, passed=False),
        requantization=REQUANT_ROUNDUP_BF16,
        uses_bias1=False,
        uses_bias2=False,
        weight_on_input=call.doweight_stage1,
        tuned=bool(names),
        **names,
    )


def grouped_gfx1250(call: Call, activation: str, q_dtype_a: str) -> Resolution:
    """gfx1250's grouped GEMM: row-interleaved w13, n32k4 scales, pads ignored. A missing beta is 1."""
    return Resolution(
        GROUPED_GFX1250,
        MODE_OF_DTYPE[q_dtype_a],
        q_dtype_a,
        w13_layout=GU_INTERLEAVED_GFX1250,
        w13_scale_layout=N32K4_GU,
        w2_layout=SEPARATED,
        w2_scale_layout=N32K4,
        activation=activation,
        limit=_clamp(call, activation, passed=True),
        beta=1.0 if call.beta is None else float(call.beta),
        linear_beta=1.0 if call.linear_beta is None else float(call.linear_beta),
        requantization=REQUANT_ROUNDUP_BF16,
        weight_on_input=call.doweight_stage1,
    )


def before_roundup(resolution: Resolution) -> Resolution:
    """The same in an AITER that rounds MX scales to even (before 0.1.16)."""
    rule = resolution.requantization
    if rule == REQUANT_ROUNDUP_BF16:
        rule = REQUANT_EVEN_BF16
    return replace(resolution, input_rounding="even", requantization=rule)
