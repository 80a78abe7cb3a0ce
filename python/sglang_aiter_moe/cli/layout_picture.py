"""A layout as SVG: the raw matrix on the left, the packed memory on the right, one colour a row."""

from __future__ import annotations

from html import escape

from sglang_aiter_moe.cli.layout_runs import LayoutMap
from sglang_aiter_moe.errors import ContractError

MAX_CELLS = 8192
CELL = 18  # pixels
MARGIN = 24
HEAD = 64
PER_LINE = 16  # chunks of packed memory in a line: one tile of weights


def draw(layout: LayoutMap) -> str:
    """The picture as SVG text.

    Raises:
        ContractError: more cells than anyone can look at.
    """
    chunk = layout.chunk
    cells = len(layout.source) // chunk
    if cells > MAX_CELLS:
        raise ContractError(
            f"the picture would have {cells} cells",
            allowed=f"at most {MAX_CELLS}",
            fix="draw a smaller matrix, for example --rows 64 --cols 256: the pattern repeats",
        )
    raw_columns = layout.row_bytes // chunk
    raw_width = raw_columns * CELL
    packed_x = MARGIN + raw_width + 3 * MARGIN
    lines = -(-cells // PER_LINE)
    width = packed_x + PER_LINE * CELL + MARGIN
    height = HEAD + max(layout.rows, lines) * CELL + 2 * MARGIN
    unit = "bytes" if chunk > 1 else "byte"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="9">',
        f"<title>{escape(layout.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="20" font-size="13">{escape(layout.title)}, one cell = {chunk} {unit}'
        "</text>",
        f'<text x="{MARGIN}" y="38">blue: first half of the rows (gate), orange: second half (up), '
        "grey: padding; the number is the raw row</text>",
        f'<text x="{MARGIN}" y="{HEAD - 8}">raw</text>',
        f'<text x="{packed_x}" y="{HEAD - 8}">packed, line after line</text>',
    ]
    for row in range(layout.rows):
        for column in range(raw_columns):
            x, y = MARGIN + column * CELL, HEAD + row * CELL
            parts.append(_cell(layout, x, y, row, f"row {row}, chunk {column}"))
    for cell in range(cells):
        source = layout.source[cell * chunk]
        x, y = packed_x + cell % PER_LINE * CELL, HEAD + cell // PER_LINE * CELL
        if source < 0:
            parts.append(_cell(layout, x, y, None, f"packed {cell * chunk}: padding"))
            continue
        row, column = divmod(source, layout.row_bytes)
        text = f"packed {cell * chunk}: row {row}, byte {column}"
        parts.append(_cell(layout, x, y, row, text))
    parts.append("</svg>\n")
    return "\n".join(parts)


def _cell(layout: LayoutMap, x: int, y: int, row: int | None, tip: str) -> str:
    if row is None:
        fill, label = "#dddddd", ""
    else:
        half = max(layout.rows // 2, 1)
        lightness = 88 - 38 * (row % half) // half
        hue = 212 if layout.part_of(row) == "gate" else 28
        fill, label = f"hsl({hue},75%,{lightness}%)", str(row)
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x}" y="{y}" width="{CELL - 1}" '
        f'height="{CELL - 1}" fill="{fill}"/><text x="{x + (CELL - 1) / 2}" y="{y + 12}" '
        f'text-anchor="middle">{label}</text></g>'
    )
