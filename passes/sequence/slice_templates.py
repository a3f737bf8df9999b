"""What a slice takes over of a call: emitted once for layers that are alike, and filled in for each."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from autoshard.ir.lowered import PlacedValue
from autoshard.ir.statements import Statement
from autoshard.passes.sequence.slice_emit import PartStatements, SliceContext

#: a value by the place where a call's statements name it first, and what is made of it
_Role = tuple[int, str]


@dataclass(frozen=True)
class _Template:
    """group: that of another call. given, made: names inside -> values, by their roles. have: the roles of
    what was put together."""

    group: PartStatements
    given: tuple[tuple[str, _Role], ...]
    made: tuple[tuple[str, _Role], ...]
    have: tuple[int, ...]


class Templates:
    """Groups of statements by all that decides how they are emitted (`SliceEmitter`): values of unlike calls
    differ in their names alone. joined: results that are put together."""

    def __init__(self, of: SliceContext, joined: Collection[str]) -> None:
        self.of, self.joined = of, joined
        self._known: dict[Hashable, _Template] = {}
        self._types: dict[PlacedValue | None, int] = {}
        #: a run by its first statement and their number -> its values, what is known of them
        self._values: dict[tuple[int, int], tuple[list[str], Hashable]] = {}

    def key(self, statements: Sequence[Statement], how: Hashable, have: Collection[str]) -> Hashable:
        """how: segment, phase, slice, and the ways in which the statements run."""
        values, alike = self._roles(statements)
        return how, alike, tuple([v in have for v in values])

    def _roles(self, statements: Sequence[Statement]) -> tuple[list[str], Hashable]:
        """(the values of a call by their roles, what is known of them)."""
        run = id(statements[0]), len(statements)
        if run not in self._values:
            numbers: dict[str, int] = {}
            order = [numbers.setdefault(v, len(numbers)) for v in _named(statements)]
            of, values = self.of, list(numbers)
            sources: list[tuple[int, int, int]] = []
            for name in values:  # which grow
                for which, also in enumerate((of.moved, of.again)):
                    if name in also:
                        source = numbers.setdefault(also[name], len(numbers))
                        sources.append((which, numbers[name], source))
                        values += [also[name]] if source == len(values) else []
            facts = [(self._type(v), of.place(v), v in of.summed, v in self.joined) for v in values]
            alike = tuple(s.number for s in statements), tuple(order), tuple(sources), tuple(facts)
            self._values[run] = values, alike
        return self._values[run]

    def _type(self, value: str) -> int:
        """Type and layout of a value, in a number."""
        placed = self.of.values.get(value)
        return self._types.setdefault(placed, len(self._types))

    def keep(
        self, key: Hashable, statements: Sequence[Statement], group: PartStatements, joined: Collection[str]
    ) -> None:
        """Note a group that was emitted; joined: the values that were put together for it."""
        roles = {value: k for k, value in enumerate(self._roles(statements)[0])}

        def role(name: str) -> _Role:
            value, end = self.of.outer.origin.get(name, (name, ""))
            return roles[value], end

        self._known[key] = _Template(
            PartStatements(
                group.part,
                group.item,
                list(group.nodes),
                values=dict(group.values),
                why=dict(group.why),
            ),
            tuple((inner, role(name)) for inner, name in group.given.items()),
            tuple((inner, role(name)) for inner, name in group.made.items()),
            tuple(roles[v] for v in joined),
        )

    def filled(
        self, key: Hashable, statements: Sequence[Statement], part: int, have: set[str]
    ) -> PartStatements | None:
        """The group of a call that is like one before, None if none is. have: grows as it did then."""
        template = self._known.get(key)
        if template is None:
            return None
        values, of = self._roles(statements)[0], template.group

        def named(roles: Iterable[tuple[str, _Role]]) -> dict[str, str]:
            return {inner: self.of.outer(values[k], end) for inner, (k, end) in roles}

        have.update(values[k] for k in template.have)
        new = PartStatements(part, statements[0].item, list(of.nodes), named(template.given))
        new.made, new.values, new.why = named(template.made), dict(of.values), dict(of.why)
        return new


def _named(statements: Sequence[Statement]) -> Iterable[str]:
    """The values of statements in the order in which they are named."""
    for statement in statements:
        yield from statement.uses
        yield from statement.makes
