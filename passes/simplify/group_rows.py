"""Alike rows of experts travel as one (`ops.similar_rows`; Nie et al., "LSH-MoE", NeurIPS 2024).

The tokens that go to experts, the choices that say where, and what comes back are those of groups: every op
between (`ops.experts`) is the same on fewer rows. A token's sum is made of what comes back where the token
is, with its weights, which experts are then not given. Backward is that of this function, groups held fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.errors import UsageError
from autoshard.ir import Arg, Graph, Joint, Node, Origin, Ref, TensorType, refs_of
from autoshard.ir.graph import renamed
from autoshard.ir.names import fresh_name
from autoshard.ir.similar_rows import (
    GROUP_CHOICES,
    GROUP_MEANS,
    LSH_GROUPS,
    SEED,
    UNGROUP,
    UNGROUP_TO_ROWS,
    UNGROUP_TO_TOKENS,
    UNGROUP_TO_WEIGHTS,
    RowGroups,
)
from autoshard.passes.mixtures import loop_route, refusal
from autoshard.passes.rewrite import first_type

_ROUTE, _DISPATCH, _COMBINE, _WEIGHTS, _WEIGHTS_BACK, _SCALE, _MM = (
    f"autoshard.{name}.default"
    for name in (
        *("route", "dispatch", "combine", "dispatch_weights", "combine_weights"),
        *("scale_rows", "expert_mm"),
    )
)
#: of slots, they give what is of tokens, or of experts
_SUMS = frozenset((_COMBINE, _WEIGHTS_BACK, "autoshard.expert_outer.default", "autoshard.expert_sum.default"))
#: linear in the rows that they are given first
_LINEAR = frozenset((_MM, "aten._to_copy.default"))


def group_rows(joint: Joint, groups: RowGroups | None) -> Joint:
    """The model with the rows of all its experts in such groups, itself for None. Raises UsageError where it
    has none, or weighs rows before an expert that is not linear in them."""
    if groups is None:
        return joint
    bodies = tuple(
        replace(body, joint=replace(body.joint, graph=_grouped(body.joint.graph, groups)))
        for body in joint.bodies
    )
    new = replace(joint, graph=_grouped(joint.graph, groups), bodies=bodies)
    if new == joint:
        raise _refused("the model has no experts that tokens can be exchanged for")
    return new


def _refused(why: str, origin: Origin | None = None) -> UsageError:
    return refusal("rows of experts cannot be grouped", why, "leave lsh-moe out of --allow", origin)


@dataclass(frozen=True)
class _Mixture:
    """One mixture of experts: its ops on tokens, and values that are to be made.

    slots: the value. route, dispatch, weigh, combine: the nodes of forward. groups, choices, means: what the
    ops of their names make. made: what comes back from the experts.
    """

    slots: str
    route: Node
    dispatch: Node
    weigh: Node
    combine: Node
    groups: Ref
    choices: Ref
    means: Ref
    made: Ref


def _grouped(graph: Graph, groups: RowGroups) -> Graph:
    if other := loop_route(graph.nodes):
        raise _refused("its experts are a loop in Python that is not one mixture", other.origin)
    if all(node.op != _ROUTE for node in graph.nodes):
        return graph
    return _Grouping(graph, groups).run()


class _Grouping:
    """One graph, node by node."""

    def __init__(self, graph: Graph, groups: RowGroups) -> None:
        self.graph, self.how, self.types = graph, groups, graph.types()
        self.taken = set(self.types)
        self.users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for value in dict.fromkeys(refs_of(node)):
                self.users.setdefault(value, []).append(node)
        self.mixtures = {n.name: self._mixture(n) for n in graph.nodes if n.op == _ROUTE}
        #: values of slots whose weights are taken away -> those without
        self.bare: dict[str, Ref] = {}
        self.nodes: list[Node] = []
        #: slots -> the gradient of the tokens' sum, and of what came back from the experts
        self.back: dict[str, tuple[Ref, Ref]] = {}
        #: values that are made so far
        self.known = {name for name, _ in graph.inputs}

    def run(self) -> Graph:
        self._check_weights()
        self._check_sums()
        of = {m.slots: m for m in self.mixtures.values()}
        for node in self.graph.nodes:
            self.known.update(node.outs)
            given = next((of[r] for r in refs_of(node) if r in of), None)
            (new,) = renamed([self._with_fewer_rows(node)], {k: v.name for k, v in self.bare.items()})
            if node.op == _ROUTE:
                self._route(new, of[node.name])
            elif node.op == _SCALE and new.args[1].name in {m.weigh.name for m in of.values()}:
                self.bare[node.name] = new.args[0]
            elif given is None or node.op not in (_DISPATCH, _COMBINE, _WEIGHTS, _WEIGHTS_BACK):
                self.nodes.append(new)
            elif node.backward:
                self._backward(new, given)
            elif node.op == _DISPATCH:
                self._add(
                    node, _DISPATCH, (given.means, given.choices, node.args[2]), first_type(new), node.name
                )
            elif node.op == _COMBINE:
                self._combine(new, given)
        outputs = tuple(self.bare[o].name if o in self.bare else o for o in self.graph.outputs)
        return replace(self.graph, nodes=tuple(self.nodes), outputs=outputs)

    def _mixture(self, route: Node) -> _Mixture:
        """Raises UsageError unless a mixture has one op of each kind in forward."""
        found: dict[str, Node] = {}
        for node in self.users.get(route.name, ()):
            if node.backward or node.op not in (_DISPATCH, _COMBINE, _WEIGHTS):
                continue
            if node.op in found:
                raise _refused("its tokens are dispatched or combined more than once", node.origin)
            found[node.op] = node
        if len(found) < 3:
            raise _refused("its tokens are not dispatched and combined with weights", route.origin)
        x, y = (self.types[found[op].name] for op in (_DISPATCH, _COMBINE))
        if x.shape[1] != y.shape[1]:
            raise _refused("what experts give has other sizes than what they take", route.origin)
        names = (self._name(route, word) for word in ("groups", "choices", "means", "made"))
        return _Mixture(route.name, route, found[_DISPATCH], found[_WEIGHTS], found[_COMBINE], *names)

    def _name(self, node: Node, word: str) -> Ref:
        return Ref(fresh_name(f"{node.name}_{word}", self.taken))

    def _check_weights(self) -> None:
        """Raises UsageError unless each row is scaled by its weight, and all that follows is linear in it."""
        for mixture in self.mixtures.values():
            users = self.users.get(mixture.weigh.name, [])
            scaling = [n for n in users if not n.backward]
            if any(n.op != _SCALE for n in users) or len(scaling) != 1:
                raise _refused("its weights do more than to scale rows", mixture.weigh.origin)
            node = scaling[0]
            while node.name != mixture.combine.name:
                after = [n for n in self.users.get(node.name, ()) if not n.backward]
                if len(after) != 1 or not (after[0] is mixture.combine or after[0].op in _LINEAR):
                    raise _refused("rows are weighed before what is not linear in them", node.origin)
                if next(refs_of(after[0])) != node.name:
                    raise _refused("rows are weighed before what is not linear in them", node.origin)
                node = after[0]

    def _check_sums(self) -> None:
        """Raises UsageError for sums over rows that are not those of tokens or experts."""
        for node in self.graph.nodes:
            taken = any(self.types[r].has_slots for r in refs_of(node))
            if taken and node.op not in _SUMS and not all(t is None or t.has_slots for t in node.types):
                raise _refused("an op adds up the rows of all tokens", node.origin)

    def _fewer(self, type_: TensorType) -> TensorType:
        """Of slots of groups, of whose rows each has one choice."""
        if not type_.has_slots:
            return type_
        assert type_.filled is not None
        choices, experts = type_.filled
        shape = (type_.shape[0] * choices, *type_.shape[1:])
        return replace(type_, shape=shape, filled=(1, experts), share=self.how.share)

    def _with_fewer_rows(self, node: Node) -> Node:
        return replace(node, types=tuple(t and self._fewer(t) for t in node.types))

    def _of_groups(self, like: TensorType, of: _Mixture) -> TensorType:
        """A row of every group, of one of every token."""
        choices = self.types[of.route.args[0].name].shape[1]
        shape = (like.shape[0] * choices, *like.shape[1:])
        return replace(like, shape=shape, filled=(1, 1), share=self.how.share)

    def _add(self, like: Node, op: str, args: tuple[Arg, ...], type_: TensorType, name: str) -> Ref:
        self.nodes.append(Node(op, args, (), (name,), (type_,), like.origin, like.backward))
        return Ref(name)

    def _route(self, node: Node, of: _Mixture) -> None:
        """Groups of the tokens, and the slots of their means."""
        x, chosen = of.dispatch.args[0], node.args[0]
        if x.name not in self.known:
            raise _refused("tokens choose experts before they are what experts take", node.origin)
        type_ = self.types[chosen.name]
        args = (x, chosen, node.args[1], self.how.hashes, SEED)
        self._add(of.dispatch, LSH_GROUPS, args, type_, of.groups.name)
        one = replace(self._of_groups(type_, of), shape=(type_.numel, 1))
        self._add(of.dispatch, GROUP_CHOICES, (chosen, of.groups), one, of.choices.name)
        means = self._of_groups(self.types[x.name], of)
        self._add(of.dispatch, GROUP_MEANS, (x, of.groups), means, of.means.name)
        self.nodes.append(replace(node, args=(of.choices, node.args[1])))

    def _combine(self, node: Node, of: _Mixture) -> None:
        """A token's sum, of what came back of its groups."""
        x, weights, type_ = of.dispatch.args[0], of.weigh.args[0], first_type(node)
        args = (node.args[0], of.choices, node.args[2])
        self._add(node, _COMBINE, args, self._of_groups(type_, of), of.made.name)
        self._add(node, UNGROUP, (of.made, x, of.means, weights, of.groups), type_, node.name)

    def _backward(self, node: Node, of: _Mixture) -> None:
        x, weights, type_ = of.dispatch.args[0], of.weigh.args[0], first_type(node)
        value, _, slots = node.args
        if node.op == _DISPATCH and of.slots not in self.back:
            like, name = self._of_groups(self.types[value.name], of), self._name(of.route, "gradient").name
            rows = self._add(node, UNGROUP_TO_ROWS, (value, weights, of.groups), like, name)
            self.back[of.slots] = value, rows
            self._add(node, _DISPATCH, (rows, of.choices, slots), type_, node.name)
            return
        if node.op == _DISPATCH or of.slots not in self.back:
            raise _refused("its backward is none that is known", node.origin)
        grad, rows = self.back[of.slots]
        if node.op == _COMBINE:
            name = self._name(of.route, "means_gradient").name
            args = (value, of.choices, slots)
            means = self._add(node, _COMBINE, args, self._of_groups(type_, of), name)
            told: tuple[Arg, ...] = (means, rows, grad, weights, of.groups)
            self._add(node, UNGROUP_TO_TOKENS, told, type_, node.name)
        else:
            told = (grad, of.made, x, of.means, weights, of.groups)
            self._add(node, UNGROUP_TO_WEIGHTS, told, type_, node.name)
