"""Which dims of a model's weights tensor parallelism divides, read off its graph.

The first product of an attention or feed-forward layer is divided by columns, the second by the rows that
meet them; embedding and head by the vocabulary (Shoeybi et al., Megatron-LM, 2019, section 3). No names: the
columns of one are the rows of another, so that both dims are of one class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.ir import refs_of
from autoshard.ir.flow import Place
from autoshard.search.problem.problem import Model

#: what looks rows up
_LOOKUP = "aten.embedding"


@dataclass(frozen=True)
class _Weight:
    """A matrix. other: (elements above, size, class) of every part of the dim that is not the hidden one,
    outermost first. looked_up: whether all that reads it looks rows up. in_layer: whether layers read it."""

    other: tuple[tuple[int, int, int], ...]
    looked_up: bool
    in_layer: bool


@dataclass(frozen=True)
class DividedClasses:
    """Classes of dims. hidden: of what goes between layers, of hidden_size elements. columns: those that
    tensor parallelism divides; layer_sizes: how long these are in layers."""

    hidden: frozenset[int]
    columns: frozenset[int]
    hidden_size: int
    layer_sizes: tuple[int, ...]


def divided_classes(model: Model) -> DividedClasses:
    """The dims of a model that tensor parallelism divides, and those that it leaves whole."""
    matrices = [
        (place, [model.digits.values.get((*place, dim), ()) for dim in (0, 1)])
        for place, group in model.flow.classes.items()
        if group.first.kind == "param" and len(group.first.type.shape) == 2
    ]
    atoms = Counter(dim[0][1:] for _, dims in matrices for dim in dims if len(dim) == 1)
    if not atoms:
        return DividedClasses(frozenset(), frozenset(), 0, ())
    hidden_size, hidden_class = atoms.most_common(1)[0][0]
    hidden = frozenset((hidden_class,))
    weights = list(_weights(model, matrices, hidden))
    often = Counter(cls for w in weights for cls in {cls for _, _, cls in w.other})
    columns: set[int] = set()
    sizes: set[int] = set()
    inside: set[int] = set()
    for weight in weights:
        shared = [(size, cls) for _, size, cls in weight.other if often[cls] > 1]
        if shared:
            columns.add(shared[0][1])
            inside.add(shared[0][0])
        elif len(weight.other) == 1 and not (weight.looked_up or weight.in_layer):
            # the head: no weight's rows meet the vocabulary
            columns.add(weight.other[0][2])
            sizes.add(weight.other[0][1])
    # an embedding has the rows of the head, which positions have not
    columns |= {w.other[0][2] for w in weights if w.looked_up and w.other and w.other[0][1] in sizes}
    return DividedClasses(hidden, frozenset(columns), hidden_size, tuple(sorted(inside)))


def _weights(
    model: Model, matrices: list[tuple[Place, list[tuple[tuple[int, int, int], ...]]]], hidden: frozenset[int]
) -> Iterator[_Weight]:
    layers = {call.segment for call in model.folded.calls if call.label and not call.backward}
    readers: dict[Place, list[tuple[str, str]]] = {}
    for source, (segment, value) in model.flow.edges:
        for node in model.folded.segments[segment].nodes if segment else ():
            if value in refs_of(node):
                readers.setdefault(source, []).append((segment, node.op))
    for place, dims in matrices:
        inside = [any(cls in hidden for _, _, cls in dim) for dim in dims]
        if inside[0] != inside[1]:
            read = readers.get(place, [])
            yield _Weight(
                tuple(sorted(dims[1] if inside[0] else dims[0])),
                all(op.startswith(_LOOKUP) for _, op in read),
                any(segment in layers for segment, _ in read),
            )
