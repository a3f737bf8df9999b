"""What waits for the gradients of parameters where these are made apart from those of activations.

Schedules without bubbles ("Zero Bubble Pipeline Parallelism", Qi et al., ICLR'24) make gradients of
parameters later: until then they keep what those take, and nothing else of the microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from autoshard.ir import Folded, refs_of
from autoshard.ir.flow import Flow, Place

#: adds up gradients
_ADD = "aten.add.Tensor"


def read_late(folded: Folded, flow: Flow) -> frozenset[Place]:
    """What the ops take that make gradients of parameters, as the segments of backward call it.

    What merely reshapes or adds up gradients belongs to the ops before, as when a pipeline is cut
    (`passes.stages.gradient_owners`).
    """
    grads: dict[str, set[str]] = {}
    for group in flow.classes.values():
        for segment, value in group.grads:
            grads.setdefault(segment, set()).add(value)
    return frozenset((name, value) for name, own in grads.items() for value in _read(folded, name, own))


def _read(folded: Folded, name: str, grads: set[str]) -> Iterator[str]:
    nodes = folded.segments[name].nodes
    makers = {out: k for k, node in enumerate(nodes) for out in node.outs}
    users: Counter[str] = Counter(ref for node in nodes for ref in set(refs_of(node)))
    late: set[int] = set()
    left = list(grads)
    while left:
        number = makers.get(left.pop())
        if number is None or number in late:
            continue
        late.add(number)
        refs = set(refs_of(nodes[number]))
        if (len(refs) == 1 or nodes[number].op == _ADD) and all(users[r] == 1 for r in refs):
            left += refs
    for number in sorted(late):
        yield from (r for r in refs_of(nodes[number]) if makers.get(r) not in late)


def made_late(
    folded: Folded, flow: Flow, late: frozenset[Place], backward: Mapping[str, bool]
) -> dict[Place, int]:
    """Gradients of activations among what is read late: the place that makes one -> in how many calls.

    late: what is read late, views as what they are views of.
    """
    makers = {name: {o for node in g.nodes for o in node.outs} for name, g in folded.segments.items()}
    counts = folded.counts()
    numbers: dict[Place, int] = {}
    for segment, value in late:
        if backward[segment] and value in makers[segment]:
            numbers[segment, value] = counts[segment]
    for (source, target), count in flow.edges.items():
        if target in late and source[0] and backward[source[0]]:
            numbers[source] = max(count, numbers.get(source, 0))
    return numbers
