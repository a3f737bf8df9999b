"""Put the graph of a layer in the place of every call of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from autoshard.ir import Arg, Graph, Joint, Node, Origin, Port, Ref, Result, refs_of, substitute
from autoshard.torch_adapters.repeat_op import REPEAT, REPEAT_BACKWARD, RepeatKey

_DROPOUT = "autoshard.dropout.default"
_SITE = 3
_ADD = "aten.add.Tensor"
#: what autograd gives for an output that nothing uses
_ZEROS = frozenset({"aten.zeros.default", "aten.new_zeros.default"})
#: kind of a result that is a gradient -> kind of the port it belongs to
_GRADS = MappingProxyType({"grad": "param", "input_grad": "input"})


@dataclass(frozen=True)
class Body:
    """A layer traced on its own.

    feeds: the ports that a call gives values to, in the order of its tensors. outputs: values of the
    layer's outputs, by position. tangents: port names, in the order of the outputs that have a gradient.
    grads: values of the gradients, in the order of the feeds that have one. sites: dropout calls inside.
    """

    joint: Joint
    feeds: tuple[Port, ...]
    outputs: tuple[str, ...]
    tangents: tuple[str, ...]
    grads: tuple[tuple[int, str], ...]
    sites: int

    def away(self) -> set[str]:
        """Parameters, by their names in the layer, that `passed` leaves out of ops that are apart."""
        return {self.feeds[k].target for k in set(range(len(self.feeds))) - set(self.passed(apart=True))}

    def passed(self, *, apart: bool) -> tuple[int, ...]:
        """Positions of the feeds that the op of a call is given.

        apart: without the parameters that have a gradient, but for the first.
        """
        away = [k for k, _ in self.grads if self.feeds[k].kind == "param"][1:] if apart else []
        return tuple(k for k in range(len(self.feeds)) if k not in away)


Away: TypeAlias = Mapping[int, Mapping[int, str]]


def expand_repeats(joint: Joint, bodies: Sequence[Body], away: Away) -> Joint | None:
    """The joint graph with every ``repeat`` and ``repeat_backward`` written out.

    away: per call, parameters that its op was not given: position among the feeds -> name. None if one of
    them is used by something else, too: then its gradient is not the call's alone.
    """
    if not bodies:
        return joint
    hidden = {name for call in away.values() for name in call.values()}
    inputs = {p.name for p in joint.ports if p.kind == "param" and p.target in hidden}
    used = {r for node in joint.graph.nodes for r in refs_of(node)} | {r.value for r in joint.results}
    if inputs & used or any(r.kind == "grad" and r.target in hidden for r in joint.results):
        return None
    return _Expander(joint, bodies, away).run()


class _Expander:
    def __init__(self, joint: Joint, bodies: Sequence[Body], away: Away) -> None:
        self.joint, self.bodies, self.away = joint, bodies, away
        self.parameters = {p.target: p.name for p in joint.ports if p.kind == "param"}
        #: gradients of what the ops were not given: name of the parameter -> value
        self.grads: dict[str, str] = {}
        self.alias: dict[str, str] = {}
        self.nodes: list[Node] = []
        #: per call: name inside the body -> name in the whole graph
        self.inside: dict[int, dict[str, str]] = {}
        self.constants = dict(joint.constants)
        self.ports = list(joint.ports)
        self.known: dict[tuple[int, str], str] = {}
        self.types = dict(joint.graph.types())
        self.zeros = {n.name for n in joint.graph.nodes if n.op in _ZEROS}

    def run(self) -> Joint:
        for node in self.joint.graph.nodes:
            if node.op == REPEAT:
                self._forward(node)
            elif node.op == REPEAT_BACKWARD:
                self._backward(node)
            else:
                self.nodes.append(substitute(node, lambda name: Ref(self._real(name))))
        results = self._results()
        used = {r for node in self.nodes for r in refs_of(node)} | {r.value for r in results}
        self.nodes = [n for n in self.nodes if n.op not in _ZEROS or used & set(n.outs)]
        graph = Graph(
            "joint",
            tuple((p.name, p.type) for p in self.ports),
            tuple(self.nodes),
            tuple(r.value for r in results),
        )
        return replace(
            self.joint, graph=graph, ports=tuple(self.ports), results=results, constants=self.constants
        )

    def _results(self) -> tuple[Result, ...]:
        """Gradients last, in the order of the ports."""
        place: dict[tuple[str, str], int] = {(p.kind, p.target): k for k, p in enumerate(self.joint.ports)}
        found = [replace(r, value=self._real(r.value)) for r in self.joint.results]
        grads = [r for r in found if r.kind in _GRADS]
        grads += (Result(value, "grad", name) for name, value in self.grads.items())
        grads.sort(key=lambda r: place[_GRADS[r.kind], r.target])
        return (*(r for r in found if r.kind not in _GRADS), *grads)

    def _real(self, name: str) -> str:
        return self.alias.get(name, name)

    def _names(self, arg: Arg) -> list[str]:
        return [self._real(ref.name) for ref in arg]

    def _forward(self, node: Node) -> None:
        key = RepeatKey.parse(node.args[1])
        body = self.bodies[key.body]
        away = self.away[key.call]
        passed = (p.name for k, p in enumerate(body.feeds) if k not in away)
        names = dict(zip(passed, self._names(node.args[0]), strict=True))
        names.update((body.feeds[k].name, self.parameters[name]) for k, name in away.items())
        for port in body.joint.ports:
            if port.kind == "const":
                names[port.name] = self._constant(key.body, port)
        self.inside[key.call] = names
        self._copy(body, key, names, node.origin, backward=False)
        self.alias.update((out, names[v]) for out, v in zip(node.outs, body.outputs, strict=True))

    def _backward(self, node: Node) -> None:
        key = RepeatKey.parse(node.args[2])
        body, names = self.bodies[key.body], self.inside[key.call]
        names.update(zip(body.tangents, self._names(node.args[0]), strict=True))
        self._copy(body, key, names, node.origin, backward=True)
        away = self.away[key.call]
        passed = [v for k, v in body.grads if k not in away]
        self.alias.update((out, names[v]) for out, v in zip(node.outs, passed, strict=True))
        self.grads.update((away[k], names[v]) for k, v in body.grads if k in away)

    def _copy(self, body: Body, key: RepeatKey, names: dict[str, str], at: Origin, *, backward: bool) -> None:
        refs = {name: Ref(value) for name, value in names.items()}
        origins: dict[Origin, Origin] = {}
        behind = f"_r{key.call}"
        for original in body.joint.graph.nodes:
            if original.backward != backward:
                continue
            inner = original.origin
            if inner not in origins:
                origins[inner] = _inside(inner, at)
            outs = tuple([out + behind for out in original.outs])
            node = substitute(original, refs.__getitem__, outs=outs, origin=origins[inner])
            other = self._beside_zeros(node) if self.zeros else None
            if other is not None:
                names[original.name], refs[original.name] = other, Ref(other)
                continue
            for old, new, type_ in zip(original.outs, outs, node.types, strict=True):
                names[old], refs[old] = new, Ref(new)
                if type_ is not None:
                    self.types[new] = type_
            self.nodes.append(_moved(node, key.site))

    def _beside_zeros(self, node: Node) -> str | None:
        """What zeros are added to, if a node does only that: the gradient of an output that nothing uses."""
        if node.op != _ADD or node.kwargs or len(node.args) != 2:
            return None
        a, b = node.args
        if not (isinstance(a, Ref) and isinstance(b, Ref)) or not {a.name, b.name} & self.zeros:
            return None
        other = a.name if b.name in self.zeros else b.name
        return other if self.types.get(other) == node.types[0] else None

    def _constant(self, body: int, port: Port) -> str:
        """A constant of a layer's code: one input for all its calls."""
        if (body, port.name) not in self.known:
            target = f"layer{body}_{port.target}"
            self.constants[target] = self.bodies[body].joint.constants[port.target]
            self.known[body, port.name] = f"{port.name}_layer{body}"
            self.ports.append(replace(port, name=f"{port.name}_layer{body}", target=target))
        return self.known[body, port.name]


def _inside(inner: Origin, at: Origin) -> Origin:
    """Where an op of a layer is in the whole model."""
    fqn = f"{at.fqn}.{inner.fqn}" if inner.fqn else at.fqn
    return Origin(fqn, at.call, inner.source or at.source)


def _moved(node: Node, site: int) -> Node:
    """A dropout with the number it has in the whole model."""
    if node.op != _DROPOUT or not site:
        return node
    args = list(node.args)
    args[_SITE] = int(args[_SITE]) + site
    return replace(node, args=tuple(args))
