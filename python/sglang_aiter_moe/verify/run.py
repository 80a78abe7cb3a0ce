"""Runs cases and controls, layer by layer, so that each layer's weights exist once at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path

import torch
from rich.progress import Progress

from sglang_aiter_moe import environ
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.metrics import cosine, logits_diff, relative_error
from sglang_aiter_moe.numerics.oracle import RawExperts
from sglang_aiter_moe.verify import harness
from sglang_aiter_moe.verify.batches import Batch, make_batch, oracle_output
from sglang_aiter_moe.verify.cases import Case
from sglang_aiter_moe.verify.controls import Control, run_control
from sglang_aiter_moe.verify.harness import Loaded, Machine
from sglang_aiter_moe.verify.layers import Layer
from sglang_aiter_moe.verify.results import CaseResult, ControlResult, Report
from sglang_aiter_moe.verify.weights import write_checkpoint


def run(
    cases: Sequence[Case],
    controls: Sequence[Control] = (),
    *,
    backend: str = "auto",
    scratch: Path | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Report:
    """Runs everything and reports; a case that raises is a failed case, not an end.

    Args:
        cases: what to compare with the oracle.
        controls: deliberate mistakes, which have to collapse.
        backend: "auto", "cpu", "triton" or "aiter".
        scratch: where weight files go; a temporary directory by default.
        progress: shows bars, where there is a terminal.
        say: is told each result as one line, where there is none.

    Raises:
        ContractError: the backend cannot run on this machine.
    """
    machine = choose_machine(backend)
    work = [case for case in cases if _can_pretend(case, machine)]
    work_controls = [control for control in controls if _can_pretend(control.case, machine)]
    steps = Steps(progress or Progress(disable=True), len(work) + len(work_controls), say)
    results: list[CaseResult] = []
    control_results: list[ControlResult] = []
    with _scratch(scratch) as directory:
        for layer, (layer_cases, layer_controls) in _grouped(work, work_controls).items():
            store = LayerStore(layer, directory, machine, steps, layer_cases, layer_controls)
            with store:
                results.extend(store.run_cases())
                control_results.extend(store.run_controls())
    order = {case.name: position for position, case in enumerate(cases)}
    results.sort(key=lambda result: order[result.name])
    not_run = [case.name for case in cases if case not in work]
    not_run += [control.name for control in controls if control not in work_controls]
    return Report(machine.backend, tuple(results), tuple(control_results), tuple(not_run))


def choose_machine(backend: str) -> Machine:
    """Resolves "auto", and checks that the backend can run here.

    Raises:
        ContractError: no GPU for "triton" or "aiter", or no AITER.
    """
    gpu = torch.cuda.is_available()
    rocm = gpu and torch.version.hip is not None
    if backend == "auto":
        backend = "aiter" if rocm and harness.aiter_is_installed() else "triton" if gpu else "cpu"
    if backend == "aiter" and not (rocm and harness.aiter_is_installed()):
        raise ContractError(
            "--backend aiter, but "
            + ("AITER is not installed" if rocm else "there is no ROCm GPU"),
            allowed="the real AITER on a ROCm GPU",
            fix="install AITER there, or use --backend cpu",
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and not (gpu or interpreted):
        raise ContractError(
            "--backend triton, but torch sees no GPU",
            allowed="a CUDA or ROCm GPU that torch can use, or TRITON_INTERPRET=1 for small cases",
            fix="use --backend cpu",
        )
    device = torch.device("cpu" if backend == "cpu" or not gpu else "cuda")
    arch = None
    if backend == "aiter":
        arch = torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    return Machine(backend, device, arch)


def _can_pretend(case: Case, machine: Machine) -> bool:
    """The real AITER is what it is: it runs only the cases of its own architecture and kernels."""
    if machine.backend != "aiter":
        return True
    plain = Case.__dataclass_fields__
    return (
        case.arch == machine.arch
        and case.aiter == plain["aiter"].default
        and case.a16w4_kernel == plain["a16w4_kernel"].default
    )


def _grouped(
    cases: Sequence[Case], controls: Sequence[Control]
) -> dict[Layer, tuple[list[Case], list[Control]]]:
    groups: dict[Layer, tuple[list[Case], list[Control]]] = {}
    for case in cases:
        groups.setdefault(case.layer, ([], []))[0].append(case)
    for control in controls:
        groups.setdefault(control.case.layer, ([], []))[1].append(control)
    return groups


class Steps:
    """The progress bars: one over everything, one for what takes long inside."""

    def __init__(self, progress: Progress, total: int, say: Callable[[str], None] | None) -> None:
        self._progress = progress
        self._say = say
        self._done, self._total = 0, total
        self._all = progress.add_task("verify", total=total)
        self._inner = progress.add_task("", total=None, visible=False)

    def start(self, name: str) -> None:
        self._progress.update(self._all, description=name)

    def finish(self, name: str, verdict: str) -> None:
        self._done += 1
        self._progress.update(self._all, advance=1)
        if self._say is not None:
            self._say(f"[{self._done}/{self._total}] {name}: {verdict}")

    def inner(self, what: str, total: int) -> Callable[[int], None]:
        """Shows a second bar; the function returned sets how much of it is done."""
        self._progress.reset(self._inner, description=f"  {what}", total=total, visible=True)

        def set_done(done: int) -> None:
            self._progress.update(self._inner, completed=done, visible=done < total)

        return set_done


@dataclass
class LayerStore:
    """One layer's file, its tensors, and what the oracle says of its batches."""

    layer: Layer
    directory: Path
    machine: Machine
    steps: Steps
    cases: list[Case]
    controls: list[Control]
    path: Path = field(init=False)
    experts: RawExperts = field(init=False)
    _moved: RawExperts | None = None
    _outputs: dict[tuple, torch.Tensor] = field(default_factory=dict)
    _batches: dict[int, Batch] = field(default_factory=dict)

    def __enter__(self) -> LayerStore:
        shape = self.layer.shape
        self.path = self.directory / f"{self.layer.name}.safetensors"
        written = self.steps.inner(f"writing {self.layer.name}", shape.num_bytes)
        total = 0

        def advance(count: int) -> None:
            nonlocal total
            total += count
            written(total)

        write_checkpoint(shape, self.path, advance)
        self.experts = harness.raw_experts(self.layer, self.path)
        return self

    def __exit__(self, *error: object) -> None:
        del self.experts
        self._moved = None
        self._outputs.clear()
        self._batches.clear()
        self.path.unlink()

    def run_cases(self) -> Iterator[CaseResult]:
        """The layer's cases; those that share a plan share the prepared weights."""

        def key(case: Case) -> tuple:
            return (tuple(case.env.items()), case.arch, case.aiter, case.a16w4_kernel)

        for _, group in groupby(sorted(self.cases, key=key), key=key):
            loaded: Loaded | None = None
            for case in group:
                self.steps.start(case.name)
                result, loaded = self._run_case(case, loaded)
                self.steps.finish(case.name, "ok" if result.passed else f"FAILED {result.error}")
                yield result

    def run_controls(self) -> Iterator[ControlResult]:
        """The layer's controls."""
        for control in self.controls:
            self.steps.start(control.name)
            case = control.case
            batch = self.batch(case)
            expected = self.expected(case, case.mode)
            result = run_control(control, self.path, batch, expected, self.machine)
            verdict = "collapsed" if result.collapsed else f"DID NOT COLLAPSE {result.error}"
            self.steps.finish(control.name, verdict)
            yield result

    def _run_case(self, case: Case, loaded: Loaded | None) -> tuple[CaseResult, Loaded | None]:
        facts = {
            "name": case.name,
            "activation": case.layer.activation.value,
            "mode": case.mode,
            "layout": case.layout,
            "gate_mode": case.gate_mode,
            "tokens": case.tokens,
            "experts": case.layer.shape.experts,
        }
        try:
            with environ.exactly(case.env), harness.aiter_of(case, self.machine):
                loaded = loaded or harness.load(case, self.path, self.machine)
                batch = self.batch(case)
                start = time.perf_counter()
                output = harness.call(loaded, case.layer, batch, self.machine.device)
                seconds = time.perf_counter() - start
            plan = loaded.plan
            tokens = max(case.tokens, 1)  # no tokens: the runner returns before any mode is chosen
            decided = (str(plan.mode_for(tokens)), plan.w13_layout, str(plan.gate_mode))
            wanted = (case.mode, case.layout, case.gate_mode)
            error = ""
            if decided != wanted:
                error = f"the plan decides {', '.join(decided)}; expected {', '.join(wanted)}"
            if output.dtype is not torch.bfloat16:
                error = f"the output is {output.dtype}"
            expected = self.expected(case, case.mode)
            result = CaseResult(
                **facts,
                cosine=cosine(output, expected),
                logits_diff=logits_diff(output, expected),
                rel_err=relative_error(output, expected),
                unquantised_logits_diff=logits_diff(output, self.expected(case, None)),
                family=plan.family_for(tokens),
                seconds=seconds,
                error=error,
            )
            return result, loaded
        except Exception as error:  # a case that raises has failed; the others still run
            return CaseResult(**facts, error=f"{type(error).__name__}: {error}"), loaded

    def batch(self, case: Case) -> Batch:
        """The case's tokens and routing."""
        every = case.unused_slots
        if every not in self._batches:
            self._batches[every] = make_batch(self.layer, self._longest(every), unused_slots=every)
        return self._batches[every].first(case.tokens)

    def expected(self, case: Case, mode: str | None) -> torch.Tensor:
        """The oracle's output for a case, with the quantisation of `mode`."""
        every, rule = case.unused_slots, case.requantization
        key = (every, mode, rule if mode in ("A8W4", "A4W4") else None)
        if key not in self._outputs:
            tokens = self._longest(every, mode)
            what = f"oracle, {tokens} tokens, {mode or 'no'} quantisation"
            bar: list[Callable[[int], None]] = []

            def advance(done: int, total: int) -> None:
                if not bar:
                    bar.append(self.steps.inner(what, total))
                bar[0](done)

            batch = self._batches[every].first(tokens)
            experts, device = self._oracle_experts()
            self._outputs[key] = oracle_output(
                self.layer, experts, batch, mode, rule, advance, device
            )
        return self._outputs[key][: case.tokens]

    def _oracle_experts(self) -> tuple[RawExperts, torch.device]:
        """The raw weights where the oracle computes: on the GPU if there is one in use."""
        device = self.machine.device
        if device.type != "cpu" and self._moved is None:
            tensors = (getattr(self.experts, f.name) for f in fields(self.experts))
            self._moved = RawExperts(
                *(t.to(device) if isinstance(t, torch.Tensor) else t for t in tensors)
            )
        return self._moved or self.experts, device

    def _longest(self, unused_slots: int, mode: str | None = None) -> int:
        every_case = [*self.cases, *(control.case for control in self.controls)]
        return max(
            case.tokens
            for case in every_case
            if case.unused_slots == unused_slots and mode in (None, case.mode)
        )


class _scratch:
    """A directory for weight files: the given one, or a temporary one that goes away."""

    def __init__(self, given: Path | None) -> None:
        self._given = given

    def __enter__(self) -> Path:
        if self._given is not None:
            self._given.mkdir(parents=True, exist_ok=True)
            self._path = Path(tempfile.mkdtemp(prefix="aiter-moe-", dir=self._given))
        else:
            self._path = Path(tempfile.mkdtemp(prefix="aiter-moe-"))
        return self._path

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
