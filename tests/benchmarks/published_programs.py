"""Published plans and ours as programs: cut, lowered and simulated alike.

Ours is the plan that ``autoshard plan`` takes, which becomes a program that fits. The published mesh,
pipeline, microbatch and recomputation get the best placements, as in `bench.published`, and every pass that
ours gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoshard.cluster import Cluster, usable_memory
from autoshard.cost.recipe import MIXED
from autoshard.errors import AutoshardError
from autoshard.options import PlanOptions
from autoshard.planner.memory_fit import MemoryFitter, Peak
from autoshard.planner.planned import Planned
from autoshard.planner.planning import PlanningRequest
from autoshard.search.problem.rescale_batch import NotRescalable, with_batch
from autoshard.search.select.request import SearchRequest
from benchmarks.published import SLOWER, Asked, machine, name_of, questions, settle
from benchmarks.published_rows import Published, Skipped

#: how often a published plan is placed again with less room, and by how much more than what it held too much
_ROUNDS, _MORE = 4, 1.03


@dataclass(frozen=True)
class Programs:
    """Simulated seconds of a step of both. fits: whether the published plan's program does, by its simulated
    peak; ours does. mesh, microbatches: of our plan."""

    row: Published
    published_s: float
    fits: bool
    ours_s: float
    mesh: str
    microbatches: int

    @property
    def ratio(self) -> float:
        """Our step over the published one."""
        return self.ours_s / self.published_s

    @property
    def slower(self) -> bool:
        """Whether the published plan fits and beats ours."""
        return self.fits and self.ratio > SLOWER


def simulate(rows: Sequence[Published], progress: Callable[[str], None]) -> Iterator[Programs | Skipped]:
    """One comparison per row, or why there is no program on a side. Raises what capturing raises."""
    for asked in questions(rows, progress):
        cluster = machine(asked.first)
        progress(f"planning {asked.first.devices} x {cluster.name}, batch {asked.first.batch}")
        try:
            ours = _ours(asked, cluster)
        except AutoshardError as error:
            yield from (Skipped(r.id, r.study, f"we find no plan: {error.what}") for r in asked.rows)
            continue
        assert ours.solution is not None and ours.peak is not None and ours.peak.step is not None
        where = ours.solution.configuration
        for row in asked.rows:
            try:
                peak, fits = _published(asked, row, cluster)
            except (NotRescalable, AutoshardError) as error:
                yield Skipped(row.id, row.study, f"its plan is no program: {error}")
                continue
            assert peak.step is not None  # there is no limit that it could miss
            yield Programs(row, peak.step, fits, ours.peak.step, name_of(where), where.microbatches)


def _ours(asked: Asked, cluster: Cluster) -> Planned:
    first, budget = asked.first, usable_memory(cluster.device)
    request = PlanningRequest(
        cluster,
        cluster,
        first.devices,
        PlanOptions(global_batch=first.batch, optimizer=MIXED.name),
        memory=budget,
        target="",
        progress=lambda _: None,
    )
    return request.planned_from(asked.source, asked.many)


def _published(asked: Asked, row: Published, cluster: Cluster) -> tuple[Peak, bool]:
    """The fullest rank of the published plan's program, with its step, and whether that fits.

    Placements that fill the memory as the search counts it hold more as a program, so others are looked for
    in less room, as for our plan. What never fits is what the search took for the best.
    """
    analysis = asked.analysis(row)
    model, budget = with_batch(analysis.model, row.micro), usable_memory(cluster.device)
    fitter = MemoryFitter(
        analysis, cluster, SearchRequest(batch=row.batch, recipe=MIXED), fixed=True, progress=lambda _: None
    )
    first: Peak | None = None
    room = float(budget)
    for _ in range(_ROUNDS):
        settled, counted = settle(model, row, cluster, room)
        if first is not None and not counted:
            break
        staging = fitter.cutting(settled).best(fixed=True) if row.pipe.ranks > 1 else None
        peak = fitter.peak(settled, staging)
        if peak.bytes <= budget:
            return peak, True
        first = first or peak
        if not counted:
            break
        room -= _MORE * (peak.bytes - budget)
    assert first is not None
    return first, False
