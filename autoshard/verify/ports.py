"""The ends of a program: shards that cover what they are of, and results that are those of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autoshard.errors import VerificationError
from autoshard.ir import Port, Result
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Partial, Shard, layout_ok
from autoshard.program.holders import holders_of
from autoshard.program.program import Program
from autoshard.rules.local import MeshShape
from autoshard.verify.indices import cover, splits_of
from autoshard.verify.result import Finding, ProgramLocation, Rule
from autoshard.verify.translation_validation import LOST
from autoshard.verify.value_numbering import TermTable

#: phases in which a value is summed over the microbatches
_SUMMED = ("backward", "weight", "reduce")


def broken_shards(program: Program, mesh: MeshShape) -> Iterator[Finding]:
    """Inputs of the program that ranks do not hold exactly once, or that are not what the model takes."""
    for port in program.signature.ports:
        placed = program.lowered.values.get(port.name)
        if placed is None or placed.type != port.type:
            yield Finding(
                "shards", f"{port.kind} {port.target} is not of its own type", ProgramLocation(port.name)
            )
            continue
        why = uncovered(placed, mesh)
        if why:
            yield Finding(
                "shards", f"{port.kind} {port.target} is not divided exactly", ProgramLocation(port.name), why
            )


def uncovered(placed: PlacedValue, mesh: MeshShape) -> str:
    """What is wrong with how a value is divided over the mesh, "" if nothing is."""
    shape, layout = placed.type.shape, placed.layout
    if any(isinstance(p, Partial) for p in layout):
        return "nobody adds up what ranks are given"
    for dim in dict.fromkeys(p.dim for p in layout if isinstance(p, Shard)):
        why = cover(shape[dim], splits_of(layout, dim, mesh.sizes))
        if why:
            return f"dim {dim}: {why}"
    return "" if layout_ok(shape, layout, mesh.sizes) else "axes divide a dim in parts that overlap"


def broken_results(
    program: Program, terms: TermTable, own: Mapping[int, Mapping[str, int]]
) -> Iterator[Finding]:
    """Results that are not the model's, and gradients that do not end as their parameters lie.

    own: stage -> value -> term, of what each stage makes.
    """
    ports = {(p.kind, p.target): p for p in program.signature.ports}
    holders = _holders(program)
    phases = _phases(program)
    for result, wanted in zip(program.signature.results, terms.results, strict=True):
        new = {stage: values[result.value] for stage, values in own.items() if result.value in values}
        if LOST in new.values():
            continue  # told where it was lost
        if not new and result.value in terms.ports:
            new = {0: terms.ports[result.value]}
        yield from _computed(result, new, wanted, terms, phases)
        if result.kind == "grad":
            yield from _gradient(program, result, ports.get(("param", result.target)), new, holders)
        elif result.kind == "buffer":
            yield from _lies_alike(program, result, ports.get(("buffer", result.target)))


def _computed(
    result: Result, made: Mapping[int, int], wanted: int, terms: TermTable, phases: Mapping[str, set[str]]
) -> Iterator[Finding]:
    name, at = f"{result.kind} {result.target}", ProgramLocation(result.value)
    if not made:
        yield Finding("result", f"{name} is made by no stage", at)
    elif result.kind == "grad":
        results, right = terms.all_terms(made.values()), terms.terms_of(wanted)
        if results != right:
            stages = ", ".join(map(str, made))
            yield Finding(
                "gradient",
                f"{name} is not that of the model",
                at,
                f"the model adds up {len(right)} terms; stages {stages} add up {len(results)}, "
                f"{len(set(results) & set(right))} of them the model's",
            )
        early = phases.get(result.value, set()) - set(_SUMMED)
        if early:
            yield Finding(
                "step", f"{name} is made in {min(early)}", at, "only backward is summed over microbatches"
            )
    elif any(term != wanted for term in made.values()):
        wrong = next(stage for stage, term in made.items() if term != wanted)
        yield Finding(
            "result", f"{name} is not that of the model", ProgramLocation(result.value, stage=wrong)
        )


def _gradient(
    program: Program,
    result: Result,
    port: Port | None,
    made: Mapping[int, int],
    holders: Mapping[str, tuple[int, ...]],
) -> Iterator[Finding]:
    if port is None:
        yield Finding("gradient", f"there is no parameter {result.target}", ProgramLocation(result.value))
        return
    yield from _lies_alike(program, result, port)
    foreign = sorted(set(made) - set(holders.get(port.name, ())))
    if foreign:
        yield Finding(
            "gradient",
            f"stage {foreign[0]} makes the gradient of {result.target}, which it does not hold",
            ProgramLocation(result.value, stage=foreign[0]),
            "its term would be added to nothing",
        )


def _lies_alike(program: Program, result: Result, port: Port | None) -> Iterator[Finding]:
    """A gradient lies as its parameter. A buffer's new value may lie in any way: it is gathered as it is kept
    (`Runner.update_buffers`)."""
    values = program.lowered.values
    if port is None or result.value not in values:
        return
    have, want = values[result.value], values[port.name]
    anyhow = result.kind == "buffer" or have.layout == want.layout
    if not anyhow or have.type.shape != want.type.shape:
        rule: Rule = "gradient" if result.kind == "grad" else "result"
        names = program.mesh
        yield Finding(
            rule,
            f"{result.kind} {result.target} does not lie as it should",
            ProgramLocation(result.value),
            f"on {names}: {_text(have)}, but {port.kind} {port.target} is {_text(want)}",
        )


def _text(placed: PlacedValue) -> str:
    return f"{placed.type} {' '.join(map(str, placed.layout))}"


def _holders(program: Program) -> Mapping[str, tuple[int, ...]]:
    try:
        return holders_of(program)
    except VerificationError:
        return {}


def _phases(program: Program) -> Mapping[str, set[str]]:
    """Value of main -> the phases in which it is made."""
    result: dict[str, set[str]] = {}
    for part in program.lowered.parts:
        for item in program.lowered.of(part):
            for out in item.outs:
                result.setdefault(out, set()).add(part.phase)
    return result
