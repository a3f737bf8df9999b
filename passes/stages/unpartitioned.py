"""A placed program before it is cut into stages: its statements, and who makes and uses their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.ir.lowered import Lowered
from autoshard.ir.statements import Statements, repeats_of, statements_of


@dataclass(frozen=True)
class Unpartitioned:
    """A placed program statement by statement, with what holds wherever it is cut.

    repeats: see `ir.statements.repeats_of`. users: value -> places of the statements that use it. maker:
    value -> place of the one that makes it.
    """

    whole: Statements
    repeats: Mapping[str, str]
    users: Mapping[str, Sequence[int]]
    maker: Mapping[str, int]

    @staticmethod
    def of(lowered: Lowered) -> Unpartitioned:
        """Of a program that `pipeline.place` made."""
        full = statements_of(lowered)
        return Unpartitioned(full, repeats_of(full), *_index(full))

    def with_whole(self, whole: Statements) -> Unpartitioned:
        """With statements added that repeat nothing."""
        users, maker = _index(whole)
        return replace(self, whole=whole, users=users, maker=maker)


def _index(whole: Statements) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The users and the maker of every value; see `Unpartitioned`."""
    users: dict[str, list[int]] = {}
    maker: dict[str, int] = {}
    for place, statement in enumerate(whole.all):
        for value in statement.uses:
            known = users.get(value)
            if known is None:
                users[value] = [place]
            elif known[-1] != place:
                known.append(place)
        for value in statement.makes:
            maker[value] = place
    return users, maker
