"""Placements, and the sizes and offsets of what a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from autoshard.ir import LocalOffset, LocalSize
from autoshard.ir.placement import Partial, R, Shard
from autoshard.program.program import Program
from autoshard.simulate.op_work import product_of
from faults.edits import (
    pairs_of,
    replaced,
    sites,
    with_nodes,
)
from faults.fault import TEXT, Fault, Kind, rules


def off_by_one_size(program: Program) -> Iterator[Fault]:
    """A local size is one more than what the rank holds."""
    for name, number, node in sites(program):
        if node.op in ("aten.reshape.default", "aten.expand.default", "aten.full.default"):
            place = 0 if node.op == "aten.full.default" else 1
            shape = list(node.args[place])
            for dim, size in enumerate(shape):
                if isinstance(size, LocalSize):
                    shape[dim] = replace(size, size=size.size + 1)
                elif isinstance(size, int) and size > 1:
                    shape[dim] = size + 1
                else:
                    continue
                args = list(node.args)
                args[place] = tuple(shape)
                wrong = replace(node, args=tuple(args))
                yield Fault(
                    replaced(program, name, number, wrong), rules("arguments", "function"), (node.outs[0],)
                )
                break


def off_by_one_offset(program: Program) -> Iterator[Fault]:
    """A rank believes its shard to begin where that of a dim one longer would."""
    yield from _offsets(program, lambda offset: replace(offset, size=offset.size + 1))


def no_offset(program: Program) -> Iterator[Fault]:
    """Every rank believes its shard to begin at 0."""
    yield from _offsets(program, lambda offset: 0)


def _offsets(program: Program, change: Callable[[LocalOffset], Any]) -> Iterator[Fault]:
    def changed(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(changed(a) for a in arg)
        return change(arg) if isinstance(arg, LocalOffset) else arg

    for name, number, node in sites(program):
        wrong = replace(node, args=changed(node.args))
        if wrong.args != node.args:
            yield Fault(
                replaced(program, name, number, wrong), rules("arguments", "function"), (node.outs[0],)
            )


def wrong_exchange(program: Program) -> Iterator[Fault]:
    """Tokens go to the experts of another axis, or there is one expert more."""
    axes = [a.split("=")[0] for a in program.mesh.split(",")]
    for name, number, node in sites(program):
        if node.op in (
            "comm.expert_route.default",
            "comm.expert_dispatch.default",
            "comm.expert_combine.default",
        ):
            args = list(node.args)
            args[2] += 1
            yield Fault(
                replaced(program, name, number, replace(node, args=tuple(args))),
                rules("arguments", "function"),
                (node.outs[0],),
            )
            if len(axes) > 1:
                other = axes[(axes.index(node.args[1]) + 1) % len(axes)]
                wrong = replace(node, args=(node.args[0], other, *node.args[2:]))
                yield Fault(
                    replaced(program, name, number, wrong), rules("arguments", "function"), (node.outs[0],)
                )


def no_exchange(program: Program) -> Iterator[Fault]:
    """A rank's experts work on the tokens of this rank alone, or their sums stay where they are."""
    for name, number, node in sites(program):
        if node.op.startswith("comm.expert_"):
            yield Fault(
                replaced(program, name, number, product_of(node)),
                rules("arguments", "placement", "function"),
                (node.outs[0],),
            )


def wrong_placement(program: Program) -> Iterator[Fault]:
    """A value is said to be whole, or split along another dim, than it is."""
    for name, _, node in sites(program):
        if node.op.startswith("comm.") or node.types[0] is None:
            continue
        segment, out = program.lowered.segments[name], node.outs[0]
        layout, shape = segment.layouts[out], node.types[0].shape
        for axis, placed in enumerate(layout):
            if isinstance(placed, Shard) and len(shape) > 1:
                other: Any = Shard((placed.dim + 1) % len(shape))
            elif isinstance(placed, Partial):
                other = R
            else:
                continue
            layouts = {**segment.layouts, out: (*layout[:axis], other, *layout[axis + 1 :])}
            made = with_nodes(program, name, pairs_of(program, name), layouts=layouts)
            yield Fault(made, rules("placement", "partial", "arguments"), (out,))
            break


def wrong_port(program: Program) -> Iterator[Fault]:
    """A parameter is handed out along another dim than the program takes it."""
    for port in program.signature.ports:
        if port.kind != "param":
            continue
        placed = program.lowered.values[port.name]
        for axis, p in enumerate(placed.layout):
            if isinstance(p, Shard) and len(placed.type.shape) > 1:
                other = Shard((p.dim + 1) % len(placed.type.shape))
                layout = (*placed.layout[:axis], other, *placed.layout[axis + 1 :])
                values = {**program.lowered.values, port.name: replace(placed, layout=layout)}
                made = replace(program, lowered=replace(program.lowered, values=values))
                yield Fault(
                    made, rules("interface", "gradient", "shards", "collective"), (port.name, port.target)
                )
                break


def uncovered_port(program: Program) -> Iterator[Fault]:
    """The last elements of a parameter are held by nobody: the split counts too few."""
    for port in program.signature.ports:
        placed = program.lowered.values[port.name]
        for axis, p in enumerate(placed.layout):
            size = placed.type.shape[p.dim] if isinstance(p, Shard) else 0
            if port.kind == "param" and isinstance(p, Shard) and size > 2:
                other = Shard(p.dim, 1, size)
                layout = (*placed.layout[:axis], other, *placed.layout[axis + 1 :])
                values = {**program.lowered.values, port.name: replace(placed, layout=layout)}
                made = replace(program, lowered=replace(program.lowered, values=values))
                yield Fault(made, rules("shards"), (port.name,))
                break


KINDS: dict[str, Kind] = {
    "off-by-one local size": Kind(off_by_one_size, TEXT),
    "off-by-one offset": Kind(off_by_one_offset, ("vocabulary", "dropout")),
    "missing offset": Kind(no_offset, ("vocabulary", "dropout")),
    "wrong exchange of rows": Kind(wrong_exchange, ("exchange",)),
    "tokens not sent to their experts": Kind(no_exchange, ("exchange",)),
    "wrong placement": Kind(wrong_placement, TEXT),
    "parameter along another dim": Kind(wrong_port, TEXT),
    "parameter not covered": Kind(uncovered_port, TEXT),
}
