"""Instructions that do the same to values of other names: most stages of a pipeline are alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from autoshard.ir import Call, refs_of
from autoshard.ir.lowered import Instruction, PlacedValue


def likeness(
    items: Sequence[Instruction], values: Mapping[str, PlacedValue], marks: Callable[[str], Hashable]
) -> Hashable:
    """Equal for instructions that are equal but for the names of their values.

    values: of main. marks: what of a value matters beside where it is made and used.
    """
    names: dict[str, int] = {}

    def number(value: str) -> tuple[int, Hashable]:
        result = names.setdefault(value, len(names))
        return result, marks(value)

    rows: list[Hashable] = []
    for item in items:
        if isinstance(item, Call):
            what: Hashable = item.segment
            used: Sequence[str] = item.args
        else:
            used = tuple(refs_of(item))
            laid = tuple(values[v].layout for v in (*used, *item.outs) if v in values)
            what = (item.op, item.types, tuple(values[v].type for v in used if v in values), laid)
        rows.append((what, tuple([number(v) for v in used]), tuple([number(v) for v in item.outs])))
    return tuple(rows)
