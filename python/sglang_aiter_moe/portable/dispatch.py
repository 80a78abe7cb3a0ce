"""AITER's dispatch: from the arguments of ``fused_moe`` and AITER's own variables to a kernel family.

Follows docs/contract.md section b step by step, defects included, and reads each variable when and how AITER does
(section b.5). It knows neither the plan nor SGLang, so that a wrong rule there cannot agree with itself here.
Not modelled: AITER_MOE_A8W4_BYPASS_QUANT, AITER_FLYDSL_STAGE2_FP8 and AITER_MXFP4_INTERMEDIATE (debugging and
precision switches, off by default), the shared-expert path, quantisation other than MXFP4 weights per 1x32.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import replace

from sglang_aiter_moe.portable import resolution as families
from sglang_aiter_moe.portable.enums import ACTIVATION_NAMES, GELU, SILU, SITUV2, SWIGLU, GateMode
from sglang_aiter_moe.portable.machine import COMPUTE_UNITS, Machine
from sglang_aiter_moe.portable.resolution import Call, Resolution
from sglang_aiter_moe.portable.tuned import BF16, FP4, FP8, TunedTable, padded_tokens

logger = logging.getLogger("aiter")

_OLD_BF16_FP8_BOUND = 512  # SwiGLU before gate_mode decided anything
_SEPARATED, _INTERLEAVE = GateMode.SEPARATED, GateMode.INTERLEAVE


class Dispatcher:
    """AITER's dispatch on one machine, from its import on.

    Args:
        machine: architecture and release.
        env: the environment, looked at when AITER would look; ``os.environ`` by default.
        log: warn where AITER warns, once each.

    Raises:
        ValueError: GPTOSS_SWIGLU_MXFP4_BF16_BOUND, which AITER reads at import, is no integer.
    """

    def __init__(
        self, machine: Machine, env: Mapping[str, str] | None = None, log: bool = True
    ) -> None:
        self.machine = machine
        self._env = os.environ if env is None else env
        self._swiglu_bf16_bound = 0
        if machine.release.gate_mode_decides:
            self._swiglu_bf16_bound = int(self._env.get("GPTOSS_SWIGLU_MXFP4_BF16_BOUND", "256"))
        self._tuned: TunedTable | None = None
        self._log = log
        self._warned: set[str] = set()
        # AITER caches the chosen kernels by these arguments; variables read inside stay as they were.
        self._select_cached = functools.lru_cache(maxsize=2048)(self._select)

    def resolve(self, call: Call) -> Resolution:
        """What runs for ``call``.

        Raises:
            ValueError: no such gate_mode; AITER_BF16_FP8_MOE_BOUND (or another integer variable) is no
                integer; beta or linear_beta not above 0.
            NotImplementedError: AITER refuses the combination.
            RuntimeError: AITER has no kernel for it, or the kernel aborts or is undefined.
        """
        release = self.machine.release
        gate_mode = GateMode(call.gate_mode) if release.has_gate_mode else _SEPARATED
        if call.activation not in ACTIVATION_NAMES:
            raise RuntimeError(f"Unsupported activation {call.activation} for fused_moe")
        bound = 0
        if release.gate_mode_decides:
            bound = int(self._env.get("AITER_BF16_FP8_MOE_BOUND", "256"))
        if call.w_dtype != "fp4x2":
            raise RuntimeError(
                f"no MXFP4 kernel takes weights of dtype {call.w_dtype}: pass the float4_e2m1fn_x2 view"
            )
        a_dtype = self._activation_dtype(call, gate_mode, bound)
        if self.machine.arch == "gfx1250":
            a_dtype = self._gfx1250_activation_dtype()
            grouped = release.has_arch_aware_shuffle and self.machine.flydsl
            if gate_mode is _INTERLEAVE and grouped:
                resolved = families.grouped_gfx1250(call, self._name(call), a_dtype)
                return self._finish(call, resolved)
        if call.activation == SITUV2 and a_dtype == BF16:
            self._check_a16w4_situv2(call)
        if self.machine.arch == "gfx1250":
            raise RuntimeError(
                f"gate_mode {gate_mode.value!r} on gfx1250 leads to kernels with CDNA matrix instructions, "
                "which gfx1250 does not have"
            )
        resolved = self._select_cached(self._cache_key(call, gate_mode, a_dtype))
        return self._finish(call, resolved(call))

    # -- activation dtype (section b.1) ------------------------------------------------------------

    def _activation_dtype(self, call: Call, gate_mode: GateMode, bound: int) -> str:
        release, arch = self.machine.release, self.machine.arch
        swiglu = call.activation == SWIGLU
        if not release.gate_mode_decides:
            if not swiglu:
                return FP4
            return FP8 if arch == "gfx950" and call.tokens >= _OLD_BF16_FP8_BOUND else BF16
        if call.activation == SITUV2:
            # Exactly "1"; A8W4 wins.
            if self._env.get("AITER_SITUV2_A8W4", "0") == "1":
                return FP8
            if release.has_situv2_a4w4 and self._env.get("AITER_SITUV2_A4W4", "0") == "1":
                return FP4
            return BF16
        if swiglu and gate_mode is _SEPARATED:
            return BF16 if call.tokens < self._swiglu_bf16_bound else FP4
        if swiglu or gate_mode is _INTERLEAVE:
            return FP8 if arch == "gfx950" and call.tokens >= bound else BF16
        return FP4

    def _gfx1250_activation_dtype(self) -> str:
        if not self.machine.release.has_gfx1250_force_a8w4:
            return FP4
        # A substring test in AITER: the empty string is a part of "1".
        return FP8 if self._env.get("AITER_FORCE_A8W4", "0") in "1" else FP4

    # -- what AITER refuses ------------------------------------------------------------------------

    def _check_a16w4_situv2(self, call: Call) -> None:
        arch = self.machine.arch
        reasons = (
            (
                arch not in ("gfx942", "gfx950") or not self.machine.flydsl,
                f"requires the FlyDSL kernel on CDNA gfx942/gfx950 (gfx={arch!r})",
            ),
            (call.has_bias1 or call.has_bias2, "per-expert bias"),
            (call.has_expert_mask, "expert-parallel masking"),
            (
                not call.shuffled or not call.g1u1 or call.doweight_stage1,
                "non-preshuffled / non-g1u1 weights or doweight_stage1=True",
            ),
            (
                bool(call.hidden % 256 or call.inter % 128),
                f"K={call.hidden} or inter_dim={call.inter} not aligned to the kernel's tiles",
            ),
        )
        for refused, why in reasons:
            if refused:
                raise NotImplementedError(
                    f"a16w4 (bf16 A x MXFP4 W) SiTUv2 is not supported: {why}."
                )

    def _finish(self, call: Call, resolved: Resolution) -> Resolution:
        if resolved.activation == "situv2":
            for name in ("beta", "linear_beta"):
                if not getattr(resolved, name) > 0:
                    raise ValueError(f"situ {name} must be > 0, got {getattr(resolved, name)}")
        if resolved.family == families.MXMOE and call.has_expert_mask:
            raise NotImplementedError("MXFP4 a4w4 FlyDSL port does not support expert-parallel yet")
        if self.machine.arch == "gfx942" and resolved.mode != families.MODE_OF_DTYPE[BF16]:
            raise RuntimeError(
                f"{resolved.family} {resolved.mode} does not exist for gfx942: AITER picks it all the same, and the "
                "FlyDSL stage 1 aborts inside LLVM"
            )
        if not self.machine.release.rounds_scales_up:
            resolved = families.before_roundup(resolved)
        return resolved

    # -- which kernel (sections b.2 and b.3) -------------------------------------------------------

    def _cache_key(self, call: Call, gate_mode: GateMode, a_dtype: str) -> tuple:
        return (
            padded_tokens(call.tokens),
            call.hidden,
            call.inter,
            call.num_experts,
            call.topk,
            a_dtype,
            call.g1u1,
            call.activation,
            call.doweight_stage1,
            call.w1_shuffled,
            call.w2_shuffled,
            gate_mode,
            call.has_expert_mask,
            call.has_bias2,
        )

    def _select(self, key: tuple):
        """A function from Call to Resolution: the family that AITER's metadata stands for."""
        (
            tokens,
            hidden,
            inter,
            experts,
            topk,
            a_dtype,
            g1u1,
            activation,
            doweight,
            w1_shuffled,
            w2_shuffled,
            gate_mode,
            is_ep,
            has_bias2,
        ) = key
        shuffled = w1_shuffled or w2_shuffled
        row = None
        if g1u1 and not int(self._env.get("AITER_BYPASS_TUNE_CONFIG", "0")):
            row = self._table().lookup(
                tokens=tokens,
                hidden=hidden,
                inter=inter,
                experts=experts,
                topk=topk - int(is_ep),
                activation=activation,
                a_dtype=a_dtype,
                doweight_stage1=doweight,
                masked=is_ep,
            )
            if row is not None and self._drops(
                row, activation, w1_shuffled, w2_shuffled, has_bias2
            ):
                row = None
        if row is not None:
            chosen = self._from_row(row, activation, a_dtype, gate_mode)
            if chosen is not None:
                return chosen
            ksplit = row.ksplit
        else:
            int(self._env.get("AITER_USE_NT", "-1"))  # cache hints only, but junk raises here
            ksplit = self._ksplit(tokens, topk, experts, inter, hidden)
        on_miss = self._without_row(
            activation, a_dtype, gate_mode, shuffled, g1u1, doweight, ksplit
        )
        if row is None:
            return on_miss
        return lambda call: replace(
            on_miss(call), tuned=True, kernel1=row.kernel1, kernel2=row.kernel2
        )

    def _without_row(self, activation, a_dtype, gate_mode, shuffled, g1u1, doweight, ksplit):
        """The order of section b.3, for a miss and for a row whose names decide nothing."""
        release, name = self.machine.release, ACTIVATION_NAMES[activation]
        if activation == SWIGLU and (gate_mode is not _SEPARATED or not release.gate_mode_decides):
            return lambda call: families.cktile(call, name, a_dtype)
        if self._flydsl_heuristic(activation, a_dtype, shuffled, g1u1, doweight):
            self._warn(f"no tuned FlyDSL config for {name} {a_dtype}: heuristic FlyDSL kernels")
            return lambda call: families.flydsl(call, name, a_dtype, self.machine.a16w4_kernel)
        swiglu_bf16 = activation == SWIGLU and a_dtype == BF16
        if (
            release.gate_mode_decides
            and shuffled
            and not (activation == SWIGLU and a_dtype == FP4)
            and (ksplit > 1 or swiglu_bf16)
        ):
            return self._cktile_splitk(activation, a_dtype, swiglu_bf16)
        if activation == SWIGLU:
            self._warn("SwiGLU MXFP4 not supported by CK 2-stage: CK-tile split-k (ROCM-25478)")
            return self._cktile_splitk(activation, a_dtype, standard=False)
        return self._ck2stages(activation, a_dtype)

    def _drops(self, row, activation, w1_shuffled, w2_shuffled, has_bias2) -> bool:
        """Whether AITER discards a row: an Opus one that cannot take the call."""
        opus1, opus2 = row.kernel1.startswith("opus_"), row.kernel2.startswith("opus_")
        known = activation in (SILU, SWIGLU)
        known = known or (activation == SITUV2 and self.machine.release.has_opus_situv2)
        dropped = (opus1 or opus2) and not (w1_shuffled and w2_shuffled)
        dropped = dropped or (opus1 and not known) or (opus2 and has_bias2)
        if dropped:
            self._warn(f"discarding Opus tuned config {row.kernel1}: heuristics instead")
        return dropped

    def _from_row(self, row, activation, a_dtype, gate_mode):
        """The family of a tuned row, None where its names decide nothing."""
        name = ACTIVATION_NAMES[activation]
        names = {"kernel1": row.kernel1, "kernel2": row.kernel2}
        kernel1, kernel2 = row.kernel1, row.kernel2
        if "mxmoe" in kernel1 or "mxmoe" in kernel2:
            interleave = gate_mode is _INTERLEAVE
            return lambda call: families.mxmoe(call, interleave, **names)
        if row.run_1stage:
            return self._ck2stages(activation, a_dtype, families.ASM, names)
        if kernel1.startswith("opus_moe1_"):
            return lambda call: families.opus(call, name, **names)
        if kernel1.startswith("flydsl_") and self.machine.flydsl:
            kernel = self.machine.a16w4_kernel
            return lambda call: families.flydsl(call, name, a_dtype, kernel, **names)
        if "ck2stages" in kernel1:
            return self._ck2stages(activation, a_dtype, families.CK2STAGES, names)
        return None

    def _flydsl_heuristic(self, activation, a_dtype, shuffled, g1u1, doweight) -> bool:
        if not (self.machine.flydsl and shuffled and g1u1 and not doweight):
            return False
        if not self.machine.release.gate_mode_decides:
            return False
        if a_dtype == BF16:
            return activation == SITUV2
        if activation in (SWIGLU, SITUV2):
            return True
        if not self.machine.release.has_flydsl_force:
            # What a miss did then is not recorded; no other family takes fp8 activations.
            return a_dtype == FP8
        return self._env.get("AITER_FLYDSL_FORCE", "1") == "1"

    def _cktile_splitk(self, activation: int, a_dtype: str, standard: bool):
        name = ACTIVATION_NAMES[activation]
        if activation in (SITUV2, GELU):
            raise RuntimeError(f"CK-tile MoE has no branch for {name}: undefined")
        swiglu = activation == SWIGLU

        def resolved(call: Call) -> Resolution:
            if swiglu and not standard and call.has_bias1:
                raise ValueError("CK-Tile interleaved split-k bias is not supported")
            return families.cktile_splitk(call, name, a_dtype, standard, uses_bias=swiglu)

        return resolved

    def _ck2stages(self, activation, a_dtype, family=families.CK2STAGES, names=None):
        name, names = ACTIVATION_NAMES[activation], names or {}
        if activation not in (SILU, GELU):
            raise RuntimeError(f"Unsupported activation for ck_moe_stage1: {name}")
        if a_dtype != FP4:
            raise RuntimeError(
                f"Unsupported scales/output dtype! ({a_dtype} activations, fp4 weights)"
            )
        return lambda call: families.ck2stages(call, name, family, **names)

    def _ksplit(self, tokens: int, topk: int, experts: int, inter: int, hidden: int) -> int:
        """How far AITER splits K when one wave of tiles leaves compute units idle, 0 for not at all."""
        forced = int(self._env.get("AITER_KSPLIT", "0"))
        if forced:
            return forced
        units = COMPUTE_UNITS[self.machine.arch]
        tiles = -(-inter // 128) * tokens * topk
        if tokens * topk > experts or tiles >= units:
            return 0
        for split in range(-(-units // tiles), 1, -1):
            if hidden % split == 0 and hidden // split % 256 == 0:
                return split
        return 0

    def _table(self) -> TunedTable:
        if self._tuned is None:
            machine = self.machine
            self._tuned = TunedTable.from_environment(self._env, machine.release, machine.arch)
        return self._tuned

    def _name(self, call: Call) -> str:
        return ACTIVATION_NAMES[call.activation]

    def _warn(self, text: str) -> None:
        if self._log and text not in self._warned:
            self._warned.add(text)
            logger.warning("[fused_moe] %s", text)
