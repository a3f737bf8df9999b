"""From a traced FX graph to ours: names, types and arguments without any torch object."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autoshard.capture.expert_slots import with_slots
from autoshard.capture.joint_trace import Traced
from autoshard.capture.origins import COPY
from autoshard.capture.strided_views import reshaped
from autoshard.capture.tracing import constant_of, is_tagged_backward, mark_of
from autoshard.errors import CaptureError
from autoshard.ir import DTYPES, Arg, Dtype, Graph, Node, Origin, Port, Ref, Result, TensorType
from autoshard.ir.views import RESHAPES

#: ops that give back their first argument, unchanged and with the same type; how a tensor lies in memory
#: is no part of our graphs, so copies are such ops
FORWARDED = frozenset(
    (
        torch.ops.aten.clone.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.lift_fresh_copy.default,
    )
)
#: views that need certain strides: in our graphs a reshape, which needs none
#: checks without a result
DROPPED = frozenset(("aten._assert_tensor_metadata.default", "aten._assert_async.msg"))
#: arguments that say where and how a tensor lies, not what it holds
PLACING = frozenset(("device", "layout", "pin_memory", "memory_format"))
_DTYPES = MappingProxyType({getattr(torch, name): short for short, (name, _) in DTYPES.items()})


@dataclass(frozen=True)
class TracedSignature:
    """What the arguments and outputs of the traced function were.

    arguments: per argument (kind, target, name wished for). outputs: position of each traced output among
    the flattened outputs of the model. absent: arguments that the function was traced without, by position,
    none of them last.
    """

    arguments: Sequence[tuple[str, str, str]]
    outputs: Sequence[int]
    absent: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def given(self) -> tuple[int, ...]:
        """Positions of the arguments that the function was traced with."""
        return tuple(k for k in range(len(self.arguments)) if k not in self.absent)


@dataclass(frozen=True)
class Imported:
    """The parts of a ``Joint`` that come from the graph. sources: what the constants are copies of."""

    graph: Graph
    ports: tuple[Port, ...]
    results: tuple[Result, ...]
    constants: dict[str, torch.Tensor]
    sources: tuple[torch.Tensor, ...] = ()


def import_joint(traced: Traced, ends: TracedSignature, origins: Sequence[Origin]) -> Imported:
    """Convert a traced joint graph; time linear in its nodes.

    Raises CaptureError for what our graphs cannot hold: ops that write in place, control flow as nodes,
    values read by Python.
    """
    return _Importer(traced, ends, origins).run()


@dataclass(frozen=True, slots=True)
class _Schema:
    """What is needed of an op's schema: per positional argument and per keyword, whether it is dropped."""

    name: str
    names: tuple[str, ...]
    defaults: dict[str, object]
    placing: bool


@dataclass
class _Importer:
    traced: Traced
    ends: TracedSignature
    origins: Sequence[Origin]
    names: dict[fx.Node, str] = field(default_factory=dict)
    items: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    schemas: dict[torch._ops.OpOverload, _Schema] = field(default_factory=dict)
    types: dict[tuple[torch.Size, torch.dtype], TensorType] = field(default_factory=dict)
    ports: list[Port] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, torch.Tensor] = field(default_factory=dict)
    #: real tensor -> name of its port
    known: dict[object, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    backward: set[fx.Node] = field(default_factory=set)
    #: per value: (position of the node that made it, its origin)
    made: dict[str, tuple[int, Origin]] = field(default_factory=dict)

    def run(self) -> Imported:
        graph = self.traced.graph
        placeholders = iter(self.traced.inputs)
        self.backward = _backward_nodes(graph, self.traced)
        output: fx.Node | None = None
        for node in graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, *next(placeholders))
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                output = node
            else:
                raise self._refusal(node, f"the traced graph holds a {node.op} node ({node.target})")
        assert output is not None
        results = self._results(output)
        ordered = [n for n in self.nodes if not n.backward] + [n for n in self.nodes if n.backward]
        nodes = _alive(ordered, results)
        ports = self._used_ports(nodes, results)
        inputs = tuple((p.name, p.type) for p in ports)
        joint = with_slots(Graph("joint", inputs, nodes, tuple(r.value for r in results)))
        constants = self._used_constants(ports)
        return Imported(joint, ports, results, constants, tuple(self.sources[key] for key in constants))

    def _fresh(self, wish: str) -> str:
        name, k = wish, 1
        while name in self.taken or keyword.iskeyword(name):
            name, k = f"{wish}_{k}", k + 1
        self.taken.add(name)
        return name

    def _type(self, value: object) -> TensorType | None:
        if not isinstance(value, torch.Tensor):
            return None
        key = (value.shape, value.dtype)
        result = self.types.get(key)
        if result is None:
            if value.dtype not in _DTYPES:
                raise CaptureError(
                    f"tensors of type {value.dtype} are not supported", hint="use a plain element type"
                )
            shape = tuple(int(n) for n in value.shape)
            result = self.types[key] = TensorType(shape, _DTYPES[value.dtype])
        return result

    def _port(self, value: object, kind: Any, target: str, wish: str) -> str:
        """A port of the type of a value; its name."""
        name = self._fresh(identifier(wish))
        type_ = self._type(value)
        if type_ is None:
            raise CaptureError(f"the input {wish} of the graph is not a tensor")
        self.ports.append(Port(name, kind, target, type_))
        return name

    def _placeholder(self, node: fx.Node, kind: str, position: int) -> None:
        value = node.meta.get("val")
        if kind == "tangent":
            target = str(self.ends.outputs[position])
            self.names[node] = self._port(value, "tangent", target, f"tangent_{target}")
            return
        place = self.ends.given[position]
        before = place
        while before - 1 in self.ends.absent:
            before -= 1
        for missing in range(before, place):
            self._port(self.ends.absent[missing], *self.ends.arguments[missing])
        self.names[node] = self._port(value, *self.ends.arguments[place])

    def _constant(self, node: fx.Node) -> None:
        value: Any = self.traced.root
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule):
            return  # the body of a control flow op: refused where it is used
        tensor = constant_of(value)
        if tensor is None or tensor.device.type == "meta":
            raise self._refusal(
                node,
                "the model uses a tensor without values that is neither a parameter, a buffer nor an input",
            )
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if same in self.known:
            self.names[node] = self.known[same]
            return
        key = f"const_{len(self.constants)}"
        self.constants[key], self.sources[key] = tensor.detach().clone(), tensor
        self.known[same] = self.names[node] = self._port(node.meta.get("val"), "const", key, key)

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if node.op == "call_function" and getattr(target, "__name__", "") == "getitem":
            source, index = node.args
            if isinstance(source, fx.Node) and source in self.items and isinstance(index, int):
                self.names[node] = self.items[source][index]
                return
        if not isinstance(target, torch._ops.OpOverload):
            raise self._refusal(node, f"the traced graph calls {target}, which is not a plain op")
        if target in FORWARDED:
            (source, *_) = node.args
            assert isinstance(source, fx.Node)
            self.names[node] = self.names[source]
            return
        schema = self._schema(target, node)
        if schema.name in DROPPED:
            return
        source = reshaped(node)
        if source is not None:
            self._reshape(node, source)
            return
        self._add(node, schema)

    def _reshape(self, node: fx.Node, source: fx.Node) -> None:
        """A call that only lays the elements of another value out anew."""
        type_ = self._type(node.meta.get("val"))
        assert type_ is not None
        name = self.names[node] = self._fresh(node.name)
        args: tuple[Arg, ...] = (self._convert(source, node), type_.shape)
        origin = self._origin(node, (name,), args, ())
        self.nodes.append(
            Node("aten.reshape.default", args, (), (name,), (type_,), origin, node in self.backward)
        )

    def _add(self, node: fx.Node, schema: _Schema) -> None:
        args, kwargs = self._arguments(node, schema)
        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            outs = tuple(self._fresh(f"{node.name}_{k}") for k in range(len(value)))
            types = tuple(self._type(v) for v in value)
            self.items[node] = outs
        elif isinstance(value, torch.Tensor):
            outs, types = (self._fresh(node.name),), (self._type(value),)
            self.names[node] = outs[0]
        else:
            raise self._refusal(node, f"the op {schema.name} gives a {type(value).__name__}, not a tensor")
        origin = self._origin(node, outs, args, kwargs)
        op = schema.name
        if op in RESHAPES and types[0] is not None:
            op, args = "aten.reshape.default", (args[0], types[0].shape)
        if op == "aten._to_copy.default" and not isinstance(args[0], Ref):
            op, args = "aten.full.default", ((), args[0])  # a number that torch took for a tensor
        self.nodes.append(Node(op, args, kwargs, outs, types, origin, node in self.backward))

    def _origin(self, node: fx.Node, outs: Sequence[str], args: Arg, kwargs: Arg) -> Origin:
        number = mark_of(node)
        if number is not None and number != COPY:
            origin = self.origins[number]
        else:
            result = [self.made[r] for r in _refs((args, kwargs)) if r in self.made]
            origin = max(result, key=_first)[1] if result else Origin()
        position = len(self.nodes)
        for out in outs:
            self.made[out] = (position, origin)
        return origin

    def _schema(self, target: torch._ops.OpOverload, node: fx.Node) -> _Schema:
        result = self.schemas.get(target)
        if result is None:
            schema = target._schema
            name = str(target)
            if schema.is_mutable:
                raise self._refusal(node, f"the op {name} writes in place and could not be made functional")
            result = self.schemas[target] = _Schema(
                name,
                tuple(a.name for a in schema.arguments),
                {a.name: a.default_value for a in schema.arguments if a.has_default_value()},
                any(a.name in PLACING for a in schema.arguments),
            )
        return result

    def _arguments(
        self, node: fx.Node, schema: _Schema
    ) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        positional = node.args
        named = node.kwargs
        if schema.placing and any(n in PLACING for n in schema.names[: len(positional)]):
            # what follows a dropped positional argument has to be named
            first = next(k for k, n in enumerate(schema.names) if n in PLACING)
            rest = zip(schema.names[first:], positional[first:], strict=False)
            named = {**dict(rest), **named}
            positional = positional[:first]
        args = tuple([self._convert(a, node) for a in positional])
        if not named:
            return args, ()
        kwargs = []
        for key, raw in named.items():
            if key in PLACING:
                continue
            if key in schema.defaults and not isinstance(raw, fx.Node) and _same(schema.defaults[key], raw):
                continue
            kwargs.append((key, self._convert(raw, node)))
        return args, tuple(kwargs)

    def _convert(self, value: object, node: fx.Node) -> Arg:
        if isinstance(value, fx.Node):
            name = self.names.get(value)
            if name is None:
                raise self._refusal(node, f"the op {node.target} uses {value.target}, which is not a tensor")
            return Ref(name)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return tuple([self._convert(v, node) for v in value])
        if isinstance(value, torch.dtype):
            return Dtype(_DTYPES[value]) if value in _DTYPES else self._unsupported(value, node)
        return self._unsupported(value, node)

    def _unsupported(self, value: object, node: fx.Node) -> Arg:
        what = f"the op {node.target} has the argument {value!r}, which programs cannot hold"
        raise self._refusal(node, what)

    def _refusal(self, node: fx.Node, what: str) -> CaptureError:
        number = mark_of(node)
        where = "" if number is None else self.origins[number].source
        return CaptureError(what, where=where, hint="rewrite the statement with plain tensor functions")

    def _results(self, output: fx.Node) -> tuple[Result, ...]:
        (values,) = output.args
        assert isinstance(values, tuple | list)
        results: list[Result] = []
        for value, (kind, position) in zip(values, self.traced.outputs, strict=True):
            if not isinstance(value, fx.Node):
                continue  # no gradient: the parameter is not used
            name = self.names[value]
            if kind == "output":
                results.append(Result(name, "output", str(self.ends.outputs[position])))
                continue
            port_kind, target, _ = self.ends.arguments[self.ends.given[position]]
            if kind == "grad" and port_kind in ("param", "input"):
                results.append(Result(name, "grad" if port_kind == "param" else "input_grad", target))
            elif kind == "mutation" and port_kind == "buffer":
                results.append(Result(name, "buffer", target))
            elif kind == "mutation" and port_kind == "param":
                raise _changed(port_kind, target)
        return tuple(results)

    def _used_ports(self, nodes: Sequence[Node], results: Sequence[Result]) -> tuple[Port, ...]:
        """All ports but unused constants and an unused dropout seed."""
        used = {r for n in nodes for r in _refs((n.args, n.kwargs))} | {r.value for r in results}
        return tuple(p for p in self.ports if p.name in used or not (p.kind == "const" or p.target == SEED))

    def _used_constants(self, ports: Sequence[Port]) -> dict[str, torch.Tensor]:
        return {p.target: self.constants[p.target] for p in ports if p.kind == "const"}


def _changed(kind: str, name: str) -> CaptureError:
    return CaptureError(
        f"the forward changes the {'parameter' if kind == 'param' else kind} {name} in place",
        why="parameters, frozen ones too, are changed by optimizers only",
        hint="change it outside of forward, or make it a buffer",
    )


#: target of the input port that dropout masks depend on
SEED = "seed"


def _first(pair: tuple[int, Origin]) -> int:
    return pair[0]


def _same(default: object, value: object) -> bool:
    return type(default) is type(value) and default == value


def _refs(arg: Arg) -> list[str]:
    result: list[str] = []
    _gather(arg, result.append)
    return result


def _gather(arg: Arg, add: Callable[[str], object]) -> None:
    if type(arg) is Ref:
        add(arg.name)
    elif type(arg) is tuple:
        for item in arg:
            _gather(item, add)


def _backward_nodes(graph: fx.Graph, traced: Traced) -> set[fx.Node]:
    """Nodes that need a tangent, and those made for the backward that no forward node uses."""
    reached: set[fx.Node] = set()
    tagged: list[fx.Node] = []
    kinds = iter(traced.inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            if next(kinds)[0] == "tangent":
                reached.add(node)
        elif node.op == "call_function":
            if any(n in reached for n in node.all_input_nodes):
                reached.add(node)
            elif is_tagged_backward(node):
                tagged.append(node)
    backward = set(reached)
    for node in reversed(tagged):
        if all(user in backward or user.op == "output" for user in node.users):
            backward.add(node)
    return backward


def _alive(nodes: Sequence[Node], results: Sequence[Result]) -> tuple[Node, ...]:
    """Nodes that some result needs, in order."""
    wanted = {r.value for r in results}
    kept: list[Node] = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outs):
            kept.append(node)
            _gather((node.args, node.kwargs), wanted.add)
    kept.reverse()
    return tuple(kept)


def identifier(text: str) -> str:
    """A Python name made from any text."""
    name = re.sub(r"\W+", "_", text).strip("_") or "x"
    return f"v_{name}" if name[0].isdigit() else name
