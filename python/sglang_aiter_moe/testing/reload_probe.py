"""Weight updates of SGLang's real layers through its real ``WeightUpdater``, without an engine.

``python -m sglang_aiter_moe.testing.reload_probe CHECKPOINTS PORT``: CHECKPOINTS holds ``a`` and ``b``, the
same model with other weights. Prints one line ``RESULT {json}``; the tests judge it. Runs with every supported
release: up to 0.5.20 SGLang has no sessions, and receives and loads in one step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open

from sglang_aiter_moe.testing import sglang_process

STAGING = "SGLANG_AITER_MOE_RELOAD_STAGING"


def tensors_in(path: Path) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, as a trainer sends them."""
    with safe_open(path / "model.safetensors", "pt") as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.data.clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def identity(model: torch.nn.Module) -> dict[str, Any]:
    return {
        name: (id(p), p.data_ptr(), id(getattr(p, "weight_loader", None)), tuple(p.shape))
        for name, p in model.named_parameters()
        if ".experts." in name
    }


class Probe:
    def __init__(self, folder: Path, port: int) -> None:
        self.paths = {name: folder / name for name in ("a", "b")}
        self.config = sglang_process.become_single_rank(self.paths["a"], port)
        self.fresh = {
            name: state_of(sglang_process.build_carrier(self.config, path))
            for name, path in self.paths.items()
        }
        self.model = sglang_process.build_carrier(self.config, self.paths["a"])
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        # Up to 0.5.21 it asks the runner whether the weights are shared.
        runner = SimpleNamespace(server_args=SimpleNamespace(weight_cache_mode="off"))
        self.updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=self.config,
            custom_weight_loaders={},
            get_model=lambda: self.model,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: runner,
        )
        self.identity = identity(self.model)

    def is_fresh(self, name: str) -> bool:
        """Bit-identical to a fresh load, in the same parameters at the same addresses."""
        return (
            same(state_of(self.model), self.fresh[name]) and identity(self.model) == self.identity
        )

    @property
    def has_sessions(self) -> bool:
        return hasattr(self.updater, "begin_weight_update")

    def session(self, *steps: list[tuple[str, torch.Tensor]]) -> list[tuple[bool, str]]:
        if self.has_sessions:
            self.updater.begin_weight_update()
        results = [tuple(self.updater.update_weights_from_tensor(step)) for step in steps]
        if self.has_sessions:
            self.updater.end_weight_update(run_post_load=False)
        return results

    def distributed(self, tensors: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        """As if a trainer had sent them."""
        if self.has_sessions:
            self.updater.begin_weight_update()
            received = self.updater.load_weights_from_distributed(tensors)
            self.updater.end_weight_update(run_post_load=False)
            return received
        names, values = zip(*tensors, strict=True)
        coming = iter(values)

        class Sent:
            def wait(self) -> None:
                pass

        def broadcast(weight: torch.Tensor, **_: Any) -> Sent:
            weight.copy_(next(coming))
            return Sent()

        self.updater._model_update_group["trainer"] = None
        dtypes = [str(value.dtype).removeprefix("torch.") for value in values]
        shapes = [tuple(value.shape) for value in values]
        with mock.patch("torch.distributed.broadcast", broadcast):
            return self.updater.update_weights_from_distributed(names, dtypes, shapes, "trainer")

    def call(self) -> str | None:
        """What a forward of the first layer's experts raises."""
        block = self.model.model.layers[0].mlp
        try:
            with torch.no_grad():
                block(torch.ones(2, self.config.hf_config.hidden_size, dtype=torch.bfloat16))
        except Exception as error:
            return str(error)
        return None

    def run(self) -> dict[str, Any]:
        a, b = (tensors_in(self.paths[name]) for name in ("a", "b"))
        half = len(b) // 2
        found: dict[str, Any] = {"other_weights": not same(self.fresh["a"], self.fresh["b"])}
        found["session"] = self.session(b[:half], b[half:]), self.is_fresh("b"), self.call()
        found["disk"] = (
            self.updater.update_weights_from_disk(str(self.paths["a"]), "auto"),
            self.is_fresh("a"),
        )
        found["distributed"] = self.distributed(b), self.is_fresh("b")
        found["without_session"] = self.updater.update_weights_from_tensor(a), self.is_fresh("a")
        found["partial"] = self.partial(a, b)
        found["refused"] = self.refused(b)
        found["failures"] = self.failures(a, b)
        found["others"] = self.others(a, b)
        return found

    def others(self, a: list, b: list) -> dict[str, Any]:
        """The loader fails after the first tensors that are not of experts."""
        original = type(self.model).load_weights

        def broken(model: Any, weights: Any) -> None:
            original(model, [w for w in weights if ".experts." not in w[0]][:3])
            raise OSError("connection lost")

        found = {}
        for staging in ("host", "none"):
            os.environ[STAGING] = staging
            type(self.model).load_weights = broken
            result = self.updater.update_weights_from_tensor(b)
            type(self.model).load_weights = original
            found[staging] = {"result": result, "undone": self.is_fresh("a"), "call": self.call()}
            healed = self.updater.update_weights_from_tensor(a)
            found[staging] |= {"healed": healed, "fresh": self.is_fresh("a"), "after": self.call()}
        return found

    def partial(self, a: list, b: list) -> dict[str, Any]:
        """Only scales of layer 0; then back."""
        chosen = {n for n, _ in b if "layers.0." in n and ".experts." in n and "scale" in n}
        result = self.session([(n, t) for n, t in b if n in chosen])
        now = state_of(self.model)
        changed = {n for n in now if not torch.equal(now[n], self.fresh["a"][n])}
        right = all(torch.equal(now[n], self.fresh["b"][n]) for n in changed)
        back = self.session([(n, t) for n, t in a if n in chosen])
        return {
            "result": result,
            "changed": sorted(changed),
            "right": right,
            "back": back,
            "restored": self.is_fresh("a"),
        }

    def refused(self, b: list) -> dict[str, Any]:
        """The last expert tensor of an update does not fit: nothing of the update is written."""
        names = [n for n, _ in b if ".experts." in n and ("weight" in n or "blocks" in n)]
        last = names[-1]
        cases = {
            "shape": [(n, t[..., :-1].contiguous() if n == last else t) for n, t in b],
            "dtype": [(n, t.float() if n == last else t) for n, t in b],
            "name": [(f"{n}_extra" if n == last else n, t) for n, t in b],
        }
        found = {}
        for case, tensors in cases.items():
            found[case] = self.updater.update_weights_from_tensor(tensors), self.is_fresh("a")
        return found

    def failures(self, a: list, b: list) -> dict[str, Any]:
        """The loader fails after half of the tensors, with and without a copy on the host."""
        original = type(self.model).load_weights

        def broken(model: Any, weights: Any) -> None:
            weights = list(weights)
            experts = [w for w in weights if ".experts." in w[0]]
            original(model, experts[: len(experts) // 2])
            raise OSError("connection lost")

        found = {}
        for staging in ("host", "none"):
            os.environ[STAGING] = staging
            type(self.model).load_weights = broken
            result = self.updater.update_weights_from_tensor(b)
            type(self.model).load_weights = original
            experts_kept = all(
                torch.equal(p.data, self.fresh["a"][n])
                for n, p in self.model.named_parameters()
                if ".experts." in n
            )
            refusal = self.call()
            healed = self.updater.update_weights_from_tensor(a)
            found[staging] = {
                "result": result,
                "kept": experts_kept,
                "call": refusal,
                "healed": healed,
                "fresh": self.is_fresh("a"),
                "call_after": self.call(),
            }
        return found


if __name__ == "__main__":
    sglang_process.print_result(**Probe(Path(sys.argv[1]), int(sys.argv[2])).run())
