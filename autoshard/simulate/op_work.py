"""What an op of a program asks of a device, on the shapes that a rank has."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from autoshard.cluster.mesh import Mesh
from autoshard.ir import DTYPES, Graph, LocalSize, Node, TensorType, refs_of
from autoshard.ir.collectives import (
    COLLECTIVES,
    EXPERT_RELAY,
    CollectiveSpec,
    axes_of,
    is_ring,
    spec_of,
    wheres_of,
)
from autoshard.ir.experts import exchanged_bytes, owner_ways
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.offload import HOST_OPS, STORE
from autoshard.ir.placement import Layout, R, Shard, in_one_piece, local_extent, local_shape
from autoshard.ir.quantized import packed_bytes
from autoshard.ir.routing import EVEN
from autoshard.ir.row_tiles import TILES, RowTiles, has_rows, tiles_of
from autoshard.ir.scaled import (
    PACKED_MM,
    SCALED_MM,
    copies_of,
    expert_copies,
    packed_copies,
    packed_rate,
    rate_of,
)
from autoshard.ir.scans import SCAN, Scan, scan_of
from autoshard.ir.views import VIEWS
from autoshard.kernels.registry import Operand, specs
from autoshard.rules import attention, experts, matmul, packed, scaled, scaled_experts, similar_rows
from autoshard.rules.chains import ALONE, InKernel
from autoshard.rules.stops import PRODUCTS
from autoshard.simulate import rings
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.similar_rows import grouped_work
from autoshard.simulate.work import (
    Attention,
    Beat,
    CollectiveWork,
    HostWork,
    Level,
    MatmulWork,
    MemoryWork,
    TiledWork,
    Transfer,
    Work,
)

#: segments that backward recomputes, parts of them (`passes.memory.recompute`, `ir.statements.Taker`), and
#: values (`passes.memory.join_recompute`)
AGAIN = re.compile(r"_again\d*(_part(_\d+)?)?(_\d+)?$")
_CONVOLUTION, _CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
#: products of rows with rows
_OUTER = frozenset(("autoshard.expert_outer.default",))
_NORM_BACKWARD = "aten.native_layer_norm_backward.default"
#: bytes of an element of a narrow copy
_NARROW = 1
#: products that may be of narrow factors
NARROWED = frozenset(
    (
        *("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default"),
        *("autoshard.expert_mm.default", *_OUTER),
    )
)


class Ops:
    """Reads ops for one rank of a mesh.

    coords: of the rank.
    """

    def __init__(self, mesh: Mesh, coords: Sequence[int], behaviour: Behaviour) -> None:
        self.mesh, self.coords, self.behaviour = mesh, tuple(coords), behaviour
        self._bytes: dict[tuple[TensorType, Layout], float] = {}
        self._loads: dict[tuple[int, int, int], float] = {}
        #: by the identity of a value's type and layout, which many values of alike layers share
        self._known: dict[int, tuple[PlacedValue, float]] = {}

    def bytes_of(self, type_: TensorType, layout: Layout) -> float:
        """Bytes of a value on the rank."""
        key = type_, layout
        result = self._bytes.get(key)
        if result is None:
            shape = local_shape(type_.shape, layout, self.mesh.sizes, self.coords)
            rows = type_.existing(prod(shape)) * self.load(type_, layout)
            result = self._bytes[key] = float(rows * DTYPES[type_.dtype][1])
        return result

    def load(self, type_: TensorType, layout: Layout) -> float:
        """Slots of the fullest rank over the average, 1 for other values."""
        if not type_.has_slots or self.behaviour.routing == EVEN:
            return 1.0
        assert type_.filled is not None
        key = *type_.filled, owner_ways(layout, self.mesh.sizes)
        if key not in self._loads:
            self._loads[key] = self.behaviour.routing.load(*key)
        return self._loads[key]

    def shape(self, placed: PlacedValue) -> tuple[int, ...]:
        """Elements per dim of a value on the rank, of slots of experts as many as there are on average."""
        shape = local_shape(placed.type.shape, placed.layout, self.mesh.sizes, self.coords)
        if placed.type.filled is None:
            return shape
        return (round(placed.type.existing(shape[0]) * self.load(placed.type, placed.layout)), *shape[1:])

    def ways(self, node: Node) -> int:
        """Ranks between which a collective goes."""
        return prod(self.mesh.sizes[self.mesh.index(name)] for name in axes_of(node))

    def nbytes(self, placed: PlacedValue) -> float:
        """Bytes of a value on the rank."""
        known = self._known.get(id(placed))
        if known is None:
            known = self._known[id(placed)] = placed, self.bytes_of(placed.type, placed.layout)
        return known[1]

    def work(
        self,
        node: Node,
        values: Mapping[str, PlacedValue],
        kernel: InKernel = ALONE,
        weights: Collection[str] = (),
        narrow: Collection[str] = (),
    ) -> list[Work]:
        """What an op does, one piece after the other; nothing for a view.

        values: of the graph that it stands in. kernel: that it is a part of. weights: values that are
        parameters. narrow: those that are gathered as narrow copies.
        """
        if node.op in VIEWS:
            return []
        spec = spec_of(node)
        if spec is not None:
            return self._collective(node, spec, values, narrow)
        if node.op in HOST_OPS:
            return [Transfer(sum(self.nbytes(values[name]) for name in refs_of(node)), node.op == STORE)]
        ins = [values[name] for name in refs_of(node)]
        outs = [values[n] for n, t in zip(node.outs, node.types, strict=True) if t is not None]
        dtype = next((v.type.dtype for v in outs if v.type.is_float), "f32")
        if node.op in NARROWED:
            factors = [name for name in refs_of(node) if values[name].type.is_float][-2:]
            once = () if self.behaviour.narrow_weights else weights
            new = (name for name in factors if name not in once and name not in narrow)
            narrowed = self._narrowed(sum(self.nbytes(values[name]) for name in new), dtype)
            dtype = self.behaviour.product_dtype or dtype
            if node.op not in experts.RULES:
                return [*narrowed, self._product(ins, outs[0], dtype)]
            moved = self._moved(node, values, kernel.unmoved)
            return [*narrowed, *self._other_products(node, ins, outs, dtype, moved)]
        if node.op == SCALED_MM:
            rate, left, right = rate_of(ins[0].type.dtype), ins[-2], ins[-1]
            of_left, of_right = copies_of(rate, (left.turned, right.turned))
            copied = of_left * self.nbytes(left) + of_right * self.nbytes(right)
            product = self._product(ins, outs[0], rate)
            return [MemoryWork(copied), product] if copied else [product]
        if node.op == PACKED_MM:
            return self._packed(node, ins, outs[0])
        if node.op in scaled_experts.PRODUCTS:
            rate = rate_of(ins[0].type.dtype)
            each = zip(expert_copies(node, rate), ins, strict=True)
            copies = MemoryWork(sum(times * self.nbytes(v) for times, v in each))
            moved = self._moved(node, values, kernel.unmoved)
            return [copies, *self._other_products(node, ins, outs, rate, moved)]
        if node.op in attention.RULES:
            return self._attention(node, ins, outs, dtype)
        if node.op == TILES:
            return [self._tiled(node)]
        if node.op == SCAN:
            return [self._stepped(node)]
        if node.op in similar_rows.RULES:
            return [*grouped_work(node, ins, outs, self.shape, self.nbytes)]
        moved = self._moved(node, values, kernel.unmoved)
        if node.op == _NORM_BACKWARD:
            moved += (self.behaviour.norm_reads - 1) * sum(self.nbytes(v) for v in ins[:2])
        if node.op in PRODUCTS:
            return self._other_products(node, ins, outs, dtype, moved)
        written = specs().get(node.op)
        if written is not None:
            cost = written.cost([self._operand(v) for v in ins], [self._operand(v) for v in outs])
            return [MemoryWork(cost.moved, cost.flop)]
        numel = max((prod(self.shape(v)) for v in (*outs, *ins)), default=0)
        return [MemoryWork(moved, float(numel), kernel.joined)]

    def in_order(
        self,
        node: Node,
        values: Mapping[str, PlacedValue],
        kernel: InKernel = ALONE,
        weights: Collection[str] = (),
        narrow: Collection[str] = (),
    ) -> list[Beat]:
        """The same, as it is issued: the pieces of a ring wait for some of those before, all others for the
        one before."""
        if is_ring(node):
            return rings.beats(node, values, self)
        works = self.work(node, values, kernel, weights, narrow)
        return [Beat(work, (k - 1,) if k else ()) for k, work in enumerate(works)]

    def _operand(self, placed: PlacedValue) -> Operand:
        return Operand(self.shape(placed), DTYPES[placed.type.dtype][1])

    def _moved(self, node: Node, values: Mapping[str, PlacedValue], unmoved: Collection[str]) -> float:
        """Bytes that an op reads and writes, but for some values."""
        names = dict.fromkeys((*refs_of(node), *node.outs))
        return sum(self.nbytes(values[n]) for n in names if n in values and n not in unmoved)

    def _narrowed(self, nbytes: float, dtype: str) -> list[Work]:
        """Making narrow copies of factors of so many bytes."""
        if not self.behaviour.product_dtype:
            return []
        return [MemoryWork(nbytes / DTYPES[dtype][1] * self.behaviour.narrow_bytes)]

    def _product(self, ins: Sequence[PlacedValue], out: PlacedValue, dtype: str) -> MatmulWork:
        left, new = self.shape(ins[-2]), self.shape(out)
        batch, rows, columns, depth = prod(new[:-2]), new[-2], new[-1], left[-1]
        taken = sum(self.nbytes(v) for v in ins[-2:])
        turned = ins[-2].turned, ins[-1].turned
        return MatmulWork(batch, rows, columns, depth, dtype, taken + self.nbytes(out), turned)

    def _packed(self, node: Node, ins: Sequence[PlacedValue], out: PlacedValue) -> list[Work]:
        """A product of operands of 4 bits, and what is copied before it."""
        native = self.behaviour.four_bits
        product = self._product(ins, out, packed_rate(native))
        left, right = ins[-2:]
        of_left, of_right = packed_copies(native, product.turned)
        copied = of_left * self.nbytes(left) + of_right * self.nbytes(right)
        depth = product.depth * (2 if node.args[6] == 1 else 1)
        return [*([MemoryWork(copied)] if copied else []), replace(product, depth=depth)]

    def _other_products(
        self, node: Node, ins: Sequence[PlacedValue], outs: Sequence[PlacedValue], dtype: str, moved: float
    ) -> list[Work]:
        """Products without rows and columns of their own (convolutions, experts), each as a long one."""
        ways = self._shards(ins)
        flop = product_flops(node, [v.type for v in ins], [v.type for v in outs]) / ways
        flop *= max(self.load(v.type, v.layout) for v in (*ins, *outs))
        if not flop:
            return [MemoryWork(moved)]
        sides = self._sides(node, outs)
        each, bytes_ = flop / len(sides), moved / len(sides)
        return [
            MatmulWork(
                1, rows, columns, max(1, round(each / (2 * rows * columns))), dtype, bytes_, (turned, False)
            )
            for rows, columns, turned in sides
        ]

    def _sides(self, node: Node, outs: Sequence[PlacedValue]) -> list[tuple[int, int, bool]]:
        """(rows, columns, whether the sum is over rows of both factors) of each product of an op.

        A convolution is a product of every place of every image with the channels; for the gradient of its
        weight, of the channels with the parts of a filter (NVIDIA, "Convolutional layers user's guide",
        table 1).
        """
        if node.op == _CONVOLUTION:
            return [(*self._places(self.shape(outs[0])), False)]
        if node.op == _CONVOLUTION_BACKWARD:
            image, weight = (t is not None for t in node.types[:2])
            result = [(*self._places(self.shape(outs[0])), False)] if image else []
            if weight:
                shape = self.shape(outs[int(image)])
                result.append((max(1, shape[0]), max(1, prod(shape[1:])), True))
            return result
        out = self.shape(max(outs, key=lambda v: prod(self.shape(v))))
        return [(max(1, prod(out[:-1])), max(1, out[-1] if out else 1), node.op in _OUTER)]

    @staticmethod
    def _places(shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of images [images, channels, ...]."""
        return max(1, shape[0] * prod(shape[2:])), max(1, shape[1])

    def _attention(
        self, node: Node, ins: Sequence[PlacedValue], outs: Sequence[PlacedValue], dtype: str
    ) -> list[Work]:
        backward = "backward" in node.op
        q, k = (self.shape(p) for p in (ins[1:3] if backward else ins[:2]))
        types = [TensorType(self.shape(p), p.type.dtype) for p in ins]
        rule = attention.RULES[node.op](node, types)
        moved = sum(self.nbytes(p) for p in (*ins, *outs))
        how = self.behaviour
        sizes, reach = (q[0] * q[1], q[2], k[-2], q[3]), how.attention_reach / rule.slowdown
        fused = Attention(
            *sizes, backward, rule.rate or dtype, rule.flops, moved, how.attention_native, reach
        )
        if self.behaviour.attention == "flash":
            return [fused]
        return unfused(fused, DTYPES[dtype][1], self.behaviour)

    def _tiled(self, node: Node) -> TiledWork:
        """A body, tile after tile; what a tile gives is copied to where all of it lies, or added there."""
        tiles, count, values = self._tile(node)
        works: list[Work] = []
        for inner in tiles.body.nodes:
            works += self.work(inner, values)
        given = sum(
            self.nbytes(values[v]) * (2 if has_rows(tiles.kinds[v]) else 3) for v in tiles.body.outputs
        )
        return _repeated([*works, MemoryWork(given)], count)

    def _stepped(self, node: Node) -> TiledWork:
        """A body, step after step; what a step gives is copied to where all of it lies, or added there."""
        scan, values = self._step(node)
        works: list[Work] = []
        for inner in scan.body.nodes:
            works += self.work(inner, values)
        given = sum(
            self.nbytes(values[v]) * (3 if how == "sum" else 2)
            for v, how in zip(scan.body.outputs, scan.results, strict=True)
            if how != "carry"
        )
        return _repeated([*works, MemoryWork(given)], scan.steps)

    def body_flop(self, node: Node, values: Mapping[str, PlacedValue]) -> float:
        """FLOP of the products of a body on all ranks together, what it recomputes not counted."""
        if node.op == SCAN:
            scan, inner = self._step(node)
            count, nodes = scan.steps, scan.body.nodes
        else:
            tiles, count, inner = self._tile(node)
            nodes = tiles.body.nodes[tiles.recomputed :]
        ways = self._shards([values[n] for n in (*refs_of(node), *node.outs)])
        works = (w for each in nodes for w in self.work(each, inner))
        return ways * count * sum(w.flop for w in works if isinstance(w, MatmulWork | Attention))

    def _step(self, node: Node) -> tuple[Scan, Mapping[str, PlacedValue]]:
        """(what a node runs step after step, values of one)."""
        scan = scan_of(node)
        full = (R,) * len(self.mesh.sizes)
        return scan, {v: PlacedValue(t, full) for v, t in self._sized(scan.body).types().items()}

    def _shards(self, placed: Sequence[PlacedValue]) -> int:
        """Over how many ranks work is divided, by where what it takes and makes lies."""
        split = [
            any(isinstance(v.layout[axis], Shard) for v in placed) for axis in range(len(self.mesh.sizes))
        ]
        return prod(size for size, divided in zip(self.mesh.sizes, split, strict=True) if divided)

    def _tile(self, node: Node) -> tuple[RowTiles, int, Mapping[str, PlacedValue]]:
        """(what a node runs, in how many tiles, values of the largest)."""
        tiles = tiles_of(node)
        body = self._sized(tiles.body)
        count, types = replace(tiles, body=body).tile()
        full = (R,) * len(self.mesh.sizes)
        return tiles, count, {v: PlacedValue(t, full) for v, t in types.items()}

    def _sized(self, body: Graph) -> Graph:
        """With the sizes that this rank has."""

        def size(n: int | LocalSize) -> int:
            if isinstance(n, int):
                return n
            axes = [self.mesh.index(s.axis) for s in n.shards]
            shards = [
                (Shard(0, s.outer, s.inner), self.mesh.sizes[k], self.coords[k])
                for s, k in zip(n.shards, axes, strict=True)
            ]
            return local_extent(n.size, shards)[1]

        def sized(type_: TensorType) -> TensorType:
            return TensorType(tuple(map(size, type_.shape)), type_.dtype)

        inputs = tuple((n, sized(t)) for n, t in body.inputs)
        nodes = tuple(replace(n, types=tuple(t and sized(t) for t in n.types)) for n in body.nodes)
        return replace(body, inputs=inputs, nodes=nodes)

    def _room(self, node: Node) -> float:
        """Bytes of a tile or a step at its fullest, with the sums of all of them."""
        if node.op == SCAN:
            scan, values = self._step(node)
            body = scan.body
            sums = [values[v].type for v, how in zip(body.outputs, scan.results, strict=True) if how == "sum"]
        else:
            tiles, _, values = self._tile(node)
            body = tiles.body
            full = self._sized(body).types()
            sums = [full[o] for o in body.outputs if not has_rows(tiles.kinds[o])]
        nodes = body.nodes
        roots: dict[str, str] = {}
        for each in nodes:
            source = next(refs_of(each), "")
            roots.update((o, roots.get(source, source) if each.op in VIEWS else o) for o in each.outs)
        last = {roots.get(r, r): k for k, each in enumerate(nodes) for r in refs_of(each)}
        last |= {roots.get(o, o): len(nodes) for o in body.outputs}
        live: dict[str, float] = {}
        peak = 0.0
        for k, each in enumerate(nodes):
            live.update((o, self.nbytes(values[o])) for o in each.outs if roots[o] == o)
            peak = max(peak, sum(live.values()))
            live = {v: size for v, size in live.items() if last.get(v, k) > k}
        return peak + sum(4.0 * prod(t.shape) for t in sums if DTYPES[t.dtype][1] < 4)

    def workspace(self, node: Node, values: Mapping[str, PlacedValue]) -> float:
        """Bytes that an op needs while it runs, beside what it takes and makes."""
        if is_ring(node):
            return rings.room(node, values, self)
        if node.op in (TILES, SCAN):
            return self._room(node)
        if node.op not in attention.RULES or self.behaviour.attention == "flash":
            return 0.0
        backward = "backward" in node.op
        names = list(refs_of(node))
        q, k = (self.shape(values[name]) for name in (names[1:3] if backward else names[:2]))
        width = DTYPES[values[names[0]].type.dtype][1]
        return 2.0 * q[0] * q[1] * q[2] * k[-2] * width

    def _collective(
        self, node: Node, spec: CollectiveSpec, values: Mapping[str, PlacedValue], narrow: Collection[str]
    ) -> list[Work]:
        if spec.family == "ring":
            return rings.apart(node, values, self)
        if node.op == EXPERT_RELAY.op:
            return self._relay(node, spec, values)
        if spec.family == "experts":
            return self._exchange(node, spec, values)
        if spec.family == "quantised":
            return self._quantised(node, spec, values)
        if not spec.primitive:
            # a part that does not lie in one piece is copied (`runtime.collectives`)
            part = sum(self.nbytes(values[name]) for name in node.outs)
            return [MemoryWork(2.0 * part)] if self.strewn(node, values)[0] else []
        counted = node.outs if spec.gathers else tuple(refs_of(node))
        total = sum(self.nbytes(values[n]) / self._narrower(n, values, narrow) for n in counted)
        message = CollectiveWork(spec.primitive, self.mesh.index(str(node.args[1])), total)
        # a single tensor lies in memory as it is sent, if it is split by rows or not at all
        moved = 2.0 * total * sum(self.strewn(node, values))
        if moved and spec.transfer == "reduce_scatter" and _outer(node) != 1:
            moved *= 2  # first part by part, then into one tensor
        if self.behaviour.transport == "memory" and spec.transfer != "all_to_all":
            moved = 0.0  # laying a message down and reading it are the copies
        if not spec.gathers:
            if spec.bucket:
                width = DTYPES[values[counted[0]].type.dtype][1]
                moved += total / width * self.behaviour.ready_bytes
            return [MemoryWork(moved), message] if moved else [message]
        parts = list(refs_of(node))
        new = sum(
            self.nbytes(values[part]) / DTYPES[values[part].type.dtype][1] * self.behaviour.narrow_bytes
            for part, out in zip(parts, node.outs, strict=True)
            if out in narrow
        )
        casts = [MemoryWork(new)] if new else []
        if not moved:
            return [*casts, message]
        copy = MemoryWork(moved)
        packed = zip(parts, node.outs, strict=True)
        shards = sum(self.nbytes(values[n]) / self._narrower(out, values, narrow) for n, out in packed)
        return [*casts, *([MemoryWork(2 * shards)] if spec.bucket else []), message, copy]

    def _narrower(self, name: str, values: Mapping[str, PlacedValue], narrow: Collection[str]) -> float:
        """How many times as wide a value is as what is sent of it."""
        if name not in narrow:
            return 1.0
        return DTYPES[values[name].type.dtype][1] / _NARROW

    def strewn(self, node: Node, values: Mapping[str, PlacedValue]) -> tuple[bool, bool]:
        """Whether what a rank sends, and what it receives, is copied, as it lies in several pieces of a
        tensor; so are the tensors of a bucket, together, unless they are views of a flat one."""
        spec, how = COLLECTIVES[node.op], self.behaviour
        if spec.bucket:
            flat = how.flat_parameters if spec.gathers else how.flat_gradients
            return not (spec.gathers or flat), spec.gathers and not flat
        if spec.family != "layout" or spec.transfer == "all_reduce" or not how.copied_messages:
            return False, False
        (where,) = wheres_of(node)
        # where it is cut, and where it is joined: (dim, blocks)
        ends = (where[0::2], where[1::2]) if spec.transfer == "all_to_all" else (where[:2], where[:2])
        names = next(iter(refs_of(node))), node.outs[0]
        cut, joined = (
            not in_one_piece(self.shape(values[name]), dim, blocks)
            for (dim, blocks), name in zip(ends, names, strict=True)
        )
        return cut and not spec.gathers, joined and spec.transfer in ("all_gather", "all_to_all")

    def _quantised(self, node: Node, spec: CollectiveSpec, values: Mapping[str, PlacedValue]) -> list[Work]:
        """A message with less precision: packed, unless it is a wire already, sent, unpacked
        (`runtime.transport.quantized_buffers`).

        Gathers that join along rows are unpacked to where they stay; others are copied once more.
        """
        ins, outs = [values[n] for n in refs_of(node)], [values[n] for n in node.outs]
        axes = [self.mesh.index(name) for name in axes_of(node)]
        packed = float(self.packed(node, values))
        taken, given = sum(map(self.nbytes, ins)), sum(map(self.nbytes, outs))
        if not spec.gathers:
            first, last = MemoryWork(3 * taken + packed), MemoryWork(packed + given)
            return [first, CollectiveWork(spec.primitive, axes[0], packed), last]
        wheres = wheres_of(node)
        repeated = sum(self.nbytes(v) for v, w in zip(outs, wheres, strict=True) if w[0] or w[1] > 1)
        sent = packed / prod(self.mesh.sizes[axis] for axis in axes)
        works: list[Work] = [] if spec.packed else [MemoryWork(3 * taken + sent)]
        for axis in axes:
            sent *= self.mesh.sizes[axis]
            works.append(CollectiveWork(spec.primitive, axis, sent))
        return [*works, MemoryWork(packed + given + 2 * repeated)]

    def packed(self, node: Node, values: Mapping[str, PlacedValue]) -> int:
        """Bytes of the buffers of all ranks of an axis together, for a quantised message."""
        size, spec = self.ways(node), COLLECTIVES[node.op]
        if spec.packed:
            return size * int(self.nbytes(values[next(refs_of(node))]))
        parts = list(refs_of(node)) if spec.gathers else node.outs
        numels = [prod(self.shape(values[n])) for n in parts]
        width = DTYPES[values[node.outs[0]].type.dtype][1]
        return size * packed_bytes(numels, node.args[3], node.args[4], width)

    def _exchange(self, node: Node, spec: CollectiveSpec, values: Mapping[str, PlacedValue]) -> list[Work]:
        """Tokens sent to the ranks of their experts and laid into slots there, or sums sent back."""
        ins = [values[r.name] for r in node.args[0]]
        local = self.work(product_of(node), values)
        tasks, routes = self.behaviour.exchange_tasks, len(ins) == 1
        there: list[Work] = [] if routes or not tasks else [HostWork(tasks, False)]
        back: list[Work] = list(there)
        tokens = self.sent_tokens(node, values)
        if node.kwarg("bits", 0):
            there.append(MemoryWork(self.nbytes(ins[0]) * (1 + self._narrow_rows(node, values))))
        for (axis, ways, level), sent in zip(_hops(node, self.mesh), tokens, strict=True):
            message, packed = CollectiveWork(spec.primitive, axis, sent, level), MemoryWork(2.0 * sent)
            if routes:
                # first how many tokens go where
                counts = CollectiveWork(spec.primitive, axis, 8.0 * ways, level)
                there += [counts, HostWork(tasks, True)]
            there += [packed, message]
            back[:0] = [message, packed]
        combines = not routes and ins[0].type.has_slots
        if node.kwarg("relayed", None):  # what is made of rows that come stands behind the second hop
            return [*local, back[0]] if combines else there[: 2 + bool(node.kwarg("bits", 0))]
        if node.kwarg("bits", 0):
            there.append(MemoryWork(tokens[-1] * (1 + 1 / self._narrow_rows(node, values))))
        return [*local, *back] if combines else [*there, *local]

    def _narrow_rows(self, node: Node, values: Mapping[str, PlacedValue]) -> float:
        """How wide a row is that is sent, beside one with all bits."""
        bits, type_ = node.kwarg("bits", 0), values[node.outs[0]].type
        if not bits:
            return 1.0
        width = type_.shape[-1]
        return packed_bytes([width], (bits,), node.kwarg("group", 0), 0) / (width * DTYPES[type_.dtype][1])

    def _relay(self, node: Node, spec: CollectiveSpec, values: Mapping[str, PlacedValue]) -> list[Work]:
        """The second hop of an exchange by node: tokens inside the node, or their sums across."""
        out, axis = values[node.name], self.mesh.index(axes_of(node)[0])
        across, inside = self.sent_tokens(node, values)
        if not out.type.has_slots:
            far = CollectiveWork(spec.primitive, axis, across, "across")
            return [MemoryWork(2.0 * inside), far, MemoryWork(2.0 * across)]
        near = CollectiveWork(spec.primitive, axis, inside, "inside")
        wide = inside * (1 + 1 / self._narrow_rows(node, values)) if node.kwarg("bits", 0) else 0.0
        return [MemoryWork(2.0 * inside), near, MemoryWork(2.0 * self.nbytes(out) + wide)]

    def sent_tokens(self, node: Node, values: Mapping[str, PlacedValue]) -> tuple[float, ...]:
        """Bytes of the rows of tokens that an exchange with experts sends from a rank over each of its axes,
        or of their levels, on average."""
        ins = [values[r.name] for r in node.args[0]]
        slots = values[node.outs[0]] if len(ins) == 1 else ins[2]
        filled = ins[0].type.has_slots
        tokens = self.nbytes(values[node.outs[0]] if filled else ins[0])
        if filled and node.op == EXPERT_RELAY.op:  # on its way to slots, of which a token has several
            tokens /= values[node.outs[0]].type.filled[0]  # type: ignore[index]
        tokens *= self._narrow_rows(node, values)
        ways = [ways for _, ways, _ in _hops(node, self.mesh)]
        if self.behaviour.exchange == "choice":
            assert slots.type.filled is not None
            return tuple(tokens * slots.type.filled[0] for _ in ways)
        return tuple(exchanged_bytes(tokens, slots.type, ways, self.behaviour.routing))


def _outer(node: Node) -> int:
    """Into how many parts the dim of a message is cut first, each of which is then divided over the ranks."""
    given = dict(node.kwargs).get("outer", node.args[3] if len(node.args) > 3 else 1)
    assert isinstance(given, int)
    return given


def kept_scores(scores: int, values: Mapping[str, PlacedValue], node: Node, behaviour: Behaviour) -> float:
    """Bytes of scores after softmax, and with dropout also of those left and of the mask, a byte each
    (Korthikanti et al., 2022, section 4.1: 5 a s^2 b)."""
    width = DTYPES[values[next(refs_of(node))].type.dtype][1]
    return float(scores * (2 * width + 1 if behaviour.dropout else width))


def unfused(whole: Attention, width: int, behaviour: Behaviour) -> list[Work]:
    """Attention by products that write their scores, and kernels that read them (Shoeybi et al., 2019).

    width: bytes of an element. Scale, mask and softmax are one kernel.
    """
    b, s, t, d, dtype = whole.heads, whole.queries, whole.keys, whole.width, whole.dtype
    scores = float(b * s * t)

    def product(rows: int, columns: int, depth: int) -> MatmulWork:
        sizes = rows * depth + depth * columns + rows * columns
        return MatmulWork(b, rows, columns, depth, dtype, float(b * sizes * width))

    dropped = [MemoryWork(scores * (2 * width + 1))] if behaviour.dropout else []
    first: list[Work] = [product(s, t, d), MemoryWork(2 * width * scores), *dropped]
    if not whole.backward:
        return [*first, product(s, d, t)]
    repeated = first if behaviour.recomputes_scores else []
    return [
        *repeated,
        product(t, d, s),
        product(s, t, d),
        *dropped,
        MemoryWork(3 * width * scores),
        product(s, d, t),
        product(t, d, s),
    ]


def _hops(node: Node, mesh: Mesh) -> list[tuple[int, int, Level]]:
    """(axis, ranks, level) of all among which an exchange sends tokens, outermost first."""
    inside = node.kwarg("inside", None)
    axes = [mesh.index(name) for name in axes_of(node)]
    if inside is None:
        return [(axis, mesh.sizes[axis], "all") for axis in axes]
    return [(axes[0], mesh.sizes[axes[0]] // inside, "across"), (axes[0], inside, "inside")]


def product_of(node: Node) -> Node:
    """The op on full tensors, for one that exchanges tokens or passes keys round; other ops as they are."""
    spec = spec_of(node)
    if spec is None or not spec.product:
        return node
    if node.op in attention.KEYS:
        return attention.of_all_keys(node)
    parts, _, count = node.args
    return replace(node, op=spec.product, kwargs=(), args=parts if len(parts) > 1 else (*parts, count))


def product_flops(node: Node, ins: Sequence[TensorType], outs: Sequence[TensorType]) -> float:
    """FLOP of a full matrix product or attention; 0 where the rule does not know."""
    # what a rank has an uneven share of
    node = replace(node, args=tuple(a.size if isinstance(a, LocalSize) else a for a in node.args))
    if node.op == "aten.addmm.default":
        return 2.0 * ins[1].shape[0] * ins[1].shape[1] * ins[2].shape[1]
    for rules in (
        matmul.RULES,
        attention.RULES,
        experts.RULES,
        scaled.PRODUCTS,
        scaled_experts.PRODUCTS,
        packed.PRODUCTS,
    ):
        if node.op in rules:
            return rules[node.op](node, ins).flops
    return 0.0


def _repeated(works: Sequence[Work], count: int) -> TiledWork:
    kinds = MatmulWork | Attention | MemoryWork
    return TiledWork(tuple(w for w in works if isinstance(w, kinds)), count)
