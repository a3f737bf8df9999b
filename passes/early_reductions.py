"""Gradients that are reduced once a step go out while backward still computes.

`defer_reductions` puts these reductions into messages at the end of a step. With one microbatch, a message
need not wait for that: it is issued behind the call that makes the last of its gradients (as
DistributedDataParallel does: Li et al., VLDB 2020, section 3.2.3), and waited for at the end of backward.
What works on the result of another message stays where it is: it would wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir import Node, refs_of
from autoshard.ir.comm import is_message
from autoshard.ir.lowered import Instruction, Lowered, Part, with_parts


def early_reductions(lowered: Lowered) -> Lowered:
    """The program of a single microbatch with messages of ``reduce`` in ``backward``, where they can be."""
    items: dict[Part, list[Instruction]] = {part: list(lowered.of(part)) for part in lowered.parts}
    backward = {p.stage: p for p in lowered.parts if p.phase == "backward" and p.slice == 0}
    weights = {p.stage for p in lowered.parts if p.phase == "weight" or p.slice}
    for part in lowered.parts:
        if part.phase != "reduce" or part.stage in weights or part.stage not in backward:
            continue
        late: list[Instruction] = []
        for item in items[part]:
            behind = _behind(item, items[backward[part.stage]], late)
            if behind is None:
                late.append(item)
            else:
                items[backward[part.stage]].insert(behind, item)
        items[part] = late
    return with_parts(lowered, items.items())


def _behind(item: Instruction, backward: Sequence[Instruction], late: Sequence[Instruction]) -> int | None:
    """The place in backward at which all that a message sends is made, None for what has to stay."""
    if not _is_message(item):
        return None
    assert isinstance(item, Node)
    needed = set(refs_of(item))
    if any(needed.intersection(other.outs) for other in late):
        return None
    makers = [k for k, other in enumerate(backward) if not needed.isdisjoint(other.outs)]
    if not makers or any(_is_message(backward[k]) for k in makers):
        return None
    place = makers[-1] + 1
    # messages of an axis keep their order
    while place < len(backward) and _is_message(backward[place]):
        place += 1
    return place


def _is_message(item: Instruction) -> bool:
    return isinstance(item, Node) and is_message(item)
