"""The inputs of a plan: the model's layer (:class:`MoeSpec`) and where it runs (:class:`Target`)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.errors import ContractError, check_integer
from sglang_aiter_moe.numerics.activations import SWIGLU_ALPHA, Activation

ARCHS = ("gfx942", "gfx950", "gfx1250")
A16W4_KERNEL = "SGLANG_AITER_MOE_A16W4_KERNEL"
A16W4_KERNELS = ("separated", "gu_interleaved")
#: AITER packs a token's index into 24 bits (docs/contract.md section d, sorting).
MAX_TOKENS = 1 << 24
#: It packs the slot into the 8 bits above.
MAX_TOPK = 255
#: One E8M0 scale per 32 elements (OCP MX spec).
BLOCK = 32


@dataclass(frozen=True)
class MoeSpec:
    """One MoE layer on one rank, as the checkpoint and the parallel layout give it.

    Attributes:
        activation: see :class:`~sglang_aiter_moe.numerics.activations.Activation`.
        num_experts: experts on this rank (E), fused shared experts included.
        topk: experts per token.
        hidden_size: width of the experts' input (H), unpadded; K3's latent 3584, not its 7168.
        intermediate_size: I per rank, unpadded, as the loader fills it (see :func:`shard`).
        gate_up_interleaved: checkpoint rows of w13 alternate gate and up (gpt-oss).
        has_bias: the experts have biases.
        swiglu_limit: the model's clamp, None or 0 if it states none.
        alpha: slope of SwiGLU-OAI.
        beta, linear_beta: SiTUv2's constants; needed there, ignored elsewhere.
        expert_parallel: the call carries an expert mask.
        doweight_stage1: the routing weight multiplies the input (apply_router_weight_on_input).
        shared_expert: a shared expert is handed to the same call (AITER's shared_w1).
        no_combine: the caller wants one result per expert slot.
        name: what to call the layer in messages.
    """

    activation: Activation
    num_experts: int
    topk: int
    hidden_size: int
    intermediate_size: int
    gate_up_interleaved: bool = False
    has_bias: bool = False
    swiglu_limit: float | None = None
    alpha: float = SWIGLU_ALPHA
    beta: float | None = None
    linear_beta: float | None = None
    expert_parallel: bool = False
    doweight_stage1: bool = False
    shared_expert: bool = False
    no_combine: bool = False
    name: str = "moe"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "activation", Activation(self.activation))
        except ValueError:
            raise ContractError(
                f"activation is {self.activation!r}",
                allowed=", ".join(a.value for a in Activation),
                fix="name the activation that the model's config gives",
            ) from None
        for name in ("num_experts", "topk", "hidden_size", "intermediate_size"):
            check_integer(
                name,
                getattr(self, name),
                least=1,
                fix=f"take {name} from the model's config, divided over the ranks",
            )
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if field_.type == "bool" and not isinstance(value, bool):
                raise ContractError(
                    f"{field_.name} is {value!r}",
                    allowed="True or False",
                    fix=f"take {field_.name} from the model's config, as a truth value",
                )
        most = MAX_TOPK if self.expert_parallel else min(MAX_TOPK, self.num_experts)
        if self.topk > most:
            raise ContractError(
                f"topk is {self.topk} with {self.num_experts} experts",
                allowed=f"at most {most}",
                fix="take topk from the model's config; set expert_parallel where experts are elsewhere",
            )
        for name in ("hidden_size", "intermediate_size"):
            value = getattr(self, name)
            if value % BLOCK:
                raise ContractError(
                    f"{name} is {value}, {value % BLOCK} over a multiple of {BLOCK}",
                    allowed=f"whole MX blocks of {BLOCK}",
                    fix="shard on block boundaries (contract.spec.shard)",
                )
        for name in ("swiglu_limit", "alpha", "beta", "linear_beta"):
            value = getattr(self, name)
            if value is None and name != "alpha":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or math.isnan(value):
                raise ContractError(
                    f"{name} is {value!r}",
                    allowed="a number" + ("" if name == "alpha" else " or None"),
                    fix=f"take {name} from the model's config",
                )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MoeSpec:
        """The inverse of :meth:`to_dict`."""
        return cls(**data)


@dataclass(frozen=True)
class Target:
    """Where the layer runs.

    Attributes:
        arch: gfx942, gfx950 or gfx1250.
        capabilities: of its AITER.
        env: the environment; only the variables of ``environ.VARIABLES`` are kept.
        a16w4_kernel: the w13 layout that its SiTUv2 A16W4 kernel is built to read; from
            SGLANG_AITER_MOE_A16W4_KERNEL when None.
        sglang: SGLang's release, None without one.
    """

    arch: str
    capabilities: Capabilities
    env: Mapping[str, str] = field(default_factory=dict)
    a16w4_kernel: str | None = None
    sglang: str | None = None

    def __post_init__(self) -> None:
        from sglang_aiter_moe.environ import VARIABLES

        if not isinstance(self.env, Mapping):
            raise ContractError(
                f"env is {self.env!r}",
                allowed="a mapping of variables to their raw values",
                fix="pass os.environ, or {} for an empty environment",
            )
        env = {k: v for k, v in self.env.items() if k in VARIABLES}
        for name, value in env.items():
            if not isinstance(value, str):
                raise ContractError(
                    f"env[{name!r}] is {value!r}",
                    allowed="the raw value, a string",
                    fix=f"pass {str(value)!r}, or leave {name} out where it is not set",
                )
        object.__setattr__(self, "env", env)
        arch = str(self.arch).split(":")[0]
        object.__setattr__(self, "arch", arch)
        if arch not in ARCHS:
            raise ContractError(
                f"arch is {self.arch!r}",
                allowed=", ".join(ARCHS),
                fix="run the AITER path on one of these GPUs, or use the portable backend",
            )
        named = self.a16w4_kernel is None
        kernel = env.get(A16W4_KERNEL, A16W4_KERNELS[0]) if named else self.a16w4_kernel
        object.__setattr__(self, "a16w4_kernel", kernel)
        if kernel not in A16W4_KERNELS:
            raise ContractError(
                f"{A16W4_KERNEL if named else 'a16w4_kernel'} is {kernel!r}",
                allowed=", ".join(A16W4_KERNELS),
                fix=f"type `export {A16W4_KERNEL}=separated`, or unset it",
            )

    @classmethod
    def current(cls, arch: str, capabilities: Capabilities, *, sglang: str | None = None) -> Target:
        """The target of this process: its environment as it is now."""
        return cls(arch, capabilities, dict(os.environ), sglang=sglang)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "capabilities": self.capabilities.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Target:
        """The inverse of :meth:`to_dict`."""
        return cls(**{**data, "capabilities": Capabilities.from_dict(data["capabilities"])})


def shard(full: int, ranks: int) -> int:
    """Intermediate columns per rank, as SGLang's MXFP4 loaders divide them: whole blocks of 32, rounded up.

    gpt-oss's 2880 gives 1440, 736 and 384 on 2, 4 and 8 ranks (not 720 and 360; sglang#27201).

    Raises:
        ContractError: if ``full`` is not a whole number of blocks or ``ranks`` is below 1.
    """
    for name, value in (("intermediate size", full), ("ranks", ranks)):
        check_integer(name, value, fix="take both from the model's config and the launch command")
    if full % BLOCK or full < BLOCK or ranks < 1:
        raise ContractError(
            f"intermediate size {full} on {ranks} ranks",
            allowed=f"a positive multiple of {BLOCK} on at least one rank",
            fix="take both from the model's config and the launch command",
        )
    return -(-(full // BLOCK) // ranks) * BLOCK
