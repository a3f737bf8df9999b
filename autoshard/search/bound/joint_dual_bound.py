"""Bounds on the step of a configuration from its own problem: parameters and activations together.

As in `search.bound.decomposed_dual_bound`, for any price per byte and any exposure of overlaps the least of
seconds plus price times bytes, less the price of the full budget, is less than any step that fits takes.
Here one elimination finds the least over everything that is decided, so that nothing is lost but what duality
loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cost.step_time import Exposure
from autoshard.search.bound.dual_function import DualPoint, least_of
from autoshard.search.problem.cost_terms import Bytes
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.recompute_bound import extremes
from autoshard.search.solve.step_config import OF_STATE, StepConfig
from autoshard.solver.network import Array

#: nothing of parameters shows beside computing, or all of it
EXPOSURES = (Exposure(0.0, 0.0, 0.0, 0.0), Exposure(1.0, 1.0, 1.0, 1.0))
#: numbers of prices in the order in which a wide problem is looked at: none, the dearest at which anything is
#: worth recomputing, and the cheapest
_TURNS = (0, 2, 1)


@dataclass(frozen=True)
class StepOption:
    """A way to run steps. prices: of a byte, in seconds, ascending. held: how much of bytes counts in a
    setting. pipe: number of the pipeline; of several ways to count what one holds each bounds it."""

    setting: StepConfig
    prices: tuple[float, ...]
    held: Callable[[StepConfig], Callable[[Bytes], float]] = lambda policy: policy.bytes_weight
    pipe: int = 0


def joint_dual_values(
    formulated: ShardingProblem,
    ways: Sequence[StepOption],
    exposures: Sequence[Exposure],
    *,
    recompute: bool,
    in_parts: bool = False,
) -> list[Array] | None:
    """Seconds of a step plus price times bytes that nothing goes below, [exposures, prices], of every way.

    recompute: whether it is allowed. in_parts: see `search.bound.dual_function.least_of`. None where the
    network is too wide to be eliminated for each of them.
    """
    columns = [_columns(way, exposures, recompute=recompute) for way in ways]
    least = least_of(formulated, [c for some in columns for c in some], in_parts=in_parts)
    if least is None:
        return None
    parts = np.split(least, np.cumsum([len(some) for some in columns])[:-1])
    shapes = [(len(exposures), -1, len(way.prices)) for way in ways]
    return [part.reshape(shape).min(axis=1) for part, shape in zip(parts, shapes, strict=True)]


def _columns(way: StepOption, exposures: Sequence[Exposure], *, recompute: bool) -> list[DualPoint]:
    """By exposure, by what is recomputed, by price."""
    bare = replace(way.setting, recompute={})
    return [
        DualPoint(policy.time_weight(exposure), way.held(policy), price)
        for exposure in exposures
        for policy in (extremes(bare) if recompute else [bare])
        for price in way.prices
    ]


def step_options(setting: StepConfig, prices: Array, pipe: int) -> list[StepOption]:
    """Ways to count what a pipeline holds. prices: of a byte of one microbatch."""
    counted = [(_early, setting.flight)]
    waiting, others = setting.waiting
    if setting.pipe.splits_backward and not others:
        counted.append((_late, waiting))
    counts = setting.weights(EXPOSURES[0])
    # by how often seconds and bytes of one microbatch count
    often = min(counts.work_forward, counts.work_backward)
    return [
        StepOption(setting, tuple((prices * (often / min(1.0, flight))).tolist()), held, pipe)
        for held, flight in counted
    ]


def joint_dual_bounds(
    formulated: ShardingProblem,
    ways: Sequence[StepOption],
    budget: float,
    *,
    recompute: bool,
    share: float = 1.0,
) -> Iterator[float]:
    """Seconds that no step which fits goes below, each as good as the one before or better.

    ways: of all pipelines, of which any may be the fastest. share: of what the problem takes, that counts; if
    not all does, a wide problem is looked at without a price alone. Nothing where the network is too wide.
    """
    least = dict.fromkeys([way.pipe for way in ways], 0.0)

    def better(ways: Sequence[StepOption], floors: Sequence[Array]) -> float:
        for way, floor in zip(ways, floors, strict=True):
            bound = float((share * floor - np.array(way.prices) * budget).max())
            least[way.pipe] = max(least[way.pipe], bound)
        return min(least.values())

    floors = joint_dual_values(formulated, ways, EXPOSURES, recompute=recompute)
    if floors is not None:
        yield better(ways, floors)
        return
    for turn in _TURNS if share == 1.0 else _TURNS[:1]:
        at = [replace(way, prices=way.prices[turn : turn + 1]) for way in ways if turn < len(way.prices)]
        # where bytes cost nothing, nothing is gained by what is recomputed
        full = recompute and any(any(way.prices) for way in at)
        floors = (
            joint_dual_values(formulated, at, EXPOSURES[:1], recompute=full, in_parts=True) if at else None
        )
        if floors is not None:
            yield better(at, floors)


def _early(policy: StepConfig) -> Callable[[Bytes], float]:
    """How much of bytes the fullest rank of a pipeline holds at least as the first backward begins, however
    its stages are cut."""
    # the first rank has put off no gradient yet
    return _shared(policy, policy.waitless if policy.pipe.splits_backward else policy, policy.flight)


def _late(policy: StepConfig) -> Callable[[Bytes], float]:
    """The same where it has put off most gradients of parameters, and holds nothing else."""
    return _shared(policy, policy, policy.waiting[0])


def _shared(policy: StepConfig, kept: StepConfig, flight: float) -> Callable[[Bytes], float]:
    """What a rank holds at least: no less than its share of what is in flight. kept: says what of activations
    is, flight: of how many microbatches that is."""
    share = min(1.0, 1.0 / flight)

    def weight(kind: Bytes) -> float:
        return policy.bytes_weight(kind) if kind.kind in OF_STATE else share * kept.bytes_weight(kind)

    return weight
