"""Gather the cast of a value in place of the value, where nothing else is made of it (`ir.scaled`).

The search gathers a parameter, and its cast is made of the whole. Where the scales of what a rank holds are
those of the whole (of its rows, or of blocks that no shard cuts), a rank casts its shard, and what is
gathered is codes and scales: half the bytes of bf16. One scale for a tensor, or for columns that are cut,
would first have to be reduced over ranks: there the value is gathered as it is. Of 4 bits, whose blocks have
scales beside the one of the tensor, it is reduced: a number for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from autoshard.ir import Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import ALL_GATHER, ALL_REDUCE, TensorTransfer, collective
from autoshard.ir.lowered import Lowered, LoweredSegment
from autoshard.ir.names import fresh_name
from autoshard.ir.placement import Layout, Partial, Shard
from autoshard.ir.scaled import AMAX_SCALE, BLOCK_SCALE, CAST_PACKED, CAST_SCALED
from autoshard.passes.rewrite import first_type

#: casts -> what makes the scales that are gathered with them
_SCALES = MappingProxyType({CAST_SCALED: AMAX_SCALE, CAST_PACKED: BLOCK_SCALE})


def narrow_gathers(lowered: Lowered, sizes: Sequence[int]) -> Lowered:
    """The program with such gathers. sizes: of the axes of the mesh."""
    return replace(lowered, segments={n: _segment(s, sizes) for n, s in lowered.segments.items()})


@dataclass(frozen=True)
class _Cast:
    """A value that is gathered, one gather after the other, and then cast once.

    whole: makes the scale of all of it, where there are scales of blocks beside it.
    """

    source: str
    gathers: tuple[Node, ...]
    scale: Node
    cast: Node
    whole: Node | None


def _segment(segment: LoweredSegment, sizes: Sequence[int]) -> LoweredSegment:
    graph = segment.graph
    result = [c for c in _casts(graph) if _is_local(c, graph.types()[c.source], segment.layouts, sizes)]
    if not result:
        return segment
    taken, layouts = set(segment.layouts) | set(graph.types()), dict(segment.layouts)
    instead: dict[str, list[Node]] = {}
    for each in result:
        instead |= {n.name: [] for n in (*each.gathers, each.scale, each.cast)}
        new = _narrowed(each, layouts, taken)
        if each.whole is None:
            instead[each.gathers[0].name] = new
        else:  # between the two, the scale of all is reduced over other axes
            instead[each.whole.name] = _whole(each, each.whole, layouts, taken)
            instead[each.scale.name] = new
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
        if node.op not in _SCALES:
            continue
        value, scale = node.args[0].name, makers.get(node.args[1].name)
        if scale is None or scale.op != _SCALES[node.op] or scale.args[0] != node.args[0]:
            continue
        whole = _maker_of_whole(node, makers) if node.op == CAST_PACKED else None
        gathers: list[Node] = []
        wanted = [scale, node] if whole is None else [whole, scale, node]
        while (new := makers.get(value)) is not None and new.op == ALL_GATHER.op:
            if value in graph.outputs or users[value] != wanted:
                break
            gathers.insert(0, new)
            value, wanted = new.args[0].name, [new]
        if gathers:
            result.append(_Cast(value, tuple(gathers), scale, node, whole))
    return result


def _maker_of_whole(cast: Node, makers: Mapping[str, Node]) -> Node | None:
    """What makes the scale of all of a value, before it is reduced."""
    node = makers.get(cast.args[3].name)
    while node is not None and node.op == ALL_REDUCE.op:
        node = makers.get(node.args[0].name)
    return node


def _is_local(each: _Cast, type_: TensorType, layouts: Mapping[str, Layout], sizes: Sequence[int]) -> bool:
    """Whether the scales of a shard are a shard of the scales, and codes with scales are fewer bytes."""
    split = [(p, n) for p, n in zip(layouts[each.source], sizes, strict=True) if isinstance(p, Shard)]
    if first_type(each.cast).nbytes + first_type(each.scale).nbytes >= type_.nbytes:
        return False
    if each.whole is not None:
        ways = [prod(n for p, n in split if p.dim == dim) for dim in range(2)]
        blocks = zip(type_.shape, each.scale.args[3], ways, strict=True)
        return all(p.outer == p.inner == 1 for p, _ in split) and not any(n % (b * w) for n, b, w in blocks)
    along, block = each.scale.args[1:3]
    if along is None:
        return False
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


def _whole(each: _Cast, whole: Node, layouts: dict[str, Layout], taken: set[str]) -> list[Node]:
    """The scale of a shard, and the largest over the axes along which the value was gathered."""
    shard = fresh_name(f"{whole.name}_shard", taken)
    result = [replace(whole, args=(Ref(each.source), *whole.args[1:]), outs=(shard,))]
    before, after, at = (layouts[n] for n in (each.source, each.gathers[-1].name, whole.name))

    def pending(now: Layout) -> Layout:
        return tuple(Partial("max") if now[k] != after[k] else p for k, p in enumerate(at))

    layouts[shard], value = pending(before), shard
    for number, gather in enumerate(each.gathers, 1):
        out = whole.name if number == len(each.gathers) else fresh_name(f"{whole.name}_part", taken)
        layouts[out], moved = pending(layouts[gather.name]), (TensorTransfer(value, out, ()),)
        told = gather.args[1], moved, whole.types, gather.origin, gather.backward
        result.append(collective("all_reduce", *told, reduce="max"))
        value = out
    return result
