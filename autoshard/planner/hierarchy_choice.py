"""Ways to lay the collectives of a program on levels of wiring, and the choice between them by the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from autoshard.cluster import Cluster, Mesh
from autoshard.cluster.levels import levels_of
from autoshard.errors import UsageError
from autoshard.passes.partition.hierarchy import AxisLevels, CannotRefineError
from autoshard.passes.partition.hpz_secondary_shards import NO_SECONDARY, Secondary
from autoshard.program.program import Program
from autoshard.simulate.step import estimate_step

OFF, AUTO, LEVELS = "off", "auto", "levels"


@dataclass(frozen=True)
class HierarchyOption:
    """levels: axes that are taken apart. secondary: what else is split over fewer ranks within a step."""

    name: str
    levels: tuple[AxisLevels, ...] = ()
    secondary: Secondary = NO_SECONDARY


@dataclass(frozen=True)
class TriedHierarchy:
    """A way with its simulated step: seconds, bytes at the peak of the fullest rank; or why it cannot be."""

    way: HierarchyOption
    seconds: float = inf
    peak: float = inf
    why_not: str = ""


def hierarchy_options(text: str, cluster: Cluster, whole: Mesh, mesh: Mesh) -> list[HierarchyOption]:
    """The ways that a wish allows.

    text: ``off``; ``levels``, collectives level by level; ``copy=node``, with a copy of the parameters that
    is split inside a node and kept from forward to backward; ``copy=package,once``, made once a step;
    ``gradients=node``, reduced inside a node in every microbatch and over the network once a step; or
    ``auto``, the best of all of these. whole: the mesh with its pp axis, which decides what axes cross; mesh:
    without it. Raises UsageError for any other word, and where the axis has no such level.
    """
    words = [w.strip() for w in text.split(",")]
    if words == [OFF] or words == [""]:
        return [HierarchyOption(OFF)]
    apart = [
        AxisLevels(axis.name, parts)
        for axis in mesh.axes
        if axis.meaning.splits_batch and (parts := levels_of(cluster, whole, axis.name))
    ]
    if words == [AUTO]:
        return [HierarchyOption(OFF), *_all(tuple(apart))]
    if not apart:
        raise UsageError(
            f"no axis of {whole} crosses more than one level of {cluster.name}",
            where=f"hierarchy {text!r}",
            hint="leave the hierarchy out, or let dp or fsdp reach over several nodes",
        )
    return [HierarchyOption(text, tuple(apart), _wished(words, text, apart))]


def _all(apart: tuple[AxisLevels, ...]) -> Iterator[HierarchyOption]:
    if not apart:
        return
    yield HierarchyOption(LEVELS, apart)
    stored = _stored(apart)
    if stored is None:
        return
    names = stored.names
    short = [n.removeprefix(f"{stored.axis}_") for n in names]
    for k in range(1, len(names)):
        yield HierarchyOption(f"copy={short[k]}", apart, Secondary(names[:k]))
        for g in range(k + 1):
            waits = f",gradients={short[g]}" if g else ""
            yield HierarchyOption(
                f"copy={short[k]},once{waits}", apart, Secondary(names[:k], True, names[:g])
            )


def _stored(apart: Sequence[AxisLevels]) -> AxisLevels | None:
    """The axis over which parameters are stored in parts."""
    return next((each for each in apart if each.axis == "fsdp"), None)


def _wished(words: Sequence[str], text: str, apart: Sequence[AxisLevels]) -> Secondary:
    copies: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    once = "once" in words
    for word in words:
        key, _, level = word.partition("=")
        if word in (LEVELS, "once"):
            continue
        if key not in ("copy", "gradients"):
            raise UsageError(
                f"{word!r} is no hierarchy",
                where=f"hierarchy {text!r}",
                hint="off, auto, levels, copy=LEVEL, copy=LEVEL,once or gradients=LEVEL",
            )
        outer = _outside(level, text, apart)
        if key == "copy":
            copies = outer
        else:
            gradients = outer
    if once and not copies:
        raise UsageError("once says how copies are made", where=f"hierarchy {text!r}", hint="add copy=LEVEL")
    return Secondary(copies, once, gradients)


def _outside(level: str, text: str, apart: Sequence[AxisLevels]) -> tuple[str, ...]:
    """The axes outside a level, over which what is split inside it is the same."""
    stored = _stored(apart)
    if stored is None:
        raise UsageError("parameters are not split over several levels", where=f"hierarchy {text!r}")
    inner = [n.removeprefix(f"{stored.axis}_") for n in stored.names]
    if level not in inner[1:]:
        raise UsageError(
            f"{stored.axis} has no inner level {level!r}",
            where=f"hierarchy {text!r}",
            hint=f"name one of {', '.join(inner[1:])}",
        )
    return stored.names[: inner.index(level)]


def best_hierarchy(
    options: Sequence[HierarchyOption],
    build: Callable[[HierarchyOption], Program],
    cluster: Cluster,
    budget: int | None,
    say: Callable[[str], None],
) -> tuple[Program, list[TriedHierarchy]]:
    """The program with the shortest simulated step among those that fit the memory; if none does, the one
    that holds least.

    With a single way nothing is simulated. Raises UsageError if that one cannot be.
    """
    if len(options) == 1:
        try:
            return build(options[0]), []
        except CannotRefineError as error:
            raise UsageError(
                f"the program cannot be laid out as {options[0].name!r}",
                why=str(error),
                hint="leave the hierarchy out, or let sizes be divisible by the mesh",
            ) from None
    tried: list[TriedHierarchy] = []
    programs: list[Program | None] = []
    for way in options:
        say(f"hierarchy {way.name}")
        try:
            program = build(way)
        except CannotRefineError as error:
            tried.append(TriedHierarchy(way, why_not=str(error)))
            programs.append(None)
            continue
        step = estimate_step(program, cluster)
        tried.append(TriedHierarchy(way, step.seconds, step.fullest.peak))
        programs.append(program)
    fits = [k for k, t in enumerate(tried) if budget is None or t.peak <= budget]
    if fits:
        best = min(fits, key=lambda k: tried[k].seconds)
    else:
        best = min(range(len(tried)), key=lambda k: tried[k].peak)
    chosen = programs[best]
    assert chosen is not None
    return chosen, tried


def comparison(tried: Sequence[TriedHierarchy]) -> str:
    """One line per way, as comments for a dump."""
    lines = []
    for t in tried:
        outcome = t.why_not or f"step {t.seconds * 1e3:.1f} ms, {t.peak / 2**30:.2f} GiB at the peak"
        lines.append(f"# {t.way.name:<32} {outcome}\n")
    return "".join(lines)
