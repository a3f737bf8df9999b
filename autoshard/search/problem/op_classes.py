"""What of an op is the same on every mesh: which others are divided as it is, and which cost what it does."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from autoshard.ir import Folded, TensorType, refs_of
from autoshard.ir.flow import Place
from autoshard.ir.transposed import turned_in
from autoshard.rules.chains import FusedKernels
from autoshard.rules.core import Factored
from autoshard.rules.factor_splits import DigitTable


@dataclass(frozen=True, slots=True)
class Kind:
    """Of one op.

    refs, ins: values that it takes, and their types. divided: the same number for ops that have the same
    states on any mesh. costs: the same for ops that take the same time in the same states. grow: which of all
    its values, those it takes first, hold the batch. grows: whether there is more to compute with more of it.
    turned: of a product, whether each of its factors lies in memory by its other dim. inside: which of its
    values it neither reads from memory nor writes there where chains are fused; () if none. joined:
    whether it is then a part of a kernel that another op begins.
    """

    refs: tuple[str, ...]
    ins: tuple[TensorType, ...]
    divided: int
    costs: int
    grow: tuple[bool, ...]
    grows: bool
    turned: tuple[bool, bool] = (False, False)
    inside: tuple[bool, ...] = ()
    joined: bool = False


@dataclass(frozen=True)
class Kinds:
    """Of a model. ops: every op's. users: who takes a value. dims: in how many dims of a value the batch is,
    of all values that ops make or take. twice: whether that is more than one for some value. inside: values
    that stay inside fused kernels (`rules.chains`)."""

    ops: Mapping[tuple[str, int], Kind]
    users: Mapping[Place, list[tuple[str, int]]]
    dims: Mapping[Place, int]
    twice: bool
    inside: frozenset[Place]

    @staticmethod
    def of(folded: Folded, rules: Mapping[tuple[str, int], Factored], digits: DigitTable) -> Kinds:
        """Those of all ops."""
        table: dict[Hashable, int] = {}
        dims: dict[Place, int] = {}
        ops: dict[tuple[str, int], Kind] = {}
        users: dict[Place, list[tuple[str, int]]] = {}
        within: set[Place] = set()
        for name, graph in folded.segments.items():
            types, lying = graph.types(), turned_in(graph)
            fused = FusedKernels.of(graph.nodes, graph.outputs)
            within.update((name, value) for value in fused.inside)
            for number, node in enumerate(graph.nodes):
                rule, refs = rules[name, number], tuple(refs_of(node))
                ins = tuple([types[r] for r in refs])
                values = [*zip(refs, ins, strict=True), *zip(node.outs, node.types, strict=True)]
                for value, type_ in values:
                    if type_ is not None and (name, value) not in dims:
                        dims[name, value] = batch_dims(digits, (name, value), type_)
                grow = tuple([t is not None and dims[name, v] > 0 for v, t in values])
                # of the class of a part only this matters: whether it is the batch, a sequence, heads,
                # experts
                told = (digits.batch, digits.causal, digits.windowed, digits.heads, digits.experts)
                parts = tuple(
                    [
                        tuple([(above, own, *(cls in c for c in told)) for above, own, cls in factor])
                        for factor in digits.factors[name, number]
                    ]
                )
                grows = any(held for factor in parts for _, _, held, *_ in factor)
                turned = (False, False)
                if rule.kernel == "product":
                    left, right = refs[-2:]
                    turned = left in lying, right in lying
                kernel = fused.of_node(node)
                inside = kernel.among([value for value, _ in values])
                divided = rule.division, ins, node.types, parts
                costs = (
                    rule.kind,
                    rule.kernel,
                    rule.flops,
                    rule.slowdown,
                    rule.window,
                    rule.rate,
                    rule.copies,
                    rule.packed,
                    rule.inputs,
                    rule.outputs,
                    ins,
                    node.types,
                    grow,
                    grows,
                    turned,
                    inside,
                    kernel.joined,
                )
                ops[name, number] = Kind(
                    refs,
                    ins,
                    table.setdefault(divided, len(table)),
                    table.setdefault(costs, len(table)),
                    grow,
                    grows,
                    turned,
                    inside,
                    kernel.joined,
                )
                for ref in refs:
                    users.setdefault((name, ref), []).append((name, number))
        return Kinds(ops, users, dims, any(n > 1 for n in dims.values()), frozenset(within))


def batch_dims(digits: DigitTable, place: Place, type_: TensorType) -> int:
    """In how many dims a value holds the batch."""
    values, batch = digits.values, digits.batch
    return sum(
        any(cls in batch for _, _, cls in values.get((*place, dim), ())) for dim in range(len(type_.shape))
    )
