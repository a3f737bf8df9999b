"""Which lines of the user's code made a difference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from autoshard.auditing.recording import OpRecord

_SUMS = frozenset(("all_reduce", "reduce_scatter", "reduce"))

Predicate = Callable[[OpRecord], bool]


def cone(records: Sequence[OpRecord], end: int | None, stop: Predicate | None = None) -> set[int]:
    """The records that a result depends on, up to those at which to stop."""
    reached: set[int] = set()
    waiting = [] if end is None else [end]
    while waiting:
        number = waiting.pop()
        if number in reached or (stop is not None and number != end and stop(records[number])):
            continue
        reached.add(number)
        waiting.extend(records[number].reads)
    return reached


def suspects(
    records: Sequence[OpRecord],
    wrong: Sequence[int | None],
    right: Collection[int | None],
    known: Predicate,
) -> list[OpRecord]:
    """What wrong results depend on and right ones do not, the most likely first.

    wrong, right: records of gradients. Sums of what is equal on all ranks come first; then what is not the
    reference's though all before it is.
    """
    ends = [end for end in dict.fromkeys(wrong) if end is not None]
    if not ends:
        return []
    sound = set().union(*(cone(records, end) for end in right))
    shared = set.intersection(*(cone(records, end) for end in ends)) - sound
    twice = [records[k] for k in sorted(shared) if sums_equal(records[k])]
    unknown = [cone(records, end, known) for end in ends]
    inside = set.intersection(*unknown) or set.union(*unknown)
    first = [records[k] for k in sorted(inside - sound or inside)]
    return twice + first


def sums_equal(record: OpRecord) -> bool:
    """Whether a collective adds up what all its ranks have alike."""
    return record.op in _SUMS and record.reduction == "sum" and record.alike


def last_reductions(
    records: Sequence[OpRecord], ends: Collection[int | None], ranks: frozenset[int]
) -> list[OpRecord]:
    """The sums over at least these ranks that results went through, the last first."""
    reached = set().union(*(cone(records, end) for end in ends))
    over = [r for k in reached if (r := records[k]).op in _SUMS and ranks <= set(r.ranks)]
    return sorted(over, key=lambda record: -record.number)


def lines_of(records: Sequence[OpRecord], most: int) -> tuple[str, ...]:
    """Different lines, in order."""
    return tuple(dict.fromkeys(r.line for r in records if r.line))[:most]
