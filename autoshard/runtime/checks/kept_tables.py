"""Tables that one call of a model leaves for the next, whose programs have each its own."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.capture.python_state.kept_tables import tables_agree
from autoshard.errors import UsageError
from autoshard.program.program import Program


def check_tables(known: Iterable[Program], new: Program) -> None:
    """UsageError if a program has other values in a table than a program of the model before it: a later call
    of the model itself would use the longer table, or the first."""
    tables = new.state.tables
    for before in (program.state.tables for program in known):
        for label in tables.keys() & before.keys():
            if not tables_agree(before[label], tables[label]):
                name = label.rpartition("[")[0]
                raise UsageError(
                    f"forward keeps {name} for its next calls, with values that depend on a call's sizes",
                    why="calls of other sizes use it, each program has one of its own, and their values "
                    "differ",
                    hint="compute it in every call, or once in __init__ for the longest sequence",
                )
