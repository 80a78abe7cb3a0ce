"""Reads expert weights of any supported format from safetensors files, one expert or one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_aiter_moe.checkpoint.names import ExpertTensor, parse
from sglang_aiter_moe.errors import ContractError

_KIND_OF = {"": "weight", "_scale": "scale", "_bias": "bias"}


@dataclass
class Layer:
    """One layer's expert tensors in a checkpoint.

    Attributes:
        prefix: up to ``experts``.
        names: what each tensor is -> its name in the file.
    """

    prefix: str
    checkpoint: Checkpoint
    names: dict[tuple[str, str, int | None], str] = field(default_factory=dict)
    alternating: bool = False

    @property
    def experts(self) -> int:
        """How many experts the layer has in this checkpoint."""
        numbers = [expert for _, _, expert in self.names if expert is not None]
        if numbers:
            return max(numbers) + 1
        return self.checkpoint.shape(next(iter(self.names.values())))[0]

    @property
    def file(self) -> Path:
        """The file that the layer is in; one of them if it is spread."""
        return self.checkpoint.file_of(next(iter(self.names.values())))

    @property
    def metadata(self) -> dict[str, str]:
        """Of :attr:`file`."""
        return self.checkpoint.metadata_of(self.file)

    @property
    def per_expert(self) -> bool:
        return any(expert is not None for _, _, expert in self.names)

    def has(self, parameter: str) -> bool:
        """Whether the layer has a parameter (``w13_weight_bias``, ...)."""
        part, kind = _split(parameter)
        return any(
            k == kind and (p == part or (p in ("w1", "w3") and part == "w13"))
            for p, k, _ in self.names
        )

    def shape(self, parameter: str) -> tuple[int, ...] | None:
        """The shape of a parameter that is stored whole; None if it is not."""
        name = self.names.get((*_split(parameter), None))
        return None if name is None else self.checkpoint.shape(name)

    def whole(self, parameter: str) -> torch.Tensor:
        """A parameter of all experts as stored: ``[E, N, C]``, or what shape a packed tensor has.

        Rows of w13 alternate gate and up if :attr:`alternating`, else the gate half is first.

        Raises:
            ContractError: a tensor is missing.
        """
        part, kind = _split(parameter)
        if self.per_expert:
            return torch.stack([self.expert(parameter, e) for e in range(self.experts)])
        tensor = self.checkpoint.tensor(self._name(part, kind, None))
        return tensor.flatten(2) if tensor.dim() == 4 else tensor  # gpt-oss: [E, N, K/32, 16]

    def expert(self, parameter: str, expert: int) -> torch.Tensor:
        """One expert of a parameter, ``[N, C]`` (``[N]`` for a bias), as stored.

        Raises:
            ContractError: a tensor is missing.
        """
        part, kind = _split(parameter)
        if not self.per_expert:
            tensor = self.checkpoint.row(self._name(part, kind, None), expert)
            return tensor.flatten(1) if tensor.dim() == 3 else tensor
        parts = (
            ("w1", "w3") if part == "w13" and (part, kind, expert) not in self.names else (part,)
        )
        found = [self.checkpoint.tensor(self._name(p, kind, expert)) for p in parts]
        return _bytewise_cat(found)

    def _name(self, part: str, kind: str, expert: int | None) -> str:
        name = self.names.get((part, kind, expert))
        if name is None:
            which = self.prefix if expert is None else f"{self.prefix}.{expert}"
            raise ContractError(
                f"{which} has no {part} {kind}",
                allowed="every expert with gate, up and down weights and scales",
                fix="the checkpoint is incomplete: pass all of its files",
            )
        return name


class Checkpoint:
    """Safetensors files, opened lazily.

    Args:
        path: a file, or a directory with ``*.safetensors`` files.

    Raises:
        ContractError: there is no such file, or it is not a safetensors file.
    """

    def __init__(self, path: str | Path) -> None:
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        self.files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not self.files or not all(file.is_file() for file in self.files):
            raise ContractError(
                f"{path} has no safetensors file",
                allowed="a .safetensors file, or a directory with some",
                fix="pass the checkpoint's file or directory",
            )
        self._where: dict[str, Any] = {}
        self._file: dict[str, Path] = {}
        self._metadata: dict[Path, dict[str, str]] = {}
        for file in self.files:
            try:
                handle = safe_open(file, "pt")
            except SafetensorError as error:
                raise ContractError(
                    f"{file} cannot be read: {error}",
                    allowed="safetensors files",
                    fix="download the file again",
                ) from error
            self._metadata[file] = handle.metadata() or {}
            self._where |= dict.fromkeys(handle.keys(), handle)
            self._file |= dict.fromkeys(handle.keys(), file)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._where)

    @property
    def metadata(self) -> dict[str, str]:
        """Of all files; where they differ, the last one's."""
        return {key: text for one in self._metadata.values() for key, text in one.items()}

    def file_of(self, name: str) -> Path:
        """The file that a tensor is in."""
        return self._file[name]

    def metadata_of(self, file: Path) -> dict[str, str]:
        return self._metadata[file]

    def tensor(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)

    def row(self, name: str, index: int) -> torch.Tensor:
        """``tensor(name)[index]`` without reading the rest."""
        return self._where[name].get_slice(name)[index]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As the file says it: ``U8``, ``F8_E8M0``, ``BF16``, ..."""
        return self._where[name].get_slice(name).get_dtype()

    def layers(self) -> Mapping[str, Layer]:
        """The layers that have MXFP4 experts, by prefix, in the order of their numbers."""
        found: dict[str, Layer] = {}
        for name, what in self._experts():
            layer = found.setdefault(what.prefix, Layer(what.prefix, self))
            layer.names[what.part, what.kind, what.expert] = name
            layer.alternating |= what.alternating
        quantised = {
            prefix: layer
            for prefix, layer in found.items()
            if any(kind == "scale" for _, kind, _ in layer.names)
        }
        return dict(sorted(quantised.items(), key=lambda item: _by_number(item[0])))

    def _experts(self) -> Iterator[tuple[str, ExpertTensor]]:
        for name in self._where:
            what = parse(name)
            if what is not None:
                yield name, what


def _by_number(prefix: str) -> tuple[int, str]:
    return ExpertTensor(prefix, None, "w2", "weight").layer or 0, prefix


def _split(parameter: str) -> tuple[str, str]:
    part, _, rest = parameter.partition("_weight")
    return part, _KIND_OF[rest]


def _bytewise_cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    if tensors[0].dtype == getattr(torch, "float8_e8m0fnu", None):  # torch.cat has no such kernel
        return torch.cat([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
