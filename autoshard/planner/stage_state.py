"""What the stages of a pipeline hold whatever is in flight, by the op of forward that brings it to a stage.

Where the cuts will fall is not known yet: a stage holds what its ops bring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cost.recipe import Recipe
from autoshard.ir import DTYPES, Folded, Port
from autoshard.passes.overlap.gather_once import gathers_of
from autoshard.passes.pipeline import LoweringOptions, kept_ports, late_ports
from autoshard.passes.stages.gradient_sums import GradientSums, linear_source, sums_of
from autoshard.passes.stages.stage_assignment import StagePlaces


@dataclass(frozen=True)
class StagedState:
    """Per op of forward. held: bytes of parameters, gathered copies, summed gradients and optimizer state.
    updated: bytes that the optimizer moves. copies: values that are gathered once a step, and what is on the
    way to them. shared: trained parameters that several ops bring, as (those ops, bytes)."""

    held: np.ndarray
    updated: np.ndarray
    copies: frozenset[str]
    shared: tuple[tuple[tuple[int, ...], float], ...] = ()


def state_of(
    homes: StagePlaces,
    folded: Folded,
    options: LoweringOptions,
    recipe: Recipe,
    bytes_of: Callable[[str], float],
    by_owners: Callable[[Recipe, Port], tuple[float, float]],
    *,
    once: bool,
) -> StagedState:
    """homes: where every statement runs if every op is a stage. bytes_of: a value of main, on a rank.
    by_owners: bytes of state that a rank owns of a parameter, and that the device moves while owners compute.
    once: whether gradients are made once a step, so that nothing is summed up."""
    count = sum(not s.backward for s in homes.uncut.whole.all)
    state = StagedState(np.zeros(count), np.zeros(count), _copies(homes, folded, options))
    shared: list[tuple[tuple[int, ...], float]] = []
    homing = _Homing(homes, folded, options)
    for port in folded.joint.ports:
        if port.kind != "param":
            continue
        own, width = bytes_of(port.name), DTYPES[port.type.dtype][1]
        slots = homing.holders(port)
        trained, kept = port.target in homing.gradients, recipe.of(port)
        if trained and len(slots) > 1:
            shared.append((slots, own))
        for slot in slots:
            state.held[slot] += own
            if trained:
                owned, moved = by_owners(kept, port)
                state.held[slot] += own / width * kept.optimizer_bytes(width) + owned
                state.updated[slot] += own / width * kept.update_bytes(width) + moved
        if trained and once:
            state.held[slots[0]] += own / width * kept.gradient_bytes(width)
        elif trained:
            for slot, value in homing.summed(port):
                elements = own / width if value is None else bytes_of(value) / DTYPES[port.stored_dtype][1]
                state.held[slot] += elements * kept.sum_bytes(width)
    for value, slot in homing.readers(state.copies):
        state.held[slot] += bytes_of(value)
    return replace(state, shared=tuple(shared))


def _copies(homes: StagePlaces, folded: Folded, options: LoweringOptions) -> frozenset[str]:
    if not options.plan.moves_apart:
        return frozenset()
    forward = [s for s in homes.uncut.whole.all if not s.backward]
    return frozenset(v for s in gathers_of(forward, kept_ports(folded, options)) for v in s.makes)


class _Homing:
    """The ops of forward whose stage has a parameter, its gradient or its copy.

    gradients: target of a trained parameter -> the value that is its gradient.
    """

    def __init__(self, homes: StagePlaces, folded: Folded, options: LoweringOptions) -> None:
        self.homes = homes
        full = homes.uncut.whole
        pairs = zip(folded.joint.results, full.results, strict=True)
        self.gradients = {r.target: value for r, value in pairs if r.kind == "grad"}
        self.results = frozenset(full.results)
        self.late = late_ports(folded, options)
        sums = sums_of(homes, folded.joint)
        #: gradient that several ops add to -> (op, its sum) of the first and the last: those between are
        #: mostly in one stage with either
        self.shared = {value: _ends(sums, value) for value in {v for own in sums.of.values() for v in own}}
        self.first: dict[str, int] = {}
        for place, statement in enumerate(full.all):
            slot = homes.at[place]
            if slot is not None and not statement.backward:
                for value in statement.uses:
                    for base in homes.bases.get(value, (value,)):
                        self.first.setdefault(base, slot)

    def holders(self, port: Port) -> tuple[int, ...]:
        """Ops whose stages have the parameter."""
        ends = self.shared.get(self.gradients.get(port.target, ""), ())
        return tuple(slot for slot, _ in ends) or (self.first.get(port.name, 0),)

    def summed(self, port: Port) -> Iterator[tuple[int, str | None]]:
        """(op, value) of what is summed up for the gradient of a parameter; None: as the parameter is stored.

        Gradients that wait for the last microbatch are summed up as backward makes them.
        """
        late, value = port.name in self.late, self.gradients[port.target]
        ends = self.shared.get(value)
        if ends is not None:
            yield from ((slot, term if late else None) for slot, term in ends)
        else:
            source = linear_source(self.homes.uncut, value, self.results) if late else None
            yield self.first.get(port.name, 0), source

    def readers(self, copies: frozenset[str]) -> Iterator[tuple[str, int]]:
        """(copy, op whose stage reads it) of those that anything but another gather reads: the first op, and
        the last if that is in another call."""
        spans: dict[str, tuple[int, int]] = {}
        copies_in = {copy: frozenset((copy,)) for copy in copies}
        statements = self.homes.uncut.whole.all
        for place, statement in enumerate(statements):
            if not copies.isdisjoint(statement.makes):
                continue
            held = [copies_in[v] for v in statement.uses if v in copies_in]
            if not held:
                continue
            read = frozenset[str]().union(*held)
            slot = self.homes.at[place]
            if slot is None:  # a view, which every stage makes for itself
                copies_in.update(dict.fromkeys(statement.makes, read))
                continue
            for copy in read:
                first, last = spans.get(copy, (slot, slot))
                spans[copy] = min(slot, first), max(slot, last)
        calls = [s.item for s in statements if not s.backward]
        for copy, (first, last) in spans.items():
            yield copy, first
            if calls[first] != calls[last]:
                yield copy, last


def _ends(sums: GradientSums, value: str) -> tuple[tuple[int, str], ...]:
    slots = sorted(slot for slot, own in sums.of.items() if value in own)
    return tuple((slot, sums.of[slot][value].terms[0]) for slot in dict.fromkeys((slots[0], slots[-1])))
