"""Exchange the tokens of experts in chunks, so that one is on its way while another is computed.

Dispatch, products of experts and combination follow each other: nothing of a layer but a shared expert can
run beside its exchange. Here every sequence is cut into chunks, and each op on slots (`ops.experts`) is there
once per chunk, in forward and in backward: the next chunk travels while experts compute one (Hwang et al.,
"Tutel", MLSys 2023, section 3.2; Shi et al., "FSMoE", ASPLOS 2025). Ops stand in turns, all chunks of one
before the next op, which is the order in which messages of an axis go out. Gradients of the matrices of
experts are sums over chunks; scales that rows of several chunks share are the largest of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autoshard.errors import UsageError
from autoshard.ir import Arg, Call, CallSite, Folded, Graph, Node, Origin, TensorType, refs_of
from autoshard.ir.graph import renamed
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Shard
from autoshard.ir.row_tiles import SHAPED
from autoshard.ir.scaled import LARGEST, SCALED_EXPERT_OUTER
from autoshard.ir.slices import Slices
from autoshard.passes.mixtures import has_grouped_rows, loop_route, refusal
from autoshard.passes.segment_parts import fresh
from autoshard.passes.sequence.slice_values import Add, cut, join, sliced_type, total

_ROUTE = "autoshard.route.default"
#: ops that take a row of every token first, and give slots or the choices that make them
_TAKE = frozenset(f"autoshard.{name}.default" for name in ("choices", "dispatch", "dispatch_weights"))
#: ops that give a row of every token, and those that give sums over slots, or the largest of scales
_GIVE = frozenset(("autoshard.combine.default", "autoshard.combine_weights.default"))
_SUM = frozenset(
    ("autoshard.expert_outer.default", "autoshard.expert_sum.default", SCALED_EXPERT_OUTER, *LARGEST)
)


def chunk_experts(folded: Folded, chunks: int) -> Folded:
    """The model with the tokens of its experts in chunks.

    Raises UsageError where it has no experts that ranks may exchange tokens for, or they do not divide.
    """
    nodes = [node for graph in folded.segments.values() for node in graph.nodes]
    if not any(node.op == _ROUTE for node in nodes):
        raise _refused(chunks, "the model has no experts that tokens can be exchanged for")
    if other := loop_route(nodes):
        raise _refused(chunks, "its experts are a loop in Python, and their tokens stay", other.origin)
    if has_grouped_rows(nodes):
        raise _refused(chunks, "its rows are grouped (lsh-moe), those of all tokens of a rank")
    return _Chunking(folded, chunks).run()


def _refused(chunks: int, why: str, origin: Origin | None = None) -> UsageError:
    what = f"the tokens of experts cannot be exchanged in {chunks} chunks"
    return refusal(what, why, "leave out --expert-chunks", origin)


class _Chunking:
    """The model, call by call."""

    def __init__(self, folded: Folded, chunks: int) -> None:
        self.folded, self.chunks, self.sequences = folded, chunks, folded.joint.sequences
        #: where rows of tokens are cut: a chunk has equally many of every sequence
        self.placed = Shard(0, self.sequences)
        self.taken = {v for g in folded.segments.values() for v in g.types()}
        self.taken |= {p.name for p in folded.joint.ports} | {o for c in folded.calls for o in c.outs}
        #: value of main that has slots -> those of its chunks
        self.parts: dict[str, tuple[str, ...]] = {}

    def run(self) -> Folded:
        segments = {name: _Segment(graph, self).run() for name, graph in self.folded.segments.items()}
        calls = tuple(self._call(call) for call in self.folded.calls)
        return replace(self.folded, segments=segments, calls=calls)

    def _call(self, call: Call) -> Call:
        graph = self.folded.segments[call.segment]
        types = graph.types()
        for value, inner in zip(call.outs, graph.outputs, strict=True):
            if _has_slots(types[inner]):
                self.parts[value] = self.names(value)
        return replace(call, args=_each(call.args, self.parts), outs=_each(call.outs, self.parts))

    def names(self, value: str) -> tuple[str, ...]:
        """Of the chunks of a value."""
        return tuple(fresh(value, self.taken, f"c{k}") for k in range(self.chunks))

    def one(self, type_: TensorType) -> TensorType:
        """Of rows of tokens or slots, those of a chunk."""
        return sliced_type(type_, self.placed, Slices.equal(self.chunks), 0)


def _each(values: Iterable[str], parts: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(part for value in values for part in parts.get(value, (value,)))


def _has_slots(type_: TensorType | None) -> bool:
    """Whether its rows are slots, or the choices to which slots refer."""
    return type_ is not None and type_.filled is not None


class _Segment:
    """One segment of it."""

    def __init__(self, graph: Graph, model: _Chunking) -> None:
        self.graph, self.model, self.chunks = graph, model, model.chunks
        self.types = graph.types()
        self.parts = {v: model.names(v) for v, t in self.types.items() if _has_slots(t)}
        #: rows of tokens -> those of the chunks
        self.rows: dict[str, tuple[str, ...]] = {}
        self.nodes: list[Node] = []

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if self.parts.keys().isdisjoint((*node.outs, *refs_of(node))):
                self.nodes.append(node)
            else:
                self._chunked(node)
        inputs = tuple(
            (part, self.model.one(type_) if name in self.parts else type_)
            for name, type_ in self.graph.inputs
            for part in self.parts.get(name, (name,))
        )
        outputs = _each(self.graph.outputs, self.parts)
        return Graph(self.graph.name, inputs, tuple(self.nodes), outputs)

    def _chunked(self, node: Node) -> None:
        """An op on slots, once per chunk."""
        of_slots = all(map(_has_slots, node.types))
        if not (of_slots or node.op in _GIVE | _SUM) or self._is_sized(node):
            raise _refused(self.chunks, "an op takes all slots of a layer at once", node.origin)
        if any(isinstance(a, CallSite) for a in node.args):
            raise _refused(self.chunks, "random numbers are drawn for the rows of experts", node.origin)
        given = dict(self.parts)
        if node.op in _TAKE:
            tokens = next(refs_of(node))
            given[tokens] = self._cut(tokens, node)
        new = {out: self.parts.get(out) or self.model.names(out) for out in node.outs}
        for k in range(self.chunks):
            (part,) = renamed([node], {value: parts[k] for value, parts in (given | new).items()})
            whole = node.op in _SUM and not of_slots
            types = node.types if whole else tuple(t and self.model.one(t) for t in node.types)
            args = (part.args[0], types[0].shape) if node.op in SHAPED and types[0] else part.args
            self.nodes.append(replace(part, args=args, types=types))
        if node.op in _GIVE | _SUM and not of_slots:
            self._merge(node, new[node.name])

    def _is_sized(self, node: Node) -> bool:
        """Whether an argument is the number of slots, of an op that is not known to have a shape there."""
        sizes = {t.shape[0] for t in node.types if _has_slots(t) and t is not None}
        numbers = {a for a in (*node.args, *dict(node.kwargs).values()) if type(a) is int}
        return node.op not in SHAPED and not sizes.isdisjoint(numbers)

    def _cut(self, tokens: str, node: Node) -> tuple[str, ...]:
        """The rows of the tokens of every chunk: equally many of every sequence."""
        sequences, type_ = self.model.sequences, self.types[tokens]
        if type_.shape[0] % (sequences * self.chunks):
            why = f"{type_.shape[0]} tokens are not {sequences} sequences of a multiple of {self.chunks}"
            raise _refused(self.chunks, why, node.origin)
        if tokens not in self.rows:
            full, part = PlacedValue(type_, ()), PlacedValue(self.model.one(type_), ())
            add, slices = self._adder(node, tokens), Slices.equal(self.chunks)
            self.rows[tokens] = tuple(
                cut(tokens, full, self.model.placed, k, part, slices, add) for k in range(self.chunks)
            )
        return self.rows[tokens]

    def _merge(self, node: Node, chunks: Sequence[str]) -> None:
        """What an op gives for all tokens, of what it gives for the chunks: their rows, or their sum."""
        (type_,) = node.types
        assert type_ is not None
        full, add = PlacedValue(type_, ()), self._adder(node, node.name, node.name)
        if node.op in _SUM:
            total(chunks, full, add, "aten.maximum.default" if node.op in LARGEST else "aten.add.Tensor")
        else:
            ones = [PlacedValue(self.model.one(type_), ())] * len(chunks)
            join(chunks, ones, self.model.placed, full, add)

    def _adder(self, node: Node, base: str, last: str = "") -> Add:
        """Adds ops beside a node. base: of the names of what they make; last: that of the last one."""

        def add(op: str, args: tuple[Arg, ...], what: PlacedValue, end: str) -> str:
            name = last if last and not end else fresh(base, self.model.taken, "chunk")
            self.nodes.append(Node(op, args, (), (name,), (what.type,), node.origin, node.backward))
            return name

        return add
