"""Random changes of one instruction of a Hopper form's PTX: does an executed kernel show them?

``python -m sglang_aiter_moe.testing.ptx_mutation LAYER KERNEL [--count N] [--seed S] [--json FILE]`` runs a layer of
``hopper_cases`` (``fp8/A16W4/small``), keeps what KERNEL (``stage1_fp8``) was launched with, and launches it again with
one instruction changed at a time. A mutant is caught if anything that the kernel writes has other bits than the
unchanged kernel gives it, or if the interpreter raises.

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

import torch

from sglang_aiter_moe.nvptx.errors import ExecutionError, PtxError
from sglang_aiter_moe.nvptx.launch import Device
from sglang_aiter_moe.nvptx.triton_driver import Call, MapOf
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
                done,
            )
        )


def keep(layer: str, kernel: str, seed: int = 1) -> Kept:
    """The first launch of ``kernel`` in a layer of ``hopper_cases.layers()``.

    Raises:
        RuntimeError: the layer is wrong before any change, or has no such kernel.
    """
    form, case = hopper_cases.layers()[layer]
    kept: list[Kept] = []
    row = hopper_cases.execute(
        form, case, seed, device=lambda **options: _Keeping(kernel, kept, **options)
    )
    if not row["right"] or not kept:
        raise RuntimeError(f"{layer} is wrong before any change, or has no {kernel}: {row}")
    return kept[0]


def outcome(kept: Kept, text: str, limit: int) -> str | None:
    """How the launch with ``text`` differs from the kept one: "raised: ...", "changed: NAME", or None.

    Raises:
        NotAMutant: the interpreter does not have the changed instruction.
    """
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
    try:
        device.launched(dataclasses.replace(kept.call, arguments=tuple(arguments)))
    except PtxError as error:
        if "not modelled" in str(error):
            raise NotAMutant(str(error)) from error
        return f"raised: {error.what}"
    except ExecutionError as error:
        return f"raised: {error.what}"
    for (name, found), before in zip(names, kept.written, strict=True):
        if not torch.equal(as_bits(found), as_bits(before)):
            return f"changed: {name}"
    return None


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


def assembles(text: str) -> bool:
    """Whether ptxas, which Triton carries, takes the module."""
    from sglang_aiter_moe.testing.hopper_compile import BIN

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "k.ptx")
        Path(path).write_text(text)
        command = [os.path.join(BIN, "ptxas"), "-arch=sm_90a", "-O0", path, "-o", os.devnull]
        return not subprocess.run(command, capture_output=True, check=False).returncode


def survey(kept: Kept, count: int, seed: int) -> list[dict]:
    """``count`` mutants and their outcomes."""
    choose = random.Random(seed)
    limit = 4 * sum(kept.executed.values())
    return amd_mutation.collect(
        count,
        lambda: mutate(kept.call.assembly, kept.executed, choose),
        lambda text, mutation: assembles(text),
        lambda text: outcome(kept, text, limit),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layer", help="form/mode/case of hopper_cases")
    parser.add_argument("kernel", metavar="KERNEL")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a list of reports, to which this one is added")
    options = parser.parse_args(arguments)
    kept = keep(options.layer, options.kernel)
    rows = survey(kept, options.count, options.seed)
    caught = sum(row["outcome"] is not None for row in rows)
    print(f"{caught} of {len(rows)} caught", file=sys.stderr)
    if options.json:
        report = {"layer": options.layer, "kernel": options.kernel, "seed": options.seed}
        amd_mutation.add_report(options.json, report, rows)
    return int(caught < 0.8 * len(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
