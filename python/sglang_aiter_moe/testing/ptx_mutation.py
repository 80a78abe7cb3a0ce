"""Random changes of one instruction of a Hopper form's PTX: does an executed kernel show them?

``python -m sglang_aiter_moe.testing.ptx_mutation LAYER KERNEL [--count N] [--seed S] [--json FILE]`` runs a layer of
``hopper_cases`` (``fp8/A16W4/small``), keeps what KERNEL (``stage1_fp8``) was launched with, and launches it again with
one instruction changed at a time. A mutant is caught if anything that the kernel writes has other bits than the
unchanged kernel gives it, if it leaves a byte unwritten that the unchanged kernel writes (or writes there what comes of
nothing), or if the interpreter raises. With ``--multiprocessors 1`` programs take several turns, so rings wrap.

The instruction is drawn from those executed, each execution of a warp being as likely. Waits, barriers and fences are
changed like all others; not changed is what has no effect here (register counts, hints, dependent launches). A change
that ptxas refuses is no mutant: another one is drawn in its place. The loop and the reports are ``amd_mutation``'s.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import triton

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation import provenance
from sglang_aiter_moe.nvptx.errors import ExecutionError, PtxError
from sglang_aiter_moe.nvptx.launch import Device
from sglang_aiter_moe.nvptx.triton_driver import MULTIPROCESSORS, Call, MapOf
from sglang_aiter_moe.testing import amd_mutation, hopper_cases
from sglang_aiter_moe.testing.amd_mutation import Mutation, NotAMutant, as_bits

WITHOUT_EFFECT = (
    "setmaxnreg",
    "griddepcontrol",
    "prefetch",
    "nanosleep",
    "bra",
    "brx",
    "ret",
    "exit",
)
SIBLINGS = amd_mutation.SIBLINGS | {
    "shl": ("shr",), "shr": ("shl",), "wide": ("lo",), "lo": ("hi",), "hi": ("lo",), "bfly": ("idx",),
    "e4m3x2": ("e5m2x2",), "ex2": ("lg2",), "ca": ("cg",), "u32": ("s32",), "s32": ("u32",), "x4": ("x2",),
}  # fmt: skip
SIGNED = ("shr", "bfe", "max", "min", "div", "rem", "cvt", "setp", "redux")
SIGNED_PRODUCTS = (["mul", "hi"], ["mul", "wide"], ["mad", "wide"])
_UNSIGNED = {"u32": "b32", "s32": "b32"}
"""Where the sign makes no difference the type is not changed."""
_REGISTER = re.compile(r"%(p|rs|rd|r)(\d+)(?!\w)")
_NUMBER = re.compile(r"(?<![\w%.$:])(-?\d+|0x[0-9a-fA-F]+)(?![\w.:])")


@dataclass(frozen=True)
class Kept:
    """A launch that can be run again: the call with its tensors as they were before, and what it wrote."""

    call: Call
    fresh: frozenset[int]
    """Places in the arguments of tensors that nothing had written before the launch."""
    written: tuple[torch.Tensor, ...]
    known: tuple[np.ndarray, ...]
    """bool [bytes] of each tensor: what is written when the launch is run again by itself."""
    executed: dict[int, int]
    """Line of the text -> how often a warp executed it."""


def _tensor(argument) -> torch.Tensor | None:
    argument = argument.tensor if isinstance(argument, MapOf) else argument
    return argument if isinstance(argument, torch.Tensor) else None


def _with(argument, tensor: torch.Tensor):
    return dataclasses.replace(argument, tensor=tensor) if isinstance(argument, MapOf) else tensor


class _Keeping(Device):
    """Keeps the first launch of a kernel."""

    def __init__(self, kernel: str, kept: list[Kept], **options) -> None:
        super().__init__(**options)
        self._kernel, self._kept = kernel, kept

    def launched(self, call: Call) -> None:
        if call.name != self._kernel or self._kept:
            super().launched(call)
            return
        before, fresh, tensors = [], set(), []
        for i, (name, argument) in enumerate(call.arguments):
            tensor = _tensor(argument)
            if tensor is not None:
                tensors.append(tensor)
                argument = _with(argument, tensor.clone())
                if self.placing.scratch(tensor):
                    address = self.placing.address(tensor, name)
                    if address and not self.memory.written(address, as_bits(tensor).numel()).any():
                        fresh.add(i)
            before.append((name, argument))
        super().launched(call)
        done = dict(self.launches[-1].statistics.lines)
        self._kept.append(
            Kept(
                dataclasses.replace(call, arguments=tuple(before)),
                frozenset(fresh),
                tuple(t.clone() for t in tensors),
                (),
                done,
            )
        )


def keep(layer: str, kernel: str, seed: int = 1, multiprocessors: int = MULTIPROCESSORS) -> Kept:
    """The first launch of ``kernel`` in a layer of ``hopper_cases.layers()``.

    Raises:
        ContractError: there is no such layer, or it has no such kernel.
        RuntimeError: the layer is wrong before any change.
    """
    layers = hopper_cases.layers()
    if layer not in layers:
        raise ContractError(
            f"layer {layer!r}", allowed=", ".join(layers), fix="name one of them as form/mode/case"
        )
    form, case = layers[layer]
    kept: list[Kept] = []
    row = hopper_cases.execute(
        form,
        case,
        seed,
        device=lambda **options: _Keeping(kernel, kept, **options),
        multiprocessors=multiprocessors,
    )
    if not row["right"]:
        raise RuntimeError(f"{layer} is wrong before any change: error {row['rel_err']}")
    if not kept:
        raise ContractError(
            f"kernel {kernel!r} of layer {layer}",
            allowed=", ".join(dict.fromkeys(launch["kernel"] for launch in row["launches"])),
            fix="name one of the kernels that the layer launches",
        )
    tensors, known = _run(kept[0], kept[0].call.assembly, 2 * sum(kept[0].executed.values()))
    for (name, again), before, written in zip(tensors, kept[0].written, known, strict=True):
        if not torch.equal(as_bits(again).view(-1)[written], as_bits(before).view(-1)[written]):
            raise RuntimeError(f"{kernel} of {layer} gives {name} other bits when run again")
    return dataclasses.replace(kept[0], known=tuple(known))


def outcome(kept: Kept, text: str, limit: int) -> str | None:
    """How the launch with ``text`` differs from the kept one, or None.

    "raised: ...", "unwritten: NAME" or "changed: NAME".
    Bytes that the unchanged kernel leaves unwritten, or gives what comes of nothing, mean nothing and are not compared.

    Raises:
        NotAMutant: the interpreter does not have the changed instruction.
    """
    try:
        tensors, known = _run(kept, text, limit)
    except PtxError as error:
        if "not modelled" in str(error):
            raise NotAMutant(str(error)) from error
        return f"raised: {error.what}"
    except ExecutionError as error:
        return f"raised: {error.what}"
    rows = list(zip(tensors, known, kept.written, kept.known, strict=True))
    for (name, _), found, _, expected in rows:
        if (expected & ~found).any():
            return f"unwritten: {name}"
    for (name, tensor), found, before, expected in rows:
        same = torch.equal(as_bits(tensor).view(-1)[expected], as_bits(before).view(-1)[expected])
        if not same or (found & ~expected).any():
            return f"changed: {name}"
    return None


def _run(
    kept: Kept, text: str, limit: int
) -> tuple[list[tuple[str, torch.Tensor]], list[np.ndarray]]:
    """The launch again, with ``text``: its tensors by name, and which of their bytes are written then."""
    arguments, names, fresh = [], [], set()
    for i, (name, argument) in enumerate(kept.call.arguments):
        tensor = _tensor(argument)
        if tensor is not None:
            copy = tensor.clone()
            argument = _with(argument, copy)
            names.append((name, copy))
            if i in kept.fresh:
                fresh.add(copy.data_ptr())
        arguments.append((name, argument))
    device = Device(
        scratch=lambda tensor: tensor.data_ptr() in fresh,
        edit=lambda name, old: text,
        max_instructions=limit,
    )
    device.launched(dataclasses.replace(kept.call, arguments=tuple(arguments)))
    known = []
    for _, tensor in names:
        address = device.placing.address_of(tensor)
        nbytes = as_bits(tensor).numel()
        known.append(device.memory.written(address, nbytes) if nbytes else np.zeros(0, bool))
    return names, known


def mutate(text: str, executed: dict[int, int], choose: random.Random) -> tuple[str, Mutation]:
    """``text`` with one executed instruction changed, drawn by how often it was executed."""
    lines = text.splitlines()
    candidates = [n for n in executed if _may_change(lines[n - 1])]
    weights = [executed[n] for n in candidates]
    while True:
        (line,) = choose.choices(candidates, weights)
        code = lines[line - 1].split("//")[0].rstrip()
        changes = [_dropped, _opcode, _register, _number, _guard]
        choose.shuffle(changes)
        for change in changes:
            after = change(code, choose, text)
            if after is not None and after != code:
                lines[line - 1] = after
                kind = change.__name__.strip("_")
                return "\n".join(lines) + "\n", Mutation(line, kind, code.strip(), after.strip())


def _may_change(line: str) -> bool:
    code = re.sub(r"^\s*@!?%\w+\s+", "", line).strip()
    return bool(code) and not code.startswith((*WITHOUT_EFFECT, "{", "}", ".", "//", "$"))


def _dropped(code: str, choose: random.Random, text: str) -> str | None:
    return ""


def _opcode(code: str, choose: random.Random, text: str) -> str | None:
    found = re.match(r"(\s*(?:@!?%\w+\s+)?)([\w.:]+)", code)
    if not found:
        return None
    parts = found[2].split(".")
    if parts[0] not in SIGNED and parts[:2] not in SIGNED_PRODUCTS:
        parts = [_UNSIGNED.get(part, part) for part in parts]
    spots = [(i, s) for i, part in enumerate(parts) for s in SIBLINGS.get(part, ())]
    if not spots:
        return None
    parts = found[2].split(".")
    i, sibling = choose.choice(spots)
    name = ".".join([*parts[:i], sibling, *parts[i + 1 :]])
    return found[1] + name + code[found.end() :]


def _register(code: str, choose: random.Random, text: str) -> str | None:
    """Another register of the same class that the text names near it."""
    spots = list(_REGISTER.finditer(code))
    if not spots:
        return None
    spot = choose.choice(spots)
    others = sorted({m[0] for m in _REGISTER.finditer(text) if m[1] == spot[1]} - {spot[0]})
    return code[: spot.start()] + choose.choice(others) + code[spot.end() :] if others else None


def _number(code: str, choose: random.Random, text: str) -> str | None:
    head = re.match(r"\s*(?:@!?%\w+\s+)?[\w.:]+", code)
    spots = list(_NUMBER.finditer(code, head.end() if head else 0))
    if not spots:
        return None
    spot = choose.choice(spots)
    value = int(spot[1], 0) ^ (1 << choose.randrange(5))
    return code[: spot.start()] + str(value) + code[spot.end() :]


def _guard(code: str, choose: random.Random, text: str) -> str | None:
    """The opposite guard, or none."""
    found = re.match(r"(\s*)@(!?)(%\w+)\s+", code)
    if not found:
        return None
    left = "" if choose.random() < 0.5 else f"@{'' if found[2] else '!'}{found[3]} "
    return found[1] + left + code[found.end() :]


def assembler(text: str) -> Path:
    """The ptxas that takes the unchanged module: Triton carries several, of which old ones refuse a new PTX version.

    Raises:
        ContractError: there is none, so a mutant could not be told from what is no PTX.
    """
    from sglang_aiter_moe.testing.hopper_compile import BIN

    found = sorted(Path(BIN).glob("ptxas*"))
    for ptxas in found:
        if assembles(text, ptxas):
            return ptxas
    version = re.search(r"^\.version.*$", text, re.MULTILINE)
    raise ContractError(
        f"no ptxas takes the unchanged kernel ({version[0] if version else 'without .version'})",
        allowed=f"a module that one of {', '.join(map(str, found)) or 'no file at all in ' + BIN} takes",
        fix="install a Triton whose ptxas is as new as its PTX",
    )


def assembles(text: str, ptxas: Path) -> bool:
    """Whether ``ptxas`` takes the module."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "k.ptx")
        Path(path).write_text(text)
        command = [str(ptxas), "-arch=sm_90a", "-O0", path, "-o", os.devnull]
        return not subprocess.run(command, capture_output=True, check=False).returncode


def survey(kept: Kept, count: int, seed: int) -> list[dict]:
    """``count`` mutants and their outcomes.

    Raises:
        ContractError: no ptxas takes the unchanged kernel.
    """
    ptxas = assembler(kept.call.assembly)
    choose = random.Random(seed)
    limit = 4 * sum(kept.executed.values())
    return amd_mutation.collect(
        count,
        lambda: mutate(kept.call.assembly, kept.executed, choose),
        lambda text, mutation: assembles(text, ptxas),
        lambda text: outcome(kept, text, limit),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layer", help="form/mode/case of hopper_cases")
    parser.add_argument("kernel", metavar="KERNEL")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--multiprocessors", type=int, default=MULTIPROCESSORS)
    parser.add_argument("--json", type=Path, help="a list of reports, to which this one is added")
    options = parser.parse_args(arguments)
    provenance.may_keep(options.json)
    kept = keep(options.layer, options.kernel, multiprocessors=options.multiprocessors)
    rows = survey(kept, options.count, options.seed)
    caught = sum(row["outcome"] is not None for row in rows)
    print(f"{caught} of {len(rows)} caught", file=sys.stderr)
    if options.json:
        report = {
            "layer": options.layer,
            "kernel": options.kernel,
            "multiprocessors": options.multiprocessors,
            "seed": options.seed,
            "triton": triton.__version__,
        }
        amd_mutation.add_report(options.json, report, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
