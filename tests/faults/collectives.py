"""Collectives that are missing, late, repeated, or others than those that are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.ir import Node, Ref, refs_of, substitute
from autoshard.program.program import Program
from faults.edits import (
    SINGLE,
    dropped,
    pairs_of,
    replaced,
    sites,
    used,
    with_main,
    with_nodes,
)
from faults.fault import TEXT, Fault, Kind, rules


def drop_collective(program: Program) -> Iterator[Fault]:
    """A collective is left out: what comes before it is used in its place."""
    for name, number, node in sites(program):
        if node.op in SINGLE and used(program, name, node.outs[0]):
            made = dropped(program, name, number, next(refs_of(node)))
            yield Fault(made, rules("placement", "partial", "interface", "collective", "arguments"), (name,))
    for number, item in enumerate(program.lowered.main):
        if isinstance(item, Node) and item.op.startswith("comm.") and len(item.outs) > 1:
            # one gradient of a bucket
            keep = item.args[2][1:] if len(item.args) > 2 else None
            args = (item.args[0][1:], item.args[1], *((keep,) if keep is not None else ()))
            short = replace(item, args=args, outs=item.outs[1:], types=item.types[1:])
            main = [short if k == number else i for k, i in enumerate(program.lowered.main)]
            yield Fault(with_main(program, main), rules("result", "function"), (item.outs[0],))


def duplicate_collective(program: Program) -> Iterator[Fault]:
    """A reduction is done twice."""
    for name, number, node in sites(program):
        if node.op == "comm.all_reduce.default":
            pairs = pairs_of(program, name)
            again, note = f"{node.outs[0]}_twice", pairs[number][1]
            first = replace(node, outs=(again,))
            second = replace(node, args=(Ref(again), *node.args[1:]))
            pairs[number : number + 1] = [(first, note), (second, note)]
            segment = program.lowered.segments[name]
            layouts = {**segment.layouts, again: segment.layouts[node.outs[0]]}
            yield Fault(
                with_nodes(program, name, pairs, layouts=layouts), rules("collective"), (node.outs[0],)
            )
    for number, item in enumerate(program.lowered.main):
        if isinstance(item, Node) and item.op == "comm.all_reduce_bucket.default":
            values = dict(program.lowered.values)
            early = tuple(f"{o}_twice" for o in item.outs)
            values.update({e: values[o] for e, o in zip(early, item.outs, strict=True)})
            main = list(program.lowered.main)
            second = replace(item, args=(tuple(map(Ref, early)), *item.args[1:]))
            main[number : number + 1] = [replace(item, outs=early), second]
            parts = [
                replace(p, start=p.start + (p.start > number), stop=p.stop + (p.stop > number))
                for p in program.lowered.parts
            ]
            made = with_main(program, main, parts, values)
            yield Fault(made, rules("collective"), item.outs)


def late_collective(program: Program) -> Iterator[Fault]:
    """A collective comes after what needs it: one use takes what comes before the collective."""
    for name, number, node in sites(program):
        if node.op not in SINGLE:
            continue
        source = next(refs_of(node))
        for place, other in enumerate(program.lowered.segments[name].graph.nodes):
            if place > number and node.outs[0] in refs_of(other) and not other.op.startswith("comm."):
                early = substitute(other, lambda v, s=source, n=node: Ref(s if v == n.outs[0] else v))  # type: ignore[misc]
                yield Fault(
                    replaced(program, name, place, early),
                    rules("placement", "partial", "arguments"),
                    (other.outs[0],),
                )
                break


def wrong_axis(program: Program) -> Iterator[Fault]:
    """A collective over the other axis of the mesh: another group of ranks."""
    axes = [a.split("=")[0] for a in program.mesh.split(",")]
    if len(axes) < 2:
        return
    for name, number, node in sites(program):
        if node.op in SINGLE:
            other = axes[(axes.index(node.args[1]) + 1) % len(axes)]
            wrong = replace(node, args=(node.args[0], other, *node.args[2:]))
            yield Fault(replaced(program, name, number, wrong), rules("collective"), (node.outs[0],))
    for number, item in enumerate(program.lowered.main):
        if isinstance(item, Node) and item.op.startswith("comm."):
            other = axes[(axes.index(item.args[1]) + 1) % len(axes)]
            main = list(program.lowered.main)
            main[number] = replace(item, args=(item.args[0], other, *item.args[2:]))
            yield Fault(with_main(program, main), rules("collective"), item.outs)


def wrong_reduction(program: Program) -> Iterator[Fault]:
    """The largest in place of the sum, or the other way."""
    for name, number, node in sites(program):
        if node.op == "comm.all_reduce.default":
            other = () if node.kwargs else (("op", "max"),)
            wrong = replace(node, kwargs=other)
            yield Fault(replaced(program, name, number, wrong), rules("collective"), (node.outs[0],))


def wrong_dim(program: Program) -> Iterator[Fault]:
    """A gather, scatter or slice along another dim."""
    for name, number, node in sites(program):
        if node.op in ("comm.all_gather.default", "comm.reduce_scatter.default", "comm.slice.default"):
            type_ = node.types[0]
            assert type_ is not None
            if len(type_.shape) > 1:
                dim = (node.args[2] + 1) % len(type_.shape)
                wrong = replace(node, args=(*node.args[:2], dim))
                yield Fault(replaced(program, name, number, wrong), rules("collective"), (node.outs[0],))


def wrong_collective(program: Program) -> Iterator[Fault]:
    """A slice in place of a gather, an all-reduce in place of a reduce-scatter."""
    swap = {
        "comm.all_gather.default": "comm.slice.default",
        "comm.slice.default": "comm.all_gather.default",
        "comm.reduce_scatter.default": "comm.slice.default",
    }
    for name, number, node in sites(program):
        if node.op in swap:
            wrong = replace(node, op=swap[node.op])
            yield Fault(replaced(program, name, number, wrong), rules("collective"), (node.outs[0],))


def swapped_bucket(program: Program) -> Iterator[Fault]:
    """Two values of one message change places."""
    for number, item in enumerate(program.lowered.main):
        if isinstance(item, Node) and item.op.endswith("_bucket.default"):
            for a, b in _alike(item):
                outs = list(item.outs)
                outs[a], outs[b] = outs[b], outs[a]
                main = list(program.lowered.main)
                main[number] = replace(item, outs=tuple(outs))
                near = (item.outs[a], item.outs[b])
                yield Fault(with_main(program, main), rules("gradient", "collective", "interface"), near)
                break
    for name, number, node in sites(program):
        if node.op.endswith("_bucket.default"):
            for a, b in _alike(node):
                outs = list(node.outs)
                outs[a], outs[b] = outs[b], outs[a]
                made = replaced(program, name, number, replace(node, outs=tuple(outs)))
                # told where it is first used, or where it ends
                yield Fault(made, rules("gradient", "collective", "function"), ())
                break


def _alike(node: Node) -> Iterator[tuple[int, int]]:
    for a in range(len(node.outs)):
        for b in range(a + 1, len(node.outs)):
            if node.types[a] == node.types[b]:
                yield a, b


KINDS: dict[str, Kind] = {
    "drop a collective": Kind(drop_collective, TEXT),
    "duplicate a collective": Kind(duplicate_collective, TEXT),
    "collective after its use": Kind(late_collective, TEXT),
    "wrong axis (group)": Kind(wrong_axis, ("flat", "experts", "pipeline")),
    "wrong reduction": Kind(wrong_reduction, TEXT),
    "wrong dim": Kind(wrong_dim, TEXT),
    "wrong collective": Kind(wrong_collective, TEXT),
    "swapped values of a message": Kind(swapped_bucket, ("flat", "experts", "pipeline")),
}
