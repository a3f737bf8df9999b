"""What the terms of a problem are made of, so that they can be priced for a larger batch, too.

With more sequences in a microbatch all decisions stay the same ones; values that hold the batch grow, and
what touches them takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.model import CostModel
from autoshard.ir import TensorType
from autoshard.ir.placement import Layout, Partial
from autoshard.rules.core import Factored
from autoshard.rules.states import OpState
from autoshard.search.problem.cost_terms import Bytes, CostTerms, Time
from autoshard.solver.network import Array


@dataclass(frozen=True, eq=False)
class Laid:
    """Layouts of a value in every state of a variable; there is one for all that are alike."""

    layouts: tuple[Layout | None, ...]


@dataclass(frozen=True, eq=False)
class CallGroup:
    """Calls that are alike, in their states. grow: which of all values, ins first, hold the batch; grows:
    whether there is more to compute with more of it. turned, inside, joined: see
    `Kind`."""

    rule: Factored
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType | None, ...]
    states: tuple[OpState, ...]
    grow: tuple[bool, ...]
    grows: bool
    turned: tuple[bool, bool] = (False, False)
    inside: tuple[bool, ...] = ()
    joined: bool = False


@dataclass(frozen=True, eq=False)
class LayoutChange:
    """From some layouts of a value to others. grows: whether it holds the batch. reduces: whether partial
    sums may be reduced; those of some gradients are cast first (`search.problem.gradient_casts`). inside:
    whether a chain of ops that is compiled would not write it if its layout stayed."""

    type: TensorType
    grows: bool
    given: Laid
    wanted: Laid
    reduces: bool = True
    inside: bool = False


class BatchPricing:
    """Prices with ``scale`` times the sequences; what is alike is priced once.

    sizes: of the axes. fixed: prices at another scale or without waves, of which those that do not depend on
    it are taken. waves: see `CostModel.op_seconds`.
    """

    def __init__(
        self,
        cost: CostModel,
        sizes: Sequence[int],
        scale: float = 1.0,
        fixed: BatchPricing | None = None,
        *,
        waves: bool = False,
    ) -> None:
        self.cost, self.sizes, self.scale, self.waves, self._fixed = cost, tuple(sizes), scale, waves, fixed
        self._busy: dict[CallGroup, Array] = {}
        self._ways: dict[LayoutChange, Array] = {}
        self._larger: dict[LayoutChange, NDArray[np.bool_]] = {} if fixed is None else fixed._larger

    def busy(self, call: CallGroup) -> Array:
        """Seconds of computing of a call in each of its states."""
        cached = self._busy.get(call)
        if cached is None:
            if self._fixed is not None and not self._changes(call):
                cached = self._fixed.busy(call)
            else:
                cached = self.cost.op_seconds(
                    call.rule,
                    call.ins,
                    call.outs,
                    call.states,
                    self.sizes,
                    self.scale,
                    call.grows,
                    call.grow,
                    call.turned,
                    self.waves,
                    call.inside,
                    joined=call.joined,
                )
            self._busy[call] = cached
        return cached

    def _changes(self, call: CallGroup) -> bool:
        """Whether it takes another time than by the prices that there are already."""
        grows = call.grows or any(call.grow)
        rescaled = self._fixed is not None and self._fixed.scale != self.scale
        return grows and (rescaled or (self.waves and call.rule.kernel == "product"))

    def way(self, way: LayoutChange) -> Array:
        """Seconds between layouts, [given, wanted]."""
        cached = self._ways.get(way)
        if cached is None:
            given = self._fixed
            alike = given is not None and (given.scale == self.scale or not way.grows)
            cached = given.way(way) if given is not None and alike else self._reshard(way)
            self._ways[way] = cached
        return cached

    def larger(self, way: LayoutChange) -> NDArray[np.bool_]:
        """Whether a rank holds more in the layout that is wanted, [given, wanted]."""
        if way not in self._larger:
            bytes_of = partial(self.cost.local_bytes, way.type, sizes=self.sizes)
            given, wanted = (
                np.array([0.0 if layout is None else bytes_of(layout) for layout in laid.layouts])
                for laid in (way.given, way.wanted)
            )
            self._larger[way] = np.greater(wanted[None, :], given[:, None])
        return self._larger[way]

    def _reshard(self, way: LayoutChange) -> Array:
        given, target = way.given.layouts, way.wanted.layouts
        table = self.cost.reshard.table(
            way.type,
            [lay for lay in (*given, *target) if lay is not None],
            scale=self.scale if way.grows else 1.0,
        )
        rows = [0 if lay is None else table.index[lay] for lay in given]
        cols = [table.index[lay] for lay in target if lay is not None]
        seconds = table.seconds.take(rows, axis=0).take(cols, axis=1)
        apart = np.array(rows)[:, None] != np.array(cols)
        if way.inside and self.cost.device.compiled:
            written, read = (self._moved(way, laid.layouts) for laid in (way.given, way.wanted))
            seconds = seconds + np.where(apart, written[:, None] + read, 0.0)
        if way.reduces:
            return seconds
        partial = np.array([lay is not None and any(isinstance(p, Partial) for p in lay) for lay in given])
        return np.where(partial[:, None] & apart, np.inf, seconds)

    def _moved(self, way: LayoutChange, layouts: Sequence[Layout | None]) -> Array:
        """Seconds in which a rank writes or reads a value, in each of its layouts."""
        scale = (self.scale if way.grows else 1.0) / self.cost.device.traffic
        held = (0.0 if lay is None else self.cost.local_bytes(way.type, lay, self.sizes) for lay in layouts)
        return scale * np.array(list(held))


class Entry(Protocol):
    """A part of the terms."""

    def put(self, terms: CostTerms, prices: BatchPricing) -> None:
        """Add it."""
        ...


@dataclass(frozen=True)
class Busy:
    """Computing of a call, ``count`` times."""

    key: Time
    variable: int
    count: int
    call: CallGroup

    def put(self, terms: CostTerms, prices: BatchPricing) -> None:
        terms.add(self.key, self.variable, prices.busy(self.call) * self.count)


@dataclass(frozen=True)
class Recomputed:
    """What recomputing a call adds, ``count`` times. calls: it as it is, in forward where its layer is
    recomputed, recomputed, and that with its result written. reads: of its result in backward where that is
    saved, each as long as writing it; where it is recomputed it stays in a kernel."""

    key: Time
    variable: int
    count: int
    calls: tuple[CallGroup, ...]
    reads: int

    def put(self, terms: CostTerms, prices: BatchPricing) -> None:
        call, forward, backward, written = (prices.busy(each) for each in self.calls)
        more = forward + backward - call - self.reads * (written - backward)
        # a state that cannot be costs inf in all three
        terms.add(self.key, self.variable, np.maximum(np.nan_to_num(more, posinf=0.0), 0.0) * self.count)


@dataclass(frozen=True)
class Exchanged:
    """Rows that a call exchanges with their owners, ``count`` times. exposed: share of the seconds in which
    nothing is computed."""

    key: Time
    variable: int
    count: int
    call: CallGroup
    exposed: float

    def put(self, terms: CostTerms, prices: BatchPricing) -> None:
        call, cost = self.call, prices.cost
        sent = [
            cost.exchange_seconds(call.rule, call.ins, call.outs, s, prices.sizes, prices.scale)
            for s in call.states
        ]
        terms.add(self.key, self.variable, np.array(sent) * self.count * self.exposed)


@dataclass(frozen=True)
class Circulating:
    """Keys that go round an axis, ``count`` times. repeats: see `CostModel.ring_seconds`."""

    key: Time
    variable: int
    count: int
    call: CallGroup
    repeats: int

    def put(self, terms: CostTerms, prices: BatchPricing) -> None:
        call, price = self.call, prices.cost.ring_seconds
        given, times = (call.rule, call.ins, call.outs), (prices.scale, self.repeats)
        more = [
            price(*given, state, prices.sizes, busy, *times)
            for state, busy in zip(call.states, prices.busy(call), strict=True)
        ]
        terms.add(self.key, self.variable, np.array(more) * self.count)


@dataclass(frozen=True)
class Joined:
    """The reshard between two variables, ``count`` times. larger: kind of those to layouts of more bytes."""

    key: Time
    larger: Time
    source: int
    target: int
    count: int
    way: LayoutChange

    def put(self, terms: CostTerms, prices: BatchPricing) -> None:
        seconds = self.count * prices.way(self.way)
        if self.larger != self.key:
            apart = prices.larger(self.way) & np.isfinite(seconds) & (seconds > 0)
            if apart.any():
                terms.join(self.larger, self.source, self.target, np.where(apart, seconds, 0.0))
                seconds = np.where(apart, 0.0, seconds)
        terms.join(self.key, self.source, self.target, seconds)


@dataclass(frozen=True)
class ValueBytes:
    """Bytes of a value. grows: whether it holds the batch."""

    key: Bytes
    variable: int
    held: Array
    grows: bool

    def put(self, terms: CostTerms, prices: BatchPricing) -> None:
        terms.hold(self.key, self.variable, prices.scale * self.held if self.grows else self.held)


@dataclass(frozen=True)
class Fixed:
    """What has nothing to do with the batch. target: None where one variable alone decides."""

    key: Time | Bytes
    source: int
    target: int | None
    costs: Array

    def put(self, terms: CostTerms, prices: BatchPricing) -> None:
        if isinstance(self.key, Bytes):
            terms.hold(self.key, self.source, self.costs)
        elif self.target is None:
            terms.add(self.key, self.source, self.costs)
        else:
            terms.join(self.key, self.source, self.target, self.costs)
