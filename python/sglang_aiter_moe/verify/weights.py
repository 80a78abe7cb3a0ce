"""Random but realistic MXFP4 expert weights in a real safetensors file.

The codes follow what a Gaussian weight matrix quantises to, the E8M0 scales lie around 2^-7 to
2^-5, so a K3-like layer's gate and up values leave the linear range of the activation without
saturating it. Experts are made and written one at a time: memory is that of one expert.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A block's largest element sits between 3 and 6 in units of its scale; for 32 Gaussian elements
# that puts one standard deviation near 2.
CODE_SIGMA = 2.0
SCALE_BYTES = (120, 121, 122)  # 2^-7, 2^-6, 2^-5
SCALE_BLOCK = 32


@dataclass(frozen=True)
class LayerShape:
    """The checkpoint tensors of one MoE layer on one rank, all sizes without padding.

    Attributes:
        experts: experts held, E.
        hidden: width of the expert's input and output, H, a multiple of 32.
        intermediate: expert width on this rank, I, a multiple of 32.
        bias: whether the checkpoint has fp32 biases `[E, 2I]` and `[E, H]`.
        gate_up_interleaved: rows of w13 come as g0, u0, g1, u1, ... (gpt-oss) in place of all gate
            rows, then all up rows.
        seed: of the random generator; two layers with one seed and one shape are equal.
    """

    experts: int
    hidden: int
    intermediate: int
    bias: bool = False
    gate_up_interleaved: bool = False
    seed: int = 0

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Safetensors dtype and shape by tensor name, in file order."""
        e, h, i = self.experts, self.hidden, self.intermediate
        tensors = {
            "w13_weight": ("U8", (e, 2 * i, h // 2)),
            "w13_weight_scale": ("U8", (e, 2 * i, h // SCALE_BLOCK)),
            "w2_weight": ("U8", (e, h, i // 2)),
            "w2_weight_scale": ("U8", (e, h, i // SCALE_BLOCK)),
        }
        if self.bias:
            tensors["w13_weight_bias"] = ("F32", (e, 2 * i))
            tensors["w2_weight_bias"] = ("F32", (e, h))
        return tensors

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in the file."""
        return sum(math.prod(shape) * _WIDTH[dtype] for dtype, shape in self.tensors().values())


_WIDTH = {"U8": 1, "F32": 4}


def write_checkpoint(shape: LayerShape, path: Path, progress=None) -> None:
    """Writes the layer's random tensors to `path` as safetensors, expert by expert.

    Args:
        shape: what to write.
        path: the file, replaced if it exists.
        progress: called with the number of bytes after each expert, for a progress bar.
    """
    header, offset = {}, 0
    for name, (dtype, dims) in shape.tensors().items():
        size = math.prod(dims) * _WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": dims, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data must start at a multiple of 8 bytes
    start = 8 + len(text)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(start + offset)
        for expert in range(shape.experts):
            written = 0
            for name, (dtype, dims) in shape.tensors().items():
                data = _expert_tensor(shape, name, dtype, dims[1:], expert)
                file.seek(start + header[name]["data_offsets"][0] + expert * data.nbytes)
                file.write(data.tobytes())
                written += data.nbytes
            if progress is not None:
                progress(written)


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, memory-mapped: pages are read when they are touched."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def _expert_tensor(
    shape: LayerShape, name: str, dtype: str, dims: tuple[int, ...], expert: int
) -> np.ndarray:
    names = list(shape.tensors())
    rng = np.random.Generator(np.random.SFC64([shape.seed, expert, names.index(name)]))
    count = math.prod(dims)
    if dtype == "F32":
        return rng.standard_normal(count, dtype=np.float32) * np.float32(0.25)
    if name.endswith("_scale"):
        return np.asarray(SCALE_BYTES, np.uint8)[rng.integers(0, len(SCALE_BYTES), count)]
    bits = rng.integers(0, 1 << 64, -(-count // 4), dtype=np.uint64).view(np.uint16)[:count]
    return _PACKED_BYTES.take(bits, mode="clip")  # every uint16 is in range: clip skips the check


def _packed_bytes() -> np.ndarray:
    """Maps 16 uniform random bits to a byte of two independent Gaussian E2M1 codes."""
    edges = [(a + b) / 2 for a, b in itertools.pairwise(E2M1_MAGNITUDES)]
    below = [math.erf(edge / (CODE_SIGMA * math.sqrt(2))) for edge in edges]
    level = (np.arange(128) + 0.5) / 128  # of the magnitude's cumulative distribution
    magnitude = np.searchsorted(below, level).astype(np.uint8)
    nibble = np.concatenate([magnitude, magnitude | 8])  # bit 3 is the sign
    both = np.arange(1 << 16)
    return nibble[both & 0xFF] | (nibble[both >> 8] << 4)


_PACKED_BYTES = _packed_bytes()
