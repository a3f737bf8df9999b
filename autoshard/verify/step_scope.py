"""What runs once a step, and what runs for every microbatch, may not be mixed up.

``gather`` runs before the first microbatch, so it may only depend on parameters; ``count`` runs on the inputs
of each microbatch, and what leaves it is added up over them, so it must be a total, and totals must be made
nowhere else; ``reduce`` runs on gradients that are summed over all microbatches, so it must be linear; and a
gradient that is being summed is nothing that other parts may read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autoshard.ir import Call, Node
from autoshard.ir.boundaries import ends_of, part_name
from autoshard.ir.lowered import Lowered, StagePart, uses_of
from autoshard.passes.simplify.scale_terms import TOTAL
from autoshard.program.holders import accumulated, counted
from autoshard.program.program import Program
from autoshard.verify.moves import MOVES
from autoshard.verify.result import Finding, ProgramLocation
from autoshard.verify.translation_validation import LOST
from autoshard.verify.value_numbering import TermTable


def broken_steps(
    program: Program, terms: TermTable, own: Mapping[int, Mapping[str, int]]
) -> Iterator[Finding]:
    """Parts that do what their phase must not."""
    lowered = program.lowered
    for part in lowered.parts:
        if part.phase == "gather":
            yield from _gathered(lowered, part, terms, own.get(part.stage, {}))
        elif part.phase == "reduce":
            yield from _reduced(lowered, part)
        yield from _counted(program, part)
    for stage in sorted({p.stage for p in lowered.parts}):
        yield from _summed(program, stage)


def _gathered(
    lowered: Lowered, part: StagePart, terms: TermTable, own: Mapping[str, int]
) -> Iterator[Finding]:
    for number, item in _numbered(lowered, part):
        for out in item.outs:
            term = own.get(out, LOST)
            if term != LOST and term not in terms.fixed:
                yield Finding(
                    "step",
                    f"{out} is made once a step and depends on more than parameters",
                    _at(part, number, out),
                    "later microbatches would use that of the first",
                )


def _counted(program: Program, part: StagePart) -> Iterator[Finding]:
    """Totals, and what they are made of."""
    lowered, given = program.lowered, {p.name: p for p in program.signature.ports}
    for number, item in _numbered(lowered, part):
        nodes, outs = _nodes(lowered, item)
        totals = {o for n in nodes if n.op == TOTAL for o in n.outs}
        if part.phase != "count":
            if totals:
                what = f"{part_name(lowered, part)} makes a total of one microbatch"
                yield Finding("step", what, _at(part, number, item.outs[0] if item.outs else ""))
            continue
        for value in uses_of(item):
            port = given.get(value)
            if port is not None and (port.kind in ("param", "tangent") or port.target == "seed"):
                what = f"what is counted before the step depends on {port.kind} {port.target}"
                yield Finding("step", what, _at(part, number, value))
        for value, inner in outs.items():
            if value in counted(program, part.stage)[0] and inner not in totals:
                why = "it is added up over all microbatches"
                yield Finding("step", f"{value} is no total", _at(part, number, value), why)


def _nodes(lowered: Lowered, item: Call | Node) -> tuple[tuple[Node, ...], dict[str, str]]:
    """The ops of an instruction, and its results by what they are called inside."""
    if isinstance(item, Node):
        return (item,), {o: o for o in item.outs}
    graph = lowered.segments[item.segment].graph
    return graph.nodes, dict(zip(item.outs, graph.outputs, strict=True))


def _reduced(lowered: Lowered, part: StagePart) -> Iterator[Finding]:
    stage = part.stage
    new: set[str] = set()
    for other in lowered.parts:
        if other.stage == stage and other.phase in ("backward", "weight"):
            new.update(ends_of(lowered, other).makes)
    for number, item in _numbered(lowered, part):
        if not _is_linear(lowered, item):
            what = item.segment if isinstance(item, Call) else item.op
            yield Finding(
                "step",
                f"{what} runs on gradients that are summed over the microbatches",
                _at(part, number, item.outs[0] if item.outs else ""),
                "only what is linear gives the same before and after the sum",
            )
        foreign = [v for v in uses_of(item) if v not in new]
        if foreign:
            yield Finding(
                "step",
                f"{foreign[0]} is reduced once a step, but its stage makes no such gradient in backward",
                _at(part, number, foreign[0]),
            )
        new.update(item.outs)


def _is_linear(lowered: Lowered, item: Call | Node) -> bool:
    nodes = lowered.segments[item.segment].graph.nodes if isinstance(item, Call) else (item,)
    return all(n.op in MOVES and n.kwarg("op", "sum") == "sum" for n in nodes)


def _summed(program: Program, stage: int) -> Iterator[Finding]:
    """Gradients that are taken away to be summed, and that another part reads."""
    lowered = program.lowered
    taken = set(accumulated(program, stage))
    makers = {
        value: part.phase
        for part in lowered.parts
        if part.stage == stage and part.phase in ("backward", "weight")
        for value in ends_of(lowered, part).makes
        if value in taken
    }
    for part in lowered.parts:
        own = part.stage == stage and part.phase in ("reduce", "gather", "forward")
        if own:
            continue
        for value in ends_of(lowered, part).uses:
            elsewhere = value in makers and (part.stage != stage or part.phase != makers[value])
            if elsewhere and not _makes(lowered, part.stage, stage, value):
                yield Finding(
                    "step",
                    f"{part_name(lowered, part)} reads {value}, a gradient that is taken away to be summed",
                    _at(part, -1, value),
                )


def _makes(lowered: Lowered, stage: int, other: int, value: str) -> bool:
    """Whether a stage other than ``other`` makes a value itself."""
    return stage != other and any(
        value in ends_of(lowered, p).makes for p in lowered.parts if p.stage == stage
    )


def _numbered(lowered: Lowered, part: StagePart) -> Iterator[tuple[int, Call | Node]]:
    return ((part.start + k, item) for k, item in enumerate(lowered.of(part)))


def _at(part: StagePart, item: int, value: str) -> ProgramLocation:
    return ProgramLocation(value, part.stage, part.phase, part.slice, item)
