"""What attention with keys that go round an axis asks of a rank (`runtime.ring_attention`,
`runtime.window_ring`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from autoshard.ir import DTYPES, Node, TensorType, refs_of
from autoshard.ir.collectives import RING_ATTENTION_BACKWARD
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import R
from autoshard.ir.rings import joined_bytes
from autoshard.ir.window_hops import WindowHops
from autoshard.rules.attention import KEYS, is_windowed, of_all_keys
from autoshard.simulate.work import Attention, Beat, CollectiveWork, MemoryWork, Work

if TYPE_CHECKING:
    from autoshard.simulate.op_work import Ops


def keys_of_ring(node: Node, values: Mapping[str, PlacedValue], ops: Ops) -> Keys:
    """The work of attention, message by message."""
    return (KeysInReach if is_windowed(node) else Keys)(node, values, ops)


class Keys:
    """Attention with keys that go round (`runtime.ring_attention`), on one rank. keys: bytes of its keys and
    values. moved: bytes that it sends in a step. total: of what it adds parts to, in fp32."""

    def __init__(self, node: Node, values: Mapping[str, PlacedValue], ops: Ops) -> None:
        self.node, self.ops = of_all_keys(node), ops
        self.values = values
        self.axis = ops.mesh.index(str(node.args[1]))
        self.ways = ops.mesh.sizes[self.axis]
        self.backward, self.causal = node.op == RING_ATTENTION_BACKWARD.op, bool(node.args[2])
        refs = list(refs_of(node))
        at = KEYS[node.op]
        self.keys = sum(ops.nbytes(values[name]) for name in refs[at : at + 2])
        self.moved = 2 * self.keys if self.backward else self.keys
        self.hop = "level_hop" if node.kwarg("inside", None) else "hop"
        self.total = 4.0 * prod(ops.shape(values[node.outs[0]]))

    def beats(self) -> list[Beat]:
        """In every step as many pairs of a row and a key as among the rank's own."""
        works, result = self.ops.work(self.node, self.values), list[Beat]()
        rows = self.values[self.node.outs[0]]
        added = self.ops.nbytes(rows) * joined_bytes(rows.type.dtype, backward=self.backward)
        # half of the steps, half of the rows attend to what comes by in a zigzag
        added = added * (0.75 if self.causal else 1.0) + (3 * self.keys if self.backward else 0.0)
        keys, grads = (
            tuple[int, ...](),
            tuple[int, ...](),
        )  # what brings the keys at hand, and the sums that their gradients are added to
        for step in range(self.ways):
            coming = keys
            if step + 1 < self.ways:
                coming = (len(result),)
                result.append(Beat(CollectiveWork(self.hop, self.axis, self.keys), keys))
            for work in works:
                result.append(Beat(work, keys))
            if step or self.backward:  # parts are joined, or added up
                result.append(Beat(MemoryWork(added), (len(result) - 1, *grads)))
            if self.backward:
                grads = (len(result),)
                result.append(Beat(CollectiveWork(self.hop, self.axis, self.keys), (len(result) - 1,)))
            keys = coming
        return result

    def room(self) -> float:
        """Keys at hand and those that arrive; the sums, and what is added to them."""
        beside = self.total + (3 * self.keys if self.backward else 0.0)
        return 2 * self.keys + beside + self.ops.workspace(self.node, self.values)


class KeysInReach(Keys):
    """Attention with keys that go as far as a window reaches (`runtime.window_ring`), on one rank. moved: of
    all that it sends, the part of each other rank of the axis."""

    def __init__(self, node: Node, values: Mapping[str, PlacedValue], ops: Ops) -> None:
        super().__init__(node, values, ops)
        window, zigzag = node.args[5:7]
        at = KEYS[node.op]
        self.rows = list(refs_of(node))[at - 1]
        positions = self.ops.shape(values[self.rows])[2] * self.ways
        self.way = WindowHops.over(positions, self.ways, window, causal=self.causal, zigzag=bool(zigzag))
        self.hops = range(1, self.way.count + 1)
        self.sent = sum(self._bytes(hop) for hop in self.hops)
        self.moved = self.sent * (1 + self.backward) / max(1, self.ways - 1)

    def beats(self) -> list[Beat]:
        """Keys of a hop go on beside what is computed with those before; gradients, from the last hop on,
        beside what is computed with those of the hop before."""
        result, own, came = list[Beat](), [Beat(work) for work in self._computed(0)], list[tuple[int, ...]]()
        for hop in self.hops:
            if hop == 2:
                result += own
            came.append((len(result),))
            result.append(Beat(CollectiveWork("hop", self.axis, self._bytes(hop)), *came[-2:-1]))
            if hop > 1 and not self.backward:
                result += self._part(hop - 1, came[hop - 2])
        if len(self.hops) < 2:
            result += own
        if not self.backward:
            return result + (self._part(len(self.hops), came[-1]) if came else [])
        home: tuple[int, ...] = ()
        for hop in reversed(self.hops):
            result += self._part(hop, came[hop - 1])
            result.append(Beat(MemoryWork(3 * self._bytes(hop)), (len(result) - 1, *home)))
            home = (len(result),)
            result.append(Beat(CollectiveWork("hop", self.axis, self._bytes(hop)), (len(result) - 1,)))
        return result + [Beat(MemoryWork(3 * self._bytes(1)), home)] * bool(self.hops)

    def room(self) -> float:
        """Keys that came, all of them in backward; the sums, and what goes home."""
        width = DTYPES[self.values[self.rows].type.dtype][1]
        wide = max(4, width) / width
        held = self.sent + (1 + wide) * self._bytes(1) if self.backward else 2 * self._bytes(1)
        beside = self.total + (wide * self.keys if self.backward else 0.0)
        return held + beside + self.ops.workspace(self.node, self._placed(0))

    def _part(self, hop: int, came: tuple[int, ...]) -> list[Beat]:
        return [Beat(work, came) for work in self._computed(hop)]

    def _bytes(self, hop: int) -> float:
        """Of the keys of a hop, of all blocks and to all sides."""
        return self.keys * len(self.way.sides) * self.way.moved(hop) / self.way.size if hop else self.keys

    def _computed(self, hop: int) -> list[Work]:
        """What is computed with the keys of a hop, 0 for a rank's own, and joined or added up."""
        rows = self.values[self.node.outs[0]]
        width = DTYPES[rows.type.dtype][1]
        size = self.way.moved(hop) if hop else self.way.size
        works = list[Work]()
        for work in self.ops.work(self._all_pairs(), self._placed(hop)):
            if isinstance(work, Attention):
                work = replace(work, flop=work.flop * self.way.pairs(hop) / (size * size * self._sides(hop)))
            works.append(work)
        share = self._sides(hop) * size / self.way.size
        each = joined_bytes(rows.type.dtype, backward=self.backward)
        if not hop and not self.backward:  # copied to fp32, and back
            each = 2 + 2 * max(4, width) / width
        added = share * self.ops.nbytes(rows) * each
        return [*works, MemoryWork(added + (self._bytes(0) * each if self.backward and not hop else 0.0))]

    def _sides(self, hop: int) -> int:
        return len(self.way.sides) if hop else 1

    def _all_pairs(self) -> Node:
        """Attention without a window or a causal mask."""
        at = 7 if self.backward else 4
        args = (*self.node.args[:at], False, self.node.args[at + 1], 0, *self.node.args[at + 3 :])
        return replace(self.node, args=args)

    def _placed(self, hop: int) -> Mapping[str, PlacedValue]:
        """What is computed with a hop, as tensors of one rank: blocks and sides are further sequences."""
        size = self.way.moved(hop) if hop else self.way.size
        each = self._sides(hop) * self.ops.shape(self.values[self.rows])[2] // self.way.size
        masks = list(refs_of(self.node))[6 if self.backward else 3 :]
        result: dict[str, PlacedValue] = {}
        for name in (*refs_of(self.node), *self.node.outs):
            shape, type_ = list(self.ops.shape(self.values[name])), self.values[name].type
            if name in masks:
                shape[-1] = min(size, shape[-1])
            else:
                shape[0] *= each
                shape[2 if len(shape) == 3 else -2] = size
            result[name] = PlacedValue(TensorType(tuple(shape), type_.dtype), (R,) * len(self.ops.mesh.sizes))
        return result
