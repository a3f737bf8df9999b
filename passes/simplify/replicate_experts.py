"""Experts that many tokens choose are computed where the tokens are, on every rank.

Each op on slots (`ops.experts`) is there twice: for all other experts, whose tokens may travel, and for the
replicated ones, whose matrices are looked up in the stack of all experts. Ranks that divide the stack add up
what each has of them, so that the matrices travel in place of the tokens, as gathered parameters do (He et
al., "FasterMoE", PPoPP 2022, section 4.2: shadow experts). Results are those of the model: which copy
computes a token does not change it, and gradients of the copies are added to the stack's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType

import torch

from autoshard.errors import UsageError
from autoshard.ir import Arg, Call, CallSite, Folded, Graph, Node, Origin, Port, Ref, TensorType, refs_of
from autoshard.ir.graph import renamed
from autoshard.ir.names import fresh_name
from autoshard.ir.routing import of_replicas
from autoshard.passes.mixtures import has_grouped_rows, loop_route, refusal
from autoshard.passes.rewrite import first_type
from autoshard.rules import experts, scaled_experts

_CHOICES, _ROUTE = "autoshard.choices.default", "autoshard.route.default"
#: op that takes matrices of all experts -> where they stand
_MATRICES: Mapping[str, int] = MappingProxyType(
    {"autoshard.expert_mm.default": 2, "autoshard.expert_rows.default": 0}
)
#: ops that give sums over slots for every expert
_SUMS = frozenset(("autoshard.expert_outer.default", "autoshard.expert_sum.default"))
#: ops that give a row of every token
_GIVE = frozenset(("autoshard.combine.default", "autoshard.combine_weights.default"))
#: ops on slots that treat all rows alike
_ROWS = frozenset(
    f"autoshard.{name}.default"
    for name in ("dispatch", "dispatch_weights", "scale_rows", "row_dropout", "row_dots", "put_columns")
)
#: of experts one by one
_INDEX = "i64"


def replicate_experts(folded: Folded, replicated: Sequence[Sequence[int]]) -> Folded:
    """The model with these experts of each of its mixtures, in their order, on every rank; one row stands for
    all. Raises UsageError where that cannot be."""
    nodes = [node for graph in folded.segments.values() for node in graph.nodes]
    if other := loop_route(nodes):
        raise _refused("its experts are a loop in Python that is not one mixture", other.origin)
    if has_grouped_rows(nodes):
        raise _refused("its rows are grouped (lsh-moe)")
    layers = sum(
        sum(node.op == _CHOICES for node in folded.segments[call.segment].nodes) for call in folded.calls
    )
    if not layers:
        raise _refused("the model has no experts that tokens can be exchanged for")
    if len(replicated) not in (1, layers):
        raise _refused(f"there are {len(replicated)} rows, and {layers} layers with experts")
    counts = {node.args[1] for node in nodes if node.op == _ROUTE}
    for row in replicated:
        if len(counts) > 1 or not row or len({*row}) < len(row) or not {*row} < set(range(min(counts))):
            raise _refused(f"{list(row)} are no different experts, some but not all of {sorted(counts)}")
    if len({len(row) for row in replicated}) > 1:
        raise _refused("layers have unlike many of them")
    rows = [tuple(row) for row in replicated] * (layers if len(replicated) == 1 else 1)
    return _Replicating(folded, rows, min(counts)).run()


def _refused(why: str, origin: Origin | None = None) -> UsageError:
    hint = "leave out --replicate-experts, or name experts of each layer as 3,17;0,5"
    return refusal("experts cannot be replicated", why, hint, origin)


class _Replicating:
    """The model, call by call."""

    def __init__(self, folded: Folded, rows: Sequence[tuple[int, ...]], experts: int) -> None:
        self.folded, self.rows, self.experts, self.count = folded, rows, experts, len(rows[0])
        self.taken = {v for g in folded.segments.values() for v in g.types()}
        self.taken |= {p.name for p in folded.joint.ports} | {o for c in folded.calls for o in c.outs}
        self.segments: dict[str, _Segment] = {}
        #: value of main that has slots or choices -> layer
        self.layers: dict[str, int] = {}
        #: the same -> its replicas' part
        self.replicas: dict[str, str] = {}
        #: (kind, layer) -> a constant
        self.constants: dict[tuple[str, int], tuple[Port, torch.Tensor]] = {}
        self.seen = 0

    def run(self) -> Folded:
        calls = tuple(self._call(call) for call in self.folded.calls)
        joint = self.folded.joint
        made = self.constants.values()
        joint = replace(
            joint,
            ports=(*joint.ports, *(port for port, _ in made)),
            constants={**joint.constants, **{port.target: value for port, value in made}},
        )
        graphs = {name: self.segments[name].new for name in self.folded.segments}
        return replace(self.folded, segments=graphs, calls=calls, joint=joint)

    def _call(self, call: Call) -> Call:
        graph = self.folded.segments[call.segment]
        given = [self.layers.get(arg) for arg in call.args]
        if call.segment not in self.segments:
            self.segments[call.segment] = _Segment(graph, self, given)
        segment = self.segments[call.segment]
        known = dict.fromkeys(n for n in given if n is not None)
        layers = [*known, *range(self.seen, self.seen + segment.fresh)]
        self.seen += segment.fresh
        outs: list[str] = []
        for out, inner in zip(call.outs, graph.outputs, strict=True):
            outs.append(out)
            if inner in segment.groups:
                self.layers[out] = layers[segment.groups[inner]]
                self.replicas[out] = self.fresh(out)
                outs.append(self.replicas[out])
        args = [x for arg in call.args for x in (arg, self.replicas.get(arg)) if x is not None]
        args += [self.constant(kind, layers[group]) for kind, group in segment.constants]
        return replace(call, args=tuple(args), outs=tuple(outs))

    def fresh(self, value: str) -> str:
        return fresh_name(f"{value}_replicas", self.taken)

    def constant(self, kind: str, layer: int) -> str:
        """numbers: the replicated experts of a layer. near, far: per expert, which of them it is, and which
        expert it is if it is none of them; -1 otherwise, last that of a choice that is no expert."""
        key = kind, layer
        if key not in self.constants:
            row = self.rows[layer]
            near = [row.index(e) if e in row else -1 for e in range(self.experts)]
            far = [-1 if e in row else e for e in range(self.experts)]
            values = torch.tensor({"numbers": list(row), "near": [*near, -1], "far": [*far, -1]}[kind])
            name = fresh_name(f"replicated_{layer}_{kind}", self.taken)
            port = Port(name, "const", name, TensorType(tuple(values.shape), _INDEX))
            self.constants[key] = port, values
        return self.constants[key][0].name


class _Segment:
    """One segment of it. given: of each input the layer whose slots or choices it has, in the first call.

    groups: value -> which of the segment's layers has it. constants: (kind, group) of further inputs.
    fresh: layers whose tokens choose their experts here.
    """

    def __init__(self, graph: Graph, model: _Replicating, given: Sequence[int | None]) -> None:
        self.model, self.types = model, graph.types()
        numbers = {layer: k for k, layer in enumerate(dict.fromkeys(n for n in given if n is not None))}
        self.groups = {
            name: numbers[n] for (name, _), n in zip(graph.inputs, given, strict=True) if n is not None
        }
        self.replicas = {name: model.fresh(name) for name in self.groups}
        self.constants: dict[tuple[str, int], str] = {}
        self.fresh, self._known = 0, len(numbers)
        #: (stack of matrices, group) -> those of the replicated experts
        self._picked: dict[tuple[str, int], Ref] = {}
        self.nodes: list[Node] = []
        for node in graph.nodes:
            if node.op == _CHOICES or not self.groups.keys().isdisjoint(refs_of(node)):
                self._doubled(node)
            else:
                self.nodes.append(node)
        inputs = [
            each
            for name, type_ in graph.inputs
            for each in ((name, type_), (self.replicas.get(name, ""), self._type(type_)))
            if each[0]
        ]
        lengths = {"numbers": model.count, "near": model.experts + 1, "far": model.experts + 1}
        inputs += [(n, TensorType((lengths[k],), _INDEX)) for (k, _), n in self.constants.items()]
        outputs = [x for o in graph.outputs for x in (o, self.replicas.get(o)) if x is not None]
        self.new = Graph(graph.name, tuple(inputs), tuple(self.nodes), tuple(outputs))

    def _type(self, type_: TensorType) -> TensorType:
        """Of the replicas' part of a value."""
        if not type_.has_slots:
            return type_
        assert type_.filled is not None
        rows = type_.shape[0] // self.model.experts * self.model.count
        filled = of_replicas(*type_.filled, self.model.count)
        return replace(type_, shape=(rows, *type_.shape[1:]), filled=filled)

    def _constant(self, kind: str, group: int) -> Ref:
        if (kind, group) not in self.constants:
            self.constants[kind, group] = fresh_name(f"replicated_{kind}", self.model.taken)
        return Ref(self.constants[kind, group])

    def _add(self, like: Node, op: str, args: tuple[Arg, ...], type_: TensorType, name: str = "") -> Ref:
        name = name or self.model.fresh(like.name)
        self.nodes.append(Node(op, args, (), (name,), (type_,), like.origin, like.backward))
        return Ref(name)

    def _doubled(self, node: Node) -> None:
        """An op on slots or choices, for replicated experts and for the others."""
        if any(isinstance(a, CallSite) for a in node.args):
            raise _refused("random numbers are drawn for the rows of experts", node.origin)
        if node.op == _CHOICES:
            self._choose(node)
            return
        known = node.op in _MATRICES or node.op in _SUMS | _GIVE | _ROWS | {_ROUTE}
        if not known and (node.op in experts.RULES or node.op in scaled_experts.RULES):
            raise _refused(f"{node.op} takes all experts of a layer at once", node.origin)
        (group,) = {self.groups[r] for r in refs_of(node) if r in self.groups}
        gives = node.op in _GIVE or node.op in _SUMS
        if not gives and any(t is None or t.filled is None for t in node.types):
            raise _refused(f"{node.op} takes all slots of a layer at once", node.origin)
        self.replicas.update({out: self.model.fresh(out) for out in node.outs})
        (near,) = renamed([node], self.replicas)
        args, types = list(near.args), tuple(t and self._type(t) for t in node.types)
        if node.op in _MATRICES:
            place = _MATRICES[node.op]
            args[place] = self._pick(node, args[place].name, group)
        if node.op == _ROUTE:
            args[1] = self.model.count
        if node.op in _SUMS:
            args[3 if node.op.endswith("outer.default") else 2] = self.model.count
            types = (replace(first_type(node), shape=(self.model.count, *first_type(node).shape[1:])),)
        near = replace(near, args=tuple(args), types=types)
        if not gives:
            self.groups.update(dict.fromkeys(node.outs, group))
            self.nodes += [node, near]
            return
        far = self.model.fresh(node.name)
        self.nodes += [replace(node, outs=(far,)), near]
        del self.replicas[node.name]
        term = Ref(near.name) if node.op in _GIVE else self._put(node, Ref(near.name), group)
        self._add(node, "aten.add.Tensor", (Ref(far), term), first_type(node), node.name)

    def _choose(self, node: Node) -> None:
        """The choices of replicated experts, and those of others, are no expert for the other part."""
        group = self._known + self.fresh
        self.fresh += 1
        type_ = first_type(node)
        plain = replace(type_, filled=None)
        for kind, name in (("far", node.name), ("near", self.model.fresh(node.name))):
            table = self._constant(kind, group)
            chosen = self._add(node, "aten.index.Tensor", (table, (node.args[0],)), plain)
            self._add(node, _CHOICES, (chosen,), type_, name)
        self.groups[node.name], self.replicas[node.name] = group, name

    def _pick(self, node: Node, stack: str, group: int) -> Ref:
        """The matrices of replicated experts, of those of all [E, ...]."""
        if (stack, group) not in self._picked:
            type_ = self.types[stack]
            flat = replace(type_, shape=(self.model.count, prod(type_.shape[1:])))
            rows = Ref(stack)
            if len(type_.shape) > 2:
                shape = (self.model.experts, flat.shape[1])
                rows = self._add(node, "aten.view.default", (rows, shape), replace(type_, shape=shape))
            picked = self._add(
                node, "aten.embedding.default", (rows, self._constant("numbers", group), -1), flat
            )
            self._picked[stack, group] = self._as(node, picked, (self.model.count, *type_.shape[1:]), flat)
        return self._picked[stack, group]

    def _put(self, node: Node, near: Ref, group: int) -> Ref:
        """Sums of replicated experts among those of all experts."""
        type_ = first_type(node)
        flat = replace(type_, shape=(self.model.count, prod(type_.shape[1:])))
        rows = self._as(node, near, flat.shape, replace(type_, shape=(self.model.count, *type_.shape[1:])))
        put = self._add(
            node,
            "aten.embedding_dense_backward.default",
            (rows, self._constant("numbers", group), self.model.experts, -1, False),
            replace(flat, shape=(self.model.experts, flat.shape[1])),
        )
        return self._as(node, put, type_.shape, flat)

    def _as(self, node: Node, value: Ref, shape: tuple[int, ...], type_: TensorType) -> Ref:
        """A value in another shape, if that is another."""
        if len(shape) == len(type_.shape):
            return value
        return self._add(node, "aten.view.default", (value, shape), replace(type_, shape=shape))
