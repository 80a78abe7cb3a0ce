"""Tells which layout the expert weights of a file are in, with the evidence for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_aiter_moe.checkpoint.files import Checkpoint, Layer
from sglang_aiter_moe.checkpoint.names import ExpertTensor
from sglang_aiter_moe.checkpoint.rank import rank_tensors
from sglang_aiter_moe.contract.identity import (
    RAW,
    RAW_ALTERNATING,
    TENSORS,
    UNKNOWN,
    Fingerprint,
    Sizes,
    digest,
    identify,
    one_form,
    read_back,
    sampled_experts,
)
from sglang_aiter_moe.contract.layouts import WEIGHT_LAYOUTS
from sglang_aiter_moe.contract.moe_plan import MoePlan
from sglang_aiter_moe.contract.scale_layouts import SCALE_LAYOUTS
from sglang_aiter_moe.contract.spec import MoeSpec
from sglang_aiter_moe.errors import ContractError

#: Keys of a safetensors file's metadata.
PLAN_KEY = "sglang_aiter_moe.plan"
FINGERPRINTS_KEY = "sglang_aiter_moe.fingerprints"


@dataclass(frozen=True)
class Verdict:
    """What one layer's bytes are.

    Attributes:
        layer: its prefix.
        layout: ``raw``, ``raw_alternating``, the name of w13's layout, ``mixed`` or ``unknown``.
        forms: the form of each tensor that could be told.
        evidence: what told it: ``against``, ``fingerprint``, ``plan`` or nothing.
        agrees: whether what the file says of itself holds; None if it says nothing.
        detail: one sentence.
    """

    layer: str
    layout: str
    forms: Mapping[str, str]
    evidence: str
    agrees: bool | None
    detail: str


def check_file(
    path: Path, spec: MoeSpec, *, against: Path | None = None, tp_rank: int = 0, ep_rank: int = 0
) -> list[Verdict]:
    """The verdict on each layer of a file.

    Args:
        path: a safetensors file or a directory of them.
        spec: one rank's layer, from the model's config.
        against: the raw checkpoint, of any supported format.
        tp_rank, ep_rank: which share of the raw checkpoint the file is.

    Raises:
        ContractError: the file has no MXFP4 experts, or cannot be read.
    """
    checkpoint = Checkpoint(path)
    layers = checkpoint.layers()
    if not layers:
        raise ContractError(
            f"{path} has no MXFP4 expert tensors",
            allowed="experts in a supported format (docs/weights.md)",
            fix="pass the file that holds the experts",
        )
    raw = None if against is None else Checkpoint(against).layers()
    verdicts = []
    for prefix, layer in layers.items():
        plan, fingerprints = _plan(layer), _fingerprints(layer)
        if plan is not None:
            spec = plan.spec
        if raw is not None:
            wanted = _raw_digests(_raw_layer(raw, prefix, layer), spec, tp_rank, ep_rank)
            evidence = "against"
        elif prefix in fingerprints:
            wanted, evidence = _stored_digests(fingerprints[prefix]), "fingerprint"
        else:
            wanted, evidence = None, ""
        verdicts.append(_verdict(layer, spec, plan, wanted, evidence))
    return verdicts


def layer_sizes(spec: MoeSpec, w13_shape: tuple[int, ...]) -> Sizes:
    """Sizes with the padding that the shape of w13 ``[E, 2I, H/2]`` shows."""
    experts, rows, columns = w13_shape
    return Sizes(experts, spec.intermediate_size, spec.hidden_size, rows // 2, columns * 2)


Digests = tuple[tuple[int, ...], Callable[[str, int], str | None]]


def _verdict(
    layer: Layer, spec: MoeSpec, plan: MoePlan | None, wanted: Digests | None, evidence: str
) -> Verdict:
    claimed = _claimed(plan)
    if wanted is None:
        return _by_plan(layer, plan, claimed)
    forms, open_tensors = {}, []
    sizes = _sizes(layer, spec)
    for name in TENSORS:
        form = _form(layer, name, sizes, wanted)
        if form is None:
            open_tensors.append(name)
        else:
            forms[name] = form
    if open_tensors:
        detail = f"{', '.join(open_tensors)}: no single form has this content"
        return Verdict(layer.prefix, UNKNOWN, forms, evidence, False if claimed else None, detail)
    agrees = None if claimed is None else all(_same(forms[n], claimed[n]) for n in TENSORS)
    layout = forms["w13_weight"]
    raw_forms = [form in (RAW, RAW_ALTERNATING) for form in forms.values()]
    if any(raw_forms) and not all(raw_forms):
        return Verdict(layer.prefix, "mixed", forms, evidence, False, "raw beside packed tensors")
    detail = f"the content matches read as {layout}"
    if agrees is False:
        detail += f", but the file's plan says {plan.w13_layout}"
    return Verdict(layer.prefix, layout, forms, evidence, agrees, detail)


def _by_plan(layer: Layer, plan: MoePlan | None, claimed: dict[str, str] | None) -> Verdict:
    """Without content to compare with, all there is is what the file's metadata say."""
    if plan is None or claimed is None:
        return Verdict(
            layer.prefix, UNKNOWN, {}, "", None, "no plan, no fingerprint, no raw weights"
        )
    sizes = Sizes.of_plan(plan)
    wrong = []
    for name, form in claimed.items():
        layout = (SCALE_LAYOUTS if name.endswith("scale") else WEIGHT_LAYOUTS)[form]
        if layer.shape(name) != layout.packed_shape(sizes.raw_shape(name, padded=True)):
            wrong.append(name)
    if wrong:
        detail = f"its plan says {plan.w13_layout}, which is not the shape of {', '.join(wrong)}"
        return Verdict(layer.prefix, UNKNOWN, {}, "plan", False, detail)
    detail = "its plan says so; no fingerprint and no raw weights confirm the content"
    return Verdict(layer.prefix, plan.w13_layout, claimed, "plan", None, detail)


def _sizes(layer: Layer, spec: MoeSpec) -> Sizes:
    shape = (layer.experts, *layer.expert("w13_weight", 0).shape)
    return layer_sizes(spec, shape)


def _form(layer: Layer, name: str, sizes: Sizes, wanted: Digests) -> str | None:
    experts, expected = wanted
    # Every digest is needed before the tensor, which may be large, is read.
    if any(expected(name, expert) is None for expert in experts):
        return None
    tensor = layer.whole(name)
    return one_form(identify(name, tensor, sizes, experts, lambda e: expected(name, e)))


def _claimed(plan: MoePlan | None) -> dict[str, str] | None:
    if plan is None:
        return None
    values = (plan.w13_layout, plan.w13_scale_layout, plan.w2_layout, plan.w2_scale_layout)
    return dict(zip(TENSORS, values, strict=True))


def _same(found: str, claimed: str) -> bool:
    return found == claimed or {found, claimed} <= {"separated", "a16w4"}


def _plan(layer: Layer) -> MoePlan | None:
    text = layer.metadata.get(PLAN_KEY)
    return None if text is None else MoePlan.from_json(text)


def _fingerprints(layer: Layer) -> dict[str, Fingerprint]:
    text = layer.metadata.get(FINGERPRINTS_KEY)
    if text is None:
        return {}
    try:
        data = json.loads(text).items()
    except (ValueError, AttributeError) as error:
        raise ContractError(
            f"the metadata {FINGERPRINTS_KEY} cannot be read: {error}",
            allowed="JSON, as `layout --pack` writes it",
            fix="pack the checkpoint again",
        ) from error
    return {prefix: Fingerprint.from_dict(value) for prefix, value in data}


def _stored_digests(fingerprint: Fingerprint) -> Digests:
    known = {
        (name, expert): value
        for name, values in fingerprint.digests.items()
        for expert, value in zip(fingerprint.experts, values, strict=True)
    }
    return fingerprint.experts, lambda name, expert: known.get((name, expert))


def _raw_layer(raw: Mapping[str, Layer], prefix: str, layer: Layer) -> Layer:
    if prefix in raw:
        return raw[prefix]
    number = _number(layer)
    same = [other for other in raw.values() if number is not None and _number(other) == number]
    if len(same) == 1:
        return same[0]
    raise ContractError(
        f"the raw weights have no layer {prefix}",
        allowed=", ".join(list(raw)[:5]) or "layers with MXFP4 experts",
        fix="pass the raw checkpoint of the same model with --against",
    )


def _number(layer: Layer) -> int | None:
    return ExpertTensor(layer.prefix, None, "w2", "weight").layer


def _raw_digests(layer: Layer, spec: MoeSpec, tp_rank: int, ep_rank: int) -> Digests:
    tensors = rank_tensors(layer, spec, tp_rank=tp_rank, ep_rank=ep_rank)
    form = dict.fromkeys(TENSORS, RAW)
    if spec.gate_up_interleaved:
        form |= {"w13_weight": RAW_ALTERNATING, "w13_weight_scale": RAW_ALTERNATING}
    inter, hidden = spec.intermediate_size, spec.hidden_size
    sizes = Sizes(spec.num_experts, inter, hidden, inter, hidden)

    def expected(name: str, expert: int) -> str:
        return digest(read_back(name, tensors[name], form[name], sizes, expert))

    return sampled_experts(spec.num_experts), expected
