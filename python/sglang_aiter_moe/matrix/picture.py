"""The stored results as a picture: what went wrong, by kind and release, without and with the patch set."""

from __future__ import annotations

from xml.sax.saxutils import escape

from sglang_aiter_moe.matrix.classes import Class
from sglang_aiter_moe.matrix.kinds import KINDS
from sglang_aiter_moe.matrix.stored import Stored

_LABELS, _COLUMN, _ROW, _TOP = 300, 52, 26, 64
_RED, _AMBER = (190, 30, 45), (214, 137, 16)
_ALONE, _PATCHED = "unpatched", "patched"


def rows(stored: Stored) -> list[tuple[str, bool, dict[tuple[str, str], int]]]:
    """(title, whether it is silent, count by release and side) of each kind that occurs, and of what is not silent."""
    keys = [(release, side) for release in stored.letters for side in (_ALONE, _PATCHED)]
    keys = [(release, side) for release, side in keys if side in stored.letters[release]]
    only = stored.run_everywhere()
    found = []
    for kind in KINDS:
        counts = {key: stored.kinds(*key, only)[kind.key] for key in keys}
        if any(counts.values()):
            found.append((kind.key, True, counts))
    for title, kind in (("refused late", Class.REFUSED_LATE), ("crashed", Class.CRASHED)):
        found.append((title, False, {key: stored.counts(*key, only)[kind] for key in keys}))
    return found


def svg(stored: Stored) -> str:
    """A grid: kinds by releases, each release alone and with the patch set; darker is more."""
    lines = rows(stored)
    keys = list(lines[0][2])
    most = max(count for _, _, counts in lines for count in counts.values()) or 1
    width = _LABELS + _COLUMN * len(keys) + 12
    height = _TOP + _ROW * len(lines) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(
            12,
            22,
            f"Cells of {len(stored.run_everywhere())} that are silently wrong, refused late or crash",
        ),
    ]
    for index, (release, side) in enumerate(keys):
        x = _LABELS + _COLUMN * index + _COLUMN // 2
        parts.append(_text(x, 42, release, anchor="middle"))
        parts.append(_text(x, 57, "plugin" if side == _PATCHED else "alone", "middle", "#555"))
    for number, (title, silent, counts) in enumerate(lines):
        y = _TOP + _ROW * number
        parts.append(_text(12, y + 18, ("silent: " if silent else "") + title))
        for index, key in enumerate(keys):
            parts += _cell(_LABELS + _COLUMN * index, y, counts[key], most, silent)
    note = (
        "0 in every column headed plugin"
        if _holds(lines)
        else "not 0 in every column headed plugin"
    )
    parts.append(_text(12, height - 14, note, color="#555"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _holds(lines: list) -> bool:
    return not any(
        n for _, _, counts in lines for (_, side), n in counts.items() if side == _PATCHED
    )


def _cell(x: int, y: int, count: int, most: int, silent: bool) -> list[str]:
    share = 0 if not count else 20 + 80 * count // most  # per cent; one cell in a thousand shows
    colour = _RED if silent else _AMBER
    mixed = [255 - (255 - part) * share // 100 for part in colour]
    fill = f"rgb({mixed[0]},{mixed[1]},{mixed[2]})" if count else "#eef5ee"
    box = f'<rect x="{x + 1}" y="{y + 1}" width="{_COLUMN - 2}" height="{_ROW - 2}" fill="{fill}"/>'
    colour = "#fff" if share > 55 else "#222"
    return [box, _text(x + _COLUMN // 2, y + 18, str(count), "middle", colour)]


def _text(x: int, y: int, text: str, anchor: str = "start", color: str = "#222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
