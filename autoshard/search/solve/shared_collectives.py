"""What data ranks share of a microbatch beside gradients: losses and statistics, which hold no batch."""

from __future__ import annotations

import numpy as np

from autoshard.search.problem.cost_entries import Joined
from autoshard.search.problem.exposed_collectives import sums_over
from autoshard.search.solve.formulate import ShardingProblem

#: elements of the largest: statistics of channels
_MOST = 65_536


def shared_seconds(formulated: ShardingProblem) -> float:
    """Seconds that sharing them takes at most in one microbatch; a single data rank has nothing to share."""
    blueprint, seconds = formulated.problem.blueprint, 0.0
    assert blueprint is not None
    data = [k for k, meaning in enumerate(formulated.problem.axes.meanings) if meaning.splits_batch]
    for entry in blueprint.entries:
        if isinstance(entry, Joined) and not entry.way.grows and entry.way.type.numel <= _MOST:
            given = entry.way.given.layouts
            rows = [k for k, layout in enumerate(given) if layout is not None and sums_over(layout, data)]
            costs = blueprint.prices.way(entry.way)[rows]
            seconds += entry.count * float(costs[np.isfinite(costs)].max(initial=0.0))
    return seconds
