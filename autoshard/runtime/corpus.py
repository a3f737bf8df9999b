"""Text to train on that is there without a download: the bytes of Python's own library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from autoshard.errors import UsageError

#: token numbers are bytes
VOCABULARY = 256
_ENOUGH = 4 * 1024 * 1024


@dataclass(frozen=True)
class Corpus:
    """A text as bytes [n] (uint8), and what it is."""

    data: torch.Tensor = field(repr=False)
    name: str

    def windows(self, batch: int, seq: int, *, step: int, seed: int = 0) -> torch.Tensor:
        """Token numbers [batch, seq] (int64) of one step; they depend on the step and the seed only."""
        starts = len(self.data) - seq
        if starts < 1:
            raise UsageError(f"the text has {len(self.data)} bytes", why=f"a window of {seq} does not fit")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        first = torch.randint(0, starts, (batch, 1), generator=generator)
        return self.data[first + torch.arange(seq)].long()


def standard_library() -> Corpus:
    """The modules of this Python's library in the order of their names, up to 4 MiB of them."""
    folder = Path(sysconfig.get_path("stdlib"))
    return _corpus(sorted(folder.glob("*.py")), "the sources of Python's standard library")


def load_corpus(path: str | Path | None = None) -> Corpus:
    """A text file, all files of a folder in the order of their names; by default the standard library."""
    if path is None:
        return standard_library()
    where = Path(path)
    if not where.exists():
        raise UsageError(f"there is no file or folder {where}", hint="give a text file, or a folder of them")
    files = sorted(p for p in where.rglob("*") if p.is_file()) if where.is_dir() else [where]
    return _corpus(files, str(where))


def _corpus(files: Iterable[Path], name: str) -> Corpus:
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= _ENOUGH:
            break
    if not text:
        raise UsageError(f"{name} holds no text")
    return Corpus(torch.frombuffer(text[:_ENOUGH], dtype=torch.uint8), name)
