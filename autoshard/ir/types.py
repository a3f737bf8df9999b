"""Types of values: shape and element type, with no torch object inside."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

#: short name -> (torch name, bytes per element)
DTYPES: dict[str, tuple[str, int]] = {
    "f64": ("float64", 8),
    "f32": ("float32", 4),
    "f16": ("float16", 2),
    "bf16": ("bfloat16", 2),
    "i64": ("int64", 8),
    "i32": ("int32", 4),
    "i16": ("int16", 2),
    "i8": ("int8", 1),
    "u8": ("uint8", 1),
    "bool": ("bool", 1),
    "c64": ("complex64", 8),
    "c128": ("complex128", 16),
}


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type used as an argument of an op, for instance ``dtype=f32``."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape (elements per dim) and element type of one value; global unless said otherwise."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * DTYPES[self.dtype][1]

    @property
    def is_float(self) -> bool:
        return self.dtype in ("f64", "f32", "f16", "bf16", "c64", "c128")

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"
