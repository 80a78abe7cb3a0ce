"""The YAML that LLVM writes between ``.amdgpu_metadata`` and ``.end_amdgpu_metadata``: maps, lists, scalars.

Only what LLVM's writer produces there is understood (LLVM, "Code Object Metadata"): block style, two spaces a level.
"""

from __future__ import annotations


def parse_metadata(lines: list[str]) -> dict:
    """Lines of the block to nested dict and list; integers, true and false are converted."""
    rows = []
    for line in lines:
        text = line.strip()
        if not text or text in ("---", "..."):
            continue
        indent = len(line) - len(line.lstrip())
        # "- key: value" is an entry of a list whose map starts two columns on.
        while text.startswith("- "):
            rows.append((indent, "-"))
            rest = text[2:].lstrip()
            indent += len(text) - len(rest)
            text = rest
        rows.append((indent, text))
    return _block(rows, 0)[0] if rows else {}


def _block(rows: list[tuple[int, str]], at: int):
    indent, text = rows[at]
    if text == "-":
        items = []
        while at < len(rows) and rows[at] == (indent, "-"):
            value, at = _block(rows, at + 1)
            items.append(value)
        return items, at
    key, colon, _ = text.partition(":")
    if not colon:
        return _scalar(text), at + 1
    values = {}
    while at < len(rows) and rows[at][0] == indent and rows[at][1] != "-":
        key, _, rest = rows[at][1].partition(":")
        at += 1
        if rest.strip():
            values[key] = _scalar(rest.strip())
        elif at < len(rows) and (rows[at][0] > indent or rows[at] == (indent, "-")):
            values[key], at = _block(rows, at)
        else:
            values[key] = ""
    return values, at


def _scalar(text: str):
    text = text.strip("'\"")
    if text in ("true", "false"):
        return text == "true"
    if text == "[]":
        return []
    try:
        return int(text, 0)
    except ValueError:
        return text
