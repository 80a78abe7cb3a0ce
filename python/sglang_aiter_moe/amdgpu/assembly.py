"""LLVM AMDGPU assembly text, with its metadata, to instructions and kernels.

Read is what LLVM's printer writes: Triton's ``asm["amdgcn"]`` and FlyDSL's ``21_final_isa.s``. Sources: LLVM's "User
Guide for AMDGPU Backend" (code object metadata V5, ``.amdhsa_`` directives, order of user SGPRs) and its "Syntax of
AMDGPU Instruction Operands" and "Modifiers".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sglang_aiter_moe.amdgpu.errors import AssemblyError
from sglang_aiter_moe.amdgpu.metadata import parse_metadata

SPECIAL_SGPRS = {
    "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1), "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2), "xnack_mask_lo": (104, 1), "xnack_mask_hi": (105, 1),
    "vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1),
    "m0": (124, 1), "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1),
}  # fmt: skip
"""Named scalar registers and their numbers in GFX9's operand encoding."""
REGISTERS = {"v": 256, "a": 256, "s": 102}
"""How many of each kind an operand can name by number."""
ENCODINGS = ("e32", "e64", "sdwa", "dpp")
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
"""Targets, and the LDS that a workgroup can have: the CDNA3 and CDNA4 ISA guides, "LDS"."""


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        kind: "v", "a", "s" (registers), "int", "float" (constants), "label", "off", or "name" (anything else).
        index: the first register's number.
        count: how many registers.
        value: the constant, or the label's or other name.
        negate, absolute, sext: modifiers written around the operand.
    """

    kind: str
    index: int = 0
    count: int = 1
    value: int | float | str = 0
    negate: bool = False
    absolute: bool = False
    sext: bool = False

    @property
    def plain(self) -> bool:
        return not (self.negate or self.absolute or self.sext)


@dataclass(frozen=True)
class Instruction:
    """``mnemonic`` as written; ``opcode`` without the encoding's suffix, which is ``encoding``.

    ``modifiers``: name -> True for a flag, an int, a str (``dst_sel:WORD_1``) or a tuple of ints (``op_sel:[0,1]``).
    """

    mnemonic: str
    opcode: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, object]
    line: int
    text: str
    target: str = ""


@dataclass(frozen=True)
class Argument:
    """One kernel argument. ``value_kind`` is LLVM's: "global_buffer", "by_value", "hidden_..."."""

    offset: int
    size: int
    value_kind: str
    name: str = ""


@dataclass(frozen=True)
class Kernel:
    """What a kernel's descriptor and metadata say.

    Attributes:
        entry: index of its first instruction in ``Program.instructions``.
        target: "gfx950", without features.
        vgprs, agprs, sgprs: counts in the metadata.
        lds_bytes: static LDS; a launch may ask for more (Triton's kernels have 0 here and state it beside the text).
        workgroup_size: the most work-items of a workgroup.
        user_sgprs: what is placed in s0 on, in order, as (name, registers).
        kernarg_preload: (first dword, dwords) of the kernarg segment that follow the user SGPRs.
        workgroup_ids: whether x, y, z follow in SGPRs.
        workitem_ids: 0: x alone in v0; 1: x and y; 2: x, y, z (ten bits each).
    """

    name: str
    entry: int
    target: str
    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    workgroup_size: int
    wavefront_size: int
    kernarg_size: int
    arguments: tuple[Argument, ...]
    user_sgprs: tuple[tuple[str, int], ...]
    kernarg_preload: tuple[int, int]
    workgroup_ids: tuple[bool, bool, bool]
    workitem_ids: int


@dataclass(frozen=True)
class Program:
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    """Label -> index of the instruction after it."""
    kernels: dict[str, Kernel] = field(default_factory=dict)


def parse(text: str) -> Program:
    """The program of one assembly file.

    Raises:
        AssemblyError: a line that is not understood, a label that is nowhere, a target that is not modelled.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    descriptors: dict[str, dict[str, str]] = {}
    metadata: list[str] = []
    target, descriptor, in_metadata, in_text = "", None, False, True
    for number, raw in enumerate(text.splitlines(), 1):
        stripped = raw.strip()
        if in_metadata:
            in_metadata = stripped != ".end_amdgpu_metadata"
            if in_metadata:
                metadata.append(raw)
            continue
        line = _without_comment(raw).strip()
        if found := re.match(r'([\w.$@]+|"[^"]+"):\s*', line):
            if in_text:
                labels[found[1].strip('"')] = len(instructions)
            line = line[found.end() :]
        if not line:
            continue
        if line.startswith("."):
            word, _, rest = line.partition("\t") if "\t" in line else line.partition(" ")
            word, rest = word.strip(), rest.strip()
            if word in (".text", ".section"):
                in_text = word == ".text" or rest.startswith(".text")
            elif word == ".amdgpu_metadata":
                in_metadata = True
            elif word == ".amdgcn_target":
                target = rest.strip('"').split(":")[0].rsplit("-", 1)[-1]
            elif word == ".amdhsa_kernel":
                descriptor = descriptors.setdefault(rest, {})
            elif word == ".end_amdhsa_kernel":
                descriptor = None
            elif descriptor is not None:
                descriptor[word.removeprefix(".amdhsa_")] = rest
            continue
        if in_text:
            instructions.append(parse_instruction(line, number, target))
    if target not in LDS_BYTES:
        raise AssemblyError(
            f".amdgcn_target names {target or 'nothing'}",
            allowed=" or ".join(LDS_BYTES),
            fix="compile the kernel for one of them",
        )
    for instruction in instructions:
        for operand in instruction.operands:
            if operand.kind == "label" and operand.value not in labels:
                raise _error(instruction.line, f"the label {operand.value} is nowhere in the text")
    try:
        described = {k[".name"]: k for k in parse_metadata(metadata).get("amdhsa.kernels", [])}
        kernels = {
            name: _kernel(name, values, described.get(name, {}), labels, target)
            for name, values in descriptors.items()
        }
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise AssemblyError(
            f"the metadata of the kernels lacks or misplaces {error}",
            allowed="the block between .amdgpu_metadata and .end_amdgpu_metadata as LLVM prints it",
            fix="pass the unedited text of a compiled kernel",
        ) from error
    return Program(tuple(instructions), labels, kernels)


def parse_instruction(line: str, number: int = 0, target: str = "") -> Instruction:
    """One instruction without comment: ``v_add_u32_e32 v1, s2, v3``."""
    mnemonic, _, rest = line.replace("\t", " ").partition(" ")
    opcode, encoding = mnemonic, ""
    for suffix in ENCODINGS:
        if mnemonic.endswith("_" + suffix):
            opcode, encoding = mnemonic[: -len(suffix) - 1], suffix
    chunks = _split(rest.strip(), ",") if rest.strip() else []
    operands: list[Operand] = []
    modifiers: dict[str, object] = {}
    for position, chunk in enumerate(chunks):
        words = _split(chunk, " ")
        if position + 1 < len(chunks) and len(words) > 1:
            raise _error(number, f"{chunk!r} in {line!r} is not an operand")
        for word in words:
            # Only the last chunk has modifiers, and its first word is an operand if it looks like one.
            first = word is words[0] and not _is_modifier(word)
            if first or mnemonic == "s_waitcnt":
                if word != "&":
                    operands.append(_operand(word, number))
            else:
                name, value = _modifier(word, number)
                if name in modifiers:
                    raise _error(number, f"the modifier {name} is written twice in {line!r}")
                modifiers[name] = value
    return Instruction(mnemonic, opcode, encoding, tuple(operands), modifiers, number, line, target)


_FLAGS = (
    "offen", "idxen", "glc", "slc", "nt", "sc0", "sc1", "lds", "gds", "clamp", "tfe", "row_mirror", "row_half_mirror",
)  # fmt: skip


def _is_modifier(word: str) -> bool:
    return word in _FLAGS or bool(re.match(r"[a-z_0-9]+:", word))


def _modifier(word: str, number: int) -> tuple[str, object]:
    name, colon, value = word.partition(":")
    if not colon:
        if not _is_modifier(word):
            raise _error(number, f"the modifier {word!r} is unknown")
        return name, True
    if value.startswith("["):
        try:
            return name, tuple(int(v, 0) for v in value.strip("[]").split(","))
        except ValueError:
            raise _error(number, f"the modifier {word!r} is not a list of integers") from None
    try:
        return name, int(value, 0)
    except ValueError:
        return name, value


def _operand(word: str, number: int) -> Operand:
    word = word.strip()
    negate = absolute = sext = False
    if word.startswith("-") and not re.match(r"-[\d.]", word):
        negate, word = True, word[1:]
    if found := re.fullmatch(r"neg\((.*)\)", word):
        negate, word = True, found[1]
    if found := re.fullmatch(r"\|(.*)\||abs\((.*)\)", word):
        absolute, word = True, found[1] or found[2]
    if found := re.fullmatch(r"sext\((.*)\)", word):
        sext, word = True, found[1]
    marks = {"negate": negate, "absolute": absolute, "sext": sext}
    if found := re.fullmatch(r"([vas])(?:(\d+)|\[(\d+)(?::(\d+))?\])", word):
        first = int(found[2] or found[3])
        last = int(found[4] or first)
        if not first <= last < REGISTERS[found[1]]:
            raise _error(
                number, f"{word} is not among {REGISTERS[found[1]]} registers, or backwards"
            )
        align = _alignment(found[1], last - first + 1)
        if first % align:
            raise _error(
                number,
                f"{word} begins at register {first}, where {last - first + 1} registers of this kind "
                f"begin at a multiple of {align}",
            )
        return Operand(found[1], first, last - first + 1, **marks)
    if word in SPECIAL_SGPRS:
        return Operand("s", *SPECIAL_SGPRS[word], **marks)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)", word):
        return Operand("int", value=int(word, 0), **marks)
    if re.fullmatch(r"-?\d*\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+", word):
        return Operand("float", value=float(word), **marks)
    if word == "off":
        return Operand("off")
    if word.startswith((".L", "BB")) or re.fullmatch(r"\$?[A-Za-z_][\w.$]*", word):
        return Operand("label" if word.startswith((".L", "BB")) else "name", value=word, **marks)
    if re.fullmatch(r"\w+\([^()]*\)", word) or re.fullmatch(r"[\w.$@+-]+", word):
        return Operand("name", value=word)
    raise _error(number, f"the operand {word!r} is not understood")


def _alignment(kind: str, count: int) -> int:
    """What the first of ``count`` registers is a multiple of, on gfx90a and later.

    Source: AMD, "CDNA3 ISA", on the alignment of SGPRs (pairs even, more than 64 bits by four) and of VGPRs (even);
    LLVM's assembler refuses the same.
    """
    if count == 1:
        return 1
    return 4 if kind == "s" and count > 2 else 2


def _split(text: str, separator: str) -> list[str]:
    """At separators outside brackets, parentheses; empty parts dropped."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[(":
            depth += 1
        elif c in "])":
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


def _without_comment(line: str) -> str:
    for mark in (";", "//"):
        # Neither occurs inside an instruction; strings are in directives, whose text is not read.
        at = line.find(mark)
        if at >= 0:
            line = line[:at]
    return line


def _error(number: int, what: str) -> AssemblyError:
    return AssemblyError(
        f"line {number}: {what}",
        allowed="AMDGPU assembly as LLVM prints it",
        fix="pass the unedited text of a compiled kernel",
    )


_USER_SGPRS = (
    ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2), ("dispatch_id", 2),
    ("flat_scratch_init", 2), ("private_segment_size", 1),
)  # fmt: skip


def _kernel(name: str, values: dict, described: dict, labels: dict, target: str) -> Kernel:
    def number(key: str, default: int = 0) -> int:
        try:
            return int(values.get(key, default), 0) if key in values else default
        except ValueError:
            raise AssemblyError(
                f".amdhsa_{key} of {name} is {values[key]!r}",
                allowed="a number",
                fix="print the kernel with an LLVM that resolves it",
            ) from None

    if name not in labels:
        raise _error(0, f"the kernel {name} has no label")
    if number("user_sgpr_private_segment_buffer") or described.get(".wavefront_size", 64) != 64:
        raise AssemblyError(
            f"{name} uses a private segment buffer, or waves of {described.get('.wavefront_size')}",
            allowed="architected flat scratch and waves of 64, as gfx942 and gfx950 have",
            fix="compile it for gfx942 or gfx950",
        )
    modes = {
        "float_round_mode_32": 0, "float_round_mode_16_64": 0,
        "float_denorm_mode_32": 3, "float_denorm_mode_16_64": 3, "fp16_overflow": 0,
    }  # fmt: skip
    for key, wanted in modes.items():
        default = 0 if key == "float_denorm_mode_32" else wanted
        if number(key, default) != wanted:
            raise AssemblyError(
                f".amdhsa_{key} of {name} is {number(key, default)}",
                allowed=f"{wanted}: nearest even, subnormal numbers kept",
                fix="compile the kernel without another floating point mode",
            )
    arguments = tuple(
        Argument(a[".offset"], a[".size"], a[".value_kind"], str(a.get(".name", "")))
        for a in described.get(".args", [])
    )
    return Kernel(
        name=name,
        entry=labels[name],
        target=target,
        vgprs=described.get(".vgpr_count", 0),
        agprs=described.get(".agpr_count", 0),
        sgprs=described.get(".sgpr_count", 0),
        lds_bytes=number("group_segment_fixed_size"),
        scratch_bytes=number("private_segment_fixed_size"),
        workgroup_size=described.get(".max_flat_workgroup_size", 1024),
        wavefront_size=described.get(".wavefront_size", 64),
        kernarg_size=number("kernarg_size"),
        arguments=arguments,
        user_sgprs=tuple((n, c) for n, c in _USER_SGPRS if number("user_sgpr_" + n)),
        kernarg_preload=(
            number("user_sgpr_kernarg_preload_offset"),
            number("user_sgpr_kernarg_preload_length"),
        ),
        workgroup_ids=tuple(bool(number(f"system_sgpr_workgroup_id_{c}", c == "x")) for c in "xyz"),
        workitem_ids=number("system_vgpr_workitem_id"),
    )
