"""Where the stages of a pipeline end: a cut of the plan as a place among the statements of the program.

A cut may fall behind any op, also inside a layer, and slides over the collectives behind it to where the
fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from autoshard.errors import UsageError
from autoshard.ir import Call
from autoshard.ir.collectives import is_collective
from autoshard.ir.local_bytes import held_bytes
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import R
from autoshard.ir.statements import Statements
from autoshard.rules.local import MeshShape
from autoshard.search.plan.plan import Cut


def stage_ends(whole: Statements, cuts: Sequence[Cut], mesh: MeshShape) -> list[int]:
    """For each cut, how many of the statements come before it.

    Raises UsageError if a cut is not in the model, or cuts are out of order.
    """
    calls = [k for k, i in enumerate(whole.lowered.main) if isinstance(i, Call) and not i.backward]
    ends: list[int] = []
    places = _places(whole)
    crossing = _crossing(whole, mesh)
    for cut in cuts:
        if not 0 <= cut.call < len(calls):
            raise UsageError(
                f"there is no call {cut.call} to cut at",
                why=f"the forward pass has {len(calls)} calls",
                hint="plan again for this model",
            )
        end = _after(whole, places.get(calls[cut.call], range(0)), cut)
        ends.append(_cheapest(whole, end, crossing))
    if any(a >= b for a, b in pairwise(ends)):
        raise UsageError("the pipeline cuts are not in the order of the forward pass", hint="plan again")
    return ends


def stays(whole: Statements, mesh: MeshShape) -> list[bool]:
    """For every statement, whether a cut behind it stays there and does not slide over collectives."""
    crossing = _crossing(whole, mesh)
    return [_cheapest(whole, place + 1, crossing) == place + 1 for place in range(len(whole.all))]


def _places(whole: Statements) -> dict[int, range]:
    """Number of an instruction of main -> the places of its statements, which stand together."""
    result: dict[int, range] = {}
    for place, statement in enumerate(whole.all):
        start = result[statement.item].start if statement.item in result else place
        result[statement.item] = range(start, place + 1)
    return result


def _after(whole: Statements, places: range, cut: Cut) -> int:
    """The place behind the op that the cut names, in a call of these places."""
    named = [p for p in places if not cut.value or cut.value in whole.all[p].node.outs]
    if not named:
        raise UsageError(
            f"{cut} names a value that the call does not make",
            hint="plan again: the cut was made for another program",
        )
    return named[-1] + 1


def _cheapest(whole: Statements, end: int, crossing: Sequence[int]) -> int:
    """A cut may slide over the collectives behind it, to where the fewest bytes cross."""
    best = place = end
    while place < len(whole.all) and not whole.all[place].backward:
        if not is_collective(whole.all[place].node):
            break
        place += 1
        if crossing[place] < crossing[best]:
            best = place
    return best


def _crossing(whole: Statements, mesh: MeshShape) -> list[int]:
    """Bytes per rank that a stage that ends before a place sends on; full copies travel in parts."""
    new: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, statement in enumerate(whole.all):
        if not statement.backward:
            last.update(dict.fromkeys((v for v in statement.uses if v in new), place))
            new.update(dict.fromkeys(statement.makes, place))
    steps = [0] * (len(whole.all) + 2)
    #: by identity: the values of alike layers have one type and layout between them
    sizes: dict[int, int] = {}
    for value, end in last.items():
        placed = whole.values[value]
        size = sizes.get(id(placed))
        if size is None:
            size = sizes[id(placed)] = _sent(placed, mesh)
        steps[new[value] + 1] += size
        steps[end + 1] -= size
    return list(accumulate(steps))


def _sent(placed: PlacedValue, mesh: MeshShape) -> int:
    """Bytes of a value that a rank sends."""
    size = held_bytes(placed.type, placed.layout, mesh.sizes)
    for p, ways in zip(placed.layout, mesh.sizes, strict=True):
        size = -(-size // ways) if p == R else size
    return size
