"""Which lines of the user's code made a difference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autoshard.auditing.known import PLAIN, Form
from autoshard.auditing.recording import NOWHERE, OpRecord
from autoshard.capture.origins import CodeLine

_SUMS = frozenset(("all_reduce", "reduce_scatter", "reduce"))
#: how many ops lie between a gradient and what reduces it, at most
_DEEP = 8
#: how many ops before a difference are told
_NEAR = 10
#: lines of a finding, at most
_LINES = 4
#: lines that far from each other are one place
_BESIDE = 2
#: and those of one call of a function, if they are that near
_FUNCTION = 40

Forms = Callable[[OpRecord], Form | None]


def cone(records: Sequence[OpRecord], ends: Collection[int], stop: Forms | None = None) -> set[int]:
    """The records that some results depend on, up to those that are the reference's."""
    reached: set[int] = set()
    waiting = list(ends)
    while waiting:
        number = waiting.pop()
        if number in reached or (stop is not None and number not in ends and stop(records[number])):
            continue
        reached.add(number)
        waiting.extend(records[number].reads)
    return reached


def twice_summed(
    records: Sequence[OpRecord], wrong: Collection[int], right: Collection[int]
) -> list[OpRecord]:
    """Sums of what is equal on all ranks that wrong results depend on and no right one; none if some wrong
    result depends on none."""
    sound = cone(records, right)
    each = [{k for k in cone(records, (end,)) - sound if sums_equal(records[k])} for end in wrong]
    return [records[k] for k in sorted(set().union(*each))] if all(each) else []


def first_unknown(
    records: Sequence[OpRecord], wrong: Collection[int], right: Collection[int], form: Forms
) -> list[OpRecord]:
    """What is not the reference's though all that it is made of is: the first, then what it reads, the
    rest."""
    unknown = [cone(records, (end,), form) for end in wrong]
    if not unknown:
        return []
    sound = cone(records, right)
    inside = set.intersection(*unknown) or set.union(*unknown)
    rest = [records[k] for k in sorted(inside - sound or inside) if records[k].samples]
    if not rest:
        return []
    before = [r for r in behind(records, rest[0]) if r.line != rest[0].line]
    return [rest[0], *before[:_NEAR], *rest[1:], *before[_NEAR:]]


def behind(records: Sequence[OpRecord], record: OpRecord) -> Iterator[OpRecord]:
    """What a record is made of, the nearest first."""
    level, seen = list(reversed(record.reads)), set(record.reads)
    for _ in range(_NEAR):
        yield from (records[k] for k in level)
        level = [k for number in level for k in reversed(records[number].reads) if k not in seen]
        seen.update(level)


def partial_from(records: Sequence[OpRecord], ends: Collection[int], form: Forms) -> list[OpRecord]:
    """Where values begin to be parts of a sum over ranks, the first first."""
    out = []
    for number in sorted(cone(records, ends)):
        mine = form(records[number])
        before = [f for k in records[number].reads if (f := form(records[k])) is not None]
        if mine is not None and mine.axes and not any(f.axes for f in before) and records[number].line:
            out.append(records[number])
    return out


def detached(records: Sequence[OpRecord], used: Collection[int], cuts: Collection[int]) -> list[OpRecord]:
    """Where what depends on the first uses of parameters leaves autograd."""
    wanted = set(used)
    return [records[k] for k in sorted(cuts) if records[k].line and wanted & cone(records, (k,))]


def rescaled(records: Sequence[OpRecord], ends: Collection[int], form: Forms) -> list[OpRecord]:
    """Where a multiple of the reference becomes another multiple, the last first."""
    out = []
    for number in sorted(cone(records, ends), reverse=True):
        record = records[number]
        mine = form(record)
        before = [f for k in record.reads if records[k].samples and (f := form(records[k])) is not None]
        begins = not before and bool(record.line) and (bool(record.outer) or record.op == "receive")
        if mine is not None and (before or begins) and all(f.scale != mine.scale for f in before or [PLAIN]):
            out.append(record)
    return out


def sums_equal(record: OpRecord) -> bool:
    """Whether a collective adds up what all its ranks have alike; of a gradient, if that is one number."""
    tells = bool(record.outer) or any(np.ptp(each.values) for each in record.given)
    return record.op in _SUMS and record.reduction == "sum" and record.alike and tells


def reductions(
    records: Sequence[OpRecord], ends: Collection[int], ranks: Collection[int]
) -> Iterator[OpRecord]:
    """The sums over at least these ranks that gradients went through at their end."""
    wanted = set(ranks)
    for end in sorted(ends):
        level, seen = {end}, {end}
        for _ in range(_DEEP):
            here = [records[k] for k in level if records[k].op in _SUMS and wanted <= set(records[k].ranks)]
            yield from here
            level = {k for number in level for k in records[number].reads} - seen
            seen |= level
            if here:
                break


def lines_of(records: Iterable[OpRecord]) -> tuple[str, ...]:
    """The first lines; those of one call, and those beside each other, as a range: ``file.py:105-131``."""
    places: list[tuple[CodeLine, list[int]]] = []
    for line in (line for record in records for line in (record.line, record.sender) if line):
        same = [span for at, span in places if replace(at, number=line.number) == line]
        reach = _FUNCTION if line.called else _BESIDE
        near = [span for span in same if span[0] - reach <= line.number <= span[1] + reach]
        if near:
            near[0][:] = min(near[0][0], line.number), max(near[0][1], line.number)
        else:
            places.append((line, [line.number, line.number]))
    out = []
    for line, (first, last) in places[:_LINES]:
        span = f"{line.path}:{first}" + (f"-{last}" if last > first else "")
        out.append(f"{span}, called at {line.called}" if line.called else span)
    return tuple(out)


def where_called(records: Iterable[OpRecord]) -> list[OpRecord]:
    """Records of backward, as if they stood where it was called."""
    return [replace(record, line=record.outer, sender=NOWHERE) for record in records if record.outer]
