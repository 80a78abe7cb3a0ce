"""The state of one layer's weights: packed, open for an update, invalid. See :mod:`.mxfp4_reload`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from typing import Any

import torch

from sglang_aiter_moe.contract.identity import (
    TENSORS,
    Fingerprint,
    Sizes,
    fingerprint,
    identify,
    one_form,
)
from sglang_aiter_moe.contract.scale_layouts import NAN_SCALE
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization.mxfp4_checkpoint import refuse_nan
from sglang_aiter_moe.srt.layers.quantization.mxfp4_raw_form import RawForm, pack, unpacked
from sglang_aiter_moe.srt.layers.quantization.mxfp4_watch import (
    checksum,
    data_of,
    set_data,
    versions,
    watch,
)

logger = logging.getLogger(__name__)

STAGING = "SGLANG_AITER_MOE_RELOAD_STAGING"
STAGINGS = ("none", "host")

SCALES = ("w13_weight_scale", "w2_weight_scale")


class Running:
    """The update that runs in this process.

    Attributes:
        lock: one writer at a time.
        written: the layers that it has written.
        depth: nested updates; an SGLang session counts as one.
        failed: why the session that runs has failed: no further step of it is written.
        models: each model that it has begun to write: its layers, and its ``Others``. A session writes the target
            and the draft.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.written: list[LayerWeights] = []
        self.depth = 0
        self.failed: str | None = None
        self.models: list[tuple[list[LayerWeights], Any]] = []

    def fail(self, reason: str) -> None:
        """Every layer that the update wrote gets its weights back, or becomes invalid."""
        with self.lock:
            for state in list(self.written):
                state.roll_back(reason)

    def forget(self, states: Iterable[LayerWeights]) -> None:
        """Layers that are closed are no part of it any more."""
        for state in states:
            state.forget()
            if state in self.written:
                self.written.remove(state)


RUNNING = Running()


def staging() -> str:
    """``host`` or ``none``, as SGLANG_AITER_MOE_RELOAD_STAGING says.

    Raises:
        ContractError: for another value.
    """
    value = os.environ.get(STAGING, STAGINGS[0])
    if value not in STAGINGS:
        raise ContractError(
            f"{STAGING} is {value!r}",
            allowed=", ".join(STAGINGS),
            fix=f"type `export {STAGING}=host` to keep a copy of what an update replaces, or unset it",
        )
    return value


class LayerWeights:
    """The state of one layer's weights.

    Attributes:
        plan: by which they are packed.
        forms: each parameter's raw form.
        opened: packed storage of the parameters that are open, by name.
        invalid: why the layer cannot be called; None if it can.
        blocked: why no layer of the model can be called; None if they can.
        notes: parameters whose bytes somebody has taken since they were packed.
        fingerprint: of the content, from the last time that the layer was closed.
    """

    def __init__(self, layer: Any, plan: Any, forms: dict[str, RawForm]) -> None:
        self.layer = layer
        self.plan = plan
        self.forms = forms
        self.opened: dict[str, torch.Tensor] = {}
        self.invalid: str | None = None
        self.blocked: str | None = None
        self.notes: set[str] = set()
        self._poison = False
        self._withheld: dict[str, torch.Tensor] = {}
        self._staged: dict[str, torch.Tensor] = {}
        self._touched: set[str] = set()
        self._rewritten: set[tuple[str, Any, Any]] = set()
        self.fingerprint = self._take_fingerprint()
        self._sums: dict[str, str] = {}
        self._versions: tuple[int, ...] = ()
        self._vouch(self.forms)

    # --- the two states ---------------------------------------------------------------------------

    def open(self, names: Iterable[str] | None = None) -> None:
        """Brings parameters into their raw form, all by default. Open ones stay as they are."""
        with RUNNING.lock:
            for name in self.forms if names is None else names:
                if name in self.opened:
                    continue
                parameter = getattr(self.layer, name)
                home = data_of(parameter)
                if name in self._withheld:
                    home.copy_(self._withheld.pop(name))
                set_data(parameter, unpacked(self.forms[name], home, self.plan))
                parameter.is_shuffled = False
                self.opened[name] = home

    def close(self) -> None:
        """Packs what is open. Bit-identical to a fresh load of the same weights.

        Raises:
            ContractError: a scale that was written is NaN. The update has failed then.
        """
        with RUNNING.lock:
            error = self._nan_error()
            if error is not None:
                RUNNING.fail(error.what)
                if self._nan_error() is not None:  # written past the loaders: nothing to go back to
                    self.invalid = error.what
            changed = list(self.opened)
            for name, home in self.opened.items():
                parameter = getattr(self.layer, name)
                raw = data_of(parameter)
                if raw.device != home.device:  # moved by the CPU offload
                    home = torch.empty_like(home, device=raw.device)
                pack(self.forms[name], raw, home, self.plan)
                set_data(parameter, home)
                parameter.is_shuffled = name in ("w13_weight", "w2_weight")
            self.opened.clear()
            self._vouch(changed)
            if self.invalid is not None and self._is_rewritten():
                self.invalid = None
                self._rewritten.clear()
            self._show_or_withhold()
            if changed and self.invalid is None and not self._withheld:
                self.fingerprint = self._take_fingerprint()
            if RUNNING.depth == 0:
                RUNNING.forget([self])
        if error is not None:
            raise error

    # --- writing ------------------------------------------------------------------------------------

    def touch(self, name: str) -> None:
        """Before a parameter is written: opens it, and copies it where the user asks for that."""
        with RUNNING.lock:
            keep = staging() == "host"
            self.open([name])
            if name in self._touched:
                return
            if keep and self.invalid is None:
                self._staged[name] = data_of(getattr(self.layer, name)).to("cpu", copy=True)
            self._touched.add(name)
            if self not in RUNNING.written:
                RUNNING.written.append(self)

    def check_written(self) -> None:
        """Raises if :meth:`close` would: so that an update fails before any rank packs it.

        Raises:
            ContractError: a scale that was written is NaN.
        """
        with RUNNING.lock:
            error = self._nan_error()
        if error is not None:
            raise error

    def wrote(self, name: str, shard: Any, expert: Any) -> None:
        """After a write: an invalid layer counts what it has got."""
        with RUNNING.lock:
            if self.invalid is not None:
                self._rewritten.add((name, shard, expert))

    def roll_back(self, reason: str) -> None:
        """Undoes what the running update wrote, or marks the layer invalid."""
        with RUNNING.lock:
            if not self._touched:
                return
            self.open(self._touched)
            if self._touched <= self._staged.keys():
                for name, copy in self._staged.items():
                    data_of(getattr(self.layer, name)).copy_(copy)
                logger.warning("%s: the update failed and is undone: %s", self._name, reason)
            else:
                self.invalid = reason
                self._rewritten.clear()
                # NaN goes into the packed scales alone: loaders do not write all of the raw ones on a rank that
                # has fewer columns than the others.
                self.close()
                logger.error("%s is invalid until a full update: %s", self._name, reason)
            self.forget()

    def forget(self) -> None:
        self._staged.clear()
        self._touched.clear()

    # --- what can be asked --------------------------------------------------------------------------

    def refuse_call(self) -> None:
        """Raises unless the layer may be called.

        Raises:
            ContractError: an update failed, or has not been finished.
        """
        if self.blocked is not None:
            raise ContractError(
                f"the model has no valid weights: {self.blocked}",
                allowed="calls after a full update of the model",
                fix=f"load all weights of the model again; `export {STAGING}=host` before the server "
                "starts keeps the old weights when an update fails",
            )
        if self.invalid is not None:
            raise ContractError(
                f"{self._name} has no valid weights: {self.invalid}",
                allowed="calls after a full update of this layer",
                fix=f"load all weights of the model again; `export {STAGING}=host` before the server "
                "starts keeps the old weights when an update fails",
            )
        if self.opened:
            raise ContractError(
                f"{self._name} is being updated: {', '.join(self.opened)} are in raw form",
                allowed="calls after process_weights_after_loading",
                fix="end the weight update before the next request",
            )

    @property
    def is_callable(self) -> bool:
        """Whether nothing speaks against a call, as far as can be told without looking at the bytes."""
        return not (
            self.opened
            or self.invalid is not None
            or self.blocked is not None
            or self.notes
            or self._versions != self._count()
        )

    def verify(self) -> None:
        """Raises unless every packed parameter holds the bytes that were packed; looks at all of them.

        Raises:
            ContractError: somebody wrote around the ``weight_loader``. The layer is invalid then.
        """
        with RUNNING.lock:
            if self.invalid is not None:
                return
            closed = [name for name in self.forms if name not in self.opened | self._withheld]
            foreign = [n for n in closed if checksum(self._packed(n)) != self._sums[n]]
            self.notes.clear()
            self._versions = self._count()
            if foreign:
                self.invalid = (
                    f"{', '.join(foreign)}: bytes were written that did not come through the weight_loader, "
                    "and whether they are raw or packed nothing can tell"
                )
                self._rewritten.clear()
                self._show_or_withhold()
                logger.error("%s is invalid until a full update: %s", self._name, self.invalid)
                self.refuse_call()

    def block(self, reason: str, *, poison: bool) -> None:
        """No layer of the model may be called; ``poison``: also tell captured graphs, by NaN in this one."""
        with RUNNING.lock:
            self.blocked, self._poison = reason, poison
            self._show_or_withhold()

    def unblock(self) -> None:
        """The model's other tensors are whole again."""
        with RUNNING.lock:
            self.blocked, self._poison = None, False
            self._show_or_withhold()

    def layout(self) -> dict[str, str | None]:
        """The form of each tensor as its content tells; None where it does not (see contract.identity)."""
        sizes, known = Sizes.of_plan(self.plan), self.fingerprint
        found = {}
        for name in TENSORS:
            by_expert = dict(zip(known.experts, known.digests[name], strict=True))
            tensor = self._packed(name)
            forms = identify(name, tensor, sizes, known.experts, by_expert.__getitem__)
            found[name] = one_form(forms)
        return found

    def _packed(self, name: str) -> torch.Tensor:
        return data_of(getattr(self.layer, name))

    def _count(self) -> tuple[int, ...]:
        return versions(getattr(self.layer, name) for name in TENSORS)

    def _vouch(self, names: Iterable[str]) -> None:
        """Notes the bytes of parameters as they are now."""
        for name in names:
            self._sums[name] = checksum(self._packed(name))
            watch(getattr(self.layer, name), name, self.notes)
        self.notes.difference_update(names)
        self._versions = self._count()

    def _show_or_withhold(self) -> None:
        """Captured graphs ask nobody: while calls are refused, NaN stands in the place of packed scales."""
        withhold = self.invalid is not None or self._poison
        for name in SCALES:
            if name in self.opened:
                continue
            scale = _bytes_of(getattr(self.layer, name))
            if withhold and name not in self._withheld:
                self._withheld[name] = scale.to("cpu", copy=True)
                scale.fill_(NAN_SCALE)
            elif not withhold and name in self._withheld:
                scale.copy_(self._withheld.pop(name))
        self._versions = self._count()

    @property
    def _name(self) -> str:
        return self.plan.spec.name

    def _take_fingerprint(self) -> Fingerprint:
        forms = dict(zip(TENSORS, _layout_names(self.plan), strict=True))
        tensors = {name: self._packed(name) for name in TENSORS}
        return fingerprint(tensors, forms, Sizes.of_plan(self.plan))

    def _nan_error(self) -> ContractError | None:
        if self.invalid is not None and not self._is_rewritten():
            return None  # what is missing comes with a later update
        for name in self.opened:
            if self.forms[name].is_scale:
                try:
                    refuse_nan(_bytes_of(getattr(self.layer, name)), name)
                except ContractError as error:
                    return error
        return None

    def _is_rewritten(self) -> bool:
        return all(self._covers(name) for name in self.forms)

    def _covers(self, name: str) -> bool:
        keys = {(shard, expert) for n, shard, expert in self._rewritten if n == name}
        if (None, None) in keys:
            return True
        shards = ("w1", "w3") if name.startswith("w13") else ("w2",)
        experts = range(self.plan.spec.num_experts)
        return all((shard, expert) in keys for shard in shards for expert in experts)


def _bytes_of(parameter: torch.Tensor) -> torch.Tensor:
    data = data_of(parameter)
    return data if data.dtype == torch.uint8 else data.view(torch.uint8)


def _layout_names(plan: Any) -> tuple[str, str, str, str]:
    return plan.w13_layout, plan.w13_scale_layout, plan.w2_layout, plan.w2_scale_layout
