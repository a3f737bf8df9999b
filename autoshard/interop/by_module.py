"""A plan read by modules: what stands between a plan and the texts made of it for other runtimes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoshard.cluster import Mesh
from autoshard.cluster.axes import meaning_of
from autoshard.errors import UsageError
from autoshard.interop.local_code import RANDOM, Sound, sound_styles
from autoshard.interop.local_model import LocalModel
from autoshard.interop.module_styles import LeftOut, Style, other_divisions, parameter_uses, wanted_styles
from autoshard.ir.placement import Shard
from autoshard.planner.analysis import Analysis
from autoshard.search.plan.plan import Plan

#: several names of a model in one: a part that is a number stands as ``*``
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True)
class Example:
    """The model that was planned, and example inputs of global shape."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class ByModule:
    """The styles of modules on the one axis that divides weights.

    axis: its name, "" if no axis of more than one rank divides them. styles: by full name of the module.
    notes: what of the plan is not in the styles, and why. params: names of all parameters, aliases included.
    """

    mesh: Mesh
    axis: str
    styles: Mapping[str, Style]
    notes: tuple[LeftOut, ...]
    params: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that hold parameters of their own."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.params))


def by_module(
    plan: Plan, analysis: Analysis, example: Example | None, *, split_tables: bool = True
) -> ByModule:
    """The styles that a plan comes to (example, split_tables: see `sound_styles`).

    Torch divides a module over one axis: where the plan has several that divide weights, ``tp``, or else the
    one that divides most modules, is taken and the others are noted.
    """
    mesh = Mesh.parse(plan.mesh)
    uses = parameter_uses(analysis)
    result: dict[str, tuple[dict[str, Style], list[LeftOut]]] = {}
    for number, (name, size) in enumerate(zip(mesh.names, mesh.sizes, strict=True)):
        if size == 1 or meaning_of(name).splits_batch:
            continue
        wanted, notes = wanted_styles(plan, analysis, uses, number, size)
        local = None if example is None else LocalModel(example.model, example.args, example.kwargs, size)
        sound = sound_styles(analysis, uses, wanted, size, local, split_tables=split_tables)
        notes += sound.notes
        notes += other_divisions(plan, analysis, sound.styles, notes, number)
        notes += _left_full(plan, analysis, sound, notes, number)
        notes += _dropped(analysis, sound)
        result[name] = sound.styles, notes
    axis = max(result, key=lambda name: (name == "tp", len(result[name][0])), default="")
    joint = analysis.folded.joint
    params = [p.target for p in joint.ports if p.kind == "param"] + [alias for alias, _ in joint.tied]
    styles, notes = result.get(axis, ({}, []))
    if axis and not styles:
        why = "none of its divisions can be written" if notes else "the plan divides no module over it"
        notes.append(LeftOut(f"axis {axis}", f"{why}, so that its ranks repeat each other's work"))
    for name in result:
        if name != axis:
            why = (
                f"a module is divided over one axis, here {axis}: ranks along {name} repeat each other's work"
            )
            notes.append(LeftOut(f"axis {name}", why))
    return ByModule(mesh, axis if styles else "", styles, tuple(notes), tuple(params))


def _left_full(
    plan: Plan, analysis: Analysis, sound: Sound, noted: Sequence[LeftOut], axis: int
) -> list[LeftOut]:
    """Modules whose tensors the plan splits over an axis and the styles do not, beside those noted."""
    known = {pattern_of(name) for name in (*sound.styles, *(n.what for n in noted))}
    result: dict[str, None] = {}
    for number, call in enumerate(analysis.folded.calls):
        if call.backward:
            continue
        for site, node in enumerate(analysis.folded.segments[call.segment].nodes):
            layouts = plan.nodes[call.segment, site].outputs
            split = [
                n for n, lay in zip(node.outs, layouts, strict=True) if lay and isinstance(lay[axis], Shard)
            ]
            if any((number, name) not in sound.split for name in split):
                result[pattern_of(node.origin.fqn)] = None
    why = "the plan splits its tensors (along the tokens, mostly); here each rank works on all of them"
    return [LeftOut(what or "the model's own code", why) for what in result if what not in known]


def _dropped(analysis: Analysis, sound: Sound) -> list[LeftOut]:
    """Modules whose dropout would act on a rank's part of a tensor."""
    why = "its dropout acts on parts: ranks with one random seed drop the same places of theirs"
    result: dict[str, None] = {}
    for number, call in enumerate(analysis.folded.calls):
        if not call.backward:
            for node in analysis.folded.segments[call.segment].nodes:
                if node.op.startswith(RANDOM) and (number, node.name) in sound.split:
                    result[pattern_of(node.origin.fqn)] = None
    return [LeftOut(what or "the model's own code", why) for what in result]


def check_order(mesh: Mesh) -> None:
    """UsageError where torch cannot make the mesh's part for `fully_shard` (replicas first, then shards)."""
    names = [n for n, s in zip(mesh.names, mesh.sizes, strict=True) if s > 1 and meaning_of(n).splits_batch]
    if "ep" in names:
        raise UsageError(
            f"the mesh {mesh} cannot be written with torch",
            why="fully_shard divides parameters over one axis, and exchanges no rows of experts",
            hint="plan with --mesh and fsdp in place of ep, or run the plan's own programs",
        )
    if names == ["fsdp", "dp"]:
        raise UsageError(
            f"the mesh {mesh} cannot be written with torch",
            why="hybrid sharding takes the axis of the replicas (dp) before that of the shards (fsdp)",
            hint="plan with dp before fsdp",
        )


def pattern_of(name: str) -> str:
    """``model.layers.*.mlp`` for ``model.layers.3.mlp``."""
    return _NUMBER.sub("*", name)


def grouped(names: Iterable[str], universe: Iterable[str]) -> list[str]:
    """The names, those of one pattern as that pattern if it matches no other name of the universe."""
    chosen = list(dict.fromkeys(names))
    taken = set(chosen)
    broken = {pattern_of(name) for name in universe if name not in taken}
    return list(dict.fromkeys(name if pattern_of(name) in broken else pattern_of(name) for name in chosen))


def globs(names: Iterable[str], universe: Iterable[str]) -> list[str]:
    """The names as few patterns of which every ``*`` is filled by all numbers there are at its place.

    As `grouped`, but a number stays where others at its place are not meant (``block.*.layer.0.q``).
    """
    numbers: dict[str, set[str]] = {}  # name up to a number -> numbers there
    every = [name.split(".") for name in universe]
    for words in every:
        for k, word in enumerate(words):
            if word.isdigit():
                numbers.setdefault(".".join(words[:k]), set()).add(word)
    rows = {name: name.split(".") for name in names}
    longest = max((len(words) for words in rows.values()), default=0)
    for k in reversed(range(longest)):
        alike: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for name, words in rows.items():
            if k < len(words) and words[k].isdigit():
                rest = (*words[:k], "", *words[k + 1 :])
                alike.setdefault(rest, {}).setdefault(words[k], []).append(name)
        for rest, held in alike.items():
            if len(held) > 1 and set(held) == numbers[".".join(rest[:k])]:
                for name in (n for group in held.values() for n in group):
                    rows[name][k] = "*"
    return list(dict.fromkeys(".".join(words) for words in rows.values()))


def note_lines(result: ByModule) -> list[tuple[str, list[str]]]:
    """(reason, names) of all notes, names grouped."""
    reasons: dict[str, list[str]] = {}
    for note in result.notes:
        reasons.setdefault(note.reason, []).append(note.what)
    universe = [*result.params, *result.modules]
    return [(reason, grouped(names, universe)) for reason, names in reasons.items()]
