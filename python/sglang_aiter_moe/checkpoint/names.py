"""The names that checkpoint formats give an expert's tensors; docs/weights.md has the table."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PROJECTIONS = {
    "w1": "w1",
    "w2": "w2",
    "w3": "w3",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "gate_up_proj": "w13",
    "w13": "w13",
}
_KINDS = {
    "weight": "weight",
    "weight_packed": "weight",
    "blocks": "weight",
    "weight_scale": "scale",
    "scales": "scale",
    "bias": "bias",
    "weight_bias": "bias",
}
_PER_EXPERT = re.compile(
    r"^(?P<prefix>.*experts)\.(?P<expert>\d+)\.(?P<part>w[123]|(?:gate|up|down)_proj)"
    r"\.(?P<kind>weight|weight_packed|weight_scale|bias)$"
)
_FUSED = re.compile(
    r"^(?P<prefix>.*experts)\.(?P<part>w13|w2|gate_up_proj|down_proj)"
    r"_(?P<kind>weight|weight_scale|weight_bias|blocks|scales|bias)$"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class ExpertTensor:
    """What a tensor's name says.

    Attributes:
        prefix: of the layer, up to ``experts``.
        expert: its number in the model; None for a tensor of all experts.
        part: ``w1`` (gate), ``w3`` (up), ``w2`` or ``w13``.
        kind: ``weight``, ``scale`` or ``bias``.
        alternating: rows of w13 alternate gate and up.
    """

    prefix: str
    expert: int | None
    part: str
    kind: str
    alternating: bool = False

    @property
    def layer(self) -> int | None:
        """The layer's number in the model, None if the name has none."""
        found = _LAYER.search(self.prefix + ".")
        return int(found.group(1)) if found else None

    @property
    def parameter(self) -> str:
        """The layer's parameter that it belongs in."""
        base = "w2_weight" if self.part == "w2" else "w13_weight"
        return base if self.kind == "weight" else f"{base}_{self.kind}"


def parse(name: str) -> ExpertTensor | None:
    """What a tensor's name says; None for one that is not an MXFP4 expert's."""
    found = _PER_EXPERT.match(name) or _FUSED.match(name)
    if found is None:
        return None
    fields = found.groupdict()
    expert = fields.get("expert")
    return ExpertTensor(
        fields["prefix"],
        None if expert is None else int(expert),
        _PROJECTIONS[fields["part"]],
        _KINDS[fields["kind"]],
        alternating=fields["part"] == "gate_up_proj",
    )
