"""Parameters that are only ever cast to one narrower type enter the graph in that type.

They are stored as the model has them; a rank casts its shard, and what is gathered, kept for backward and
computed with has the narrower type (Micikevicius et al., Mixed Precision Training, ICLR'18, section 3.1;
FSDP2's ``param_dtype``). Gradients are cast by the cast's own backward, before they are reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoshard.capture.repeat_op import REPEAT, REPEAT_BACKWARD, RepeatKey
from autoshard.ir import DTYPES, Graph, Joint, Node, Port, Ref, refs_of, substitute
from autoshard.ir.body import Body
from autoshard.ir.views import CASTS

#: a use of a parameter that is no cast
_OTHER = ""


def narrow_parameters(joint: Joint) -> Joint:
    """The same model with such parameters in the type that they are cast to."""
    inside = [_casts_of(body.joint.graph, {p.name for p in body.feeds}) for body in joint.bodies]
    uses: dict[str, set[str]] = {}
    fed: dict[tuple[int, str], set[str]] = {}
    names = {p.target: p.name for p in joint.ports if p.kind == "param"}
    for number, feed, name in _feeds(joint, names):
        fed.setdefault((number, feed.name), set()).add(name)
        if feed.kind == "param":
            uses.setdefault(name, set()).update(inside[number].get(feed.name, ()))
        else:
            uses.setdefault(name, set()).add(_OTHER)
    outside = _casts_of(joint.graph, set(names.values()))
    for name, types in outside.items():
        uses.setdefault(name, set()).update(types)
    ports = {p.name: p for p in joint.ports if p.kind == "param"}
    narrow = {
        name: dtype
        for name, types in uses.items()
        if name in ports and len(types) == 1
        for dtype in types
        if _narrower(dtype, ports[name])
    }
    # one graph serves all calls of a layer: its parameters are all narrow or none is
    while apart := [n for n in fed.values() if not n.isdisjoint(narrow) and n - narrow.keys()]:
        narrow = {name: dtype for name, dtype in narrow.items() if not any(name in n for n in apart)}
    if not narrow:
        return joint
    bodies = tuple(
        _body(body, {v: narrow[n] for (k, v), (n, *_) in fed.items() if k == number and n in narrow})
        for number, body in enumerate(joint.bodies)
    )
    return _narrowed(replace(joint, bodies=bodies), narrow)


def _narrower(dtype: str, port: Port) -> bool:
    return bool(dtype) and DTYPES[dtype][1] < DTYPES[port.type.dtype][1]


def _feeds(joint: Joint, names: Mapping[str, str]) -> Iterator[tuple[int, Port, str]]:
    """(number of a body, one of its feeds, what a call gives for it) of all calls of layers."""
    for node in joint.graph.nodes:
        if node.op != REPEAT:
            continue
        key = RepeatKey.parse(node.args[1])
        body, away = joint.bodies[key.body], joint.away.get(key.call, {})
        passed = (ref.name for ref in node.args[0])
        for position, feed in enumerate(body.feeds):
            yield key.body, feed, names[away[position]] if position in away else next(passed)


def _casts_of(graph: Graph, names: set[str]) -> dict[str, set[str]]:
    """Value -> the float types that it is cast to, `_OTHER` among them for any other use."""
    result: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.op in (REPEAT, REPEAT_BACKWARD):
            continue
        for name in names.intersection(refs_of(node)):
            result.setdefault(name, set()).add(_cast_to(node))
    for name in names.intersection(graph.outputs):
        result.setdefault(name, set()).add(_OTHER)
    return result


def _cast_to(node: Node) -> str:
    type_ = node.types[0]
    plain = node.op in CASTS and type_ is not None and type_.is_float
    return type_.dtype if plain and type_ is not None else _OTHER


def _body(body: Body, narrow: Mapping[str, str]) -> Body:
    if not narrow:
        return body
    feeds = tuple(_port(p, narrow) for p in body.feeds)
    return replace(body, joint=_narrowed(body.joint, narrow), feeds=feeds)


def _port(port: Port, narrow: Mapping[str, str]) -> Port:
    if port.name not in narrow:
        return port
    return replace(port, type=replace(port.type, dtype=narrow[port.name]), stored=port.type.dtype)


def _narrowed(joint: Joint, narrow: Mapping[str, str]) -> Joint:
    """With these ports in other types, and without their casts."""
    ports = tuple(_port(p, narrow) for p in joint.ports)
    instead: dict[str, str] = {}
    nodes: list[Node] = []
    for node in joint.graph.nodes:
        if node.op in CASTS and isinstance(node.args[0], Ref) and node.args[0].name in narrow:
            instead[node.name] = node.args[0].name
        else:
            nodes.append(substitute(node, lambda name: Ref(instead.get(name, name))))
    outputs = tuple(instead.get(v, v) for v in joint.graph.outputs)
    inputs = tuple((p.name, p.type) for p in ports)
    graph = Graph(joint.graph.name, inputs, tuple(nodes), outputs)
    return replace(joint, graph=graph, ports=ports)
