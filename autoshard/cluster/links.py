"""Links measured between single devices: bandwidth, and perhaps latency, of every pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autoshard.errors import UsageError

Matrix: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Links:
    """What each pair of devices has; row: from, column: to.

    bandwidth: bytes/s in one direction while no other pair uses the link; 0 on the diagonal. latency:
    seconds per message, 0 on the diagonal, or None where it was not measured. Both are [devices, devices]
    and read-only. Raises UsageError if they are not square, finite and positive off the diagonal.
    """

    bandwidth: Matrix
    latency: Matrix | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth", _checked(self.bandwidth, "the matrix of links"))
        if self.latency is None:
            return
        object.__setattr__(self, "latency", _checked(self.latency, "the latency of links"))
        if len(self.latency) != len(self.bandwidth):
            what = f"bandwidth is given for {len(self.bandwidth)} devices, latency for {len(self.latency)}"
            raise UsageError(what, where="links")

    @property
    def devices(self) -> int:
        return len(self.bandwidth)

    def first(self, devices: int) -> Links:
        """The links among the first ``devices`` devices."""
        latency = None if self.latency is None else self.latency[:devices, :devices]
        return Links(self.bandwidth[:devices, :devices], latency)

    @cached_property
    def _digest(self) -> bytes:
        both = self.bandwidth.tobytes() + (b"" if self.latency is None else self.latency.tobytes())
        return sha256(both).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Links) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"Links({self.devices} devices{', with latency' if self.latency is not None else ''})"


def read_matrix(path: Path, *, where: str) -> Matrix:
    """Numbers of a CSV file, one row a line; lines that are empty or begin with # do not count.

    Raises UsageError, with the line, if the file cannot be read or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = "the path of a matrix is relative to the cluster file"
        raise UsageError(f"cannot read {path}", where=where, why=why, hint=hint) from error
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            rows.append([float(entry) for entry in line.split(",")])
        except ValueError as error:
            hint = "write bytes/s (or seconds), separated by commas"
            raise UsageError(
                f"{path} is not a matrix", where=f"line {number}", why=str(error), hint=hint
            ) from (None)
    return matrix_of(rows, where=str(path))


def matrix_of(rows: Sequence[Sequence[float]], *, where: str) -> Matrix:
    """Rows of equal length as a matrix; UsageError if they are not."""
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        why = f"rows of {', '.join(map(str, sorted(lengths)))} entries" if lengths else "it is empty"
        raise UsageError("the links are not a matrix", where=where, why=why)
    return np.array(rows, dtype=np.float64)


def _checked(matrix: Matrix, what: str) -> Matrix:
    values = np.array(matrix, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        shape = " x ".join(map(str, values.shape))
        raise UsageError(f"{what} is {shape}", why="it has one row and one column per device")
    if np.any(np.diagonal(values) != 0):
        at = int(np.flatnonzero(np.diagonal(values) != 0)[0])
        raise UsageError(f"{what} is {values[at, at]:g} at device {at} itself", why="the diagonal must be 0")
    with np.errstate(invalid="ignore"):
        wrong = ~(np.isfinite(values) & (values > 0)) & ~np.eye(len(values), dtype=np.bool_)
    if np.any(wrong):
        row, column = (int(index) for index in np.argwhere(wrong)[0])
        why = "off the diagonal, it must be a finite number above 0"
        raise UsageError(f"{what} is {values[row, column]:g} from device {row} to {column}", why=why)
    values.setflags(write=False)
    return values
