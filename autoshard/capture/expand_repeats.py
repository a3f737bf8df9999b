"""Put the graph of a layer in the place of every call of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoshard.capture.repeat_op import REPEAT, REPEAT_BACKWARD, RepeatKey
from autoshard.ir import Arg, Graph, Joint, Node, Origin, Port, Ref, Result, refs_of, substitute
from autoshard.ir.body import NONE_AWAY, Away, Body

_DROPOUT = "autoshard.dropout.default"
_SITE = 3
_ADD = "aten.add.Tensor"
#: what autograd gives for an output that nothing uses
ZEROS = frozenset({"aten.zeros.default", "aten.new_zeros.default"})
#: kind of a result that is a gradient -> kind of the port it belongs to
_GRADS = MappingProxyType({"grad": "param", "input_grad": "input"})


def apart(joint: Joint, away: Away) -> bool:
    """Whether nothing else uses what calls were not given: then its gradient is the call's alone.

    joint: of the full model, as traced.
    """
    hidden = {name for call in away.values() for name in call.values()}
    inputs = {p.name for p in joint.ports if p.kind == "param" and p.target in hidden}
    used = {r for node in joint.graph.nodes for r in refs_of(node)} | {r.value for r in joint.results}
    return not inputs & used and not any(r.kind == "grad" and r.target in hidden for r in joint.results)


def expand_repeats(joint: Joint) -> Joint:
    """The joint graph with every ``repeat`` and ``repeat_backward`` written out: flat."""
    return _Expander(joint).run() if joint.bodies else joint


def behind(call: int | str) -> str:
    """What a call of a layer puts behind the names of what it makes."""
    return f"_r{call}"


def in_order(results: Iterable[Result], ports: Sequence[Port]) -> tuple[Result, ...]:
    """Gradients last, in the order of the ports."""
    place: dict[tuple[str, str], int] = {(p.kind, p.target): k for k, p in enumerate(ports)}
    result = list(results)
    grads = sorted((r for r in result if r.kind in _GRADS), key=lambda r: place[_GRADS[r.kind], r.target])
    return (*(r for r in result if r.kind not in _GRADS), *grads)


class _Expander:
    def __init__(self, joint: Joint) -> None:
        self.joint, self.bodies, self.away = joint, joint.bodies, joint.away
        self.parameters = {p.target: p.name for p in joint.ports if p.kind == "param"}
        #: gradients of what the ops were not given: name of the parameter -> value
        self.grads: dict[str, str] = {}
        self.alias: dict[str, str] = {}
        self.nodes: list[Node] = []
        #: per call: name inside the body -> name in the full graph
        self.inside: dict[int, dict[str, str]] = {}
        self.constants = dict(joint.constants)
        self.ports = list(joint.ports)
        self.known: dict[tuple[int, str], str] = {}
        self.types = dict(joint.graph.types())
        self.zeros = {n.name for n in joint.graph.nodes if n.op in ZEROS}

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
        self.nodes = [n for n in self.nodes if n.op not in ZEROS or used & set(n.outs)]
        graph = Graph(
            "joint",
            tuple((p.name, p.type) for p in self.ports),
            tuple(self.nodes),
            tuple(r.value for r in results),
        )
        return replace(
            self.joint,
            graph=graph,
            ports=tuple(self.ports),
            results=results,
            constants=self.constants,
            bodies=(),
            away=NONE_AWAY,
        )

    def _results(self) -> tuple[Result, ...]:
        result = [replace(r, value=self._real(r.value)) for r in self.joint.results]
        result += (Result(value, "grad", name) for name, value in self.grads.items())
        return in_order(result, self.joint.ports)

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
        suffix = behind(key.call)
        for original in body.joint.graph.nodes:
            if original.backward != backward:
                continue
            inner = original.origin
            if inner not in origins:
                origins[inner] = _inside(inner, at)
            outs = tuple([out + suffix for out in original.outs])
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
    """Where an op of a layer is in the full model."""
    fqn = f"{at.fqn}.{inner.fqn}" if inner.fqn else at.fqn
    return Origin(fqn, at.call, inner.source or at.source)


def _moved(node: Node, site: int) -> Node:
    """A dropout with the number it has in the full model."""
    if node.op != _DROPOUT or not site:
        return node
    args = list(node.args)
    args[_SITE] = int(args[_SITE]) + site
    return replace(node, args=tuple(args))
