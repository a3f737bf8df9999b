"""Gather the cast of a value in place of the value, where nothing else is made of it (`ir.scaled`).

The search gathers a parameter, and its cast is made of the whole. Where the scales of what a rank holds are
those of the whole (of its rows, or of blocks that no shard cuts), a rank casts its shard, and what is
gathered is codes and scales: half the bytes of bf16. One scale for a tensor, or for columns that are cut,
would first have to be reduced over ranks: there the value is gathered as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoshard.ir import Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import ALL_GATHER
from autoshard.ir.lowered import Lowered, LoweredSegment
from autoshard.ir.names import fresh_name
from autoshard.ir.placement import Layout, Shard
from autoshard.ir.scaled import AMAX_SCALE, CAST_SCALED
from autoshard.passes.rewrite import first_type


def narrow_gathers(lowered: Lowered, sizes: Sequence[int]) -> Lowered:
    """The program with such gathers. sizes: of the axes of the mesh."""
    return replace(lowered, segments={n: _segment(s, sizes) for n, s in lowered.segments.items()})


@dataclass(frozen=True)
class _Cast:
    """A value that is gathered, one gather after the other, and then cast once."""

    source: str
    gathers: tuple[Node, ...]
    scale: Node
    cast: Node


def _segment(segment: LoweredSegment, sizes: Sequence[int]) -> LoweredSegment:
    graph = segment.graph
    result = [c for c in _casts(graph) if _is_local(c, graph.types()[c.source], segment.layouts, sizes)]
    if not result:
        return segment
    taken, layouts = set(segment.layouts) | set(graph.types()), dict(segment.layouts)
    instead: dict[str, list[Node]] = {}
    for each in result:
        instead |= {n.name: [] for n in (*each.gathers, each.scale, each.cast)}
        instead[each.gathers[0].name] = _narrowed(each, layouts, taken)
    nodes = [new for node in graph.nodes for new in instead.get(node.name, [node])]
    built = replace(graph, nodes=tuple(nodes))
    left = {n for n, _ in built.inputs} | {o for n in nodes for o in n.outs}
    return replace(segment, graph=built, layouts={n: lay for n, lay in layouts.items() if n in left})


def _casts(graph: Graph) -> list[_Cast]:
    users: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in refs_of(node):
            users.setdefault(name, []).append(node)
    makers = {n.name: n for n in graph.nodes}
    result: list[_Cast] = []
    for node in graph.nodes:
        if node.op != CAST_SCALED:
            continue
        value, scale = node.args[0].name, makers.get(node.args[1].name)
        if scale is None or scale.op != AMAX_SCALE or scale.args[0] != node.args[0]:
            continue
        gathers: list[Node] = []
        wanted = [scale, node]
        while (new := makers.get(value)) is not None and new.op == ALL_GATHER.op:
            if value in graph.outputs or users[value] != wanted:
                break
            gathers.insert(0, new)
            value, wanted = new.args[0].name, [new]
        if gathers:
            result.append(_Cast(value, tuple(gathers), scale, node))
    return result


def _is_local(each: _Cast, type_: TensorType, layouts: Mapping[str, Layout], sizes: Sequence[int]) -> bool:
    """Whether the scales of a shard are a shard of the scales, and codes with scales are fewer bytes."""
    along, block, scales = each.scale.args[1], each.scale.args[2], first_type(each.scale)
    if first_type(each.cast).nbytes + scales.nbytes >= type_.nbytes or along is None:
        return False
    split = [(p, n) for p, n in zip(layouts[each.source], sizes, strict=True) if isinstance(p, Shard)]
    cut = [(p, n) for p, n in split if p.dim == along]
    if not cut:
        return True
    plain = all(p.outer == p.inner == 1 for p, _ in cut)
    return bool(block) and plain and type_.shape[along] % (block * prod(n for _, n in cut)) == 0


def _narrowed(each: _Cast, layouts: dict[str, Layout], taken: set[str]) -> list[Node]:
    """A shard cast, and its scales and codes gathered. layouts, taken: of all values; new ones are added."""
    at = layouts[each.source]
    names = {n.name: fresh_name(f"{n.name}_shard", taken) for n in (each.scale, each.cast)}
    layouts[names[each.scale.name]], layouts[names[each.cast.name]] = at, at
    source, out = Ref(each.source), names[each.cast.name]
    scale = replace(each.scale, args=(source, *each.scale.args[1:]), outs=(names[each.scale.name],))
    codes = replace(each.cast, args=(source, Ref(scale.name), *each.cast.args[2:]), outs=(out,))
    return [
        scale,
        codes,
        *_gathered(scale, each.scale.name, each.gathers, layouts, taken),
        *_gathered(codes, each.cast.name, each.gathers, layouts, taken),
    ]


def _gathered(
    shard: Node, name: str, gathers: Sequence[Node], layouts: dict[str, Layout], taken: set[str]
) -> list[Node]:
    """A shard gathered as what it is made of was, the last one under a name."""
    result: list[Node] = []
    value = shard.name
    for number, gather in enumerate(gathers, 1):
        out = name if number == len(gathers) else fresh_name(f"{name}_part", taken)
        layouts[out] = layouts[gather.name]
        result.append(replace(gather, args=(Ref(value), *gather.args[1:]), outs=(out,), types=shard.types))
        value = out
    return result
