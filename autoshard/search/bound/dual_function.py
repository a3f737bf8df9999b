"""What one microbatch takes at least, bytes counted at a price: for bounds of many configurations at once.

With a price per byte of activations (a Lagrange multiplier), the least over placements and over the extreme
policies of recomputation (see `search.solve.recompute_bound`) is one number for every mesh that divides
layers alike, whatever its data ranks. Of parameters it counts what their use adds, if they are gathered over
axes inside layers; the least that they take beside that is left to whoever knows the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from autoshard.search.problem.cost_terms import OF_ACTIVATIONS, Bytes, Time
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.param_costs import ParamUseCosts, added_by_use
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.search.solve.recompute_bound import extremes
from autoshard.search.solve.step_config import OF_STATE, StepConfig
from autoshard.solver.batched_elimination import SINGLE, least_of_each
from autoshard.solver.network import Array

#: parts of the parameters that ranks of pipelines hold, as far as they are told apart
_PARTS = (1.0, 1 / 16, 0.0)
#: entries of all tables of a network, and of all networks together, up to which anything is said
_WIDE, _MOST = 40_000_000, 40_000_000


@dataclass(frozen=True)
class DualRegime:
    """What a step does with microbatches and parameters, as far as floors tell it apart.

    waits: whether gradients of parameters wait, as `zb-h1` has it. once: whether a gather for the full step
    serves a single microbatch; of several, gradients are added up. copies: part of the parameters that a rank
    may have to hold for what it keeps gathered. tied: part of what gathers over axes inside layers take
    that counts.
    """

    waits: bool = False
    once: bool = False
    copies: float = 0.0
    tied: float = 0.0


def dual_regime(setting: StepConfig, *, tied: float, waits: bool) -> DualRegime:
    """What holds for a step in a setting. waits: whether to look at where gradients of parameters wait."""
    ranks, alone = setting.pipe.ranks, setting.microbatches == 1
    copies = 0.0 if not tied or (alone and ranks > 1) else _copies(ranks)
    return DualRegime(waits, alone and ranks == 1 and tied > 0, copies, tied)


def dual_regimes(regime: DualRegime) -> tuple[DualRegime, ...]:
    """Those that are likely to be asked for as well: without a pipeline, or with one."""
    one = DualRegime(copies=1.0, tied=regime.tied)
    if not regime.tied:
        return (DualRegime(), DualRegime(waits=True))
    if regime.copies == 1.0:
        return one, replace(one, once=True)
    return tuple(
        DualRegime(waits, False, part, regime.tied) for waits in (False, True) for part in _PARTS[1:]
    )


def _copies(ranks: int) -> float:
    return next(part for part in _PARTS if part * ranks <= 1)


@dataclass(frozen=True)
class DualPoint:
    """One of the networks: how often seconds count, how much of bytes is held, and what a byte costs."""

    seconds: Callable[[Time], float]
    held: Callable[[Bytes], float]
    price: float
    regime: DualRegime = field(default_factory=DualRegime)


def dual_values(
    formulated: ShardingProblem,
    setting: StepConfig,
    prices: Sequence[float],
    regimes: Sequence[DualRegime],
    *,
    recompute: bool,
) -> Array | None:
    """Seconds of computing and talking plus price times bytes of activations that nothing goes below.

    [regimes, prices]. prices: seconds per byte. recompute: whether anything may be recomputed. None where the
    network is too wide to be eliminated for each of them.
    """
    bare = replace(setting, microbatches=1, recompute={})
    recomputed = extremes(bare) if recompute else [bare]
    # while gradients of parameters wait, nothing is saved by what is recomputed
    late = [replace(bare, pipe=Pipe(1, "zb-h1"))]
    columns = [
        DualPoint(partial(least_weight, policy), partial(_activations, policy), price, regime)
        for regime in regimes
        for policy in (late if regime.waits else recomputed)
        for price in prices
    ]
    floor = least_of(formulated, columns)
    if floor is None:
        return None
    least = {(r, p): np.inf for r in regimes for p in prices}
    for column, value in zip(columns, floor.tolist(), strict=True):
        key = (column.regime, column.price)
        least[key] = min(least[key], value)
    return np.array([[least[r, p] for p in prices] for r in regimes])


def least_of(
    formulated: ShardingProblem, columns: Sequence[DualPoint], *, in_parts: bool = False
) -> Array | None:
    """Of every network, [columns]. in_parts: whether to look at a few after the others if they are too large
    together. None where they are, or if even one is."""
    terms = formulated.problem.terms
    counted = {k: np.array([c.seconds(k) for c in columns]) for k in (*terms.alone, *terms.pairs)}
    pairs = tuple(
        dict.fromkeys((*terms.hard, *(p for k, t in terms.pairs.items() if counted[k].any() for p in t)))
    )
    orders, states = formulated.problem.known.orders, tuple(terms.states)
    order = orders.along(states, pairs) or orders.along(states, pairs, _WIDE)
    if order is None:
        return None
    few = max(1, _MOST // max(1, order.total))
    if len(columns) > few:
        if not in_parts:
            return None
        parts = [least_of(formulated, columns[k : k + few]) for k in range(0, len(columns), few)]
        present = [part for part in parts if part is not None]
        return np.concatenate(present) if len(present) == len(parts) else None
    added = added_by_use(formulated) if any(c.regime.tied for c in columns) else {}
    return least_of_each(*_networks(formulated, columns, counted, pairs, added), order)


def _networks(
    formulated: ShardingProblem,
    columns: Sequence[DualPoint],
    counted: Mapping[Time, Array],
    pairs: Sequence[tuple[int, int]],
    added: Mapping[int, ParamUseCosts],
) -> tuple[list[Array], dict[tuple[int, int], Array]]:
    """As `least_of_each` takes them. added: by what uses of parameters add, where they count."""
    terms = formulated.problem.terms
    flat = np.zeros((sum(terms.states), len(columns)))
    for key, (at, costs) in terms.laid.alone.items():
        if counted[key].any():
            flat[at] += costs[:, None] * counted[key]
    for kind, (at, costs) in terms.laid.bytes.items():
        held = np.array([c.price * c.held(kind) for c in columns])
        if held.any():
            flat[at] += costs[:, None] * held
    if added:
        once = np.array([float(c.regime.once) for c in columns])
        copied = np.array([c.price * c.regime.copies for c in columns])
        tied = np.array([c.regime.tied for c in columns])
        for number, use in added.items():
            bytes_ = use.copies[:, None] + use.sums[:, None] * (1 - once)
            kept = use.gather[:, None] * once + bytes_ * copied
            a, b = terms.laid.ends[number]
            flat[a:b] += np.where(use.keep[:, None], kept, use.gathers[:, None]) * tied
    flat = flat.astype(SINGLE)
    unary = [flat[a:b] for a, b in terms.laid.ends]
    walls = [*terms.walls.items(), *((v, m) for v, m in enumerate(formulated.allowed) if m is not None)]
    for variable, wall in walls:
        unary[variable] = unary[variable] + wall[:, None].astype(SINGLE)
    edges: dict[tuple[int, int], Array] = {}
    for pair in pairs:
        hard = terms.hard.get(pair)
        edges[pair] = np.zeros((1, 1, 1), SINGLE) if hard is None else hard[:, :, None].astype(SINGLE)
    for key, table in terms.pairs.items():
        often = counted[key]
        if not often.any():
            continue
        weight = often[:1] if bool((often == often[0]).all()) else often
        for pair, matrix in table.items():
            edges[pair] = edges[pair] + (matrix[:, :, None] * weight).astype(SINGLE)
    return unary, edges


def least_weight(policy: StepConfig, key: Time) -> float:
    """How often seconds pass at least that do not belong to parameters; computing hides collectives of
    backward."""
    if key.kind not in OF_ACTIVATIONS:
        return 0.0
    backward = 1.0 - policy.overlap if key.kind == "talk" else 1.0
    once = 0.0 if key.kind == "again" else 1.0
    return backward if key.backward else once + backward * policy.recomputed_share(key.segment, key.cheap)


def _activations(policy: StepConfig, kind: Bytes) -> float:
    """How much is held of bytes that do not belong to parameters; no more than any rank has to hold."""
    if kind.kind in OF_STATE or kind.kind == "sent":
        return 0.0
    return policy.bytes_weight(kind)
