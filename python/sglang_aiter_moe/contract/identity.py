"""Which layout given bytes are in, told from their content and never from their shape or an attribute.

The content of an expert is its raw bytes in one canonical order: gate rows first, no padding. A
:class:`Fingerprint` keeps the SHA-256 of that content for a few experts, so it is the same for every
layout and padding of the same weights. To identify bytes, they are read back under every layout and
compared with a fingerprint or with the raw weights; what matches is the layout. Without either nothing
can be told, because packed bytes look like raw ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_aiter_moe.contract import _bytes
from sglang_aiter_moe.contract.layouts import WEIGHT_LAYOUTS, deinterleave_gate_up_rows
from sglang_aiter_moe.contract.scale_layouts import SCALE_LAYOUTS
from sglang_aiter_moe.contract.spec import BLOCK
from sglang_aiter_moe.errors import ContractError

TENSORS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
#: As a checkpoint stores it, gate half first; and with rows that alternate gate and up (gpt-oss).
RAW, RAW_ALTERNATING = "raw", "raw_alternating"
#: The answer when nothing tells the layout.
UNKNOWN = "unknown"
#: Scale layouts whose bytes are the same up to the tail after the last expert.
_SAME_BYTES = frozenset({"separated", "a16w4"})
_MIX_GATE_UP = frozenset(
    {"gu_interleaved", "gu_interleaved_gfx1250", "a16w4_gate_up", "n32k4_gate_up"}
)


@dataclass(frozen=True)
class Sizes:
    """One rank's layer, unpadded, and the padded sizes of its packed tensors.

    Attributes:
        experts: E. intermediate: I. hidden: H.
        padded_intermediate, padded_hidden: what packed tensors are allocated for.
    """

    experts: int
    intermediate: int
    hidden: int
    padded_intermediate: int
    padded_hidden: int

    @classmethod
    def of_plan(cls, plan: Any) -> Sizes:
        """The sizes that a ``MoePlan`` gives."""
        return cls(
            plan.spec.num_experts,
            plan.spec.intermediate_size,
            plan.spec.hidden_size,
            plan.padded_intermediate_size,
            plan.padded_hidden_size,
        )

    def raw_shape(self, name: str, *, padded: bool = False) -> tuple[int, int, int]:
        """``[E, N, C]`` in bytes of a tensor of :data:`TENSORS`."""
        inter = self.padded_intermediate if padded else self.intermediate
        hidden = self.padded_hidden if padded else self.hidden
        rows, columns = (2 * inter, hidden) if name.startswith("w13") else (hidden, inter)
        return self.experts, rows, columns // (BLOCK if name.endswith("scale") else 2)


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 of a few experts' content.

    Attributes:
        experts: which experts, ascending.
        digests: tensor name -> one hex digest for each of ``experts``.
    """

    experts: tuple[int, ...]
    digests: Mapping[str, tuple[str, ...]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"experts": list(self.experts), **{k: list(v) for k, v in self.digests.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fingerprint:
        """The inverse of :meth:`to_dict`.

        Raises:
            ContractError: for anything else.
        """
        try:
            experts = tuple(int(e) for e in data["experts"])
            digests = {name: tuple(data[name]) for name in TENSORS if name in data}
            if any(len(values) != len(experts) for values in digests.values()):
                raise ValueError("one digest per expert is needed")
        except (KeyError, TypeError, ValueError) as error:
            raise ContractError(
                f"this is no fingerprint: {type(error).__name__}: {error}",
                allowed="what Fingerprint.to_dict gives",
                fix="take it from the file's metadata unchanged",
            ) from error
        return cls(experts, digests)


def sampled_experts(experts: int) -> tuple[int, ...]:
    """The experts that a fingerprint looks at: first, middle, last."""
    return tuple(sorted({0, experts // 2, experts - 1}))


def read_back(
    name: str, tensor: torch.Tensor, form: str, sizes: Sizes, expert: int
) -> torch.Tensor | None:
    """One expert's content, on the assumption that the bytes are in a form.

    Args:
        name: of :data:`TENSORS`.
        tensor: all experts' bytes: raw ``[E, N, C]``, or a packed shape.
        form: :data:`RAW`, :data:`RAW_ALTERNATING` or the name of a layout.
        sizes: of the layer.
        expert: which.

    Returns:
        uint8 ``[N, C]`` unpadded, gate rows first; None if the shape cannot be that form's.
    """
    data = _bytes.as_bytes(tensor, name)
    wanted = sizes.raw_shape(name)[1:]
    if form in (RAW, RAW_ALTERNATING):
        for shape in (sizes.raw_shape(name), sizes.raw_shape(name, padded=True)):
            if tuple(data.shape) == shape:
                return _cropped(name, data[expert], wanted, form == RAW_ALTERNATING)
        return None
    shape = sizes.raw_shape(name, padded=True)
    layout = (SCALE_LAYOUTS if name.endswith("scale") else WEIGHT_LAYOUTS)[form]
    try:
        layout.check(shape, what=name)
    except ContractError:
        return None
    if tuple(data.shape) != layout.packed_shape(shape):
        return None
    one = (1, *shape[1:])
    if name.endswith("scale"):
        # The experts' blocks are contiguous; only a tail comes after the last one.
        size = shape[1] * layout.columns(shape[2])
        block = data.reshape(-1)[expert * size : (expert + 1) * size]
        packed = block.new_zeros(layout.packed_shape(one))
        packed.view(-1)[:size] = block
        raw = layout.unpack(packed, one, what=name)
    else:
        raw = layout.unpack(data[expert : expert + 1], what=name)
    return _cropped(name, raw[0], wanted, False)


def forms_of(name: str) -> tuple[str, ...]:
    """Every form that a tensor could be in. Only w13 has gate and up rows to mix."""
    layouts = SCALE_LAYOUTS if name.endswith("scale") else WEIGHT_LAYOUTS
    if name.startswith("w13"):
        return RAW, RAW_ALTERNATING, *layouts
    return RAW, *(form for form in layouts if form not in _MIX_GATE_UP)


def fingerprint(
    tensors: Mapping[str, torch.Tensor], forms: Mapping[str, str], sizes: Sizes
) -> Fingerprint:
    """The fingerprint of tensors whose forms are known.

    Args:
        tensors: by the names of :data:`TENSORS`.
        forms: the form that each is in.
        sizes: of the layer.

    Raises:
        ContractError: a tensor does not have its form's shape.
    """
    experts = sampled_experts(sizes.experts)
    digests = {}
    for name, tensor in tensors.items():
        contents = [read_back(name, tensor, forms[name], sizes, e) for e in experts]
        if any(content is None for content in contents):
            raise ContractError(
                f"{name} has shape {tuple(tensor.shape)}",
                allowed=f"the shape of form {forms[name]} for {sizes}",
                fix="take the fingerprint of a layer right after it was laid out",
            )
        digests[name] = tuple(map(digest, contents))
    return Fingerprint(experts, digests)


def digest(content: torch.Tensor) -> str:
    """SHA-256 of a content's bytes."""
    return hashlib.sha256(content.contiguous().cpu().numpy().tobytes()).hexdigest()


def identify(
    name: str,
    tensor: torch.Tensor,
    sizes: Sizes,
    experts: Iterable[int],
    expected: Callable[[int], str],
) -> tuple[str, ...]:
    """Every form under which the bytes have the expected content.

    Args:
        name, tensor, sizes: see :func:`read_back`.
        experts: which to look at.
        expected: the digest of an expert's content.

    Returns:
        Names of forms; empty: the bytes are not these weights in any form.
    """
    experts = tuple(experts)
    found = []
    for form in forms_of(name):
        contents = (read_back(name, tensor, form, sizes, e) for e in experts)
        if all(
            c is not None and digest(c) == expected(e)
            for e, c in zip(experts, contents, strict=True)
        ):
            found.append(form)
    return tuple(found)


def one_form(found: Sequence[str]) -> str | None:
    """The single form of :func:`identify`'s result; None if bytes allow several or none."""
    if len(found) == 1 or (found and set(found) <= _SAME_BYTES):
        return found[0]
    return None


def _cropped(
    name: str, rows: torch.Tensor, wanted: Sequence[int], alternating: bool
) -> torch.Tensor:
    count, columns = wanted
    if not name.startswith("w13"):
        return rows[:count, :columns]
    if alternating:
        return deinterleave_gate_up_rows(rows[:count, :columns])
    return rows.unflatten(0, (2, -1))[:, : count // 2, :columns].flatten(0, 1)
