"""Mode by token count, and the w13 layout and gate_mode that go with it.

Source: docs/contract.md sections 0 (SiTUv2), b.1 (order of AITER's decisions), a.4 (layouts read).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_aiter_moe import environ
from sglang_aiter_moe.contract import modes
from sglang_aiter_moe.contract.modes import ActivationMode, GateMode
from sglang_aiter_moe.contract.moe_plan import Decision
from sglang_aiter_moe.contract.spec import MAX_TOKENS, MoeSpec, Target
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import Activation

GU_ITLV = "SGLANG_USE_AITER_MOE_GU_ITLV"
BF16_FP8_BOUND = "AITER_BF16_FP8_MOE_BOUND"
SWIGLU_BOUND = "GPTOSS_SWIGLU_MXFP4_BF16_BOUND"


@dataclass(frozen=True)
class Route:
    """Mode by token count, and the w13 layout and gate_mode that go with it."""

    modes: tuple[tuple[int, ActivationMode], ...]
    layout: str
    decisions: tuple[Decision, ...]

    @property
    def gate_mode(self) -> GateMode:
        return GateMode.SEPARATED if self.layout == "separated" else GateMode.INTERLEAVE

    def mode_at(self, tokens: int) -> ActivationMode:
        return [mode for first, mode in self.modes if first <= tokens][-1]


def choose_route(spec: MoeSpec, target: Target) -> Route:
    """Mode, layout and gate_mode of a layer.

    Raises:
        ContractError: for a flag that SGLang and AITER do not read alike.
    """
    if target.arch == "gfx1250":
        return _route_gfx1250(spec, target)
    if spec.activation is Activation.SITUV2:
        return _route_situv2(target)
    return _route_by_gate_mode(spec, target)


def _route_gfx1250(spec: MoeSpec, target: Target) -> Route:
    if spec.activation is Activation.SITUV2:
        modes.situv2_mode(target.env)  # refuses unclean flags, although gfx1250 ignores them
    mode = modes.gfx1250_mode(target.env)
    return Route(
        ((1, mode),),
        "gu_interleaved_gfx1250",
        (
            _mode(mode, "on gfx1250 AITER_FORCE_A8W4 alone decides, for every activation", "b.1"),
            _layout(
                "gu_interleaved_gfx1250",
                "the grouped kernels of gfx1250 read single gate and up rows in turn",
                "a.4",
            ),
        ),
    )


def _route_situv2(target: Target) -> Route:
    has_flag = target.capabilities.has("situv2_a4w4")
    mode = modes.situv2_mode(target.env, has_a4w4_flag=has_flag)
    if mode is ActivationMode.A8W4:
        why, layout = f"{modes.SITUV2_A8W4} is 1", "gu_interleaved"
        reads = "the A8W4 kernels read 16-row tiles of gate and up in turn"
    elif mode is ActivationMode.A4W4:
        why, layout = f"{modes.SITUV2_A4W4} is 1 and {modes.SITUV2_A8W4} is not", "separated"
        reads = "the A4W4 kernels read all gate rows before all up rows"
    else:
        why, layout = "no SiTUv2 flag is 1", target.a16w4_kernel
        reads = "SGLANG_AITER_MOE_A16W4_KERNEL states a kernel that is built to read it"
        if layout == "separated":
            reads = (
                "the A16W4 kernel of every AITER release looked at reads it (executed), unlike what "
                "SGLang #33838 packs"
            )
    if target.env.get(modes.SITUV2_A4W4) == "1" and mode is ActivationMode.A16W4:
        why += f" that AITER ({target.capabilities.name}) knows: it ignores {modes.SITUV2_A4W4}"
    return Route(((1, mode),), layout, (_mode(mode, why, "0"), _layout(layout, reads, "0")))


def _route_by_gate_mode(spec: MoeSpec, target: Target) -> Route:
    bound = environ.VARIABLES[BF16_FP8_BOUND].aiter_reads(target.env.get(BF16_FP8_BOUND))
    interleave, why_layout = _wants_interleave(spec, target, bound)
    if interleave:
        parts = [(1, ActivationMode.A16W4)]
        why = f"interleaved layers run bf16 activations on {target.arch}"
        if target.arch == "gfx950":
            parts = _switch(bound, ActivationMode.A8W4)
            why = f"interleaved layers run MXFP8 activations from {bound} tokens on, bf16 below"
    elif spec.activation is Activation.SWIGLU:
        bound = _swiglu_bound(target)
        parts = _switch(bound, ActivationMode.A4W4)
        why = f"separated SwiGLU runs MXFP4 activations from {bound} tokens on, bf16 below"
    else:
        parts = [(1, ActivationMode.A4W4)]
        why = f"separated {spec.activation} runs MXFP4 activations"
    layout = "gu_interleaved" if interleave else "separated"
    decided = [_mode(mode, why, "b.1", first) for first, mode in parts]
    return Route(tuple(parts), layout, (*decided, _layout(layout, why_layout, "b.1, b.4")))


def _switch(bound: int, mode: ActivationMode) -> list[tuple[int, ActivationMode]]:
    if bound <= 1:
        return [(1, mode)]
    if bound >= MAX_TOKENS:
        return [(1, ActivationMode.A16W4)]
    return [(1, ActivationMode.A16W4), (bound, mode)]


def _swiglu_bound(target: Target) -> int:
    frozen = target.capabilities.swiglu_bf16_bound
    if frozen is not None:
        return frozen
    return environ.VARIABLES[SWIGLU_BOUND].aiter_reads(target.env.get(SWIGLU_BOUND))


def _wants_interleave(spec: MoeSpec, target: Target, bound: int) -> tuple[bool, str]:
    value = target.env.get(GU_ITLV)
    if value is not None:
        interleave = environ.VARIABLES[GU_ITLV].sglang_reads(value)
        if interleave is not environ.sglang_bool()(value):
            raise ContractError(
                f"{GU_ITLV}={value!r} is not a clean spelling: SGLang's loaders read it as on, one place in its "
                "runner as off",
                allowed=f"{GU_ITLV} unset, '0', '1', 'false' or 'true'",
                fix=f"type `export {GU_ITLV}=0` (separated) or `export {GU_ITLV}=1` (interleaved)",
            )
        return interleave, f"{GU_ITLV} is {value!r}"
    if spec.activation is Activation.SWIGLU:
        return True, f"{GU_ITLV} is not set, and SGLang's default is interleaved"
    if spec.activation is Activation.SILU and target.arch == "gfx950" and bound <= 1:
        return (
            True,
            f"{BF16_FP8_BOUND} leaves interleaved SiLU a kernel at every token count",
        )
    return False, (
        f"{GU_ITLV} is not set, and AITER has no kernel for interleaved {spec.activation} with bf16 "
        "activations"
    )


def _mode(mode: ActivationMode, reason: str, section: str, first: int = 1) -> Decision:
    value = str(mode) if first == 1 else f"{mode} from {first} tokens"
    return Decision("mode", value, reason, f"docs/contract.md section {section}")


def _layout(layout: str, reason: str, section: str) -> Decision:
    return Decision("w13_layout", layout, reason, f"docs/contract.md section {section}")
