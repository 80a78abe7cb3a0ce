"""The MoE layers that are verified: the published shapes of five models, on one rank.

Sizes are those of the checkpoint, without padding. Source: docs/contract.md section f; gpt-oss shards
whole blocks of 32, so 2880 / 4 is 736 and 2880 / 8 is 384 columns on a full rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_aiter_moe.numerics.activations import Activation
from sglang_aiter_moe.verify.weights import LayerShape


@dataclass(frozen=True)
class Layer:
    """One MoE layer on one rank.

    Attributes:
        name: what a case's name begins with; a reduced number of experts is part of it.
        shape: the checkpoint tensors.
        topk: experts a token is routed to.
        activation: between the two products.
        limit: clamp of gate and up before the activation, None for no clamp.
        beta, linear_beta: SiTUv2's constants.
        global_experts: experts over all expert-parallel ranks, None without expert parallelism.
        first_expert: global id of the first expert here; the others follow.
    """

    name: str
    shape: LayerShape
    topk: int
    activation: Activation
    limit: float | None = None
    beta: float = 4.0
    linear_beta: float = 25.0
    global_experts: int | None = None
    first_expert: int = 0

    @property
    def routed_experts(self) -> int:
        """How many experts the router chooses from."""
        return self.global_experts or self.shape.experts

    def with_experts(self, experts: int) -> Layer:
        """The same layer with fewer experts, which its name says; top-k is at most half of them."""
        return replace(
            self,
            name=f"{self.name}-e{experts}",
            shape=replace(self.shape, experts=experts),
            topk=min(self.topk, experts // 2),
        )

    def with_expert_parallel(self, experts: int, rank: int) -> Layer:
        """The same layer where this rank holds ``experts`` of all that it has."""
        return replace(
            self,
            name=f"{self.name}-ep{self.shape.experts // experts}",
            shape=replace(self.shape, experts=experts),
            global_experts=self.shape.experts,
            first_expert=rank * experts,
        )


K3 = Layer(
    # Hidden is the latent width that routed experts work in; 3072 / TP8 columns.
    "k3",
    LayerShape(experts=896, hidden=3584, intermediate=384, seed=3),
    topk=16,
    activation=Activation.SITUV2,
)
K3_FULL_WIDTH = replace(K3, name="k3-i3072", shape=replace(K3.shape, intermediate=3072))


def gpt_oss_120b(tp: int) -> Layer:
    """gpt-oss-120b at a tensor-parallel size: biases, and rows that alternate gate and up."""
    blocks = 2880 // 32
    return Layer(
        f"gpt-oss-120b-tp{tp}",
        LayerShape(
            experts=128,
            hidden=2880,
            intermediate=32 * -(-blocks // tp),
            bias=True,
            gate_up_interleaved=True,
            seed=120,
        ),
        topk=4,
        activation=Activation.SWIGLU,
        limit=7.0,
    )


DEEPSEEK_V4 = Layer(
    "deepseek-v4-like",
    LayerShape(experts=384, hidden=7168, intermediate=384, seed=4),
    topk=6,
    activation=Activation.SILU,
    # The published config's value was not at hand: any limit that clamps some values will do.
    limit=7.0,
)
QWEN3_5 = Layer(
    "qwen3.5-397b",
    LayerShape(experts=512, hidden=4096, intermediate=256, seed=35),
    topk=10,
    activation=Activation.SILU,
)
MINIMAX_M3 = Layer(
    "minimax-m3",
    LayerShape(experts=129, hidden=6144, intermediate=384, seed=33),
    topk=5,
    activation=Activation.SWIGLU,
    limit=7.0,
)
