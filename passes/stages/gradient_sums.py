"""Gradients of parameters that several stages of a pipeline use: what each stage adds to them.

The gradient is a sum of terms, behind which there may be collectives that are linear. Each stage adds up the
terms that it makes and does those collectives itself; the sum over the stages is then the gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autoshard.ir import Joint, Node, Ref
from autoshard.ir.collectives import exact_transfer
from autoshard.ir.lowered import Instruction, PlacedValue
from autoshard.passes.stages.stage_assignment import StagePlaces
from autoshard.passes.stages.unpartitioned import Unpartitioned


@dataclass(frozen=True)
class Sum:
    """terms: values that a stage adds up. tail: places of the collectives behind. name: of the sum."""

    terms: tuple[str, ...]
    tail: tuple[int, ...]
    name: str


@dataclass(frozen=True)
class GradientSums:
    """of: stage -> result -> how that stage's part of it is made, where several stages add to it. replaced:
    places of the statements that made those results before."""

    of: Mapping[int, Mapping[str, Sum]]
    replaced: frozenset[int]


@dataclass(frozen=True)
class SumItems:
    """What a stage does for its sums. renamed: value that is all of a stage's part of a result -> result."""

    items: list[Instruction]
    renamed: dict[str, str]


def sums_of(places: StagePlaces, joint: Joint) -> GradientSums:
    """The gradients that several stages add to."""
    uncut = places.uncut
    outcome: dict[int, dict[str, Sum]] = {}
    replaced: set[int] = set()
    results = set(uncut.whole.results)
    for result, value in zip(joint.results, uncut.whole.results, strict=True):
        if result.kind != "grad" or value not in uncut.maker:
            continue
        at, tail = _through(uncut, value, results)
        dropped: list[int] = []
        terms = _terms(uncut, at, value, results, dropped)
        home = min(places.owners[value])
        stages = {_where(places, term, home) for term in terms}
        if len(stages) < 2:
            continue
        for stage in stages:
            own = tuple(term for term in terms if _where(places, term, home) == stage)
            outcome.setdefault(stage, {})[value] = Sum(own, tuple(reversed(tail)), at)
        replaced.update(tail, dropped)
    return GradientSums(outcome, frozenset(replaced))


def linear_source(uncut: Unpartitioned, result: str, results: Collection[str]) -> str:
    """What a gradient is before the collectives that a sum of it may pass through; results: all of them."""
    return _through(uncut, result, results)[0]


def _through(uncut: Unpartitioned, result: str, results: Collection[str]) -> tuple[str, list[int]]:
    """(a gradient before its linear collectives, their places, the last one first)."""
    tail: list[int] = []
    at = result
    while (place := uncut.maker.get(at)) is not None:
        if not _is_linear(uncut.whole.all[place].node) or not _only_one(uncut, at, result, results):
            break
        tail.append(place)
        at = uncut.whole.all[place].uses[0]
    return at, tail


def sum_items(uncut: Unpartitioned, sums: Mapping[str, Sum], values: dict[str, PlacedValue]) -> SumItems:
    """The additions and collectives that make a stage's own parts; what they make is added to the values."""
    full = uncut.whole
    items: list[Instruction] = []
    renamed: dict[str, str] = {}
    for result, new in sums.items():
        at = new.terms[0]
        for number, term in enumerate(new.terms[1:]):
            last = number == len(new.terms) - 2
            out = new.name if last else f"{new.name}_sum{number}"
            values[out] = full.values[new.name]
            node = full.all[uncut.maker[new.name]].node if new.name in uncut.maker else None
            types = (full.values[new.name].type,)
            origin = node.origin if node is not None else full.all[0].node.origin
            items.append(Node("aten.add.Tensor", (Ref(at), Ref(term)), (), (out,), types, origin, True))
            at = out
        if len(new.terms) == 1 and not new.tail:
            renamed[at] = result
            values[result] = full.values[at]
        for place in new.tail:
            node = full.all[place].node
            outs = full.all[place].makes
            values.update({o: full.values[o] for o in outs})
            items.append(replace(node, args=(Ref(at), *node.args[1:]), outs=outs, backward=True))
            at = outs[0]
    return SumItems(items, renamed)


def _where(places: StagePlaces, value: str, home: int) -> int:
    """The stage of a term; home: of one that any stage could make."""
    stage = places.made_in.get(value)
    return home if stage is None else stage


def _only_one(uncut: Unpartitioned, value: str, result: str, results: Collection[str]) -> bool:
    """Whether a value is used once: as the result itself, or by one op."""
    uses = len(uncut.users.get(value, ()))
    return uses == 0 if value == result else uses == 1 and value not in results


def _terms(
    uncut: Unpartitioned, value: str, result: str, results: Collection[str], dropped: list[int]
) -> list[str]:
    """What is added up to make a value; dropped: gets the places of the additions."""
    place = uncut.maker.get(value)
    if place is None:
        return [value]
    statement = uncut.whole.all[place]
    plain = statement.node.op == "aten.add.Tensor" and not statement.node.kwargs and len(statement.uses) == 2
    if not plain or not _only_one(uncut, value, result, results):
        return [value]
    dropped.append(place)
    return [t for part in statement.uses for t in _terms(uncut, part, result, results, dropped)]


def _is_linear(node: Node) -> bool:
    """Whether a sum of gradients may pass through a collective term by term."""
    return exact_transfer(node) is not None and node.kwarg("op", "sum") == "sum"
