"""Operands of an instruction: registers, constants, vectors, addresses, labels."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from sglang_aiter_moe.nvptx.errors import PtxError


@dataclass(frozen=True)
class Operand:
    """One operand.

    ``kind`` and what it uses:

    - ``reg``: ``slot``, ``name``, ``type`` (class of the register), ``negate`` for ``!%p``;
    - ``int``: ``value``; ``float``: ``value`` (a Python float; of ``0f..`` the exact one, NaN with ``bits``);
    - ``symbol``: a shared variable, ``value`` is its address; ``param``: ``value`` is its offset;
    - ``special``: ``name`` (``%tid.x``); ``sink``: ``_``;
    - ``vector``: ``items``; ``pair`` (``a|b``): ``items``;
    - ``address``: ``base`` (reg, symbol, param or int), ``offset``, and ``items``, what follows in the brackets;
    - ``label``: ``value`` is the position; ``table``: ``items`` are labels.
    """

    kind: str
    name: str = ""
    slot: int = -1
    type: str = ""
    value: int | float = 0
    bits: int | None = None
    offset: int = 0
    negate: bool = False
    base: Operand | None = None
    items: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Names:
    """What names mean where the instruction stands."""

    registers: Callable[[str], int | None]
    classes: list[tuple[str, str]]
    labels: Callable[[str], int | None]
    tables: Callable[[str], list[str] | None]
    symbols: dict[str, int]
    params: dict[str, int]


_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")
_HEX_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)$")
_DECIMAL = re.compile(r"-?\d+\.\d*(?:[eE][+-]?\d+)?$")
_SPECIAL = re.compile(
    r"%(?:tid|ntid|ctaid|nctaid|cluster_ctaid|cluster_nctaid|clusterid|nclusterid)\.[xyz]$|"
    r"%(?:laneid|warpid|nwarpid|smid|nsmid|clock|clock_hi|clock64|globaltimer|cluster_ctarank|cluster_nctarank|"
    r"dynamic_smem_size|total_smem_size|lanemask_(?:eq|lt|le|gt|ge))$"
)


def refuse(line: int, text: str, what: str) -> PtxError:
    return PtxError(
        f"line {line}: {what} is not modelled ({text[:120]})",
        allowed="operands as LLVM prints them for sm_90a",
        fix="see docs/hopper-execution.md, or add it to sglang_aiter_moe/nvptx",
    )


def split(text: str) -> list[str]:
    """At commas that are outside brackets and braces."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


def parse_all(text: str, names: Names) -> list[Operand]:
    """Raises ValueError for what it cannot read."""
    return [parse(part, names) for part in split(text)]


def parse(text: str, names: Names) -> Operand:
    if text[0] == "{" and text[-1] == "}":
        return Operand("vector", items=tuple(parse_all(text[1:-1], names)))
    if text[0] == "[" and text[-1] == "]":
        first, *rest = split(text[1:-1])
        return _address(first, tuple(parse(x, names) for x in rest), names)
    if text == "_":
        return Operand("sink")
    if "|" in text:
        return Operand("pair", items=tuple(parse(x.strip(), names) for x in text.split("|")))
    if text[0] == "!":
        inner = parse(text[1:].strip(), names)
        return Operand("reg", inner.name, inner.slot, inner.type, negate=True)
    slot = names.registers(text)
    if slot is not None:
        return Operand("reg", text, slot, names.classes[slot][1])
    if _INTEGER.match(text):
        return Operand("int", text, value=int(text.rstrip("U"), 0))
    if match := _HEX_FLOAT.match(text):
        return _hex_float(text, match)
    if _DECIMAL.match(text):
        return Operand("float", text, value=float(text))
    if text in names.symbols:
        return Operand("symbol", text, value=names.symbols[text])
    if text in names.params:
        return Operand("param", text, value=names.params[text])
    if _SPECIAL.match(text):
        return Operand("special", text)
    if (table := names.tables(text)) is not None:
        return Operand("table", text, items=tuple(parse(x, names) for x in table))
    if (label := names.labels(text)) is not None:
        return Operand("label", text, value=label)
    raise ValueError(f"the operand {text!r}")


def _hex_float(text: str, match: re.Match) -> Operand:
    wide = match.group(1) in "dD"
    if len(match.group(2)) != (16 if wide else 8):
        raise ValueError(f"the constant {text!r}")
    bits = int(match.group(2), 16)
    value = struct.unpack("<d" if wide else "<f", bits.to_bytes(8 if wide else 4, "little"))[0]
    return Operand("float", text, value=value, bits=bits, type="f64" if wide else "f32")


_SUM = re.compile(r"(.+?)\s*\+\s*(-?(?:0[xX][0-9a-fA-F]+|\d+))$")


def _address(text: str, items: tuple[Operand, ...], names: Names) -> Operand:
    offset = 0
    if match := _SUM.match(text):
        text, offset = match.group(1), int(match.group(2), 0)
    return Operand("address", base=parse(text, names), offset=offset, items=items)
