"""The placements of Megatron-LM, as masks over the states of a problem.

Weights of a layer are divided by columns, then by rows; embedding, head and loss by the vocabulary; all else
is whole on every tensor rank (Shoeybi et al., 2019, section 3), or, with sequence parallelism, divided along
the sequence between layers (Korthikanti et al., MLSys 2023, section 4.2). What ZeRO divides over ``fsdp``
axes is said by its stage (Rajbhandari et al., SC'20, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autoshard.ir import Node, refs_of
from autoshard.ir.flow import Place
from autoshard.ir.placement import Layout, Partial, R, Shard
from autoshard.search.problem.decisions import (
    NodeVar,
    ParamState,
    ParamVar,
    PortVar,
    ResultVar,
    ValueVar,
    Variable,
)
from autoshard.search.problem.problem import Model
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.solver.network import Array
from autoshard.validate.columns import divided_classes

S = TypeVar("S")


@dataclass(frozen=True)
class RunPlacement:
    """What a run's code does. tensor, shards: axes of the mesh over which layers, and what ZeRO divides, are.

    sequence: whether activations between layers are divided along the sequence over the tensor axis. owners:
    the axis among whose ranks experts are divided.
    """

    tensor: int | None
    shards: tuple[int, ...]
    zero: int
    sequence: bool
    owners: int | None = None


@dataclass(frozen=True)
class Masks:
    """Per variable 0 or inf for each state, None for no restriction. notes: what could not be had."""

    allowed: tuple[Array | None, ...]
    notes: tuple[str, ...]


def masks_of(formulated: ShardingProblem, placement: RunPlacement) -> Masks:
    """The states that a run's code may be in, on a mesh whose axes the search sees one by one."""
    return _Masks(formulated, placement).run()


class _Masks:
    def __init__(self, formulated: ShardingProblem, placement: RunPlacement) -> None:
        self.formulated, self.run_placement = formulated, placement
        self.model: Model = formulated.model
        self.digits = self.model.digits.values
        self.batch = self.model.digits.batch
        classes = divided_classes(self.model)
        self.hidden, self.columns = set(classes.hidden), set(classes.columns)
        self.sequence = self._sequence() - self.columns
        self.notes: list[str] = []
        #: segment -> value -> what makes it
        self.makers: dict[str, dict[str, Node]] = {}
        self.ends = self._ends()

    def run(self) -> Masks:
        allowed = tuple(self.formulated.problem.masks(self._variable))
        return Masks(allowed, tuple(dict.fromkeys(self.notes)))

    # -- classes of dims ---------------------------------------------------------------------------

    def _sequence(self) -> set[int]:
        """Classes of the other dims of what a layer is handed."""
        layers = {c.segment for c in self.model.folded.calls if c.label and not c.backward}
        values: set[int] = set()
        for source, target in self.model.flow.edges:
            if source[0] and target[0] in layers:
                rank = len(self.model.folded.segments[target[0]].types()[target[1]].shape)
                per_dim = [{c for _, _, c in self.digits.get((*target, d), ())} for d in range(rank)]
                if rank > 1 and per_dim[-1] & self.hidden:
                    values |= set().union(*per_dim[:-1])
        return values - self.batch

    def _ends(self) -> set[Place]:
        """Values that enter or leave a segment."""
        return {
            (name, value)
            for name, graph in self.model.folded.segments.items()
            for value in (*(v for v, _ in graph.inputs), *graph.outputs)
        }

    # -- what a value may be -----------------------------------------------------------------------

    def _parts(self, place: Place, dims: int, classes: set[int]) -> list[tuple[int, int]]:
        """(dim, elements above) of the parts of a value that belong to some classes."""
        return [
            (dim, outer)
            for dim in range(dims)
            for outer, _, cls in self.digits.get((*place, dim), ())
            if cls in classes
        ]

    def _fine(self, place: Place, dims: int, layout: Layout | None, *, strict: bool) -> bool:
        """Whether a value may lie so on the tensor axis.

        strict: it is not a copy for a product that needs it whole.
        """
        axis = self.run_placement.tensor
        if layout is None or axis is None:
            return True
        placement = layout[axis]
        columns = self._parts(place, dims, self.columns)
        if columns:
            return isinstance(placement, Shard) and (placement.dim, placement.outer) in columns
        along = self._parts(place, dims, self.sequence)
        if isinstance(placement, Shard):
            return self.run_placement.sequence and (placement.dim, placement.outer) in along
        between = bool(along) and bool(self._parts(place, dims, self.hidden))
        if not (self.run_placement.sequence and between and strict):
            return True
        return isinstance(placement, Partial)

    # -- variables ---------------------------------------------------------------------------------

    def _variable(self, variable: Variable) -> Array | None:
        match variable:
            case NodeVar():
                return self._node(variable)
            case ValueVar():
                dims = len(self._shape(variable.place))
                strict = variable.place in self.ends
                keep: list[Callable[[Layout], bool]] = [
                    lambda lay: self._fine(variable.place, dims, lay, strict=strict)
                ]
                return self._narrowed(str(variable.place[1]), variable.states, keep)
            case ParamVar():
                return self._param(variable)
            case PortVar() | ResultVar():
                return None

    def _shape(self, place: Place) -> tuple[int, ...]:
        return self.model.folded.segments[place[0]].types()[place[1]].shape

    def _node(self, variable: NodeVar) -> Array | None:
        name, node = variable.segment, self.model.folded.segments[variable.segment].nodes[variable.number]
        types = self.model.folded.segments[name].types()
        ins = [(ref, len(types[ref].shape)) for ref in refs_of(node)]
        outs = [(out, 0 if t is None else len(t.shape)) for out, t in zip(node.outs, node.types, strict=True)]
        # what a product gathers is a copy of what the op before it made
        computes = not node.op.startswith(_VIEWS)
        ok = [
            all(
                self._fine((name, v), n, lay, strict=False) for (v, n), lay in zip(ins, s.inputs, strict=True)
            )
            and all(
                self._fine((name, v), n, lay, strict=computes)
                for (v, n), lay in zip(outs, s.outputs, strict=True)
            )
            for s in variable.states
        ]
        axis = self.run_placement.tensor
        if axis is not None and node.op == _SUM and self._adds_products(variable.segment, node):
            # one product of the code, or several that are added before they are reduced
            pending = [all(isinstance(lay[axis], Partial) for lay in s.inputs) for s in variable.states]
            both = [o and p for o, p in zip(ok, pending, strict=True)]
            ok = both if any(both) else ok
        rule, owners = self.model.rules[name, variable.number], self.run_placement.owners
        if owners is not None and rule.exchange:
            sent = [rule.exchanged(s.inputs, s.outputs) == owners for s in variable.states]
            ok = [o and s for o, s in zip(ok, sent, strict=True)]
        return self._mask(f"{node.op} {node.origin.fqn}", ok)

    def _adds_products(self, segment: str, total: Node) -> bool:
        """Whether a sum is one of two products over columns, or of such sums."""
        if segment not in self.makers:
            nodes = self.model.folded.segments[segment].nodes
            self.makers[segment] = {out: node for node in nodes for out in node.outs}
        makers = self.makers[segment]

        def made_by(name: str) -> Node | None:
            node = makers.get(name)
            while node is not None and node.op.startswith(_VIEWS):
                node = makers.get(next(iter(refs_of(node))))
            return node

        types = self.model.folded.segments[segment].types()

        def has_columns(name: str) -> bool:
            return bool(self._parts((segment, name), len(types[name].shape), self.columns))

        def is_partial(node: Node | None) -> bool:
            if node is None or node.op not in (_PRODUCT, _SUM):
                return False
            refs = list(refs_of(node))
            if node.op == _PRODUCT:
                return any(map(has_columns, refs)) and not has_columns(node.name)
            return len(refs) == 2 and all(is_partial(made_by(ref)) for ref in refs)

        return is_partial(total)

    def _param(self, variable: ParamVar) -> Array | None:
        group = self.model.flow.classes[variable.place]
        if group.first.kind != "param":
            return None
        dims, name = len(group.first.type.shape), group.first.target
        axis, shards, zero = self.run_placement.tensor, self.run_placement.shards, self.run_placement.zero
        keep: list[Callable[[ParamState], bool]] = []
        if axis is not None:
            keep.append(lambda s: s.stored[axis] == s.use[axis])
            keep.append(lambda s: self._fine(variable.place, dims, s.use, strict=False))
            if not self._parts(variable.place, dims, self.columns):
                keep.append(lambda s: s.use[axis] == R)
        owners = self.run_placement.owners
        if owners is not None and self._parts(variable.place, dims, set(self.model.digits.experts)):
            keep.append(lambda s: isinstance(s.use[owners], Shard) and s.stored[owners] == s.use[owners])
            shards = tuple(shard for shard in shards if shard != owners)
        for shard in shards:
            keep.append(lambda s, shard=shard: s.use[shard] == R)  # type: ignore[misc]
            if zero:
                keep.append(lambda s, shard=shard: s.stored[shard] != R)  # type: ignore[misc]
        if shards and zero:
            keep.append(lambda s: s.keep == (zero < 3))
            keep.append(lambda s: s.late == (zero == 1))
        # a bias or a gain more or less on a rank is nothing to tell of
        return self._narrowed(name if dims > 1 else "", variable.states, keep)

    # -- masks -------------------------------------------------------------------------------------

    def _narrowed(self, name: str, states: Sequence[S], keep: Sequence[Callable[[S], bool]]) -> Array | None:
        """States that all conditions leave; one that would leave none is noted and dropped."""
        ok = [True] * len(states)
        for condition in keep:
            narrower = [o and condition(s) for o, s in zip(ok, states, strict=True)]
            if any(narrower):
                ok = narrower
            elif name:
                self.notes.append(f"{name} cannot be placed as this framework does")
        return None if all(ok) else np.where(ok, 0.0, np.inf)

    def _mask(self, name: str, ok: Sequence[bool]) -> Array | None:
        if not any(ok):
            self.notes.append(f"{name} cannot be placed as this framework does")
        return None if all(ok) or not any(ok) else np.where(ok, 0.0, np.inf)


_PRODUCT, _SUM = "aten.mm.default", "aten.add.Tensor"
#: ops that make nothing new
_VIEWS = (
    "aten.reshape",
    "aten.view",
    "aten.t.",
    "aten.transpose",
    "aten.permute",
    "aten.unsqueeze",
    "aten.expand",
)
