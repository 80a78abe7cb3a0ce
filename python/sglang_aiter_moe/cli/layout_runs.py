"""A layout as a list of packed bytes with their source, and as runs of neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_aiter_moe.contract.layouts import WEIGHT_LAYOUTS
from sglang_aiter_moe.contract.scale_layouts import SCALE_LAYOUTS
from sglang_aiter_moe.errors import ContractError

#: What one picture or table holds: a map of every byte is a list in memory.
MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class LayoutMap:
    """One expert's bytes in a layout.

    Attributes:
        form: the layout's name.
        scales: whether it is one of scales.
        rows: raw rows N.
        row_bytes: raw bytes a row.
        packed_shape: shape of the packed tensor for one expert.
        source: for each packed byte the flat raw byte, -1 for padding.
    """

    form: str
    scales: bool
    rows: int
    row_bytes: int
    packed_shape: tuple[int, ...]
    source: list[int]

    @property
    def title(self) -> str:
        return f"{self.form} {'scales' if self.scales else 'weights'}"

    @property
    def chunk(self) -> int:
        """Packed bytes that always come from one row, next to each other."""
        return 1 if self.scales else 16

    def part_of(self, row: int) -> str:
        """`gate` for the first half of the rows, `up` for the second."""
        return "gate" if row < self.rows // 2 else "up"


@dataclass(frozen=True)
class Run:
    """Packed bytes `start` to `stop` that are neighbours in one raw row; row None is padding."""

    start: int
    stop: int
    row: int | None
    column: int
    part: str

    @property
    def columns_text(self) -> str:
        last = self.column + self.stop - self.start - 1
        return f"{self.column}-{last}" if last > self.column else str(self.column)


def resolve(form: str, *, rows: int, cols: int, scales: bool = False) -> LayoutMap:
    """The map of a form for one expert of `rows` rows of `cols` elements.

    Raises:
        ContractError: an unknown form, or sizes that AITER cannot lay out in it.
    """
    scales = scales or (form in SCALE_LAYOUTS and form not in WEIGHT_LAYOUTS)
    forms = SCALE_LAYOUTS if scales else WEIGHT_LAYOUTS
    if form not in forms:
        raise ContractError(
            f"FORM is {form!r}",
            allowed=f"weights: {', '.join(WEIGHT_LAYOUTS)}; scales: {', '.join(SCALE_LAYOUTS)}",
            fix="name one of these (`separated` scales need --scales)",
        )
    unit = 32 if scales else 2
    if cols <= 0 or cols % unit or rows <= 0:
        raise ContractError(
            f"--rows is {rows} and --cols {cols}",
            allowed=f"--rows above 0 and --cols a multiple of {unit}, counted in elements",
            fix="give the sizes of one expert's matrix, for example --rows 64 --cols 256",
        )
    if rows * (cols // unit) > MOST_BYTES:
        raise ContractError(
            f"--rows {rows} and --cols {cols} make {rows * (cols // unit)} bytes",
            allowed=f"{MOST_BYTES} bytes: each of them gets a place",
            fix="give a smaller matrix of the same form; the pattern repeats",
        )
    shape = (1, rows, cols // unit)
    source = forms[form].index_map(shape).tolist()
    packed_shape = tuple(forms[form].packed_shape(shape))
    return LayoutMap(form, scales, rows, cols // unit, packed_shape, source)


def runs(layout: LayoutMap) -> list[Run]:
    """The packed bytes in order, joined where raw bytes of one row follow each other."""
    found: list[Run] = []
    start, source = 0, layout.source
    for position in range(1, len(source) + 1):
        if position < len(source) and _continues(source, position, layout.row_bytes):
            continue
        first = source[start]
        if first < 0:
            found.append(Run(start, position, None, 0, ""))
        else:
            row, column = divmod(first, layout.row_bytes)
            found.append(Run(start, position, row, column, layout.part_of(row)))
        start = position
    return found


def _continues(source: list[int], position: int, row_bytes: int) -> bool:
    previous, current = source[position - 1], source[position]
    if previous < 0 or current < 0:
        return previous < 0 and current < 0
    return current == previous + 1 and current % row_bytes != 0
