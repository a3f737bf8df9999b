"""What could be won at most if repeated layers were free to differ.

The planner lets all layers of a kind take the same decisions. Here each decides for itself, its
recomputation included: a chain of equal networks (`search.networks.repeat`), whose least cost at a price per
byte bounds every plan with such layers from below, as in `search.solving.bound`. A layer costs its share of
what all of them together cost in the problem, so layers that are alike cost what the planner says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cost.step_time import Exposure, between
from autoshard.search.bounds.proving import best_price, prices_of
from autoshard.search.networks.chain import Chain, Pair
from autoshard.search.networks.network import Array, CostNetwork
from autoshard.search.networks.repeat import Repeated, Room, least
from autoshard.search.plans.plan import Recompute
from autoshard.search.problem.lives import GATHERED
from autoshard.search.problem.terms import Bytes, Time, TimeWeight, compose
from autoshard.search.problem.variables import ParamVar
from autoshard.search.reasons.unrolled import NotAChain, Run, Spread, Unrolled, lost, runs_of, unroll
from autoshard.search.solving.problems import Posed
from autoshard.search.solving.setting import Setting
from autoshard.search.solving.settle import Placed


@dataclass(frozen=True)
class Untied:
    """What is known about plans in which the layers of one run may differ.

    layers: how many. seconds: no such plan within the budget gives a shorter step in this setting; None if
    nothing can be said, and then ``reason`` says why. exact: whether it is the least at this price and
    exposure (else a bound on that). answer: of the chain, None where there is none.
    """

    layers: int
    seconds: float | None
    exact: bool = False
    reason: str = ""
    answer: Repeated | None = None


def untied_bound(
    posed: Posed,
    setting: Setting,
    exposure: Exposure,
    *,
    price: float = 0.0,
    budget: float | None = None,
    recompute: bool = True,
    run: Run | None = None,
    room: Room | None = None,
    recover: bool = False,
) -> Untied:
    """Seconds that no plan goes below whose layers of one run choose for themselves.

    setting: microbatches and overlap; with ``recompute`` its recomputation does not matter, since every layer
    may run again or not. price: seconds per byte (any is valid). exposure: which overlaps to count as
    exposed (any is valid). run: of layers, default: the longest. recover: whether to find the states.
    """
    runs = runs_of(posed.model.folded)
    chosen = run or next(iter(runs), None)
    if chosen is None:
        return Untied(0, None, reason="no two layers in a row are alike")
    try:
        unrolled = unroll(posed, chosen)
        policies = policies_of(setting, chosen, recompute=recompute, price=price)
        chain = chain_of(unrolled, policies, exposure, price)
    except NotAChain as error:
        return Untied(len(chosen.labels), None, reason=str(error))
    answer = least(chain, room, recover=recover)
    seconds = answer.lower_bound - price * (budget or 0.0)
    exact = answer.exact and not lost(unrolled) and not policies.optimistic
    return Untied(len(chosen.labels), seconds, exact, answer=answer)


def untied_from(posed: Posed, placed: Placed, budget: float | None) -> Untied:
    """The bound for what was chosen: every placement on its mesh with its microbatches, every recomputation,
    the layers of the longest run each for itself.

    posed, placed: the plan. budget: bytes per rank that it was found with. Price and exposure are those at
    which the bound for layers that are alike is best, of a few that are tried: the two differ little.
    """
    run = next(iter(runs_of(posed.model.folded)), None)
    shown = placed.setting.exposure(placed.taken)
    if run is None:
        return untied_bound(posed, placed.setting, shown)
    prices = (0.0, 0.0) if budget is None else prices_of(placed)
    free = placed.setting.exposure(posed.free.taken)
    none, every = Exposure(0.0, 0.0, 0.0, 0.0), Exposure(1.0, 1.0, 1.0, 1.0)
    tried = tuple(dict.fromkeys([between(shown, none), shown, free, between(none, every)]))
    best = best_price(posed, placed.setting, prices, tried, budget or 0.0)
    price, exposure = best or (prices[1], shown)
    return untied_bound(posed, placed.setting, exposure, price=price, budget=budget, run=run)


@dataclass(frozen=True)
class Policies:
    """Recomputation of a chain.

    each: what a layer of the run may choose from. others: of all other layers. segments: of the run.
    """

    each: tuple[Setting, ...]
    others: Setting
    segments: frozenset[str]

    @property
    def optimistic(self) -> bool:
        """Whether anything is counted at less than it takes."""
        return any(setting.optimistic for setting in (*self.each, self.others))

    def network(self, posed: Posed, each: Setting, exposure: Exposure) -> CostNetwork:
        """All layers of the run in one of their settings."""
        own, others = each.time_weight(exposure), self.others.time_weight(exposure)

        def seconds(key: Time) -> float:
            return (own if key.segment in self.segments else others)(key)

        def held(key: Bytes) -> float:
            return (each if key.segment in self.segments else self.others).bytes_weight(key)

        return compose(posed.problem.terms, seconds, held, posed.allowed)


def policies_of(setting: Setting, run: Run, *, recompute: bool, price: float) -> Policies:
    """What layers may choose from.

    A layer of the run has one call, which runs again or does not. Bytes of a layer that runs again are held
    while it does: the most of any such layer, which is no less than their mean, and that is what their shares
    add up to at most. Of other layers some calls may run again, at prices in between; they are priced as if
    none did, and held as if all did. Where bytes are free, nothing is worth running again.
    """
    if not recompute:
        if any(r.calls not in (0, setting.calls[name]) for name, r in setting.recompute.items()):
            raise NotAChain("only some of the layers run again")
        return Policies((setting,), setting, run.segments)
    bare = replace(setting, recompute={}, optimistic=False)
    if not price:
        return Policies((bare,), bare, run.segments)
    own = [name for name in setting.calls if name in run.segments]
    others = replace(bare, optimistic=len(own) < len(setting.calls))
    if len(own) > 1:
        return Policies((replace(bare, optimistic=True),), others, run.segments)
    each = [bare]
    for name in own:
        calls = setting.calls[name]
        each.append(replace(bare, recompute={name: Recompute("selective", calls)}))
        each.append(replace(bare, recompute={name: Recompute("full", calls)}))
    return Policies(tuple(each), others, run.segments)


def chain_of(unrolled: Unrolled, policies: Policies, exposure: Exposure, price: float) -> Chain:
    """The chain of a run of layers, where a byte costs ``price`` seconds."""
    posed = unrolled.posed
    networks = [policies.network(posed, each, exposure) for each in policies.each]
    weight = policies.others.time_weight(exposure)
    bytes_less = _gathered(unrolled)
    parts = []
    for network in networks:
        memory = tuple(m - bytes_less[v] if v in bytes_less else m for v, m in enumerate(network.memory))
        parts.append(_Parts(unrolled, CostNetwork(network.unary, memory, network.edges).at_price(price)))
    for part in parts:
        part.split(weight)
    # outside and between copies the policies of single layers say little: what is least in any is no more
    # than what it costs in any mixture
    first = parts[0]
    outer = CostNetwork(
        tuple(np.minimum.reduce([p.outer.unary[v] for p in parts]) for v in range(len(first.outer.unary))),
        first.outer.memory,
        _least([p.outer.edges for p in parts]),
    )
    tables = {name: _least([p.tables[name] for p in parts]) for name in ("onward", "every", "first", "last")}
    return Chain(
        unrolled.copies,
        tuple(p.inner for p in parts),
        outer,
        tables["onward"],
        tables["every"],
        tables["first"],
        tables["last"],
    )


def _least(found: Sequence[Mapping[Pair, Array]]) -> dict[Pair, Array]:
    """Entry by entry; a pair that is not in all of them costs nothing at least."""
    common = [pair for pair in found[0] if all(pair in other for other in found[1:])]
    return {pair: np.minimum.reduce([tables[pair] for tables in found]) for pair in common}


def _gathered(unrolled: Unrolled) -> dict[int, Array]:
    """Bytes by which a class of gathered parameters may hold less than its shares, per variable.

    Two neighbours are held gathered at a time (`lives.GATHERED`). Of n layers that differ, the dearest pair
    holds at least 2 / n of all together if n is even (n / 2 pairs make up all), at least 2 / (n + 1) if it
    is odd (the last one is alone in its pair).
    """
    n, found = unrolled.copies, {}
    posed = unrolled.posed
    if n % 2 == 0:
        return {}
    for number, variable in enumerate(posed.problem.variables):
        if isinstance(variable, ParamVar) and unrolled.share[number][0]:
            group = posed.model.flow.classes[variable.place]
            sizes = [
                0.0
                if life.keep or life.stored == life.use
                else posed.prices.ops.local_bytes(group.first.type, life.use, posed.problem.axes.sizes)
                for life in variable.states
            ]
            found[number] = min(len(group.ports), GATHERED) * np.array(sizes) / (n + 1)
    return found


class _Parts:
    """One network, taken apart into a copy, what is between copies, and what is outside."""

    def __init__(self, unrolled: Unrolled, network: CostNetwork) -> None:
        self.unrolled, self.network = unrolled, network
        self.inside = _numbers([each > 0 for each, _ in unrolled.share])
        self.outside = _numbers([rest > 0 for _, rest in unrolled.share])
        self.tables: dict[str, dict[Pair, Array]] = {
            name: {} for name in ("same", "onward", "every", "first", "last", "outside")
        }

    def split(self, weight: TimeWeight) -> None:
        for pair, table in self.network.edges.items():
            for spread, part in self.unrolled.parts(pair, table, weight):
                self._spread(pair, spread, part)
        share, unary = self.unrolled.share, self.network.unary
        inner = tuple(share[v][0] * unary[v] for v in self.inside)
        outer = tuple(share[v][1] * unary[v] for v in self.outside)
        self.inner = CostNetwork(inner, tuple(np.zeros(len(u)) for u in inner), self.tables["same"])
        self.outer = CostNetwork(outer, tuple(np.zeros(len(u)) for u in outer), self.tables["outside"])

    def _spread(self, pair: Pair, spread: Spread, table: Array) -> None:
        a, b = pair
        inside, outside = self.inside, self.outside
        if spread.same:
            self._put("same", inside[a], inside[b], spread.same * table)
        if spread.onward:
            self._put("onward", inside[a], inside[b], spread.onward * table)
        if spread.back:
            self._put("onward", inside[b], inside[a], spread.back * table.T)
        if spread.outside:
            self._put("outside", outside[a], outside[b], spread.outside * table)
        for name in ("every", "first", "last"):
            for at, other, turned in (("a", b, False), ("b", a, True)):
                share = getattr(spread, f"{at}_{name}")
                if share:
                    own = a if at == "a" else b
                    self._put(name, outside[own], inside[other], share * (table.T if turned else table))

    def _put(self, name: str, a: int, b: int, table: Array) -> None:
        if name in ("same", "outside") and a > b:
            a, b, table = b, a, table.T
        tables = self.tables[name]
        tables[a, b] = tables[a, b] + table if (a, b) in tables else table


def _numbers(there: Sequence[bool]) -> dict[int, int]:
    found: dict[int, int] = {}
    for variable, yes in enumerate(there):
        if yes:
            found[variable] = len(found)
    return found
