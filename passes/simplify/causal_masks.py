"""Which boolean masks keep a query from looking at positions behind its own slice of the sequence.

A mask is causal for certain if it is a comparison of two rows of numbers that do not depend on the inputs
(positions, as a rule) and comes out false for all of them, or if it is that *and* something else: a mask for
padding or a window only ever takes away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from autoshard.ir import DTYPES, Arg, Dtype, Node, Ref
from autoshard.ir.collectives import ALL_GATHER, SLICE
from autoshard.ir.statements import Statement, Statements

#: a (column) compared with b (row): ops that are true for a <= b at the most, and for a >= b
_UP = ("aten.le.Tensor", "aten.lt.Tensor")
_DOWN = ("aten.ge.Tensor", "aten.gt.Tensor")
#: true where both values are
BOTH = ("aten.bitwise_and.Tensor", "aten.logical_and.default", "aten.mul.Tensor")
#: bring a value into another layout on the mesh
_MOVED = (SLICE.op, ALL_GATHER.op)
_SAME = (*_MOVED, "aten.expand.default", "aten.alias.default", "aten.clone.default", "aten.detach.default")
#: what positions are made with; nothing else is computed here
NUMBERS = frozenset(
    f"aten.{name}"
    for name in (
        "arange.default",
        "arange.start",
        "arange.start_step",
        "full.default",
        "add.Tensor",
        "sub.Tensor",
        "unsqueeze.default",
        "squeeze.dim",
        "reshape.default",
        "view.default",
        "expand.default",
        "_to_copy.default",
    )
)
#: elements of a row of positions that are looked at
MOST = 1 << 24


class CausalMasks:
    """What can be said of the masks of a program. slices: equal parts of the sequence."""

    def __init__(self, whole: Statements, slices: int) -> None:
        self.whole, self.slices = whole, slices
        self.makers: Mapping[str, Statement] = {v: s for s in whole.all for v in s.makes}
        self.known: dict[str, bool] = {}

    def hides_later_slices(self, mask: str) -> bool:
        """Whether a mask [..., s, s] is false wherever a key is in a later slice than the query."""
        if mask not in self.known:
            self.known[mask] = self._hides(mask)
        return self.known[mask]

    def _hides(self, mask: str) -> bool:
        statement = self.makers.get(mask)
        type_ = self.whole.values[mask].type
        square = len(type_.shape) > 1 and type_.shape[-1] == type_.shape[-2] and type_.shape[-1] > 1
        if statement is None or not square or type_.dtype != "bool":
            return False
        op, uses = statement.node.op, statement.uses
        if op in BOTH:
            return any(self.hides_later_slices(v) for v in uses)
        if op in _SAME:
            # broadcasting a row or a column into a square is refused by the test for squares above
            return self.hides_later_slices(uses[0])
        if op == "aten.tril.default":
            diagonal = statement.node.arg(1, "diagonal", 0)
            return isinstance(diagonal, int) and diagonal <= 0
        if op in (*_UP, *_DOWN) and len(uses) == 2:
            first, second = uses if op in _UP else uses[::-1]
            return self._compared(self._numbers(first), self._numbers(second), type_.shape[-1])
        return False

    def _compared(self, keys: torch.Tensor | None, queries: torch.Tensor | None, length: int) -> bool:
        """Whether keys [..., 1, s] behind a slice are larger than all queries [..., s, 1] of it."""
        if keys is None or queries is None or min(keys.dim(), queries.dim()) < 2:
            return False
        rows, columns = (1, length), (length, 1)
        if tuple(keys.shape[-2:]) != rows or tuple(queries.shape[-2:]) != columns:
            return False
        by_key, by_query = keys.reshape(-1, length), queries.reshape(-1, length)
        size = length // self.slices
        return all(
            bool(by_key[:, end:].min() > by_query[:, end - size : end].max())
            for end in range(size, length, size)
        )

    def _numbers(self, value: str) -> torch.Tensor | None:
        """The numbers of a value that depends on no input; None if it does, or is not that simple."""
        statement = self.makers.get(value)
        if statement is not None and statement.node.op in _MOVED:
            return self._numbers(statement.uses[0])
        if statement is None or statement.node.op not in NUMBERS:
            return None
        if self.whole.values[value].type.numel > MOST:
            return None
        given: list[torch.Tensor] = []
        for source in statement.uses:
            numbers = self._numbers(source)
            if numbers is None:
                return None
            given.append(numbers)
        return evaluated(statement.node, iter(given))


def evaluated(node: Node, given: Iterator[torch.Tensor]) -> torch.Tensor:
    """What an op makes of these values, in order of its uses."""
    namespace, name, overload = node.op.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload)

    def value(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return next(given)
        if isinstance(arg, Dtype):
            return getattr(torch, DTYPES[arg.name][0])
        if isinstance(arg, tuple):
            return [value(a) for a in arg]
        return arg

    new: torch.Tensor = op(*map(value, node.args), **{k: value(v) for k, v in node.kwargs})
    return new
