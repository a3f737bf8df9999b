"""Gathers of parameters are issued one call ahead of the call that uses them.

A gather at the start of a segment is on its way while nothing is computed. It becomes a call of its own,
which stands before the call in front (Rajbhandari et al., SC'20, ZeRO; FSDP prefetches in the same way). A
result is waited for where it is used, so nothing else changes. One more layer's parameters are held.

Where messages run beside computing, a call in front that is over too soon to hide the gather is passed over
for a longer one (what is recomputed in front of a backward). And what is gathered over two axes is two
messages: to issue the second the first is waited for, so that the first stands one call before that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autoshard.ir import Call, Node
from autoshard.ir.collectives import is_message, is_ring, transfer_of
from autoshard.ir.lowered import Lowered, StagePart
from autoshard.ir.statements import Statement, Statements, by_part, regrouped, statements_of
from autoshard.passes.overlap.gather_once import gathers_of
from autoshard.passes.overlap.schedule_ops import Seconds, node_seconds
from autoshard.passes.stages.part_names import parts_named
from autoshard.rules.chains import ALONE

#: a call is passed over for one that computes so many times as long
_LONGER = 2.0


def prefetch(lowered: Lowered, parameters: Collection[str], seconds: Seconds | None = None) -> Lowered:
    """The program with the gathers of every call in front of a call before it.

    parameters: ports whose values are there from the start of a step. seconds: prices of nodes where messages
    run beside computing, None where a gather always stands in front of the very call before.
    """
    full = statements_of(lowered)
    costs = None if seconds is None else _Costs(lowered, seconds)
    pieces: list[tuple[StagePart, Sequence[Statement]]] = []
    result = False
    for part, statements in by_part(full).items():
        items = _items(statements)
        early = {k: _gathers(item, full, parameters) for k, item in enumerate(items)}
        early = {k: chosen for k, chosen in early.items() if k and chosen and len(chosen) < len(items[k])}
        result |= bool(early)
        pieces += [(part, piece) for piece in _ordered(items, early, costs)] or [(part, [])]
    return parts_named(regrouped(full, pieces), lowered) if result else lowered


def _items(statements: Sequence[Statement]) -> list[list[Statement]]:
    """The statements of every instruction of main."""
    result: dict[int, list[Statement]] = {}
    for statement in statements:
        result.setdefault(statement.item, []).append(statement)
    return list(result.values())


def _gathers(item: Sequence[Statement], whole: Statements, parameters: Collection[str]) -> list[Statement]:
    """The gathers of parameters in a call, with what is between a parameter and its gather."""
    if not isinstance(whole.lowered.main[item[0].item], Call):
        return []
    return gathers_of(item, parameters, _is_gather) if any(_is_gather(s.node) for s in item) else []


def _is_gather(node: Node) -> bool:
    return transfer_of(node) == "all_gather"


def _waited_for(chosen: Sequence[Statement]) -> list[Statement]:
    """Of what gathers, what another gather waits for."""
    wanted: set[str] = set()
    result: list[Statement] = []
    for statement in reversed(chosen):
        if not wanted.isdisjoint(statement.makes):
            result.append(statement)
        elif not _is_gather(statement.node):
            continue
        wanted.update(statement.uses)
    return result[::-1] if any(_is_gather(s.node) for s in result) else []


class _Costs:
    """Seconds of statements: of computing, and of messages."""

    def __init__(self, lowered: Lowered, seconds: Seconds) -> None:
        self.lowered, self.seconds = lowered, seconds
        self._of: dict[str, list[float]] = {}
        self._computing: dict[str, float] = {}

    def computing(self, item: Sequence[Statement]) -> float:
        """Of all that computes in an item of main, of which all statements are given."""
        call = self.lowered.main[item[0].item]
        name = call.segment if isinstance(call, Call) else ""
        if name not in self._computing:
            seconds = sum(self._one(s) for s in item if not is_message(s.node) or is_ring(s.node))
            if not name:
                return seconds
            self._computing[name] = seconds
        return self._computing[name]

    def messages(self, chosen: Sequence[Statement]) -> float:
        return sum(self._one(s) for s in chosen if is_message(s.node))

    def _one(self, statement: Statement) -> float:
        item = self.lowered.main[statement.item]
        if not isinstance(item, Call):
            return self.seconds(item, self.lowered.values, ALONE)
        result = self._of.get(item.segment)
        if result is None:
            segment = self.lowered.segments[item.segment]
            result = self._of[item.segment] = node_seconds(segment, self.seconds)
        return result[statement.number]


def _ordered(
    items: Sequence[list[Statement]], early: Mapping[int, list[Statement]], costs: _Costs | None
) -> list[list[Statement]]:
    """The pieces of a part: what is gathered for a call stands before a call in front of it.

    early: what gathers for an item, by its number.
    """
    before: dict[int, list[list[Statement]]] = {}
    if costs is None:
        before = {k - 1: [chosen] for k, chosen in early.items()}
    else:
        spans = [costs.computing(item) for item in items]
        last = ahead = 0
        for k, chosen in sorted(early.items()):
            first = _waited_for(chosen)
            gone = {id(s) for s in first}
            rest = [s for s in chosen if id(s) not in gone]
            # all ranks issue the messages of an axis in the same order, that of the calls
            last = max(last, _place(k, costs.messages(rest), spans))
            before.setdefault(last, []).append(rest)
            if first:
                ahead = max(ahead, _place(last, costs.messages(first), spans))
                before.setdefault(ahead, []).insert(0, first)
    result: list[list[Statement]] = []
    for k, item in enumerate(items):
        result += before.get(k, ())
        chosen_here = {id(s) for s in early.get(k, ())}
        result.append([s for s in item if id(s) not in chosen_here])
    return result


def _place(k: int, message: float, spans: Sequence[float]) -> int:
    """The item in front of which a message for item k stands. spans: seconds that each item computes."""
    if k < 1:
        return 0
    short = k > 1 and spans[k - 1] < message and spans[k - 2] > _LONGER * spans[k - 1]
    return k - 2 if short else k - 1
