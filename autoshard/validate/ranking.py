"""Whether the plan that is predicted to be the fastest is: groups of runs that differ only in their plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from autoshard.validate.rows import Run
from autoshard.validate.score import Scored

#: a pick that takes at most so much longer than the best is as good, in per cent: runs repeat no better
AS_GOOD = 3.0


@dataclass(frozen=True)
class Ranking:
    """Groups of two or more plans for the same work on the same machine.

    picked: groups whose plan of the shortest predicted step is the fastest measured one, or within 3 % of it.
    regret: by how many per cent the measured step of that plan is longer than the fastest; None if there is
    no group.
    """

    groups: int
    picked: int
    mean_regret_pct: float | None
    worst_regret_pct: float | None


def alternatives_of(run: Run) -> Hashable:
    """Equal for runs that are alternatives: the same model, code, machine, devices, batch and precision."""
    model = (run.layers, run.hidden, run.heads, run.kv_heads, run.ffn, run.vocab, run.seq)
    machine = (run.gpu, run.gpus, run.network, run.intra, run.inter)
    return (run.study, run.framework, model, machine, run.batch, run.precision)


def ranking(scored: Sequence[Scored], groups: Iterable[Hashable]) -> Ranking:
    """How well plans are ranked. groups: of every run, see `alternatives_of`."""
    by_work: dict[Hashable, list[tuple[float, float]]] = {}
    for row, group in zip(scored, groups, strict=True):
        if row.measured_s is not None:
            by_work.setdefault(group, []).append((row.predicted_s, row.measured_s))
    regrets = [
        100 * (min(rows)[1] / min(m for _, m in rows) - 1) for rows in by_work.values() if len(rows) > 1
    ]
    return Ranking(
        len(regrets),
        sum(regret <= AS_GOOD for regret in regrets),
        mean(regrets) if regrets else None,
        max(regrets, default=None),
    )
