"""Which values of a program are activations: made from the batch and from parameters, of no gradient.

Such a value is the same number wherever it stands: in forward, where backward computes forward again, and
where backward gathers what forward kept. A mask comes from the batch alone, a cast weight from parameters
alone, and a gradient from a tangent; none of these is one.

Where a gather of one is rounded, what reads its result sees other numbers than the ranks have that made it.
So that forward and backward see the same, a gather only counts if nothing reads those: every use of the
value, in any call, goes through such a gather, which rounds the same rows.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Flag, auto
from functools import reduce
from operator import or_

from autoshard.ir import Call, Node, refs_of
from autoshard.ir.collectives import exact_transfer, wheres_of
from autoshard.ir.lowered import Instruction, Lowered
from autoshard.rules.quantized_gather import FLOATS

#: what gives the rows that it is given, if they are as long as before
_SAME = frozenset(f"aten.{name}.default" for name in ("view", "reshape", "_unsafe_view", "alias", "clone"))


class _From(Flag):
    """What a value depends on."""

    NOTHING = 0
    BATCH = auto()
    PARAMETER = auto()
    TANGENT = auto()


class Activations:
    """Follows what values depend on through all calls, until nothing changes.

    batch, params, tangents: names of inputs of the program. inside: segment -> value -> what it depends on in
    any call; "" for main. read: segment -> values that some op reads as
    they are.
    """

    def __init__(
        self, lowered: Lowered, batch: Collection[str], params: Collection[str], tangents: Collection[str]
    ) -> None:
        main: dict[str, _From] = dict.fromkeys(batch, _From.BATCH)
        main.update(dict.fromkeys(params, _From.PARAMETER))
        main.update(dict.fromkeys(tangents, _From.TANGENT))
        self.inside: dict[str, dict[str, _From]] = {name: {} for name in lowered.segments}
        self.inside[""] = main
        self._types = {name: s.graph.types() for name, s in lowered.segments.items()}
        self._types[""] = {name: placed.type for name, placed in lowered.values.items()}
        self._results: dict[str, set[str]] = {name: set() for name in lowered.segments}
        self._results[""] = set(lowered.results)
        for call in (i for i in lowered.main if isinstance(i, Call)):
            outputs = lowered.segments[call.segment].graph.outputs
            ends = {i for o, i in zip(call.outs, outputs, strict=True) if o in self._results[""]}
            self._results[call.segment].update(ends)
        self.read: dict[str, set[str]] = {name: set() for name in self.inside}
        while any([self._forwards(lowered, item) for item in lowered.main]):
            pass
        self.read[""].update(lowered.results)
        self._looked_at: set[str] = set()
        while any([self._backwards(lowered, item) for item in reversed(lowered.main)]):
            pass

    def is_gradient(self, name: str, inside: str) -> bool:
        """Whether a value depends on a gradient of an output."""
        return bool(self.inside[inside].get(name, _From.NOTHING) & _From.TANGENT)

    def _forwards(self, lowered: Lowered, item: Instruction) -> bool:
        """Follow what one instruction makes from what; whether anything was learned."""
        main = self.inside[""]
        if isinstance(item, Node):
            return _follow(item, main)
        graph, own = lowered.segments[item.segment].graph, self.inside[item.segment]
        given = {n: main.get(a, _From.NOTHING) for (n, _), a in zip(graph.inputs, item.args, strict=True)}
        learned = _learn(own, given)
        if learned:
            for node in graph.nodes:
                _follow(node, own)
        ends = {o: own.get(i, _From.NOTHING) for o, i in zip(item.outs, graph.outputs, strict=True)}
        return _learn(main, ends) or learned

    def _backwards(self, lowered: Lowered, item: Instruction) -> bool:
        """Note what one instruction reads as it is; whether anything of it is new."""
        main = self.read[""]
        if isinstance(item, Node):
            return self._reads(item, "")
        graph, own = lowered.segments[item.segment].graph, self.read[item.segment]
        before, known = len(main) + len(own), len(own)
        own.update(i for o, i in zip(item.outs, graph.outputs, strict=True) if o in main)
        if len(own) > known or item.segment not in self._looked_at:
            self._looked_at.add(item.segment)
            for node in reversed(graph.nodes):
                self._reads(node, item.segment)
        main.update(a for (n, _), a in zip(graph.inputs, item.args, strict=True) if n in own)
        return len(main) + len(own) > before

    def _reads(self, node: Node, inside: str) -> bool:
        read = self.read[inside]
        before = len(read)
        through = self._joins(node, inside) or (self._keeps_rows(node, inside) and node.name not in read)
        if not through:
            read.update(refs_of(node))
        return len(read) > before

    def _keeps_rows(self, node: Node, inside: str) -> bool:
        types = self._types[inside]
        shapes = [types[n].shape for n in (*refs_of(node), *node.outs)] if node.op in _SAME else []
        return bool(shapes) and len({shape[-1:] for shape in shapes}) == 1

    def are_gathered(self, node: Node, inside: str) -> bool:
        """Whether a node joins rows of activations and nothing else, no result of the model, and nothing that
        any op also reads as it is."""
        read = self.read[inside]
        return self._joins(node, inside) and read.isdisjoint(refs_of(node))

    def _joins(self, node: Node, inside: str) -> bool:
        """Rows are whole: their last dim is not the one that is joined."""
        if exact_transfer(node) != "all_gather" or not self._results[inside].isdisjoint(node.outs):
            return False
        return all(
            self._is_one(name, inside) and dim < len(self._types[inside][name].shape) - 1
            for name, (dim, *_) in zip(refs_of(node), wheres_of(node), strict=True)
        )

    def _is_one(self, name: str, inside: str) -> bool:
        depends = self.inside[inside].get(name, _From.NOTHING)
        return depends == _From.BATCH | _From.PARAMETER and self._types[inside][name].dtype in FLOATS


def _follow(node: Node, known: dict[str, _From]) -> bool:
    result = reduce(or_, (known.get(r, _From.NOTHING) for r in refs_of(node)), _From.NOTHING)
    return _learn(known, dict.fromkeys(node.outs, result))


def _learn(known: dict[str, _From], more: dict[str, _From]) -> bool:
    """Add what values depend on; whether anything of it is new."""
    changed = False
    for name, result in more.items():
        before = known.get(name)
        after = result if before is None else before | result
        if after != before:
            known[name] = after
            changed = True
    return changed
