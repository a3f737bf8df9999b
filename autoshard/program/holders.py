"""Which pipeline stages have which parameters and buffers, and whose gradients are sums over stages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.errors import VerificationError
from autoshard.ir.boundaries import ends_of
from autoshard.program.program import Program

NONE: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def holders_of(program: Program, unused: Mapping[str, tuple[int, ...]] = NONE) -> dict[str, tuple[int, ...]]:
    """Name of a port -> the stages that use it, or update it. unused: target of a parameter -> the stages
    that have it though none uses it, otherwise stage 0."""
    names = {p.name for p in program.signature.ports}
    results: dict[str, set[int]] = {name: set() for name in names}
    for part in program.lowered.parts:
        for value in ends_of(program.lowered, part).uses:
            if value in names:
                results[value].add(part.stage)
    buffers = {p.target: p.name for p in program.signature.ports if p.kind == "buffer"}
    makers = makers_of(program)
    for result in program.signature.results:
        if result.kind == "buffer":
            results[buffers[result.target]].update(makers.get(result.value, ()))
    kept = {p.name: unused.get(p.target, (0,)) for p in program.signature.ports}
    return {name: tuple(sorted(stages)) or kept[name] for name, stages in results.items()}


def makers_of(program: Program) -> dict[str, tuple[int, ...]]:
    """Value of a result -> the stages that make it (or, of gradients shared by stages, a term of it)."""
    results = {r.value for r in program.signature.results}
    result: dict[str, set[int]] = {}
    for part in program.lowered.parts:
        for value in ends_of(program.lowered, part).makes:
            if value in results:
                result.setdefault(value, set()).add(part.stage)
    return {value: tuple(sorted(stages)) for value, stages in result.items()}


def accumulated(program: Program, stage: int) -> tuple[str, ...]:
    """Values of a stage that are summed over the microbatches: gradients, or what `reduce` makes them of."""
    lowered = program.lowered
    reduced: set[str] = set()
    taken: tuple[str, ...] = ()
    new: list[str] = []
    for part in lowered.of_stage.get(stage, ()):
        ends = ends_of(lowered, part)
        if part.phase == "reduce":
            taken, reduced = ends.uses, set(ends.makes)
        elif part.phase in ("backward", "weight"):
            new += ends.makes
    grads, also = program.signature.gradients, set(taken)
    return tuple(v for v in dict.fromkeys(new) if v in also or (v in grads and v not in reduced))


def counted(program: Program, stage: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(values of a stage that are added up over the microbatches before they run, what they are made of)."""
    lowered = program.lowered
    own = lowered.of_stage.get(stage, ())
    parts = [ends_of(lowered, part) for part in own if part.phase == "count"]
    used = {v for part in own if part.phase != "count" for v in ends_of(lowered, part).uses}
    new = tuple(v for ends in parts for v in ends.makes if v in used)
    return new, tuple(v for ends in parts for v in ends.uses) if new else ()


def check_holders(program: Program) -> None:
    """VerificationError if a stage makes the gradient of a parameter that it does not hold."""
    holders, makers = holders_of(program), makers_of(program)
    ports = {p.target: p.name for p in program.signature.ports if p.kind == "param"}
    for result in program.signature.results:
        if result.kind != "grad":
            continue
        foreign = set(makers.get(result.value, ())) - set(holders[ports[result.target]])
        if foreign:
            raise VerificationError(
                f"stage {min(foreign)} makes the gradient of {result.target}, which it does not hold",
                where=f"value {result.value} of the program",
                hint="this is a mistake in the program: please report it",
            )
