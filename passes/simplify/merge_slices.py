"""Slices that a loop reads and writes one by one, as one tensor.

A loop that fills a tensor slice by slice is a chain of as many full tensors, and the gradient of one that
it reads slice by slice is a sum of as many full tensors of zeros. Both are one ``stack`` of the slices; what
reads a slice of such a chain reads the slice that was written. Slices of several positions, one behind the
other, are slices of one position of the same tensor in blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from sys import maxsize

from autoshard.ir import Arg, Dtype, Graph, Node, Ref, TensorType, refs_of, substitute
from autoshard.passes.rewrite import Steps, Types, first_type
from autoshard.passes.segment_parts import fresh, without_dead

SELECT, STACK = "aten.select.int", "aten.stack.default"
_UNBIND, _CAT, _RESHAPE = "aten.unbind.int", "aten.cat.default", "aten.reshape.default"
_SLICE, _COPY, _ADD, _FULL = "aten.slice.Tensor", "aten.copy.default", "aten.add.Tensor", "aten.full.default"
_READS = frozenset((SELECT, _SLICE))
_WRITES = frozenset(("aten.select_scatter.default", "aten.slice_scatter.default"))
_GRADIENTS = frozenset(("aten.select_backward.default", "aten.slice_backward.default"))


@dataclass(frozen=True)
class _Block:
    """A slice: the index-th of ``width`` positions of a dim; of width 0, one position, without the dim."""

    dim: int
    width: int
    index: int

    @property
    def kind(self) -> tuple[int, int]:
        return self.dim, self.width

    def count(self, shape: tuple[int, ...]) -> int:
        """How many of them there are in a tensor, 0 if they do not fill it."""
        size, width = shape[self.dim], self.width or 1
        return 0 if size % width else size // width


def merge_slices(graph: Graph, least: int) -> Graph:
    """The graph with chains and sums of at least so many slices as stacks.

    Slices of several positions, of which there are so many, are slices of blocks.
    """
    return _summed(_written(_in_blocks(_read(graph), least), least), least)


def _block_of(node: Node, types: Types) -> _Block | None:
    """What a node reads, writes, or is the gradient of; None for slices of which others are no multiples."""
    if node.op in _GRADIENTS:
        shape, where = node.args[1], node.args[2:]
    else:
        shape, where = types[node.args[0].name].shape, node.args[2 if node.op in _WRITES else 1 :]
    dim = (where[0] if where else 0) % len(shape)
    size = shape[dim]
    if node.op.startswith("aten.select"):
        return _Block(dim, 0, where[1] % size)
    start, end, step = (where[k] if k < len(where) else None for k in (1, 2, 3))
    ends = start or 0, maxsize if end is None else end
    start, end = (max(0, n + size if n < 0 else min(n, size)) for n in ends)
    width = end - start
    if node.kwargs or step not in (None, 1) or width < 1 or width == size or start % width:
        return None
    return _Block(dim, width, start // width)


def _read(graph: Graph) -> Graph:
    """With slices of chains taken from where they were written, and copies over slices as what is copied."""
    types = graph.types()
    makers: dict[str, Node] = {}
    same: dict[str, str] = {}
    nodes = []
    for original in (each for node in graph.nodes for each in _unbound(node)):
        node = substitute(original, lambda name: Ref(same.get(name, name)))
        if node.op in _READS:
            node = _source_of(node, makers, types)
        if node.op == _COPY and isinstance(node.args[1], Ref) and types[node.args[1].name] == node.types[0]:
            same[node.name] = node.args[1].name
            continue
        makers[node.name] = node
        nodes.append(node)
    if any(o in same for o in graph.outputs):  # names of results are those of the model
        return graph
    return without_dead(replace(graph, nodes=tuple(nodes)))


def _unbound(node: Node) -> list[Node]:
    """``unbind`` as one ``select`` for each slice."""
    if node.op != _UNBIND:
        return [node]
    dim = node.arg(1, "dim", 0)
    return [
        replace(node, op=SELECT, args=(node.args[0], dim, k), kwargs=(), outs=(out,), types=(type_,))
        for k, (out, type_) in enumerate(zip(node.outs, node.types, strict=True))
    ]


def _source_of(node: Node, makers: Mapping[str, Node], types: Types) -> Node:
    """What reads a slice of what a chain began with, or a copy of the slice that was written there."""
    block, base = _block_of(node, types), node.args[0].name
    while block is not None and (maker := makers.get(base)) is not None and maker.op in _WRITES:
        written = _block_of(maker, types)
        if written is None or written.kind != block.kind:
            break
        if written == block:
            return replace(node, op=_COPY, args=(node.args[0], maker.args[1]))
        base = maker.args[0].name
    return replace(node, args=(Ref(base), *node.args[1:]))


def _in_blocks(graph: Graph, least: int) -> Graph:
    """With slices of several positions as slices of blocks, and many parts of one size, put together, as a
    stack."""
    types, taken = graph.types(), set(graph.types())
    blocks = {n.name: b for n in graph.nodes if n.op == _SLICE and (b := _block_of(n, types)) is not None}
    reads = Counter((n.args[0].name, blocks[n.name].kind) for n in graph.nodes if n.name in blocks)
    blocked: dict[tuple[str, tuple[int, int]], Ref] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        steps = Steps(node, lambda: fresh("blocks", taken, "of"))
        if node.name in blocks:
            block, source = blocks[node.name], node.args[0]
            key = source.name, block.kind
            count = block.count(types[source.name].shape)
            if reads[key] >= least and count:
                if key not in blocked:
                    type_ = _cut(types[source.name], block, count)
                    blocked[key] = steps.add(_RESHAPE, (source, type_.shape), type_)
                steps.add(SELECT, (blocked[key], block.dim, block.index), first_type(node), out=node.name)
        elif node.op == _CAT and len(node.args[0]) >= least:
            parts = {types[ref.name] for ref in node.args[0]}
            type_, dim = first_type(node), node.arg(1, "dim", 0) % len(first_type(node).shape)
            if len(parts) == 1:
                block = _Block(dim, parts.pop().shape[dim], 0)
                _stacked(steps, node.args[0], block, type_)
        nodes += steps.made or [node]
    return replace(graph, nodes=tuple(nodes))


def _cut(type_: TensorType, block: _Block, count: int) -> TensorType:
    """A type in blocks."""
    shape = (*type_.shape[: block.dim], count, block.width, *type_.shape[block.dim + 1 :])
    return replace(type_, shape=shape)


def _stacked(steps: Steps, parts: tuple[Ref, ...], block: _Block, type_: TensorType, out: str = "") -> Ref:
    """All slices of one kind as the tensor that they are of. out: its name; left out, that of the node."""
    name = out or steps.node.name
    if not block.width:
        return steps.add(STACK, (parts, block.dim), type_, out=name)
    stack = steps.add(STACK, (parts, block.dim), _cut(type_, block, len(parts)))
    return steps.add(_RESHAPE, (stack, type_.shape), type_, out=name)


def _written(graph: Graph, least: int) -> Graph:
    """With tensors of which every slice is written as stacks of the slices."""
    types, taken = graph.types(), set(graph.types())
    uses = Counter((*graph.outputs, *(r for n in graph.nodes for r in refs_of(n))))
    chains: dict[tuple[str, tuple[int, int]], dict[int, Ref]] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        block = _block_of(node, types) if node.op in _WRITES else None
        steps = Steps(node, lambda: fresh("blocks", taken, "of"))
        if block is not None:
            base, source = node.args[:2]
            before = chains.pop((base.name, block.kind), {}) if uses[base.name] == 1 else {}
            before[block.index] = source
            chains[node.name, block.kind] = before
            if len(before) == block.count(first_type(node).shape) >= least:
                parts = tuple(before[k] for k in range(len(before)))
                _stacked(steps, parts, block, first_type(node))
        nodes += steps.made or [node]
    return without_dead(replace(graph, nodes=tuple(nodes)))


@dataclass
class _Sum:
    """Of slices of a kind, by their numbers, and of one value more."""

    block: _Block
    slices: dict[int, Ref]
    more: Ref | None = None


def _summed(graph: Graph, least: int) -> Graph:
    """With sums of tensors that are zero but for a slice as stacks of the slices."""
    types, taken = graph.types(), set(graph.types())
    uses = Counter((*graph.outputs, *(r for n in graph.nodes for r in refs_of(n))))
    sums: dict[str, _Sum] = {}
    for node in graph.nodes:
        if node.op in _GRADIENTS:
            block = _block_of(node, types)
            if block is not None and block.count(node.args[1]):
                sums[node.name] = _Sum(block, {block.index: node.args[0]})
        elif node.op == _ADD and len(node.args) == 2 and not node.kwargs:
            both = [a for a in node.args if isinstance(a, Ref) and types[a.name] == node.types[0]]
            joined = _joined(both, sums, uses) if len(both) == 2 else None
            if joined is not None:
                sums[node.name] = joined
    nodes: list[Node] = []
    for node in graph.nodes:
        total, steps = sums.get(node.name), Steps(node, lambda: fresh("blocks", taken, "of"))
        if total is not None and len(total.slices) >= least:
            _add_up(steps, total, types)
        nodes += steps.made or [node]
    return without_dead(replace(graph, nodes=tuple(nodes)))


def _joined(both: list[Ref], sums: dict[str, _Sum], uses: Counter[str]) -> _Sum | None:
    """The sum of two values, if one is a sum of slices that nothing else uses; what it is of is taken."""
    known = [ref for ref in both if ref.name in sums and uses[ref.name] == 1]
    if not known or both[0] == both[1]:
        return None
    parts = [sums[ref.name] for ref in known]
    if len(known) == 1:
        (other,) = (ref for ref in both if ref is not known[0])
        if parts[0].more is not None:
            return None
        result = parts[0]
        result.more = other
    else:
        small, result = sorted(parts, key=lambda each: len(each.slices))
        if small.block.kind != result.block.kind or not small.slices.keys().isdisjoint(result.slices):
            return None
        if small.more is not None and result.more is not None:
            return None
        result.slices.update(small.slices)
        result.more = result.more or small.more
    for ref in known:
        del sums[ref.name]
    return result


def _add_up(steps: Steps, total: _Sum, types: Types) -> None:
    """Make what a node made: slices that nothing adds to are zeros."""
    type_ = first_type(steps.node)
    count = total.block.count(type_.shape)
    if len(total.slices) < count:
        part = types[next(iter(total.slices.values())).name]
        dtype: tuple[tuple[str, Arg], ...] = (("dtype", Dtype(part.dtype)),)
        zeros = steps.add(_FULL, (part.shape, 0), part, kwargs=dtype)
        total.slices.update({k: zeros for k in range(count) if k not in total.slices})
    parts = tuple(total.slices[k] for k in range(count))
    if total.more is None:
        _stacked(steps, parts, total.block, type_)
    else:
        name = steps.fresh()
        _stacked(steps, parts, total.block, type_, out=name)
        steps.add(_ADD, (total.more, Ref(name)), type_, out=steps.node.name)
