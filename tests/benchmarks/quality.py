"""Small cases in which every mesh, microbatch and recomputation is tried, against what `choose` finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster, mesh_candidates
from autoshard.cost.recipe import MIXED
from autoshard.errors import InfeasibleError, UsageError
from autoshard.planner.analysis import Analysis, analyse
from autoshard.search.plan.plan import Recompute
from autoshard.search.problem.rescale_batch import with_batch
from autoshard.search.select.choose import choose
from autoshard.search.select.request import CandidateSolution, SearchRequest
from autoshard.search.solve.configuration import data_ways, microbatch_sizes
from autoshard.search.solve.formulate import ShardingProblem, formulate, layer_calls
from autoshard.search.solve.solve_placements import place
from autoshard.search.solve.step_config import StepConfig
from autoshard.solver.network import InfeasibleNetwork
from autoshard.validate.models import Architecture, on_meta


@dataclass(frozen=True)
class Small:
    """A case small enough to try everything. batch: sequences per step; budgets: shares of the bytes that
    the best plan without a limit holds."""

    name: str
    model: Architecture
    seq: int
    devices: int
    batch: int
    cluster: str
    budgets: tuple[float, ...] = (0.7, 0.5)


@dataclass(frozen=True)
class Quality:
    """Seconds of a step by `choose` and by trying everything; None where nothing fits.

    budget: bytes per rank. tried: settings that had to be solved under the budget.
    bound: what choose claims that no plan goes below. mesh: of each.
    """

    case: Small
    budget: int
    chosen: float | None
    best: float | None
    bound: float
    tried: int
    chosen_mesh: str = ""
    best_mesh: str = ""

    @property
    def ratio(self) -> float | None:
        """Chosen over best: 1 if the search misses nothing."""
        return None if self.chosen is None or self.best is None else self.chosen / self.best

    @property
    def bound_holds(self) -> bool:
        return self.best is None or self.bound <= self.best * (1 + 1e-9)


_LLAMA1 = Architecture("llama", 1, 1024, 8, 4, 2816, 8192, 1024)
_LLAMA2 = replace(_LLAMA1, layers=2)
_GPT1 = Architecture("gpt2", 1, 1024, 8, 8, 4096, 8192, 1024)
_GPT2 = replace(_GPT1, layers=2)

SMALL = (
    Small("llama, 1 layer", _LLAMA1, 512, 4, 32, "h100-dgx"),
    Small("llama, 2 layers", _LLAMA2, 512, 8, 32, "h100-dgx"),
    Small("gpt2, 1 layer", _GPT1, 512, 8, 32, "mi250x-frontier"),
    Small("gpt2, 2 layers", _GPT2, 512, 4, 32, "h100-dgx"),
    Small("gpt2, 2 layers", _GPT2, 512, 4, 32, "cpu-gloo"),
)


def quality_of(case: Small) -> Iterator[Quality]:
    """One comparison per budget of a case. Raises what capturing and an unlimited search raise."""
    model, inputs = on_meta(case.model, case.batch, case.seq)
    analysis = analyse(capture(model, (), inputs))
    free = _choose(case, analysis, None)
    assert free is not None
    space = list(_space(case, analysis))
    for share in case.budgets:
        budget = int(free.placements.bytes * share)
        chosen = _choose(case, analysis, budget)
        best, mesh, tried = _exhaustive(space, budget)
        yield Quality(
            case,
            budget,
            None if chosen is None else chosen.placements.seconds,
            best,
            0.0 if chosen is None else chosen.bound,
            tried,
            "" if chosen is None else str(chosen.configuration.mesh),
            mesh,
        )


def _choose(case: Small, analysis: Analysis, budget: int | None) -> CandidateSolution | None:
    cluster = load_cluster(case.cluster)
    meshes = mesh_candidates(cluster, case.devices)
    try:
        return choose(
            analysis.model, meshes, cluster, SearchRequest(budget=budget, batch=case.batch, recipe=MIXED)
        )
    except InfeasibleError:
        return None


@dataclass(frozen=True)
class _Open:
    """A setting on a mesh.

    bound: seconds that it takes at least: computing again and a budget only add to what the mesh takes free.
    """

    formulated: ShardingProblem
    setting: StepConfig
    bound: float


def _space(case: Small, analysis: Analysis) -> Iterator[_Open]:
    """Every mesh with every microbatch of two sequences or more, and all recomputation by counts of calls."""
    cluster = load_cluster(case.cluster)
    calls = layer_calls(analysis.folded)
    for mesh in mesh_candidates(cluster, case.devices):
        for batch in (b for b in _microbatches(mesh, case.batch) if b > 1):
            bare = StepConfig(case.batch // batch, calls, overlap=cluster.device.overlap)
            try:
                formulated = formulate(with_batch(analysis.model, batch), mesh, cluster, bare, recipe=MIXED)
            except UsageError:
                continue  # what the search cannot use either
            for again in recomputations(calls):
                yield _Open(formulated, replace(bare, recompute=again), formulated.free.lower_bound)


def _microbatches(mesh: Mesh, total: int) -> list[int]:
    return microbatch_sizes(mesh, total) if total % data_ways(mesh) == 0 else []


def recomputations(calls: Mapping[str, int]) -> Iterator[dict[str, Recompute]]:
    """Every policy for every number of calls of every segment of a layer, none among them."""
    policies: tuple[Literal["selective", "full"], ...] = ("selective", "full")
    options = [
        [None, *(Recompute(policy, n) for policy in policies for n in range(1, count + 1))]
        for count in calls.values()
    ]
    for combination in product(*options):
        yield {name: again for name, again in zip(calls, combination, strict=True) if again is not None}


def _exhaustive(space: Sequence[_Open], budget: int) -> tuple[float | None, str, int]:
    """(least seconds, its mesh with microbatches, settings solved under the budget).

    A setting whose bound is no less than the best so far is ruled out by that.
    """
    best: tuple[float, str] | None = None
    tried = 0
    for entry in sorted(space, key=lambda e: e.bound):
        if best is not None and entry.bound >= best[0]:
            break
        tried += 1
        try:
            placed = place(entry.formulated.problem, entry.setting, budget)
        except InfeasibleNetwork:
            continue
        if best is None or placed.seconds < best[0]:
            best = (placed.seconds, f"{entry.formulated.mesh} x{entry.setting.microbatches}")
    return (None, "", tried) if best is None else (*best, tried)
