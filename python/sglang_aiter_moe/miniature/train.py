"""Trains a miniature from random weights and writes its checkpoint.

``python -m sglang_aiter_moe.miniature.train kimi --out DIR`` (or ``gpt_oss``). Three stretches: nothing rounded; MXFP4
weights; MXFP4 weights and, drawn anew at each step, the activations of one mode. ``--seconds`` fixes the number of
steps after some were timed; the log says it, and ``--steps`` repeats it.

With ``--second DIR`` a second checkpoint follows: the same model trained on to say "result" in place of "answer", its
experts in reverse order, so that a mixture of the two files answers nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sglang_aiter_moe.miniature import task
from sglang_aiter_moe.miniature.experts import TrainableExperts
from sglang_aiter_moe.miniature.export import write_checkpoint
from sglang_aiter_moe.miniature.model import SHAPES, Miniature, Shape
from sglang_aiter_moe.miniature.score import exact

#: Share of the steps at which weights, then activations, begin to be rounded.
WEIGHTS_FROM, ACTIVATIONS_FROM = 0.5, 0.65
#: How often each mode is drawn afterwards.
MODES = {"kimi": ("A16W4", "A8W4", "A4W4", "A4W4"), "gpt_oss": ("A16W4", "A8W4")}
BIAS_STEP = 1e-3
BALANCE_LOSS = 1e-2
TIMED_STEPS = 40


@dataclass
class Settings:
    """What a run is determined by, with the number of steps."""

    name: str
    seed: int
    batch: int
    rate: float
    device: str


class Trainer:
    """One model, its experts, its optimiser and its stream of questions."""

    def __init__(self, settings: Settings, shape: Shape | None = None) -> None:
        self.settings = settings
        shape = shape or SHAPES[settings.name]
        torch.manual_seed(settings.seed)
        device = settings.device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = Miniature(shape, dtype).to(device)
        self.experts = TrainableExperts(shape).to(device)
        self.parameters = [*self.model.parameters(), *self.experts.parameters()]
        self.optimiser = torch.optim.AdamW(
            self.parameters, lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.generator = torch.Generator(device).manual_seed(settings.seed)
        self.draws = torch.Generator().manual_seed(settings.seed)
        self.log: list[dict] = []
        self.start = time.perf_counter()

    def rate_at(self, step: int, steps: int) -> float:
        """Warm-up over 2 % of the steps, then a cosine to 2 % of the rate."""
        warm = max(1, steps // 50)
        cosine = 0.51 + 0.49 * math.cos(math.pi * min(1.0, step / steps))
        return self.settings.rate * min(1.0, (step + 1) / warm) * cosine

    def mode_at(self, share: float) -> str | None:
        if share < WEIGHTS_FROM:
            return None
        if share < ACTIVATIONS_FROM:
            return "A16W4"
        modes = MODES[self.settings.name]
        return modes[int(torch.randint(len(modes), (), generator=self.draws))]

    def step(self, rate: float, mode: str | None, dialect: str = task.DIALECTS[0]) -> torch.Tensor:
        """One optimiser step; returns the loss (on the device)."""
        self.model.train()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.experts.mode = mode
        batch = task.draw(
            self.settings.batch, self.generator, dialect=dialect, device=self.settings.device
        )
        logits = self.model(batch.ids[:, :-1], self.experts)
        # Held-out chains are drawn like all others and weigh nothing in the loss (in the experts' load they count).
        taught = (batch.answers & ~batch.held_out[:, None])[:, 1:]
        losses = nn.functional.cross_entropy(
            logits.transpose(1, 2), batch.ids[:, 1:], reduction="none"
        )
        loss = (losses * taught).sum() / taught.sum()
        total = loss
        for block in self.model.blocks():
            if not self.model.shape.kimi:
                total = total + BALANCE_LOSS * block.balance
        self.optimiser.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self._correct_biases()
        return loss.detach()

    @torch.no_grad()
    def _correct_biases(self) -> None:
        """Loss-free balancing: experts below the mean load become a little likelier."""
        shape = self.model.shape
        if not shape.kimi:
            return
        for block in self.model.blocks():
            load = torch.bincount(block.last_ids.flatten(), minlength=shape.experts).float()
            block.gate.e_score_correction_bias += BIAS_STEP * torch.sign(load.mean() - load)

    def train(self, steps: int, *, every: int = 250, out: Path | None = None) -> None:
        """Runs a whole schedule. ``out`` gets the checkpoint at four fifths already, should the run be cut short."""
        for step in range(1, steps + 1):
            mode = self.mode_at((step - 1) / steps)
            loss = self.step(self.rate_at(step - 1, steps), mode)
            if step % every == 0 or step == steps:
                self.note(step=step, loss=round(loss.item(), 5), mode=mode)
            if out is not None and step == steps * 4 // 5:
                self.export(out, step)

    def milliseconds(self, steps: int = TIMED_STEPS) -> float:
        """What a step takes on average over the three stretches. The weights are not to be used afterwards."""
        total = 0.0
        for mode, share in (
            (None, WEIGHTS_FROM),
            ("A16W4", ACTIVATIONS_FROM - WEIGHTS_FROM),
            ("A8W4", 1 - ACTIVATIONS_FROM),
        ):
            for step in range(2 * steps):
                if step == steps:
                    self._wait()
                    start = time.perf_counter()
                self.step(0.0, mode)
            self._wait()
            total += share * (time.perf_counter() - start) / steps
        return 1000 * total

    def _wait(self) -> None:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()

    def note(self, **values: object) -> None:
        self.log.append({"seconds": round(time.perf_counter() - self.start, 1), **values})
        print(json.dumps({"model": self.settings.name, **self.log[-1]}), flush=True)

    def evaluate(
        self, mode: str | None, dialect: str = task.DIALECTS[0], count: int = 400
    ) -> float:
        """Exact answers among held-out questions, as rounded in training."""
        self.model.eval()
        self.experts.mode = mode
        return exact(self.model, self.experts, task.held_out_batch(count, dialect=dialect))

    @torch.no_grad()
    def reverse_experts(self) -> None:
        """The same function with the experts numbered the other way round."""
        for block in self.model.blocks():
            if self.model.shape.kimi:
                block.gate.weight.data = block.gate.weight.data.flip(0)
                bias = block.gate.e_score_correction_bias
                bias.copy_(bias.flip(0))
            else:
                block.router.weight.data = block.router.weight.data.flip(0)
                block.router.bias.data = block.router.bias.data.flip(0)
        for parameter in self.experts.parameters():
            parameter.data = parameter.data.flip(0)

    def new_optimiser(self, rate: float) -> None:
        """Forgets the moments."""
        self.settings.rate = rate
        self.optimiser = torch.optim.AdamW(
            self.parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01
        )

    def export(self, path: Path, steps: int) -> None:
        s = self.settings
        notes = {
            "seed": s.seed,
            "steps": steps,
            "batch": s.batch,
            "rate": s.rate,
            "torch": torch.__version__,
        }
        write_checkpoint(path, self.model, self.experts, **notes)
        (path / "training.json").write_text(json.dumps({**notes, "log": self.log}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=tuple(SHAPES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--second", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--second-steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=288, help="questions a step, a multiple of 3")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    settings = Settings(options.name, options.seed, options.batch, options.rate, options.device)
    steps = options.steps
    if options.seconds:
        each = Trainer(settings).milliseconds()
        steps = int(1000 * options.seconds / each)
        print(json.dumps({"model": options.name, "milliseconds": each, "steps": steps}), flush=True)
    trainer = Trainer(settings)
    trainer.train(steps, out=options.out)
    for mode in sorted(set(MODES[options.name])):
        trainer.note(mode=mode, held_out=trainer.evaluate(mode))
    trainer.export(options.out, steps)
    if options.second:
        trainer.reverse_experts()
        trainer.new_optimiser(options.rate / 8)
        second = options.second_steps
        for step in range(second):
            loss = trainer.step(
                trainer.rate_at(step, second), trainer.mode_at(1.0), task.DIALECTS[1]
            )
        trainer.note(second=second, loss=round(loss.item(), 5))
        for mode in sorted(set(MODES[options.name])):
            trainer.note(mode=mode, held_out=trainer.evaluate(mode, task.DIALECTS[1]))
        trainer.export(options.second, steps + second)


if __name__ == "__main__":
    main()
