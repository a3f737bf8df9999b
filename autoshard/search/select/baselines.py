"""What a user would have picked by hand, at its best, priced by the same model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cluster.axes import AxisMeaning
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Axis, Mesh
from autoshard.errors import UsageError
from autoshard.ir.flow import Place
from autoshard.ir.placement import Layout, Shard
from autoshard.search.bound.candidate_queue import CandidateQueue
from autoshard.search.bound.stage_imbalance import imbalance_seconds
from autoshard.search.problem.decisions import NodeVar, ValueVar, Variable
from autoshard.search.problem.problem import Model
from autoshard.search.solve.configuration import Configuration, Staged, stored_ways
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.solve_placements import PlacementSolution, place
from autoshard.search.solve.step_config import StepConfig
from autoshard.search.solve.tune import QUICK
from autoshard.solver.network import Array, InfeasibleNetwork, NoFiniteAssignment

_TOO_LARGE = "does not fit the memory"

#: (mesh, with its pipelines) -> its configurations
Ranking = Callable[[Staged], CandidateQueue]
Poser = Callable[[Configuration], ShardingProblem]


@dataclass(frozen=True)
class BaselineConfigurations:
    """Configurations of a mesh, and their problems; for one way to store parameters."""

    ranked: Ranking
    pose: Poser


@dataclass(frozen=True)
class MemoryCheck:
    """What a configuration may hold if its program is to fit, as a plan of ours finds out for the same mesh.

    setting: with what is recomputed. bytes: as the search counts them, None for no limit.
    """

    setting: StepConfig
    bytes: float | None


#: the room of a configuration in some setting, None if nothing of it fits
Rooms = Callable[[Configuration, StepConfig], MemoryCheck | None]


@dataclass(frozen=True)
class Baseline:
    """A strategy by name. seconds: of a step, None if it cannot be used, and then why says why not."""

    name: str
    mesh: str
    microbatches: int
    seconds: float | None
    why: str = ""


def price_baselines(
    devices: int,
    cluster: Cluster,
    budget: float | None,
    state: float,
    setting: StepConfig,
    plain: BaselineConfigurations,
    sharded: BaselineConfigurations,
    meshes: Sequence[Staged],
    rooms: Rooms,
    reached: float,
) -> tuple[Baseline, ...]:
    """Data parallel, FSDP2, and Megatron-LM's pipeline, tensor and data parallelism, each at its best
    microbatch.

    Megatron-LM by the rules of Narayanan et al., SC'21, section 3: tensor parallelism inside a node, as
    little of it as fits, activations between layers whole on every rank of it; where a full node does not
    do, as few pipeline stages as fit, by 1F1B, interleaved or not. state: bytes of parameters with their
    gradients and optimizer, nothing of it divided. plain: prices of what our programs can
    store; sharded: of what FSDP2 stores (`search.problem.padded_params`). meshes: meshes that were searched.
    reached: seconds of the plan; whoever seems faster has to fit as a program, too, which ``rooms`` tells.
    """
    solve = _Solver(budget, state, setting, plain, rooms, reached)
    return (
        solve.one("data parallel", Staged(Mesh((Axis("dp", devices),)))),
        replace(solve, prices=sharded).one("FSDP2", Staged(Mesh((Axis("fsdp", devices),)))),
        _megatron(devices, cluster, solve, meshes),
    )


@dataclass(frozen=True)
class _Solver:
    budget: float | None
    state: float
    setting: StepConfig
    prices: BaselineConfigurations
    rooms: Rooms
    reached: float

    def one(self, name: str, staged: Staged, *, between_layers_whole: bool = False) -> Baseline:
        mesh = f"pp={staged.ranks},{staged.mesh}" if staged.ranks > 1 else str(staged.mesh)
        least = self.state / (staged.ranks * stored_ways(staged.mesh))
        if self.budget is not None and least > self.budget:
            return Baseline(name, mesh, 1, None, _TOO_LARGE)
        try:
            configurations = self.prices.ranked(staged)
        except UsageError as error:
            return Baseline(name, mesh, 1, None, error.what)
        for estimated in configurations.nearest(2):
            config = estimated.configuration
            formulated = self.prices.pose(config)
            allowed = _whole_between_layers(formulated) if between_layers_whole else ()
            check = MemoryCheck(replace(estimated.setting, microbatches=config.microbatches), self.budget)
            placements = self._place(formulated, check, allowed)
            if placements is not None and self._seconds(formulated, placements, config) < self.reached:
                fits = self.rooms(config, check.setting)
                placements = None if fits is None else self._place(formulated, fits, allowed)
            if placements is not None:
                seconds = self._seconds(formulated, placements, config)
                return Baseline(name, mesh, config.microbatches, seconds)
        return Baseline(name, mesh, 1, None, _TOO_LARGE)

    def _seconds(
        self, formulated: ShardingProblem, placements: PlacementSolution, config: Configuration
    ) -> float:
        """Of a step; stages of a pipeline are no more alike than they can be."""
        one_stage = config.pipe.ranks == 1
        return placements.seconds if one_stage else imbalance_seconds(formulated, placements, config.pipe)

    def _place(
        self, formulated: ShardingProblem, check: MemoryCheck, allowed: Sequence[Array | None]
    ) -> PlacementSolution | None:
        for trial in (check.setting, check.setting.recomputing("full")):
            try:
                return place(formulated.problem, trial, check.bytes, allowed=allowed, limits=QUICK, rounds=2)
            except (InfeasibleNetwork, NoFiniteAssignment):
                continue
        return None


def _megatron(devices: int, cluster: Cluster, solve: _Solver, given: Sequence[Staged]) -> Baseline:
    """As little tensor parallelism as fits, of the meshes that are known, or the most there can be, and then
    with as few stages as fit."""
    node = max((size for size in cluster.group_sizes if size <= 16), default=devices)
    ways = [t for t in range(1, min(node, devices) + 1) if devices % t == 0 and node % t == 0]
    meshes = [Mesh(_axes(devices // tp, tp)) for tp in ways]
    alone = {staged.mesh for staged in given if staged.ranks == 1}
    tried = [Staged(mesh) for mesh in meshes if mesh in alone or mesh == meshes[-1]]
    tried += sorted(filter(None, (_one_f_one_b(s, devices, ways[-1]) for s in given)), key=lambda s: s.ranks)
    for staged in tried:
        last = solve.one("Megatron-LM (SC'21)", staged, between_layers_whole=True)
        if last.seconds is not None:
            break
    return last


def _one_f_one_b(staged: Staged, devices: int, tp: int) -> Staged | None:
    """The pipelines of Megatron-LM among those of a mesh, None if it has none."""
    pipes = tuple(p for p in staged.pipes if p.schedule in ("1f1b", "interleaved"))
    if staged.ranks == 1 or not pipes or staged.mesh != Mesh(_axes(devices // staged.ranks // tp, tp)):
        return None
    return replace(staged, pipes=pipes)


def _axes(dp: int, tp: int) -> tuple[Axis, ...]:
    axes = tuple(Axis(name, size) for name, size in (("dp", dp), ("tp", tp)) if size > 1)
    return axes or (Axis("dp", 1),)


def _whole_between_layers(formulated: ShardingProblem) -> list[Array | None]:
    """Per variable the states that do not split what travels between layers over a tensor axis."""
    model, axes = formulated.model, formulated.problem.axes
    residual = _classes_between_layers(model)
    split = [k for k, m in enumerate(axes.meanings) if _inside_layers(m)]

    def fine(place: Place, layout: Layout | None) -> bool:
        if layout is None:
            return True
        for axis in split:
            placements = layout[axis]
            if isinstance(placements, Shard):
                digits = model.digits.values.get((*place, placements.dim), ())
                hit = {cls for outer, _, cls in digits if outer == placements.outer}
                if hit & residual:
                    return False
        return True

    def mask(variable: Variable) -> Array | None:
        if isinstance(variable, ValueVar):
            ok = [fine(variable.place, layout) for layout in variable.states]
        elif isinstance(variable, NodeVar):
            outs = model.folded.segments[variable.segment].nodes[variable.number].outs
            ok = [
                all(fine((variable.segment, o), lay) for o, lay in zip(outs, s.outputs, strict=True))
                for s in variable.states
            ]
        else:
            return None
        return None if all(ok) or not any(ok) else np.where(ok, 0.0, np.inf)

    return formulated.problem.masks(mask)


def _inside_layers(meaning: AxisMeaning) -> bool:
    return meaning.splits_layers and not meaning.splits_batch


def _classes_between_layers(model: Model) -> frozenset[int]:
    """Classes of the dims of what one forward segment hands to a layer."""
    backward = model.folded.is_backward()
    layers = {c.segment for c in model.folded.calls if c.label and not c.backward}
    numbers: set[int] = set()
    for source, target in model.flow.edges:
        if source[0] in layers and target[0] in layers and not backward[source[0]]:
            rank = len(model.folded.segments[target[0]].types()[target[1]].shape)
            for dim in range(rank):
                numbers |= {cls for _, _, cls in model.digits.values.get((*target, dim), ())}
    return frozenset(numbers - model.digits.batch)
