"""Small Triton kernels that tests of the AMD interpreter launch."""

import triton
import triton.language as tl


@triton.jit
def scale_rows(x_ptr, y_ptr, factor, rows, COLUMNS: tl.constexpr):
    """``y = x * factor`` for float32 ``[rows, COLUMNS]``, 16 rows a program."""
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    at = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows)[:, None]
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=mask) * factor, mask=mask)
