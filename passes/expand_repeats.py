"""Put the graph of a layer in the place of every call of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.ir import Arg, Graph, Joint, Node, Origin, Port, Ref, substitute
from autoshard.torch_adapters.repeat_op import REPEAT, REPEAT_BACKWARD, RepeatKey

_DROPOUT = "autoshard.dropout.default"
_SITE = 3


@dataclass(frozen=True)
class Body:
    """A layer traced on its own.

    feeds: the ports that a call gives values to, in the order of its tensors. outputs: values of the
    layer's outputs, by position. tangents: port names by position of the output. grads: values of the
    gradients, in the order of the feeds that have one. sites: dropout calls inside.
    """

    joint: Joint
    feeds: tuple[Port, ...]
    outputs: tuple[str, ...]
    tangents: tuple[str, ...]
    grads: tuple[tuple[int, str], ...]
    sites: int


def expand_repeats(joint: Joint, bodies: Sequence[Body]) -> Joint:
    """The joint graph with every ``repeat`` and ``repeat_backward`` written out."""
    return _Expander(joint, bodies).run() if bodies else joint


class _Expander:
    def __init__(self, joint: Joint, bodies: Sequence[Body]) -> None:
        self.joint, self.bodies = joint, bodies
        self.alias: dict[str, str] = {}
        self.nodes: list[Node] = []
        #: per call: name inside the body -> name in the whole graph
        self.inside: dict[int, dict[str, str]] = {}
        self.constants = dict(joint.constants)
        self.ports = list(joint.ports)
        self.known: dict[tuple[int, str], str] = {}

    def run(self) -> Joint:
        for node in self.joint.graph.nodes:
            if node.op == REPEAT:
                self._forward(node)
            elif node.op == REPEAT_BACKWARD:
                self._backward(node)
            else:
                self.nodes.append(substitute(node, lambda name: Ref(self._real(name))))
        results = tuple(replace(r, value=self._real(r.value)) for r in self.joint.results)
        graph = Graph(
            "joint",
            tuple((p.name, p.type) for p in self.ports),
            tuple(self.nodes),
            tuple(r.value for r in results),
        )
        return replace(
            self.joint, graph=graph, ports=tuple(self.ports), results=results, constants=self.constants
        )

    def _real(self, name: str) -> str:
        return self.alias.get(name, name)

    def _names(self, arg: Arg) -> list[str]:
        return [self._real(ref.name) for ref in arg]

    def _forward(self, node: Node) -> None:
        key = RepeatKey.parse(node.args[1])
        body = self.bodies[key.body]
        names = dict(zip((p.name for p in body.feeds), self._names(node.args[0]), strict=True))
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
        self.alias.update((out, names[v]) for out, (_, v) in zip(node.outs, body.grads, strict=True))

    def _copy(self, body: Body, key: RepeatKey, names: dict[str, str], at: Origin, *, backward: bool) -> None:
        for original in body.joint.graph.nodes:
            if original.backward != backward:
                continue
            node = substitute(original, lambda name: Ref(names[name]))
            outs = tuple(f"{out}_r{key.call}" for out in original.outs)
            names.update(zip(original.outs, outs, strict=True))
            inner = original.origin
            fqn = f"{at.fqn}.{inner.fqn}" if inner.fqn else at.fqn
            origin = Origin(fqn, at.call, inner.source or at.source)
            self.nodes.append(replace(_moved(node, key.site), outs=outs, origin=origin))

    def _constant(self, body: int, port: Port) -> str:
        """A constant of a layer's code: one input for all its calls."""
        if (body, port.name) not in self.known:
            target = f"layer{body}_{port.target}"
            self.constants[target] = self.bodies[body].joint.constants[port.target]
            self.known[body, port.name] = f"{port.name}_layer{body}"
            self.ports.append(replace(port, name=f"{port.name}_layer{body}", target=target))
        return self.known[body, port.name]


def _moved(node: Node, site: int) -> Node:
    """A dropout with the number it has in the whole model."""
    if node.op != _DROPOUT or not site:
        return node
    args = list(node.args)
    args[_SITE] = int(args[_SITE]) + site
    return replace(node, args=tuple(args))
