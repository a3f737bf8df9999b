"""Nodes and graphs.

A ``Graph`` is straight-line code: typed inputs, nodes in an order that respects their uses, named
outputs. Names are unique inside one graph. Nothing here is ever changed in place; a pass builds a
new graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from autoshard.ir.types import TensorType

#: what may stand as an argument: Ref, Dtype, LocalSize, LocalOffset, int, float, bool, str, None,
#: or a tuple of those
Arg: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value called ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from in the user's own code.

    fqn: module path (``layers.0.self_attn.q_proj``), "" for the root module.
    call: how many times that module had been called before, in this forward.
    source: ``file.py:line`` of the user's statement, "" if unknown.
    """

    fqn: str = ""
    call: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an op: ``outs = op(*args, **kwargs)``.

    op: ``namespace.name.overload``, for instance ``aten.mm.default`` or ``comm.all_gather.default``.
    outs, types: one name and one type per output tensor; a type is None where the op gives no tensor.
    backward: True if the node belongs to the backward half.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[str, ...]
    types: tuple[TensorType | None, ...]
    origin: Origin = Origin()
    backward: bool = False

    @property
    def name(self) -> str:
        return self.outs[0]

    def kwarg(self, key: str, default: Arg = None) -> Arg:
        for k, v in self.kwargs:
            if k == key:
                return v
        return default

    def arg(self, index: int, key: str | None = None, default: Arg = None) -> Arg:
        """The positional argument, or the keyword of that name, or the default."""
        if index < len(self.args):
            return self.args[index]
        return self.kwarg(key, default) if key else default


@dataclass(frozen=True)
class Graph:
    """A straight-line function over tensors."""

    name: str
    inputs: tuple[tuple[str, TensorType], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    def types(self) -> Mapping[str, TensorType]:
        """Type of every tensor value, inputs included."""
        return self._types

    @cached_property
    def _types(self) -> Mapping[str, TensorType]:
        table = dict(self.inputs)
        for node in self.nodes:
            for name, type_ in zip(node.outs, node.types, strict=True):
                if type_ is not None:
                    table[name] = type_
        return table


def refs_of(arg: Arg) -> Iterator[str]:
    """Names of all values used in an argument, a tuple of arguments, or a node, in order."""
    result: list[str] = []
    if isinstance(arg, Node):
        _collect(arg.args, result)
        for _, item in arg.kwargs:
            _collect((item,), result)
    else:
        _collect((arg,), result)
    return iter(result)


def _collect(args: tuple[Arg, ...], result: list[str]) -> None:
    for arg in args:
        if type(arg) is Ref:
            result.append(arg.name)
        elif type(arg) is tuple:
            _collect(arg, result)


def form_of(
    arg: Arg, ref: Callable[[str], Hashable], number: Callable[[float], Hashable] | None = None
) -> Hashable:
    """Equal for equal arguments; 1, 1.0 and True are not. ref: what stands for a value. number: for a
    fraction, if not the fraction itself."""
    if type(arg) is Ref:
        return ref(arg.name)
    if type(arg) is tuple:
        return tuple([form_of(item, ref, number) for item in arg])
    return number(arg) if number is not None and type(arg) is float else (type(arg), arg)


def _map(arg: Arg, fn: Callable[[str], Arg]) -> Arg:
    if type(arg) is Ref:
        return fn(arg.name)
    if type(arg) is tuple:
        return tuple([_map(item, fn) for item in arg])
    return arg


def substitute(
    node: Node, fn: Callable[[str], Arg], *, outs: tuple[str, ...] | None = None, origin: Origin | None = None
) -> Node:
    """The node with every use replaced by ``fn(name)``; with other outs and another origin if given."""
    # built directly: dataclasses.replace takes several times as long, and big graphs have many nodes
    return Node(
        node.op,
        tuple([_map(a, fn) for a in node.args]),
        tuple([(k, _map(v, fn)) for k, v in node.kwargs]) if node.kwargs else (),
        node.outs if outs is None else outs,
        node.types,
        node.origin if origin is None else origin,
        node.backward,
    )


def renamed(nodes: Sequence[Node], names: Mapping[str, str]) -> tuple[Node, ...]:
    """Nodes with other names for some values."""
    return tuple(
        substitute(n, lambda v: Ref(names.get(v, v)), outs=tuple([names.get(o, o) for o in n.outs]))
        for n in nodes
    )
