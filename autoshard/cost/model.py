"""The prices that the search uses on one mesh of one cluster."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from autoshard.cluster.cluster import Device
from autoshard.cost.collective import AxisLink, seconds
from autoshard.cost.compute import compute_seconds, flop_rate, roofline
from autoshard.cost.kernel_time import (
    aligned_rate,
    attention_rate,
    begin_and_end,
    edge_rate,
    filled,
    reached_rate,
    sustained,
    traffic_seconds,
)
from autoshard.cost.reshard import ReshardCost
from autoshard.ir import DTYPES, TensorType
from autoshard.ir.experts import destinations
from autoshard.ir.local_bytes import held_bytes, held_shape
from autoshard.ir.placement import Layout, Shard
from autoshard.ir.rings import joined_bytes
from autoshard.ir.scaled import copies_of, packed_copies, packed_rate
from autoshard.ir.window_hops import WindowHops
from autoshard.rules.core import Dims, Factored, TileFn
from autoshard.rules.states import OpState


@dataclass(frozen=True)
class CostModel:
    """Compute by roofline, where matrix products and attention have rates of their own; reshards by latency
    and bandwidth."""

    device: Device
    reshard: ReshardCost

    def local_bytes(self, type_: TensorType, layout: Layout, sizes: Sequence[int]) -> float:
        """Bytes on the fullest rank."""
        return held_bytes(type_, layout, sizes)

    def op_seconds(
        self,
        rule: Factored,
        ins: Sequence[TensorType],
        outs: Sequence[TensorType | None],
        states: Sequence[OpState],
        sizes: Sequence[int],
        scale: float = 1.0,
        grows: bool = False,
        grow: Sequence[bool] = (),
        turned: tuple[bool, bool] = (False, False),
        waves: bool = False,
        inside: Sequence[bool] = (),
        *,
        joined: bool = False,
    ) -> NDArray[np.float64]:
        """Seconds of computing of one call in each of its states, on the fullest rank; [states].

        Its FLOP are done in the type of its first result: what attention keeps for its backward is wider.
        scale: there are so many times as many sequences. grows: whether there is more to compute with more of
        them. grow: which values hold them, ins first; left out, all may. turned: of a product, whether each
        of its operands lies in memory by its other dim. waves: whether the last wave of tiles, which may be
        nearly empty, counts where there are more of them with more sequences: they then may take less each.
        inside: which values never leave a kernel where chains are compiled (`rules.chains`), ins first.
        joined: whether it is a part of one that another op begins there.
        """
        if rule.kind == "view" or not states:
            return np.zeros(len(states))
        if rule.tile is not None:
            return self._tiled(rule.tile, states, sizes, scale if grows else 1.0)
        # a result is there in all states or in none
        products = [
            (number, type_)
            for number, (type_, layout) in enumerate(zip(outs, states[0].outputs, strict=True))
            if type_ is not None and layout is not None
        ]
        native = "f4" in self.device.peak_flops
        units = packed_rate(native) if rule.packed else rule.rate
        dtype = units or next((type_.dtype for _, type_ in products if type_.is_float), "f32")
        moved = np.zeros(len(states))
        hidden = inside if self.device.compiled and inside else (False,) * (len(ins) + len(outs))
        copies = rule.copies
        if units and not copies:
            each = packed_copies(native, turned) if rule.packed else copies_of(units, turned)
            copies = *(0.0 for _ in ins[:-2]), *each
        for number, type_ in enumerate(ins):
            times = scale if grow and grow[number] else 1.0
            times *= not hidden[number]
            times *= 1.0 + (copies[number] if copies else 0.0)
            moved += times * self._all_bytes(type_, [s.inputs[number] for s in states], sizes)
        sums = np.zeros(len(states))  # how many there are, in results with rows and columns
        for number, type_ in products:
            times = scale if grow and grow[len(ins) + number] else 1.0
            written = times * self._all_bytes(type_, [s.outputs[number] for s in states], sizes)
            moved += 0.0 if hidden[len(ins) + number] else written
            if len(type_.shape) > 1:
                sums += written / DTYPES[type_.dtype][1]
        flops = (scale if grows else 1.0) * rule.flops / np.array([s.ways for s in states], dtype=np.float64)
        device = self.device
        if rule.kernel == "product":
            held = grow[-3:] if grow else (True, True, True)
            waves = waves or not held[-1]
            flops /= self._reached(
                rule.operands(ins), states, sizes, _growing(held, scale), dtype, turned, waves=waves
            )
        elif rule.kernel == "" and rule.kind == "matmul":
            # experts and convolutions: every sum takes as much longer as a tile takes to begin and to end
            flops += np.where(flops > 0, 2.0 * begin_and_end(dtype, device) * sums, 0.0)
        if joined and device.compiled:
            return roofline(flops, moved, flop_rate(dtype, device, matmul=False), device.traffic, 0.0)
        if rule.kernel in ("", "product"):
            return compute_seconds(flops, moved, dtype, device, matmul=rule.kind == "matmul")
        # torch's kernel, as for `simulate.behaviour.Behaviour`
        rate = attention_rate(dtype, rule.kernel == "attention_backward", device, native=False)
        start = device.kernels.attention_start + device.launch_overhead
        return roofline(flops, moved, rate / rule.slowdown, device.traffic, start)

    def _tiled(
        self, tile_of: TileFn, states: Sequence[OpState], sizes: Sequence[int], scale: float
    ) -> NDArray[np.float64]:
        """Seconds of all tiles of rows, one after the other."""
        priced: dict[tuple[object, ...], float] = {}
        for state in states:
            key = state.inputs, state.outputs
            if key in priced:
                continue
            tile = tile_of(*key, sizes, scale)
            once = traffic_seconds(tile.copied, self.device)
            for rule, ins, outs in tile.calls:
                alone = OpState(((),) * len(ins), tuple(None if t is None else () for t in outs), 1)
                once += float(self.op_seconds(rule, ins, outs, [alone], (), waves=True)[0])
            priced[key] = tile.count * once
        return np.array([priced[state.inputs, state.outputs] for state in states])

    def _reached(
        self,
        operands: Sequence[TensorType],
        states: Sequence[OpState],
        sizes: Sequence[int],
        scales: Sequence[float],
        dtype: str,
        turned: tuple[bool, bool],
        *,
        waves: bool,
    ) -> NDArray[np.float64]:
        """Part of its rate that a product reaches in each state, for the length of its sum, for how its rows
        lie in memory and for the tiles of its result. operands: its matrices. scales: see `_growing`. waves:
        whether waves of tiles count; without them no sequence takes less beside more of them, and edges of
        rows that hold the batch are left out as well.
        """
        device = self.device
        cache: dict[tuple[Layout | None, ...], float] = {}
        for state in states:
            layouts = tuple(state.inputs[-2:])
            if layouts not in cache:
                (*many, rows, depth), (*_, columns) = (
                    held_shape(type_.shape, layout, sizes)
                    for type_, layout in zip(operands, layouts, strict=True)
                )
                batch, depth = prod(many), round(scales[3] * depth)
                if waves:
                    ways, down, across = (
                        round(scale * n) for scale, n in zip(scales[:3], (batch, rows, columns), strict=True)
                    )
                    cache[layouts] = reached_rate(ways, down, across, depth, dtype, device, turned=turned)
                    continue
                aligned = aligned_rate(batch, rows, columns, depth, dtype, device, turned=turned)
                edges = edge_rate(rows if turned[0] or batch > 1 else inf, columns, device)
                full = edges * filled(depth, dtype, device, aligned)
                cache[layouts] = aligned * full * sustained(dtype, device)
        return np.array([cache[tuple(state.inputs[-2:])] for state in states])

    def _all_bytes(
        self, type_: TensorType, layouts: Sequence[Layout | None], sizes: Sequence[int]
    ) -> NDArray[np.float64]:
        """Bytes on the fullest rank in each of many layouts, 0 without one; most states share theirs."""
        held = {lay: 0.0 if lay is None else self.local_bytes(type_, lay, sizes) for lay in set(layouts)}
        return np.array([held[layout] for layout in layouts])

    def exchange_seconds(
        self,
        rule: Factored,
        ins: Sequence[TensorType],
        outs: Sequence[TensorType | None],
        state: OpState,
        sizes: Sequence[int],
        scale: float = 1.0,
    ) -> float:
        """Seconds of the all-to-all of a call, on which tokens travel to their experts, or sums back.

        scale: there are so many times as many tokens. They go to every rank by itself, or by node, what is
        faster (`passes.partition.axis_levels`). That experts are chosen evenly is assumed: imbalance has no
        price.
        """
        axis = rule.exchanged(state.inputs, state.outputs)
        if axis is None:
            return 0.0
        (tokens, owners), *_ = rule.exchange
        laid = [
            (dims, type_, layout)
            for dims, type_, layout in (
                *zip(rule.inputs, ins, state.inputs, strict=True),
                *zip(rule.outputs, outs, state.outputs, strict=True),
            )
            if dims is not None and type_ is not None and layout is not None
        ]
        slots = next(type_ for dims, type_, _ in laid if any(owners in dim for dim in dims))
        # of each token a row of the widest tensor of tokens: beside it, there are only its choices
        widest = max(
            self.local_bytes(type_, layout, sizes)
            for dims, type_, layout in laid
            if any(tokens in dim and owners not in dim for dim in dims)
        )
        link, sent = self.reshard.links[axis], scale * widest
        direct = seconds("all_to_all", sent * destinations(slots, sizes[axis]), link)
        if not link.levels or rule.sizes[owners] % sizes[axis]:
            return direct
        hops = (link.across, link.across.size), (link.inside_nodes, sizes[axis])
        by_node = sum(seconds("all_to_all", sent * destinations(slots, n), each) for each, n in hops)
        return min(direct, by_node)

    def ring_seconds(
        self,
        rule: Factored,
        ins: Sequence[TensorType],
        outs: Sequence[TensorType | None],
        state: OpState,
        sizes: Sequence[int],
        busy: float,
        scale: float = 1.0,
        repeats: int = 1,
    ) -> float:
        """Seconds that attention takes longer where its keys go round an axis, or as far as its window
        reaches: hops that its computing does not hide, and joining the parts.

        busy: seconds of computing. scale: there are so many times as many sequences. repeats: how many times
        every head of the keys is given; it travels once.
        """
        axis = rule.circulates(state.inputs, state.outputs)
        if axis is None:
            return 0.0
        keys = {owners for _, owners in rule.ring}
        laid = zip(rule.inputs, ins, state.inputs, strict=True)
        given = [(type_, layout) for dims, type_, layout in laid if _has(dims, keys)]
        heads = held_shape(given[0][0].shape, given[0][1], sizes)[1]
        sent = scale * sum(held_bytes(*each, sizes) for each in given) / max(1, min(repeats, heads))
        link, ways = self.reshard.links[axis], sizes[axis]
        rows, lies = outs[0], state.outputs[0]
        assert rows is not None and lies is not None
        backward = rule.kernel == "attention_backward"
        held = scale * held_bytes(rows, lies, sizes) * joined_bytes(rows.dtype, backward=backward)
        if rule.window:
            placed = lies[axis]
            assert isinstance(placed, Shard)
            way = WindowHops.over(
                rows.shape[2], ways, rule.window, causal=bool(rule.zigzag), zigzag=placed.outer < 0
            )
            return self._window_seconds(way, sent, traffic_seconds(held, self.device), busy, link, backward)
        joined = traffic_seconds(held * (0.75 if rule.zigzag else 1.0), self.device)
        hop = float(seconds("level_hop" if link.together else "hop", sent, link))
        on_the_way, alone = hop * (1 + backward), hop * backward
        beside = min(on_the_way, busy / ways)
        exposed = on_the_way - beside + (1.0 - self.device.overlap) * beside
        return (ways - 1) * (exposed + joined) + alone

    def _window_seconds(
        self, way: WindowHops, keys: float, joined: float, busy: float, link: AxisLink, backward: bool
    ) -> float:
        """The same for a window. keys: bytes of a rank's. joined: seconds in which all of its rows are joined
        once. In forward each hop is beside what the one before has brought; in backward the first is beside
        the rank's own keys, and gradients go home beside what is next computed, the last beside nothing."""
        pairs = [way.pairs(hop) for hop in range(way.count + 1)]
        total = joined  # of the rank's own
        for hop in range(1, way.count + 1):
            share = len(way.sides) * way.moved(hop) / way.size
            message = float(seconds("hop", keys * share, link))
            computing = busy * pairs[hop - 1] / sum(pairs)
            alone = message if backward else 0.0
            beside = min(message, computing)
            total += alone + message - beside + (1.0 - self.device.overlap) * beside + joined * share
        return total


def _has(dims: Dims, factors: Collection[int]) -> bool:
    """Whether a tensor has one of some factors."""
    return any(f in factors for dim in dims for f in dim)


def _growing(held: Sequence[bool], scale: float) -> list[float]:
    """As how many times as long (batch, rows, columns, depth) of a product count with ``scale`` times the
    sequences. held: whether left, right and result hold them; the sum is what only the result does not."""
    left, right, result = held
    lengths = (
        left and right and result,
        left and not right,
        right and not left,
        left and right and not result,
    )
    return [scale if longer else 1.0 for longer in lengths]
