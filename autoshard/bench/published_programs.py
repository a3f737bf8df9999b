"""Published plans and ours as programs: cut, lowered and simulated alike.

Ours is the plan that ``autoshard plan`` takes, which becomes a program that fits. The published mesh,
pipeline, microbatch and recomputation get the best placements, as in `bench.published`, and every pass that
ours gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoshard.bench.published import SLOWER, Asked, machine, name_of, questions, settle
from autoshard.bench.published_rows import Published, Skipped
from autoshard.candidates import PipeAsk
from autoshard.cluster import Cluster, usable_memory
from autoshard.cost.recipe import MIXED
from autoshard.errors import AutoshardError
from autoshard.fitting import Fitter, Peak
from autoshard.offload import NO_OFFLOAD
from autoshard.planning import Planned, Question
from autoshard.search.choose import Ask
from autoshard.search.rebatch import NotRebatchable, rebatched


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
        assert ours.settled is not None and ours.peak is not None and ours.peak.step is not None
        where = ours.settled.configuration
        for row in asked.rows:
            try:
                peak = _published(asked, row, cluster)
            except (NotRebatchable, AutoshardError) as error:
                yield Skipped(row.id, row.study, f"its plan is no program: {error}")
                continue
            assert peak.step is not None  # there is no limit that it could miss
            fits = peak.bytes <= usable_memory(cluster.device)
            yield Programs(row, peak.step, fits, ours.peak.step, name_of(where), where.microbatches)


def _ours(asked: Asked, cluster: Cluster) -> Planned:
    first, budget = asked.first, usable_memory(cluster.device)
    question = Question(
        cluster,
        cluster,
        first.devices,
        first.batch,
        PipeAsk(),
        Ask(budget=budget, batch=first.batch, recipe=MIXED),
        memory=budget,
        target="",
        offload=NO_OFFLOAD,
        progress=lambda _: None,
    )
    return question.planned_from(asked.source, asked.many)


def _published(asked: Asked, row: Published, cluster: Cluster) -> Peak:
    """The fullest rank of the published plan's program, and its step; in any memory."""
    analysis = asked.analysis(row)
    settled, _ = settle(rebatched(analysis.model, row.micro), row, cluster, usable_memory(cluster.device))
    anywhere = Ask(batch=row.batch, recipe=MIXED)
    fitter = Fitter(analysis, cluster, anywhere, fixed=True, progress=lambda _: None)
    staging = fitter.cutting(settled).best(fixed=True) if row.pipe.ranks > 1 else None
    return fitter.peak(settled, staging)
