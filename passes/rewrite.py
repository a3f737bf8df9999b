"""What rewrites of single nodes have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autoshard.ir import Arg, Node, Ref, TensorType
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, with_main

Types: TypeAlias = Mapping[str, TensorType]
Fresh: TypeAlias = Callable[[], str]
#: (node, types of all values, maker of names) -> the nodes that replace it, or None to keep it
Rewrite: TypeAlias = Callable[[Node, Types, Fresh], "list[Node] | None"]


def first_type(node: Node) -> TensorType:
    type_ = node.types[0]
    assert type_ is not None
    return type_


@dataclass
class Steps:
    """Collects the nodes that replace one node; each has the origin of the node that it serves."""

    node: Node
    fresh: Fresh
    made: list[Node] = field(default_factory=list)

    def add(
        self,
        op: str,
        args: tuple[Arg, ...],
        type_: TensorType,
        *,
        out: str | None = None,
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> Ref:
        """One call with one output; ``out``: its name, where it is an output of the replaced node."""
        return self.add_many(op, args, (type_,), outs=(out or self.fresh(),), kwargs=kwargs)

    def add_many(
        self,
        op: str,
        args: tuple[Arg, ...],
        types: Sequence[TensorType | None],
        *,
        outs: tuple[str, ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> Ref:
        """One call; the first of its outputs."""
        node = self.node
        self.made.append(Node(op, args, kwargs, outs, tuple(types), node.origin, node.backward))
        return Ref(outs[0])


#: name of a node -> what stands in its place, None for nothing
Replaced: TypeAlias = Mapping[str, "Node | None"]


def replaced_in_main(lowered: Lowered, result: Replaced) -> Lowered:
    """The program with other nodes in main."""

    def made(item: Instruction) -> list[Instruction]:
        new = result.get(item.name, item) if isinstance(item, Node) else item
        return [] if new is None else [new]

    gone = {o for i in lowered.main if not made(i) for o in i.outs}
    values = {n: placed for n, placed in lowered.values.items() if n not in gone}
    return replace(with_main(lowered, made), values=values)


def replaced_in(segment: LoweredSegment, result: Replaced) -> LoweredSegment:
    """The segment with other nodes."""
    nodes = tuple(new for n in segment.graph.nodes if (new := result.get(n.name, n)) is not None)
    left = {n for n, _ in segment.graph.inputs} | {o for n in nodes for o in n.outs}
    layouts = {n: layout for n, layout in segment.layouts.items() if n in left}
    return replace(segment, graph=replace(segment.graph, nodes=nodes), layouts=layouts)
