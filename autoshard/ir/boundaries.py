"""What enters and leaves the parts of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autoshard.errors import VerificationError
from autoshard.ir.lowered import Lowered, PartBoundary, StagePart, uses_of


def part_name(lowered: Lowered, part: StagePart) -> str:
    """``forward`` where there is one stage, else ``forward_3``; ``forward_3_s1`` for its slice 1."""
    alone = all(p.stage == 0 for p in lowered.parts)
    name = part.phase if alone else f"{part.phase}_{part.stage}"
    return f"{name}_s{part.slice}" if part.slice else name


def ends_of(lowered: Lowered, part: StagePart) -> PartBoundary:
    """What one of the program's parts takes and makes."""
    return lowered.ends[part]


def returns_of(lowered: Lowered, results: Collection[str]) -> dict[StagePart, tuple[str, ...]]:
    """What each part returns: results, what other stages use, and gradients that ``reduce`` takes.

    Raises VerificationError if the parts do not make a pipeline (see `check_parts`).
    """
    check_parts(lowered)
    ends = {part: ends_of(lowered, part) for part in lowered.parts}
    new: dict[int, set[str]] = {}
    for part, end in ends.items():
        new.setdefault(part.stage, set()).update(end.makes)
    sent: set[str] = set(results)
    for part, end in ends.items():
        own = () if part.phase == "reduce" else new[part.stage]
        sent.update(v for v in end.uses if v not in own)
    return {part: tuple(v for v in end.makes if v in sent) for part, end in ends.items()}


@dataclass(frozen=True, slots=True)
class Wire:
    """A value that one stage makes and another uses. phase: in which it is made; into: is first used.

    slice, into_slice: of the sequence, of the same.
    """

    value: str
    source: int
    phase: str
    target: int
    into: str
    slice: int = 0
    into_slice: int = 0


def wires_of(lowered: Lowered, ports: Collection[str]) -> tuple[Wire, ...]:
    """Everything that travels between stages, in the order in which it is made; one wire per target stage.

    ports: values that every rank has from the start. A value that several stages make comes from the
    nearest one below, or else above.
    """
    ends = {part: ends_of(lowered, part) for part in lowered.parts}
    makers: dict[str, list[StagePart]] = {}
    for part, end in ends.items():
        for value in end.makes:
            makers.setdefault(value, []).append(part)
    result: dict[tuple[str, int], Wire] = {}
    for part, end in ends.items():
        for value in end.uses:
            if value in ports or (value, part.stage) in result:
                continue
            new = makers.get(value, [])
            if any(p.stage == part.stage for p in new):
                continue
            if new:
                source = min(new, key=lambda p: (p.stage > part.stage, abs(p.stage - part.stage)))
                result[value, part.stage] = Wire(
                    value, source.stage, source.phase, part.stage, part.phase, source.slice, part.slice
                )
    place = {(part.stage, v): k for part, end in ends.items() for k, v in enumerate(end.makes)}
    at = {(str(p.phase), p.stage, p.slice): k for k, p in enumerate(lowered.parts)}
    return tuple(
        sorted(
            result.values(),
            key=lambda w: (at[w.phase, w.source, w.slice], place[w.source, w.value], w.target),
        )
    )


def check_parts(lowered: Lowered) -> None:
    """VerificationError unless every stage has the same parts, and takes only what has been made by then.

    Values of forward may be sent up, and to any later phase; values of backward are only sent down, and
    those of the weight phase and of ``reduce`` stay in their stage: whatever the schedule, none of them
    would come in time. With slices, forward only takes from the same slice and those before it, backward from
    the same and those behind it; to a gradient of a parameter each of them may add a term of its own.
    """
    phases: dict[int, set[tuple[str, int]]] = {}
    for part in lowered.parts:
        phases.setdefault(part.stage, set()).add((part.phase, part.slice))
    if sorted(phases) != list(range(len(phases))):
        raise _broken(f"its stages are {', '.join(map(str, sorted(phases)))}")
    for stage, own in phases.items():
        if own != phases[0]:
            differ = ", ".join(f"{phase} of slice {part}" for phase, part in sorted(own ^ phases[0]))
            raise _broken(f"stage {stage} has not the parts of stage 0", differ)
    ends = {part: ends_of(lowered, part) for part in lowered.parts}
    new: dict[int, set[str]] = {stage: set() for stage in phases}
    later = {stage: {v for p, e in ends.items() if p.stage == stage for v in e.makes} for stage in phases}
    for part in sorted(lowered.parts, key=_turn):
        late = (later[part.stage] - new[part.stage]).intersection(ends[part].uses)
        if late:
            raise _broken(f"{part_name(lowered, part)} uses {min(late)} before its stage makes it")
        new[part.stage].update(ends[part].makes)
    twice = {stage: _made_twice(ends, stage) for stage in phases}
    for part in lowered.parts if any(twice.values()) else ():
        both = {v for item in lowered.of(part) for v in uses_of(item)} & twice[part.stage]
        if both and part.phase != "reduce":
            raise _broken(f"{part_name(lowered, part)} uses {min(both)}, to which several slices add")
    for wire in wires_of(lowered, ()):
        if not _in_time(wire):
            raise _broken(f"{wire.into} {wire.target} takes {wire.value} from {wire.phase} {wire.source}")


def _made_twice(ends: Mapping[StagePart, PartBoundary], stage: int) -> set[str]:
    """Values that several parts of a stage make: terms of a gradient, one per slice."""
    counts = Counter(v for part, end in ends.items() if part.stage == stage for v in end.makes)
    return {value for value, count in counts.items() if count > 1}


_PHASES = ("gather", "count", "forward", "backward", "weight", "reduce")


def _turn(part: StagePart) -> tuple[int, int]:
    """When a stage runs a part: forward slice after slice, back in reverse order."""
    return _PHASES.index(part.phase), part.slice if part.phase == "forward" else -part.slice


def _in_time(wire: Wire) -> bool:
    """Whether a value can arrive in every schedule before it is used."""
    if wire.phase == "forward" and wire.into == "forward":
        return wire.source < wire.target and wire.slice <= wire.into_slice
    if wire.phase == "forward":
        return wire.into in ("backward", "weight")
    down = wire.source > wire.target and wire.slice >= wire.into_slice
    return wire.phase == "backward" and wire.into in ("backward", "weight") and down


def _broken(what: str, where: str = "") -> VerificationError:
    return VerificationError(
        f"the parts of the program make no pipeline: {what}", where=where, hint="compile the program again"
    )
