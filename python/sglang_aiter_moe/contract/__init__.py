"""What AITER requires, as data and pure functions: no GPU, no SGLang and no AITER is imported here."""

from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.layouts import WEIGHT_LAYOUTS, weight_layout
from sglang_aiter_moe.contract.modes import ActivationMode, GateMode
from sglang_aiter_moe.contract.plan import Decision, MoePlan, TokenRange, plan_moe
from sglang_aiter_moe.contract.scale_layouts import SCALE_LAYOUTS, scale_layout
from sglang_aiter_moe.contract.spec import MoeSpec, Target, shard

__all__ = [
    "SCALE_LAYOUTS",
    "WEIGHT_LAYOUTS",
    "ActivationMode",
    "Capabilities",
    "Decision",
    "GateMode",
    "MoePlan",
    "MoeSpec",
    "Target",
    "TokenRange",
    "plan_moe",
    "scale_layout",
    "shard",
    "weight_layout",
]
