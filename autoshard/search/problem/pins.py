"""What the user has decided already: placements of tensors by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from functools import cached_property

import numpy as np

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError
from autoshard.ir import refs_of
from autoshard.ir.flow import Place, PortClass
from autoshard.ir.placement import Layout, Placement, parse_placement
from autoshard.search.problem.cost_terms import compose
from autoshard.search.problem.decisions import NodeVar, ParamVar, PortVar, Variable
from autoshard.search.problem.problem import Model, Problem
from autoshard.search.problem.search_axes import SearchAxes
from autoshard.solver.network import Array, NoFiniteAssignment
from autoshard.solver.solve import solve

_FORM = "write GLOB=axis:placement, for instance 'model.layers.*.q_proj.weight=tp:S(0)' or '*.norm=tp:R'"


@dataclass(frozen=True)
class Pin:
    """A placement on some axes for every tensor whose name a glob matches.

    glob: with ``#`` for a number, as that of a layer; matches names of parameters, buffers and inputs, and of
    modules, whose output is meant; with a slash, ``SEGMENT/VALUE`` as `autoshard inspect` prints them.
    placements: (axis, placement) pairs; other axes are free.
    """

    glob: str
    placements: tuple[tuple[str, Placement], ...]

    @classmethod
    def parse(cls, text: str) -> Pin:
        """From ``GLOB=axis:placement[,axis:placement]``; raises UsageError."""
        glob, equals, rest = text.partition("=")
        pairs = [part.partition(":") for part in _split(rest)]
        if not equals or not glob.strip() or not all(name.strip() and word for name, _, word in pairs):
            raise UsageError(f"{text!r} is not a pin", hint=_FORM)
        try:
            placements = tuple((name.strip(), parse_placement(word.strip())) for name, _, word in pairs)
        except ValueError as error:
            raise UsageError(f"{text!r} is not a pin", why=str(error), hint=_FORM) from None
        return cls(glob.strip(), placements)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(translate(self.glob).replace(re.escape("#"), "[0-9]+"))

    def matches(self, name: str) -> bool:
        """Whether a name is one that it is for."""
        return self._pattern.match(name) is not None

    def __str__(self) -> str:
        return f"{self.glob}={','.join(f'{axis}:{placement}' for axis, placement in self.placements)}"


def _split(text: str) -> list[str]:
    """At commas outside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def pin_masks(
    pins: Sequence[Pin], model: Model, mesh: Mesh, problem: Problem
) -> tuple[tuple[Array | None, ...], ...]:
    """Per pin, per variable, 0 or inf for each state (None: all are allowed).

    Raises UsageError if a pin names nothing, something the mesh does not have, or what cannot be.
    """
    names = _Names(model)
    return tuple(_mask(pin, names, mesh, problem) for pin in pins)


def pinned_keys(pins: Sequence[Pin], model: Model) -> frozenset[object]:
    """Keys (as in `Problem.index`) of the parameters and ops that pins name."""
    if not pins:
        return frozenset()
    names = _Names(model)
    keys: set[object] = set()
    for group, members in names.ports():
        if any(pin.matches(name) for name in members for pin in pins):
            keys.add(group.key)
    for (segment, value), members in names.results(pins):
        if any(pin.matches(name) for name in members for pin in pins):
            nodes = model.folded.segments[segment].nodes
            number = next(k for k, node in enumerate(nodes) if value in node.outs)
            keys.add(("node", segment, number))
    return frozenset(keys)


def combined(masks: Sequence[Sequence[Array | None]], variables: int) -> list[Array | None]:
    """All masks together."""
    masks_of: list[Array | None] = [None] * variables
    for mask in masks:
        for k, one in enumerate(mask):
            if one is not None:
                before = masks_of[k]
                masks_of[k] = one if before is None else before + one
    return masks_of


def check_pins(pins: Sequence[Pin], masks: Sequence[Sequence[Array | None]], problem: Problem) -> None:
    """UsageError naming a smallest set of pins that contradict each other; nothing if none do."""

    def possible(chosen: Sequence[int]) -> bool:
        allowed = combined([masks[k] for k in chosen], len(problem.variables))
        network = compose(problem.terms, lambda key: 0.0, lambda key: 0.0, allowed)
        try:
            solve(network)
        except NoFiniteAssignment:
            return False
        return True

    chosen = list(range(len(pins)))
    if possible(chosen):
        return
    for k in list(chosen):
        rest = [c for c in chosen if c != k]
        if rest and not possible(rest):
            chosen = rest
    named = " and ".join(f"'{pins[k]}'" for k in chosen)
    if len(chosen) == 1:
        raise UsageError(
            f"the pin {named} is infeasible",
            why="no op that makes or takes the tensor can run with it on this mesh",
            hint="pin another placement, or leave the tensor to the search",
        )
    raise UsageError(
        f"the pins {named} contradict each other",
        why="each alone is feasible, but the ops between the tensors allow no placements for all of them",
        hint="drop one of them",
    )


class _Names:
    """Names of tensors and the variables that place them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.labels: dict[str, list[str]] = {}
        for call in model.folded.calls:
            if call.label and not call.backward:
                self.labels.setdefault(call.segment, []).append(call.label)

    def ports(self) -> Iterator[tuple[PortClass, list[str]]]:
        """(class, names of its members)."""
        inputs = self.model.folded.joint.input_names
        for group in self.model.flow.classes.values():
            yield (
                group,
                [
                    inputs[int(p.target)] if p.kind == "input" and p.target.isdigit() else p.target
                    for p in group.ports
                ],
            )

    def results(self, pins: Sequence[Pin]) -> Iterator[tuple[Place, list[str]]]:
        """(value, the names under which pins may mean it): outputs of modules, and any value by its place."""
        yield from self.modules()
        if any("/" in pin.glob for pin in pins):
            for segment, graph in self.model.folded.segments.items():
                for node in graph.nodes:
                    yield from (((segment, out), [f"{segment}/{out}"]) for out in node.outs)

    def modules(self) -> Iterator[tuple[Place, list[str]]]:
        """(value, names of the modules whose output it is: one per repeated layer)."""
        backward = self.model.folded.is_backward()
        for segment, graph in self.model.folded.segments.items():
            if backward[segment]:
                continue
            outputs: dict[str, str] = {}
            users: dict[str, set[str]] = {out: {""} for out in graph.outputs}
            for node in graph.nodes:
                for ref in refs_of(node):
                    users.setdefault(ref, set()).add(node.origin.fqn)
            for node in graph.nodes:
                parts = node.origin.fqn.split(".")
                for out in node.outs:
                    for end in range(1, len(parts) + 1):
                        module = ".".join(parts[:end])
                        if any(not f"{u}.".startswith(f"{module}.") for u in users.get(out, ())):
                            outputs[module] = out
            labels = self.labels.get(segment, [])
            for module, out in outputs.items():
                first = labels[0] if labels else ""
                inside = bool(first) and f"{module}.".startswith(f"{first}.")
                names = [label + module[len(first) :] for label in labels] if inside else [module]
                yield (segment, out), names


def _mask(pin: Pin, names: _Names, mesh: Mesh, problem: Problem) -> tuple[Array | None, ...]:
    placements = [(mesh.index(axis), placement) for axis, placement in pin.placements]
    masks: list[Array | None] = [None] * len(problem.variables)
    candidates: list[str] = []
    hits = 0
    for group, members in names.ports():
        candidates += members
        matching = [n for n in members if pin.matches(n)]
        if matching:
            _all_or_none(pin, matching, members)
            number = problem.index[group.key]
            masks[number] = _allowed(pin, problem.variables[number], placements, 0, problem.axes, mesh)
            hits += 1
    for (segment, value), members in names.results((pin,)):
        candidates += members
        matching = [n for n in members if pin.matches(n)]
        if matching:
            _all_or_none(pin, matching, members)
            number, position = _maker(names.model, problem, segment, value)
            masks[number] = _allowed(pin, problem.variables[number], placements, position, problem.axes, mesh)
            hits += 1
    if not hits:
        near = get_close_matches(pin.glob, candidates, n=3, cutoff=0.4)
        raise UsageError(
            f"the pin '{pin}' matches no tensor",
            why="no parameter, buffer, input or module of the model has such a name",
            hint=f"close to it: {', '.join(near)}" if near else "names are those of model.named_parameters()",
        )
    return tuple(masks)


def _all_or_none(pin: Pin, matching: Sequence[str], members: Sequence[str]) -> None:
    if len(matching) < len(members):
        other = next(n for n in members if n not in matching)
        raise UsageError(
            f"the pin '{pin}' takes {matching[0]} but not {other}",
            why=f"the {len(members)} repeated layers they belong to take the same decisions",
            hint="use * for the number of the layer",
        )


def _maker(model: Model, problem: Problem, segment: str, value: str) -> tuple[int, int]:
    for number, node in enumerate(model.folded.segments[segment].nodes):
        if value in node.outs:
            return problem.index["node", segment, number], node.outs.index(value)
    raise KeyError(value)


def _allowed(
    pin: Pin,
    variable: Variable,
    placements: Sequence[tuple[int, Placement]],
    position: int,
    axes: SearchAxes,
    mesh: Mesh,
) -> Array:
    """0 for the states that have the wanted placements, inf for the others."""

    def fits(layout: Layout | None) -> bool:
        return layout is not None and all(layout[axis] == placement for axis, placement in placements)

    match variable:
        case ParamVar():
            # where parameters are only stored split, gathering them for use is the axis' meaning
            used = [(a, p) for a, p in placements if axes.mesh_meanings[a].splits_layers]
            ok = [
                fits(s.stored) and all(axes.to_mesh(s.use)[axis] == placement for axis, placement in used)
                for s in variable.states
            ]
        case NodeVar():
            ok = []
            for state in variable.states:
                out = state.outputs[position]
                ok.append(out is not None and fits(axes.to_mesh(out)))
        case _:
            ok = [fits(axes.to_mesh(layout)) for layout in variable.states]
    if not any(ok):
        raise UsageError(
            f"the pin '{pin}' is infeasible",
            why=f"feasible layouts: {'; '.join(_feasible(variable, position, axes, mesh)[:8])}",
            hint="pin one of these, or use another mesh",
        )
    return np.where(ok, 0.0, np.inf)


def _feasible(variable: Variable, position: int, axes: SearchAxes, mesh: Mesh) -> list[str]:
    """Layouts that a variable may take, as text: ``dp:R tp:S(0)``."""
    layouts: list[Layout | None]
    match variable:
        case ParamVar():
            layouts = [s.stored for s in variable.states]
        case NodeVar():
            outs = [s.outputs[position] for s in variable.states]
            layouts = [None if o is None else axes.to_mesh(o) for o in outs]
        case PortVar():
            layouts = [axes.to_mesh(s) for s in variable.states]
        case _:
            layouts = []
    return list(dict.fromkeys(" ".join(map("{}:{}".format, mesh.names, x)) for x in layouts if x))
