"""Parts of a segment that are segments of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from autoshard.ir import Graph, Node, Ref, refs_of
from autoshard.ir.collectives import is_collective
from autoshard.ir.lowered import Lowered, LoweredSegment


def sliced(
    segment: LoweredSegment, name: str, outputs: Sequence[str], given: Sequence[str], *, backward: bool
) -> LoweredSegment:
    """What makes ``outputs`` from a segment's inputs and the values given; all else is left out.

    given: values of the segment that become inputs, behind those of its own inputs that are still used.
    backward: the half of the program in which the part runs.
    """
    graph, stop = segment.graph, set(given)
    needed = set(outputs)
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(set(node.outs) - stop):
            nodes.append(node)
            needed.update(refs_of(node))
    nodes.reverse()
    types = graph.types()
    inputs = [n for n in dict.fromkeys((*(n for n, _ in graph.inputs), *given)) if n in needed]
    layouts = {n: segment.layouts[n] for n in inputs}
    built: list[Node] = []
    taken = set(types)
    for node in nodes:
        # of several outputs some may be given: those made anew beside the others go by another name
        outs = tuple(fresh(o, taken) if o in stop else o for o in node.outs)
        layouts |= {
            new: segment.layouts[old]
            for new, old in zip(outs, node.outs, strict=True)
            if old in segment.layouts
        }
        built.append(Node(node.op, node.args, node.kwargs, outs, node.types, node.origin, backward))
    part = Graph(name, tuple((n, types[n]) for n in inputs), tuple(built), tuple(outputs))
    whys = zip(built, nodes, strict=True)
    return LoweredSegment(
        part, layouts, {new.name: segment.why[old.name] for new, old in whys if old.name in segment.why}
    )


def without_dead(graph: Graph) -> Graph:
    """Without nodes that nothing uses."""
    wanted, kept = set(graph.outputs), list[Node]()
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outs):
            kept.append(node)
            wanted.update(refs_of(node))
    return Graph(graph.name, graph.inputs, tuple(reversed(kept)), graph.outputs)


def fresh(base: str, taken: set[str], ending: str = "again") -> str:
    """``base_again``, or a name like it that is not yet taken; it is taken afterwards."""
    name = next(n for n in _candidates(f"{base}_{ending}") if n not in taken)
    taken.add(name)
    return name


def _candidates(base: str) -> Iterator[str]:
    yield base
    k = 2
    while True:
        yield f"{base}{k}"
        k += 1


def roots_of(graph: Graph, views: Collection[str]) -> dict[str, str]:
    """Every value -> the value whose storage it shares: itself unless it is one of the ``views``."""
    roots = {name: name for name, _ in graph.inputs}
    for node in graph.nodes:
        source = next(refs_of(node), "")
        roots.update((out, roots[source] if out in views and source else out) for out in node.outs)
    return roots


def moved_inputs(graph: Graph) -> dict[str, str]:
    """Values that are an input placed in another way, by collectives alone -> that input; inputs, too."""
    result = {name: name for name, _ in graph.inputs}
    for node in graph.nodes:
        source = node.args[0] if is_collective(node) else None
        if isinstance(source, Ref) and source.name in result:
            result[node.name] = result[source.name]
    return result


def derived_values(
    lowered: Lowered, known: Collection[str], derives: Callable[[Node], bool]
) -> dict[str, set[str]]:
    """Segment -> its values that are some values of main, or made of them alone by ops that derive."""
    known = set(known)
    result: dict[str, set[str]] = {}

    def follow(nodes: Iterable[Node], own: set[str]) -> None:
        for node in nodes:
            if derives(node) and own.issuperset(refs_of(node)):
                own.update(node.outs)

    for item in lowered.main:
        if isinstance(item, Node):
            follow((item,), known)
            continue
        graph = lowered.segments[item.segment].graph
        own = result.setdefault(item.segment, set())
        own |= {n for (n, _), arg in zip(graph.inputs, item.args, strict=True) if arg in known}
        follow(graph.nodes, own)
        known |= {o for o, inner in zip(item.outs, graph.outputs, strict=True) if inner in own}
    return result
