"""Tactics: the user decides axis by axis, in order, and sees the estimate after each.

A tactic brings one axis into play and never changes what earlier ones decided on theirs (the incremental
partitioning of Alabed et al., "PartIR", ASPLOS 2025). Axes that are not in play yet have one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cluster.axes import DP, FSDP, TP, AxisMeaning
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Axis, Mesh
from autoshard.cluster.order import RankOrder
from autoshard.cost.on_mesh import CostModels
from autoshard.cost.recipe import Recipe
from autoshard.cost.step_time import StepTime
from autoshard.errors import UsageError, nearest
from autoshard.ir.placement import Layout, Placement
from autoshard.search.problem.decisions import NodeVar, ParamVar, Variable
from autoshard.search.problem.pins import Pin, combined
from autoshard.search.problem.problem import Model, compatible_states
from autoshard.search.problem.search_axes import SearchAxes, plain_axes
from autoshard.search.solve.formulate import ShardingProblem, formulate
from autoshard.search.solve.solve_placements import PlacementSolution
from autoshard.search.solve.step_config import RankBytes, StepConfig
from autoshard.solver.network import Array

_FORM = "write for instance 'dp on batch; auto on tp', or 'fsdp on parameters; pin *.lm_head.weight=tp:S(0)'"
_WHAT: Mapping[str, AxisMeaning] = {"batch": DP, "parameters": FSDP, "layers": TP}


@dataclass(frozen=True)
class Tactic:
    """axis: that comes into play, "" for none. meaning: what it may do, None: what its name says. pin: a
    placement that holds from here on."""

    text: str
    axis: str = ""
    meaning: AxisMeaning | None = None
    pin: Pin | None = None


@dataclass(frozen=True)
class Stage:
    """What is reached after a tactic: the predicted step, and bytes on the fullest rank."""

    tactic: str
    mesh: str
    step: StepTime
    held: RankBytes


def parse_tactics(text: str, mesh: Mesh) -> tuple[Tactic, ...]:
    """Tactics from a text, separated by semicolons; raises UsageError.

    ``AXIS on batch`` splits the batch, ``AXIS on parameters`` also stores parameters split, ``AXIS on
    layers`` splits inside layers, ``auto on AXIS`` lets the search decide by the meaning of the axis' name,
    ``auto`` does so for all axes that are left, ``pin GLOB=axis:placement`` fixes a tensor.
    """
    tactics: list[Tactic] = []
    for part in (p.strip() for p in text.split(";") if p.strip()):
        used_axes = {t.axis for t in tactics}
        if part.startswith("pin "):
            tactics.append(Tactic(part, pin=Pin.parse(part.removeprefix("pin ").strip())))
        elif part == "auto":
            tactics += [Tactic(f"auto on {name}", name) for name in mesh.names if name not in used_axes]
        else:
            tactics.append(_axis_tactic(part, mesh, used_axes))
    missing = [name for name in mesh.names if name not in {t.axis for t in tactics}]
    if missing:
        raise UsageError(
            f"no tactic uses the axis {missing[0]!r} of the mesh {mesh}",
            hint=f"add 'auto on {missing[0]}', or leave the axis out of the mesh",
        )
    return tuple(tactics)


def _axis_tactic(part: str, mesh: Mesh, used_axes: set[str]) -> Tactic:
    left, on, right = (word.strip() for word in part.partition(" on "))
    if not on or not left or not right:
        raise UsageError(f"{part!r} is not a tactic", hint=_FORM)
    axis = right if left == "auto" else left
    if axis not in mesh.names:
        raise UsageError(f"the mesh has no axis {axis!r}", where=part, hint=nearest(axis, mesh.names))
    if axis in used_axes:
        raise UsageError(f"two tactics use the axis {axis!r}", where=part, hint="use each axis once")
    if left == "auto":
        return Tactic(part, axis)
    if right not in _WHAT:
        raise UsageError(f"{right!r} is nothing to use an axis on", where=part, hint=nearest(right, _WHAT))
    return Tactic(part, axis, _WHAT[right])


def run_tactics(
    model: Model,
    mesh: Mesh,
    cluster: Cluster | CostModels,
    setting: StepConfig,
    tactics: Sequence[Tactic],
    recipe: Recipe,
    solve: Callable[[ShardingProblem, bool], PlacementSolution],
    *,
    pins: Sequence[Pin] = (),
    order: RankOrder | None = None,
) -> tuple[ShardingProblem, PlacementSolution, tuple[Stage, ...]]:
    """Apply tactics in order; solve: (problem, whether it is the last) -> its placements.

    pins: that hold from the start, on each axis as soon as it is in play. order: of the ranks of the full
    mesh on devices. Raises UsageError if a pin cannot hold.
    """
    stages: list[Stage] = []
    previous: tuple[ShardingProblem, PlacementSolution] | None = None
    for position, tactic in enumerate(tactics):
        sofar = tactics[: position + 1]
        active = {t.axis for t in sofar if t.axis}
        now = Mesh(tuple(a if a.name in active else Axis(a.name, 1) for a in mesh.axes))
        meanings = {t.axis: t.meaning for t in sofar if t.meaning is not None}
        axes = plain_axes(now, tuple(meanings.get(a.name, a.meaning) for a in mesh.axes))
        holding = [p for p in (_pin_on(active, mesh, pin) for pin in pins) if p.placements]
        holding += (
            t.pin for t in sofar if t.pin is not None and all(a in active for a, _ in t.pin.placements)
        )
        ranks = None if order is None else _order_on(order, mesh, now)
        formulated = formulate(
            model, now, cluster, setting, recipe=recipe, pins=tuple(holding), axes=axes, order=ranks
        )
        if previous is not None:
            decided = [k for k, a in enumerate(mesh.axes) if previous[0].mesh.sizes[k] > 1 or a.size == 1]
            frozen = _frozen(*previous, formulated, decided)
            formulated = replace(
                formulated, allowed=tuple(combined([formulated.allowed, frozen], len(frozen)))
            )
        placements = solve(formulated, position == len(tactics) - 1)
        held = placements.setting.held(placements.usage)
        stages.append(Stage(tactic.text, str(now), placements.step, held))
        previous = (formulated, placements)
    if previous is None:
        raise UsageError("there are no tactics", hint=_FORM)
    return (*previous, tuple(stages))


def _pin_on(active: set[str], mesh: Mesh, pin: Pin) -> Pin:
    """What a pin says of the axes in play, and of axes that the mesh lacks: an error for `formulate`."""
    known = (p for p in pin.placements if p[0] in active or p[0] not in mesh.names)
    return replace(pin, placements=tuple(known))


def _order_on(order: RankOrder, mesh: Mesh, now: Mesh) -> RankOrder:
    """The devices of the ranks that are first on every axis that is not in play yet."""
    devices = np.array(order.devices[: mesh.world_size]).reshape(mesh.sizes)
    return RankOrder(tuple(int(d) for d in devices[tuple(slice(n) for n in now.sizes)].ravel()))


def _frozen(
    before: ShardingProblem, placements: PlacementSolution, now: ShardingProblem, axes: Sequence[int]
) -> list[Array | None]:
    """The states that agree with what was decided on these axes; all of a variable where none does.

    A tensor that was split evenly alone may not be once another axis splits it as well.
    """
    chosen = {
        key: _face(before.problem.variables[number], placements.states[number], before.problem.axes, axes)
        for key, number in before.problem.index.items()
    }
    masks: list[Array | None] = [None] * len(now.problem.variables)
    for key, number in now.problem.index.items():
        variable = now.problem.variables[number]
        ok = [_face(variable, k, now.problem.axes, axes) == chosen[key] for k in range(len(variable.states))]
        if any(ok) and not all(ok):
            # what decides together now may have decided apart before
            masks[number] = compatible_states(masks[number], np.where(ok, 0.0, np.inf))
    return masks


def _face(variable: Variable, state: int, axes: SearchAxes, chosen: Sequence[int]) -> object:
    """The placements of a state on the chosen axes."""

    def part(layout: Layout | None) -> tuple[Placement, ...]:
        return () if layout is None else tuple(axes.to_mesh(layout)[a] for a in chosen)

    match variable:
        case NodeVar():
            one = variable.states[state]
            return tuple(part(x) for x in (*one.inputs, *one.outputs))
        case ParamVar():
            strategy = variable.states[state]
            return part(strategy.stored), part(strategy.use)
        case _:
            return part(variable.states[state])
