"""What a command prints, as an SVG picture: text alone, in any monospace font."""

from __future__ import annotations

from html import escape

from rich.console import Console
from rich.segment import Segment
from rich.style import Style

_CHAR_W, _LINE_H, _MARGIN, _FONT = 7.2, 17, 14, 12
_BACKGROUND, _TEXT, _DIM = "#1e1e1e", "#d4d4d4", "#8a8a8a"
_COLOURS = {"green": "#6bbf59", "yellow": "#e5c07b", "red": "#e06c75", "cyan": "#56b6c2"}


def recording(width: int = 120) -> Console:
    """A console that keeps what is printed for :func:`picture` and shows nothing."""
    import io

    return Console(
        file=io.StringIO(),
        record=True,
        width=width,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        legacy_windows=False,
        _environ={},
    )


def picture(console: Console, command: str) -> str:
    """Everything that was printed to a :func:`recording` console, below the command, as SVG."""
    lines = _lines(console)
    columns = max([len(command) + 2, *(sum(len(t) for t, _ in line) for line in lines)])
    width = round(2 * _MARGIN + columns * _CHAR_W)
    height = 2 * _MARGIN + _LINE_H * (len(lines) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="monospace" font-size="{_FONT}" xml:space="preserve">',
        f"<title>{escape(command)}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="{_BACKGROUND}"/>',
        _text(0, 0, f"$ {command}", "#ffffff", False),
    ]
    for row, line in enumerate(lines, 1):
        column = 0
        for text, style in line:
            if text.strip():
                parts.append(_text(row, column, text, _colour(style), bool(style and style.bold)))
            column += len(text)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(row: int, column: int, text: str, colour: str, bold: bool) -> str:
    lead = len(text) - len(text.lstrip(" "))
    text = text.strip(" ")
    x = _MARGIN + (column + lead) * _CHAR_W
    y = _MARGIN + _FONT + row * _LINE_H
    weight = ' font-weight="bold"' if bold else ""
    # The length keeps columns in line whatever monospace font the reader has.
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{colour}" textLength="{len(text) * _CHAR_W:.1f}" '
        f'lengthAdjust="spacingAndGlyphs"{weight}>{escape(text)}</text>'
    )


def _colour(style: Style | None) -> str:
    if style is None:
        return _TEXT
    name = style.color.name if style.color is not None else ""
    return _COLOURS.get(name, _DIM if style.dim else _TEXT)


def _lines(console: Console) -> list[list[tuple[str, Style | None]]]:
    """The recorded text by lines, each as runs of one style."""
    segments = [s for s in console._record_buffer if not s.control]
    return [
        [(segment.text.rstrip("\n"), segment.style) for segment in line]
        for line in Segment.split_lines(segments)
    ]
