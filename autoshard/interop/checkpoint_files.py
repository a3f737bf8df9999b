"""Tensors of a checkpoint by name, of which only what is used is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from autoshard.errors import UsageError

#: what a folder of weights has, the first that is there
_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
#: bytes that are read before a file is opened anew: pages of a mapped file count as memory of the process
_MAPPED = 16 << 20


class Tensors(Protocol):
    """Names, and tensors that are read when their elements are."""

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> torch.Tensor: ...


def tensors_of(source: str | os.PathLike[str] | Mapping[str, torch.Tensor] | None) -> Tensors:
    """The tensors of a folder, of a file, of a state dict. Raises UsageError, OSError, ValueError."""
    if isinstance(source, Mapping):
        return _Loaded(source)
    if source is None:
        raise UsageError("no weights to load", hint="give a folder, a file or a state dict")
    path = Path(source)
    if path.is_dir():
        there = [path / name for name in _FILES if (path / name).is_file()]
        if not there:
            raise UsageError(f"{path} has no weights", why=f"it has none of {', '.join(_FILES)}")
        path = there[0]
    if path.suffix == ".json":
        index: dict[str, str] = json.loads(path.read_text())["weight_map"]
        files = {name: path.parent / file for name, file in index.items()}
        if path.name.endswith(".bin.index.json"):
            return _Loaded({n: x for f in sorted(set(files.values())) for n, x in _mapped(f).items()})
        return _SafeTensors(files)
    if path.suffix == ".safetensors":
        return _SafeTensors(dict.fromkeys(_header(path), path))
    return _Loaded(_mapped(path))


def _mapped(path: Path) -> dict[str, torch.Tensor]:
    """What torch.save wrote, read where it is used."""
    tensors: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return tensors


class _Loaded:
    """A state dict."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class _SafeTensors:
    """Files of safetensors, mapped into memory one at a time."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        headers = {path: _header(path) for path in set(files.values())}
        gone = [name for name, path in files.items() if name not in headers[path]]
        if gone:
            raise UsageError(f"{files[gone[0]]} has no {gone[0]}", why="the index says that it is there")
        self._shapes = {name: tuple(headers[path][name]["shape"]) for name, path in files.items()}
        self._open: Any = None
        self._path: Path | None = None
        self._bytes = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """A view of the file. It may be used until a few others are read."""
        from safetensors import safe_open

        path = self._files[name]
        if path != self._path or self._bytes >= _MAPPED:
            self._open, self._path, self._bytes = safe_open(path, framework="pt"), path, 0
        tensor: torch.Tensor = self._open.get_tensor(name)
        self._bytes += tensor.nbytes
        return tensor


def _header(path: Path) -> dict[str, Any]:
    """Names, types and shapes that a file begins with. Raises ValueError if it is none of safetensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(f"{path} ends before its header does")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = max((x["data_offsets"][1] for x in header.values()), default=0)
    if size < 8 + length + end:
        raise ValueError(f"{path} ends after {size} bytes of {8 + length + end}")
    return header
