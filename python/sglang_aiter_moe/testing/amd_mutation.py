"""Random changes of one instruction of AMDGPU assembly text: does what an executed kernel writes show them?

``python -m sglang_aiter_moe.testing.amd_mutation MODE KERNEL [--count N] [--seed S] [--by lines] [--json FILE]`` runs a
layer of Kimi K3's sizes (two experts, full tiles, tokens of very different sizes), keeps what KERNEL
(``stage1_kernel``, ``stage2_kernel``) was launched with, and launches it again with one instruction changed at a time;
then with other operands (``amd_launches.py``). A mutant is caught if anything that the kernel
writes has other bits than the unchanged kernel gives it, or if the interpreter raises.

The instruction is drawn from those executed, each execution of a wave being as likely; with ``--by lines`` from the
text's instructions. Not changed, because the interpreter does not model what they do: waits, no-ops, priorities,
barriers. A change that LLVM's assembler refuses, or that gives an instruction that the interpreter does not have, is no
mutant: another one is drawn in its place.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sglang_aiter_moe.amdgpu.errors import AssemblyError, ExecutionError
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation import provenance
from sglang_aiter_moe.testing import amd_launches
from sglang_aiter_moe.testing.amd_launches import Kept
from sglang_aiter_moe.testing.triton_compile import MODES

KERNELS = ("stage1_kernel", "stage2_kernel")
UNMODELLED = ("s_nop", "s_waitcnt", "s_barrier", "s_setprio", "s_sleep", "s_endpgm", "s_code_end")
SIBLINGS = {
    "add": ("sub",), "sub": ("add",), "mul": ("add",), "min": ("max",), "max": ("min",),
    "and": ("or", "xor"), "or": ("and",), "xor": ("or",), "lshlrev": ("lshrrev",), "lshrrev": ("lshlrev",),
    "ashrrev": ("lshrrev",), "lshl": ("lshr",), "lshr": ("lshl",), "lt": ("ge",), "le": ("gt",),
    "gt": ("le",), "ge": ("lt",), "eq": ("ne", "lg"), "ne": ("eq",), "lg": ("eq",), "nlt": ("lt",),
    "nle": ("le",), "scc0": ("scc1",), "scc1": ("scc0",), "vccz": ("vccnz",), "vccnz": ("vccz",),
    "execz": ("execnz",), "ubyte": ("sbyte",), "ushort": ("ubyte",), "exp": ("log",), "rcp": ("sqrt",),
}  # fmt: skip
"""Part of a mnemonic -> what may stand there instead."""
REDRAWS = 200
"""Changes after one another that make no mutant: an assembler refuses about every second one, never so many."""
_REGISTER = re.compile(r"(?<![\w.])([vsa])(\d+)(?![\w\[])|(?<![\w.])([vsa])\[(\d+):(\d+)\]")
_NUMBER = re.compile(r"(?<![\w\[:.$])(0x[0-9a-fA-F]+|\d+)(?![\w\]:.])")


@dataclass(frozen=True)
class Mutation:
    """``line``: in the text, from 1. ``kind``: "dropped", "opcode", "register", "number" or "modifier"."""

    line: int
    kind: str
    before: str
    after: str


def outcome(launches: list[Kept], text: str) -> str | None:
    """How launches with ``text`` differ from the kept ones: "raised: ...", "changed: NAME", or None.

    Raises:
        NotAMutant: the interpreter does not have the changed instruction.
    """
    for kept in launches:
        try:
            tensors, _ = amd_launches.run(kept, text)
        except AssemblyError as error:
            raise NotAMutant(str(error)) from error
        except ExecutionError as error:
            return f"raised: {error.what}"
        for name, before in kept.written.items():
            if not torch.equal(as_bits(tensors[name]), as_bits(before)):
                return f"changed: {name}"
    return None


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


class NotAMutant(Exception):
    """The changed text is nothing that the interpreter could run."""


def survey(launches: list[Kept], count: int, seed: int, by: str = "executions") -> list[dict]:
    """``count`` mutants and their outcomes; ``by``: "executions" (in the first launch) or "lines".

    Raises:
        ContractError: the assembler refuses what is not changed either.
    """
    choose = random.Random(seed)
    kept = launches[0]
    first = instructions(kept.call.assembly, kept.call.name)[0]
    unchanged = kept.call.assembly.splitlines()[first].split(";")[0].strip()
    if not assembles(unchanged, kept.arch):
        raise ContractError(
            f"the assembler refuses {unchanged!r} of {kept.call.name} for {kept.arch}",
            allowed="an assembler that takes the unchanged kernel",
            fix="use the Triton that compiled it",
        )
    weights = kept.executed if by == "executions" else None
    return collect(
        count,
        lambda: mutate(kept.call.assembly, kept.call.name, choose, weights),
        lambda text, mutation: assembles(mutation.after, kept.arch),
        lambda text: outcome(launches, text),
    )


def collect(
    count: int,
    draw: Callable[[], tuple[str, Mutation]],
    accepted: Callable[[str, Mutation], bool],
    try_out: Callable[[str], str | None],
) -> list[dict]:
    """``count`` drawn mutants that are accepted and can be run, with what ``try_out`` says of their texts.

    Raises:
        ContractError: ``REDRAWS`` changes after one another were no mutants.
    """
    rows, refused, last = [], 0, ""
    while len(rows) < count:
        if refused == REDRAWS:
            raise ContractError(
                f"{refused} changes after one another were refused, the last one: {last!r}",
                allowed="an assembler that takes what the interpreter runs",
                fix="assemble the unchanged kernel and look at what the assembler says",
            )
        text, mutation = draw()
        refused, last = refused + 1, mutation.after
        if not accepted(text, mutation):
            continue
        start = time.perf_counter()
        try:
            found = try_out(text)
        except NotAMutant as error:
            print(f"no mutant: {mutation.after}: {error}", file=sys.stderr)
            continue
        refused = 0
        rows.append(asdict(mutation) | {"outcome": found, "seconds": time.perf_counter() - start})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def add_report(path: Path, report: dict, rows: list[dict]) -> None:
    """Adds a report to a file's list, in place of an earlier one of the same key.

    Raises:
        ContractError: it would be a kept result without a commit.
    """
    provenance.may_keep(path)
    key = tuple(report.items())
    kept = json.loads(path.read_text()) if path.exists() else []
    kept = [r for r in kept if tuple((k, r.get(k)) for k, _ in key) != key]
    made = provenance.provenance() | report | {"mutants": rows}
    path.write_text(json.dumps([*kept, made], indent=1) + "\n")


def instructions(text: str, kernel: str) -> list[int]:
    """Indices of the lines that may be changed: the kernel's instructions up to its end."""
    lines = text.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith(f"{kernel}:"))
    found = []
    for i in range(start + 1, len(lines)):
        words = lines[i].split()
        if not words or not lines[i][0].isspace() or words[0].startswith((".", ";", "//")):
            if lines[i].startswith(".Lfunc_end"):
                break
            continue
        if not words[0].startswith(UNMODELLED):
            found.append(i)
    return found


def assembles(instruction: str, arch: str) -> bool:
    """Whether LLVM's assembler, which Triton carries, takes ``instruction``: else it makes no mutant of a kernel.

    The assembler writes its complaint to standard error.
    """
    from triton.backends.amd import compiler

    # Triton 3.9 moved the function from its C++ module to its Python one.
    assemble = getattr(compiler, "assemble_amdgcn", None) or compiler.amd.assemble_amdgcn
    try:
        assemble(f"\t.text\n\t{instruction}\n", arch, "")
    except RuntimeError:
        return False
    return True


def mutate(
    text: str, kernel: str, choose: random.Random, weights: dict[int, int] | None = None
) -> tuple[str, Mutation]:
    """``text`` with one instruction of ``kernel`` changed.

    Each instruction is as likely, or as likely as the weight of its line; then each kind of change. The result need
    not be assembly that an assembler takes: see :func:`assembles`.
    """
    lines = text.splitlines()
    candidates = instructions(text, kernel)
    likely = [1 if weights is None else weights.get(i + 1, 0) for i in candidates]
    while True:
        (at,) = choose.choices(candidates, likely)
        code = lines[at].split(";")[0].rstrip()
        changes = [_dropped, _opcode, _register, _number, _modifier]
        choose.shuffle(changes)
        for change in changes:
            after = change(code, choose, text)
            if after is not None and after != code:
                lines[at] = after
                kind = change.__name__.strip("_")
                return "\n".join(lines) + "\n", Mutation(at + 1, kind, code.strip(), after.strip())


def _dropped(code: str, choose: random.Random, text: str) -> str | None:
    if code.split()[0].startswith(("s_branch", "s_cbranch")):
        return None  # without its backward branch a loop ends early: "opcode" turns those round
    return "\ts_nop 0"


def _opcode(code: str, choose: random.Random, text: str) -> str | None:
    head, _, rest = code.strip().partition(" ")
    parts = head.split("_")
    spots = [(i, s) for i, part in enumerate(parts) for s in SIBLINGS.get(part, ())]
    if not spots:
        return None
    i, sibling = choose.choice(spots)
    return "\t" + "_".join([*parts[:i], sibling, *parts[i + 1 :]]) + " " + rest


def _register(code: str, choose: random.Random, text: str) -> str | None:
    """Another register of the same kind, width and alignment that the kernel names."""
    spots = list(_REGISTER.finditer(code, len(code) - len(code.lstrip()) + len(code.split()[0])))
    if not spots:
        return None
    spot = choose.choice(spots)
    others = sorted({m.group(0) for m in _REGISTER.finditer(text) if _shape(m) == _shape(spot)})
    others = [o for o in others if o != spot.group(0)]
    return code[: spot.start()] + choose.choice(others) + code[spot.end() :] if others else None


def _shape(found: re.Match) -> tuple:
    if found[1]:
        return found[1], 1
    first, last = int(found[4]), int(found[5])
    return found[3], last - first + 1, first % 4 if found[3] == "s" else first % 2


def _number(code: str, choose: random.Random, text: str) -> str | None:
    if "cbranch" in code or "s_branch" in code:
        return None
    spots = list(_NUMBER.finditer(code, len(code) - len(code.lstrip()) + len(code.split()[0])))
    if not spots:
        return None
    spot = choose.choice(spots)
    value = int(spot[1], 0)
    return code[: spot.start()] + str(value ^ (1 << choose.randrange(5))) + code[spot.end() :]


def _modifier(code: str, choose: random.Random, text: str) -> str | None:
    spots = list(re.finditer(r"offset:(\d+)|(?:op_sel|op_sel_hi|neg_lo|neg_hi):\[[01,]+\]", code))
    if not spots:
        return None
    spot = choose.choice(spots)
    old = spot.group(0)
    if spot[1]:
        new = f"offset:{int(spot[1]) ^ (1 << choose.randrange(4, 8))}"
    else:
        bits = [i for i, c in enumerate(old) if c in "01" and i > old.index("[")]
        bit = choose.choice(
            bits[:2] if "v_mfma" in code else bits
        )  # the third has no meaning there
        new = old[:bit] + ("1" if old[bit] == "0" else "0") + old[bit + 1 :]
    return code[: spot.start()] + new + code[spot.end() :]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("kernel", choices=KERNELS, metavar="KERNEL")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--by", choices=("executions", "lines"), default="executions")
    parser.add_argument("--json", type=Path, help="a list of reports, to which this one is added")
    options = parser.parse_args(arguments)
    provenance.may_keep(options.json)
    kept = amd_launches.keep(amd_launches.layer(options.mode), options.kernel)
    rows = survey(amd_launches.launches(kept), options.count, options.seed, options.by)
    caught = sum(row["outcome"] is not None for row in rows)
    print(f"{caught} of {len(rows)} caught", file=sys.stderr)
    if options.json:
        report = {
            "mode": options.mode,
            "kernel": options.kernel,
            "seed": options.seed,
            "by": options.by,
        }
        add_report(options.json, report, rows)
    return int(caught < 0.9 * len(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
