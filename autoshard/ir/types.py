"""Types of values: shape and element type, with no torch object inside."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

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
    # two elements e2m1, as an operand of a product has them (`ops.packed`); in memory, and to torch, a u8
    "f4e2m1x2": ("uint8", 1),
    "u8": ("uint8", 1),
    "bool": ("bool", 1),
    # of operands of products, and of their scales (`ir.scaled`)
    "f8e4m3": ("float8_e4m3fn", 1),
    "f8e5m2": ("float8_e5m2", 1),
    "f8e8m0": ("float8_e8m0fnu", 1),
    "c64": ("complex64", 8),
    "c128": ("complex128", 16),
}


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type used as an argument of an op, for instance ``dtype=f32``."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape (elements per dim) and element type of one value; global unless said otherwise.

    filled: dim 0 has a slot for every expert and token, of which only those exist in memory that hold a token
    that chose the expert: (experts that a token chooses, all experts). (1, 1) of a dim of tokens that nothing
    may order otherwise, as such slots refer to it. None of any other value. A value with it stays where it
    is along dim 0: no collective moves its slots.
    share: of these rows, those that exist on average, as groups of alike rows are one (`ir.similar_rows`).
    """

    shape: tuple[int, ...]
    dtype: str
    filled: tuple[int, int] | None = None
    share: float = 1.0

    @property
    def has_slots(self) -> bool:
        """Whether dim 0 has slots of experts: as many rows in memory as the data say."""
        return self.filled not in (None, (1, 1))

    @property
    def ragged(self) -> bool:
        """Whether the data say how many rows there are in memory: of slots, or of groups of rows."""
        return self.has_slots or self.share != 1.0

    @property
    def numel(self) -> int:
        """Elements; of slots, those that exist on average."""
        return self.existing(prod(self.shape))

    def existing(self, slots: int) -> int:
        """Of so many elements those that exist on average."""
        if self.filled is None:
            return slots
        each = -(-slots * self.filled[0] // self.filled[1])
        return each if self.share == 1.0 else ceil(each * self.share)

    def stays(self, *split: object) -> bool:
        """Whether no collective may lead from or to a placement that splits this dim."""
        return self.filled is not None and 0 in split

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * DTYPES[self.dtype][1]

    @property
    def is_float(self) -> bool:
        return self.dtype in ("f64", "f32", "f16", "bf16", "c64", "c128")

    def __str__(self) -> str:
        first = f"*{self.filled[0]}/{self.filled[1]}" if self.filled else ""
        first += f"~{self.share:g}" if self.share != 1.0 else ""
        sizes = [f"{n}{'' if dim else first}" for dim, n in enumerate(self.shape)]
        return f"{self.dtype}[{', '.join(sizes)}]"
