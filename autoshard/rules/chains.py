"""Chains of elementwise ops and sums over rows, each of which a compiler makes one kernel of.

As Inductor does: ops are fused along their values, and with others that read the same rows, unless a product,
a collective or attention stands between them; what ends up in one kernel is read once, and written only where
others need it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from autoshard.ir import Node, refs_of
from autoshard.ir.scaled import CAST_SCALED
from autoshard.ir.views import PARTS, VIEWS
from autoshard.rules import pointwise

_SUMS = ("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default")
_PLACED = ("aten.cat.default", "aten.slice_backward.default", "aten.constant_pad_nd.default")
#: ops that chains in one kernel are made of: elementwise, sums over rows, and parts put beside each other
CHAINED = frozenset((*pointwise.RULES, *_SUMS, *_PLACED, CAST_SCALED))


class InKernel(NamedTuple):
    """An op in a fused kernel. unmoved: values that it neither reads from memory nor writes there. joined:
    whether ops before it have begun the kernel."""

    unmoved: frozenset[str] = frozenset()
    joined: bool = False

    def among(self, values: Sequence[str]) -> tuple[bool, ...]:
        """Which of its values an op does not move, () if none."""
        result = tuple([value in self.unmoved for value in values])
        return result if any(result) else ()


#: an op that is a kernel
ALONE = InKernel()


@dataclass(frozen=True)
class FusedKernels:
    """The fused kernels of a graph.

    inside: values that no kernel writes or reads. shared: by the results of an op, values that an op before
    it in its kernel has read or made already. kernels: by the values that a kernel makes and views of them,
    its number. joined: results of ops in kernels that others have begun.
    """

    inside: frozenset[str]
    shared: Mapping[tuple[str, ...], frozenset[str]]
    kernels: Mapping[str, int]
    joined: frozenset[tuple[str, ...]]

    @staticmethod
    def of(
        nodes: Sequence[Node], outputs: Collection[str], dropped: frozenset[str] = frozenset()
    ) -> FusedKernels:
        """nodes, outputs: of a graph. dropped: outputs and inputs that no kernel keeps, though the program
        does."""
        return _Fusing(nodes, outputs, dropped).kernels()

    def beside(self, nodes: Sequence[Node], value: str) -> tuple[str, ...]:
        """The ops of the kernel that makes a value, in order, by their first results; () if it is alone."""
        number = self.kernels.get(value)
        ops = tuple(n.name for n in nodes if n.op in CHAINED and self.kernels[n.name] == number)
        return ops if len(ops) > 1 else ()

    def of_node(self, node: Node) -> InKernel:
        """What of the cost of an op its kernel takes."""
        more = self.shared.get(node.outs)
        return InKernel(self.inside if more is None else self.inside | more, node.outs in self.joined)


#: where every op is a kernel
NOT_FUSED = FusedKernels(frozenset(), MappingProxyType({}), MappingProxyType({}), frozenset())


class _Fusing:
    """Ops that can be one kernel: linked by their values, with no other op on a way between the two.

    alias: view -> what it is a view of. viewed: view -> (what it looks at, whether at all of it). users: of
    every value, which of the ops. stage: of every chained op, how many other ops its values go through at
    most before it may run: as few as its inputs need, or, where chained ops alone read it, as many as the
    first of these, in which it is then computed.
    """

    def __init__(self, nodes: Sequence[Node], outputs: Collection[str], dropped: frozenset[str]) -> None:
        self.nodes, self.dropped = nodes, dropped
        self.alias: dict[str, str] = {}
        self.viewed: dict[str, tuple[str, bool]] = {}
        self.users: dict[str, list[int]] = {}
        self.taken: list[list[str]] = []
        self.makers: dict[str, int] = {}
        for number, node in enumerate(nodes):
            names = [self.alias.get(n, n) for n in dict.fromkeys(refs_of(node))]
            self.taken.append(list(dict.fromkeys(names)))
            if node.op in VIEWS:
                if names:
                    self.alias.update(dict.fromkeys(node.outs, names[0]))
                    self.viewed.update(dict.fromkeys(node.outs, (next(refs_of(node)), node.op not in PARTS)))
                continue
            self.makers.update(dict.fromkeys(node.outs, number))
            for name in names:
                self.users.setdefault(name, []).append(number)
        self.out = {self.alias.get(n, n) for n in outputs} - dropped
        self.stage = self._stages()

    def _stages(self) -> dict[int, int]:
        ready: dict[str, int] = {}
        result: dict[int, int] = {}
        for number, node in enumerate(self.nodes):
            if node.op in VIEWS:
                continue
            stage = max((ready.get(name, 0) for name in self.taken[number]), default=0)
            if node.op in CHAINED:
                result[number] = stage
            ready.update(dict.fromkeys(node.outs, stage + (node.op not in CHAINED)))
        for number in reversed(result):
            outs = self.nodes[number].outs
            users = [user for out in outs for user in self.users.get(out, ())]
            if users and self.out.isdisjoint(outs) and all(user in result for user in users):
                result[number] = min(result[user] for user in users)
        return result

    def kernels(self) -> FusedKernels:
        inside = {name for name in self.makers if self._is_inside(name)}
        inside |= {name for name in self.dropped if name not in self.makers}
        kernels = self._kernels()
        shared: dict[tuple[str, ...], frozenset[str]] = {}
        joined: set[tuple[str, ...]] = set()
        reached: set[tuple[int, str]] = set()  # values that a kernel has read or made
        begun: set[int] = set()
        for number, kernel in kernels.items():
            node = self.nodes[number]
            refs = dict.fromkeys(refs_of(node))
            more = {r for r in refs if any((kernel, name) in reached for name in self._spans(r))}
            if more:
                shared[node.outs] = frozenset(more)
            if kernel in begun:
                joined.add(node.outs)
            elif any(v not in more and self.alias.get(v, v) not in inside for v in (*refs, *node.outs)):
                begun.add(kernel)
            reached.update((kernel, next(self._spans(name))) for name in (*refs, *node.outs))
        views = {a for a, root in self.alias.items() if root in inside}
        numbers = {out: k for n, k in kernels.items() for out in self.nodes[n].outs}
        numbers |= {a: numbers[root] for a, root in self.alias.items() if root in numbers}
        return FusedKernels(frozenset(inside | views), shared, numbers, frozenset(joined))

    def _spans(self, name: str) -> Iterator[str]:
        """The value or the part of one that a view looks at, then what that is a part of, and so on."""
        while name in self.viewed:
            source, all_of_it = self.viewed[name]
            if not all_of_it:
                yield name
            name = source
        yield name

    def _is_inside(self, name: str) -> bool:
        """Whether a value is made elementwise, and read in the same kernels alone."""
        maker, users = self.makers[name], self.users.get(name, ())
        return (
            maker in self.stage
            and name not in self.out
            and bool(users or name in self.dropped)
            and all(self.stage.get(user) == self.stage[maker] for user in users)
        )

    def _kernels(self) -> dict[int, int]:
        """By chained op, in order, a number of its kernel. Sums over other dims than the last go through
        memory in another order: they and what they alone read are kernels of their own."""
        column: dict[int, int] = {}
        for number in reversed(self.stage):
            node = self.nodes[number]
            users = {
                column.get(user) if user in self.stage else None
                for out in node.outs
                for user in self.users.get(out, ())
            }
            (only,) = users if len(users) == 1 and self.out.isdisjoint(node.outs) else (None,)
            mine = number if _sums_columns(node) else only
            if mine is not None:
                column[number] = mine
        kernel: dict[int, int] = {}
        readers: dict[tuple[object, ...], int] = {}  # of a value, in one place and order
        for number in self.stage:
            node = self.nodes[number]
            at = self.stage[number], column.get(number)
            linked = {
                kernel[maker]
                for name in self.taken[number]
                if (maker := self.makers.get(name)) in kernel and (self.stage[maker], column.get(maker)) == at
            }
            shape = node.types[0].shape if node.types[0] is not None else ()
            keys = [(name, shape, *at) for r in dict.fromkeys(refs_of(node)) for name in self._spans(r)]
            linked |= {kernel[readers[key]] for key in keys if key in readers}
            first = min(linked, default=number)
            kernel[number] = first
            kernel.update({n: first for n, k in kernel.items() if k in linked})
            readers.update((key, number) for key in keys)
        return kernel


def _sums_columns(node: Node) -> bool:
    """Whether an op sums over other dims than the last one alone."""
    if node.op not in _SUMS or node.types[0] is None:
        return False
    dims = node.args[1] if len(node.args) > 1 else None
    if not dims:
        return True
    keeps = node.args[2] if len(node.args) > 2 else node.kwarg("keepdim", False)
    rank = len(node.types[0].shape) + (0 if keeps else len(dims))
    return any(dim % rank != rank - 1 for dim in dims)
