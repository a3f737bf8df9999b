"""What a ring asks of a device, chunk by chunk (`ir.rings`, `runtime.rings`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from autoshard.ir import DTYPES, Node
from autoshard.ir.collectives import COLLECTIVES
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.rings import Ring, ring_of, together
from autoshard.rules.attention import KEYS
from autoshard.simulate.ring_attention import keys_of_ring
from autoshard.simulate.work import Beat, CollectiveWork, MatmulWork, MemoryWork, Work

if TYPE_CHECKING:
    from autoshard.simulate.op_work import Ops


def beats(node: Node, values: Mapping[str, PlacedValue], ops: Ops) -> list[Beat]:
    """The work of a ring in the order in which it is issued: messages as soon as there is something to send,
    products and sums of the chunk at hand meanwhile. Nothing for a ring that cannot be read."""
    if node.op in KEYS:
        return keys_of_ring(node, values, ops).beats()
    ring = ring_of(node)
    if ring is None:
        return []
    sizes = _Sizes(ring, node, values, ops)
    return sizes.gather() if ring.gathers else sizes.scatter()


def apart(node: Node, values: Mapping[str, PlacedValue], ops: Ops) -> list[Work]:
    """The same work, its messages as the one collective that they are together."""
    ring = None if node.op in KEYS else ring_of(node)
    if ring is None and node.op not in KEYS:
        return []
    sizes = keys_of_ring(node, values, ops) if ring is None else _Sizes(ring, node, values, ops)
    computed = [b.work for b in beats(node, values, ops) if not isinstance(b.work, CollectiveWork)]
    return [*computed, CollectiveWork(COLLECTIVES[node.op].primitive, sizes.axis, sizes.ways * sizes.moved)]


def alone(result: Sequence[Beat], price: Callable[[Work], float], overlap: float) -> float:
    """Seconds of a ring with nothing else beside it.

    overlap: part of the time of messages beside computing that costs the computing nothing.
    """
    free, busy = [0.0, 0.0], [0.0, 0.0]
    ends: list[float] = []
    for beat in result:
        stream, cost = int(isinstance(beat.work, CollectiveWork)), price(beat.work)
        ready = max((ends[k] for k in beat.after), default=0.0)
        if stream:  # issued by who computes
            free[0] = max(free[0], ready)
            ready = free[0]
        end = max(free[stream], ready) + cost
        free[stream] = end
        busy[stream] += cost
        ends.append(end)
    total = max(free)
    return total + (1.0 - overlap) * max(0.0, sum(busy) - total)


def room(node: Node, values: Mapping[str, PlacedValue], ops: Ops) -> float:
    """Bytes that a ring holds at once beside what it takes and gives."""
    if node.op in KEYS:
        return keys_of_ring(node, values, ops).room()
    ring = ring_of(node)
    if ring is None:
        return 0.0
    sizes = _Sizes(ring, node, values, ops)
    if ring.gathers:  # the chunk at hand and the one that arrives
        return 0.0 if sizes.blocks == 1 else 2.0 * sizes.moved
    # what is sent, what arrives, and what is made meanwhile, of which the last is the result
    return (2.0 + (len(ring.products) > 1)) * sizes.moved


class _Sizes:
    """A ring on one rank. moved: bytes of a chunk that travels. blocks: in how many pieces it lies among the
    others. rows: of a piece."""

    def __init__(self, ring: Ring, node: Node, values: Mapping[str, PlacedValue], ops: Ops) -> None:
        self.ring, self.node, self.values, self.ops = ring, node, values, ops
        self.axis = ops.mesh.index(ring.axis)
        self.ways = ops.mesh.sizes[self.axis]
        shape = ops.shape(values[ring.moved])
        self.blocks = prod(shape[: ring.dim]) * ring.outer
        self.rows = prod(shape[:-1]) // self.blocks
        self.moved = ops.nbytes(values[ring.moved])

    def products(self) -> list[list[Work]]:
        """Those of one chunk, each with what is copied for it."""
        result: list[list[Work]] = []
        for left, right in self.ring.products:
            depth, columns = self.ops.shape(self.values[right])
            dtype = self.values[left].type.dtype
            width, rows = DTYPES[dtype][1], self.blocks * self.rows
            moved = float((rows * depth + depth * columns + rows * columns) * width)
            kind = self.ops.behaviour.product_dtype or dtype
            turned = self.values[left].turned, self.values[right].turned
            if not together(self.blocks, self.rows):
                result.append([MatmulWork(self.blocks, self.rows, columns, depth, kind, moved, turned)])
                continue
            # what is made is put where it stays, and what a scatter needs is taken from where it lies
            copied = rows * (columns if self.ring.gathers else depth + columns)
            product = MatmulWork(1, rows, columns, depth, kind, moved, turned)
            result.append([product, MemoryWork(2.0 * copied * width)])
        return result

    def gather(self) -> list[Beat]:
        result = [Beat(MemoryWork(2 * self.moved))]
        chunk = 0  # what makes the chunk at hand
        for step in range(self.ways):
            coming = chunk
            if step + 1 < self.ways:
                coming = len(result)
                result.append(Beat(CollectiveWork("hop", self.axis, self.moved), (chunk,)))
            result += [Beat(work, (chunk,)) for works in self.products() for work in works]
            if self.blocks > 1 and step + 1 < self.ways:
                result.append(Beat(MemoryWork(2 * self.moved), (coming,)))
            chunk = coming
        return result

    def scatter(self) -> list[Beat]:
        result: list[Beat] = []
        total = self._share(result)
        for _ in range(1, self.ways):
            coming = len(result)
            result.append(Beat(CollectiveWork("hop", self.axis, self.moved), (total,)))
            own = self._share(result)
            total = len(result)
            result.append(Beat(MemoryWork(3 * self.moved), (own, coming)))
        return result

    def _share(self, result: list[Beat]) -> int:
        """What the rank adds to one part; the place of the last piece of it."""
        total = -1
        for works in self.products():
            result += [Beat(work) for work in works]
            product = len(result) - 1
            if total >= 0:
                result.append(Beat(MemoryWork(3 * self.moved), (total, product)))
            total = len(result) - 1
        return total
