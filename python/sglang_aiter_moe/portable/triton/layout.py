"""Where AITER keeps a weight byte and a scale byte (docs/contract.md sections a.1 and a.3).

All of them take *logical* coordinates: for w13 a half (0 gate, 1 up) and a row ``i < I`` of that half, for w2
half 0 and ``i < H``. Layout names are those of ``portable.request``.
"""

import triton
import triton.language as tl


@triton.jit
def weight_row(half, i, HALF_ROWS: tl.constexpr, LAYOUT: tl.constexpr):
    """Row of the stored matrix that holds row ``i`` of ``half``."""
    if LAYOUT == "gu_interleaved":  # 16-row tiles alternate gate and up
        return (i // 16) * 32 + half * 16 + i % 16
    elif LAYOUT == "gu_interleaved_gfx1250":  # single rows do
        return i * 2 + half
    else:
        return i + half * HALF_ROWS


@triton.jit
def weight_offset(row, kbyte, KBYTES: tl.constexpr, LAYOUT: tl.constexpr):
    """Byte offset inside one expert: [N/16][KBYTES/16][16 rows][16 bytes], or row-major for "raw"."""
    if LAYOUT == "raw":
        return row * KBYTES + kbyte
    else:
        return ((row // 16) * (KBYTES // 16) + kbyte // 16) * 256 + (row % 16) * 16 + kbyte % 16


@triton.constexpr_function
def scale_columns(blocks, layout):
    """Stored columns for ``blocks`` = K/32 real ones."""
    return (blocks + 7) // 8 * 8 if layout in ("separated", "gu_interleaved") else blocks


@triton.jit
def scale_offset(half, i, j, HALF_ROWS: tl.constexpr, BLOCKS: tl.constexpr, LAYOUT: tl.constexpr):
    """Byte offset inside one expert of the scale of row ``i`` of ``half``, K block ``j``."""
    COLS: tl.constexpr = scale_columns(BLOCKS, LAYOUT)
    row = i + half * HALF_ROWS
    if LAYOUT == "separated":
        tile = (row // 32) * (32 * COLS) + (j // 8) * 256
        return tile + (j % 4) * 64 + (row % 16) * 4 + (j % 8) // 4 * 2 + (row % 32) // 16
    elif LAYOUT == "gu_interleaved":  # the lowest bit is gate/up and not the 16-row half
        tile = (i // 16) * (32 * COLS) + (j // 8) * 256
        return tile + (j % 4) * 64 + (i % 16) * 4 + (j % 8) // 4 * 2 + half
    elif LAYOUT == "n32k4":
        return (row // 32) * (32 * COLS) + (j // 4) * 128 + (row % 32) * 4 + j % 4
    elif LAYOUT == "n32k4_gu":
        single = i * 2 + half
        return (single // 32) * (32 * COLS) + (j // 4) * 128 + (single % 32) * 4 + j % 4
    else:
        return row * COLS + j
