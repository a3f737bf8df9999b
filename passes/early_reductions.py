"""Gradients that are reduced once a step go out while backward still computes.

`defer_reductions` puts these reductions into messages at the end of a step. With one microbatch, a message
need not wait for that: it is issued behind the call that makes the last of its gradients (as
DistributedDataParallel does: Li et al., VLDB 2020, section 3.2.3), and waited for at the end of backward.
What works on the result of another message stays where it is: it would wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

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
        behind = _Behind(items[backward[part.stage]])
        late: list[Instruction] = []
        missing: set[str] = set()
        for item in items[part]:
            if not _is_message(item) or not missing.isdisjoint(refs_of(item)) or not behind.put(item):
                late.append(item)
                missing.update(item.outs)
        items[backward[part.stage]], items[part] = behind.all(), late
    return with_parts(lowered, items.items())


class _Behind:
    """The instructions of backward, with messages put behind some of them."""

    def __init__(self, backward: Sequence[Instruction]) -> None:
        self._backward = backward
        self._maker = {value: k for k, item in enumerate(backward) for value in item.outs}
        self._added: dict[int, list[Instruction]] = {}
        self._brought: set[str] = set()

    def put(self, item: Node) -> bool:
        """Put a message where all that it sends is made; False if that is not here, or brought by another."""
        needed = set(refs_of(item))
        makers = {self._maker[v] for v in needed if v in self._maker}
        if not makers or not self._brought.isdisjoint(needed):
            return False
        if any(_is_message(self._backward[k]) for k in makers):
            return False
        place = max(makers)
        # messages of an axis keep their order
        while place + 1 < len(self._backward) and _is_message(self._backward[place + 1]):
            place += 1
        self._added.setdefault(place, []).append(item)
        self._brought.update(item.outs)
        return True

    def all(self) -> list[Instruction]:
        return [x for k, item in enumerate(self._backward) for x in (item, *self._added.get(k, ()))]


def _is_message(item: Instruction) -> TypeGuard[Node]:
    return isinstance(item, Node) and is_message(item)
