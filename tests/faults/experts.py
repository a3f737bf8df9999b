"""Gradients of experts that are counted by the wrong ranks, chunks of tokens that are mixed up, and rows that
are grouped wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autoshard.cluster.mesh import Mesh
from autoshard.ir import Arg, Node, Ref, refs_of, substitute
from autoshard.ir.placement import Shard
from autoshard.ir.similar_rows import LSH_GROUPS, UNGROUP
from autoshard.program.program import Program
from faults.edits import pairs_of, replaced, sites, with_nodes
from faults.fault import Fault, Kind, rules


def scaled_gradient(program: Program) -> Iterator[Fault]:
    """Gradients of experts are divided by the number of ranks that experts are divided over."""
    yield from _after_products(program, lambda axis, ways: ("aten.div.Tensor", (float(ways),)))


def summed_gradient(program: Program) -> Iterator[Fault]:
    """Gradients of experts are summed over ranks that have other experts."""
    yield from _after_products(program, lambda axis, ways: ("comm.all_reduce.default", (axis,)))


def _after_products(
    program: Program, change: Callable[[str, int], tuple[str, tuple[Arg, ...]]]
) -> Iterator[Fault]:
    """Put an op (of name and further arguments) behind each gradient of matrices of experts."""
    axes = Mesh.parse(program.mesh).axes
    for name, number, node in sites(program):
        if node.op != "autoshard.expert_outer.default":
            continue
        layout = program.lowered.segments[name].layouts[node.outs[0]]
        for axis, placed in zip(axes, layout, strict=True):
            if isinstance(placed, Shard) and placed.dim == 0:
                op, more = change(axis.name, axis.size)
                made = f"{node.outs[0]}_counted"
                pairs = pairs_of(program, name)
                first = replace(node, outs=(made,))
                wrong = Node(op, (Ref(made), *more), (), node.outs, node.types, node.origin, node.backward)
                pairs[number : number + 1] = [(first, pairs[number][1]), (wrong, pairs[number][1])]
                layouts = {**program.lowered.segments[name].layouts, made: layout}
                yield Fault(
                    with_nodes(program, name, pairs, layouts=layouts),
                    rules("function", "collective", "gradient", "partial", "placement", "result"),
                    (),
                )


def other_chunk(program: Program) -> Iterator[Fault]:
    """What is made of the tokens of one chunk goes by the slots of another."""
    for name, number, node in sites(program):
        refs = list(refs_of(node))
        routes = [r for r in refs if r.startswith("route") and "_c0" in r]
        if "expert" in node.op and routes and node.op != "comm.expert_route.default":
            other = {routes[-1]: routes[-1].replace("_c0", "_c1")}
            wrong = substitute(node, lambda r, other=other: Ref(other.get(r, r)))
            yield Fault(replaced(program, name, number, wrong), rules("function"), (node.outs[0],))


def lost_chunk(program: Program) -> Iterator[Fault]:
    """The gradient of the matrices of experts is that of one chunk, twice."""
    for name, number, node in sites(program):
        first = next(refs_of(node), "")
        if node.op == "aten.add.Tensor" and first.startswith("expert_outer"):
            wrong = replace(node, args=(Ref(first), Ref(first)))
            yield Fault(replaced(program, name, number, wrong), rules("gradient"), ("expert_outer",))


def no_difference(program: Program) -> Iterator[Fault]:
    """What a row differs by from the mean of its group is left out."""
    for name, number, node in sites(program):
        if node.op != UNGROUP:
            continue
        segment, pairs = program.lowered.segments[name], pairs_of(program, name)
        types, layouts = segment.graph.types(), dict(segment.layouts)
        zeros = {ref.name: f"{ref.name}_left_out" for ref in node.args[1:3]}
        layouts |= {new: layouts[old] for old, new in zeros.items()}
        made = [
            Node("aten.mul.Tensor", (Ref(old), 0.0), (), (new,), (types[old],), node.origin, node.backward)
            for old, new in zeros.items()
        ]
        wrong = substitute(node, lambda r, zeros=zeros: Ref(zeros.get(r, r)))
        pairs[number : number + 1] = [(n, pairs[number][1]) for n in (*made, wrong)]
        yield Fault(with_nodes(program, name, pairs, layouts=layouts), rules("function"), (*zeros.values(),))


def other_hash(program: Program) -> Iterator[Fault]:
    """Rows are grouped by other hashes."""
    for name, number, node in sites(program):
        if node.op == LSH_GROUPS:
            wrong = replace(node, args=(*node.args[:4], node.args[4] + 1))
            yield Fault(
                replaced(program, name, number, wrong), rules("arguments", "function"), (node.outs[0],)
            )


KINDS = {
    "differences from means of groups left out": Kind(no_difference, ("grouped",)),
    "rows grouped by other hashes": Kind(other_hash, ("grouped",)),
    "slots of another chunk": Kind(other_chunk, ("chunks",)),
    "gradient of a chunk lost": Kind(lost_chunk, ("chunks",)),
    "gradients of experts scaled": Kind(scaled_gradient, ("exchange",)),
    "gradients of experts summed over other experts": Kind(summed_gradient, ("exchange",)),
}
