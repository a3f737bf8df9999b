"""Cast the operands of products of experts (`autoshard.expert_mm`), as `cast_products` does of others.

The gradient of a matrix is a sum over the rows of its expert, whose columns have scales of their own, each
for the rows of an expert on all ranks. There are as many rows as tokens chose it, which are no full blocks:
formats with blocks leave these products as they are. Those of 4 bits leave all products of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.ir import Dtype, Graph, Node, Ref, refs_of
from autoshard.ir.scaled import SCALED_EXPERT_MM, SCALED_EXPERT_OUTER, WORD
from autoshard.passes.rewrite import Steps, first_type
from autoshard.passes.simplify.operand_casts import FLOATS, OperandCasts

EXPERT_MM, _OUTER, _DISPATCH = (
    f"autoshard.{name}.default" for name in ("expert_mm", "expert_outer", "dispatch")
)


class ExpertProducts:
    """The products of experts of a graph. chosen: whether one of forward is to be cast."""

    def __init__(self, graph: Graph, casts: OperandCasts, chosen: Callable[[Node], bool]) -> None:
        self.casts, self.types, self.format = casts, casts.types, casts.format
        given = () if self.format.packed else graph.nodes
        products = [n for n in given if n.op == EXPERT_MM and self._fits(n)]
        forward = [n for n in products if not n.backward and chosen(n)]
        #: matrices -> rows that forward multiplies with them
        self.forward: dict[str, set[str]] = {}
        for node in forward:
            self.forward.setdefault(node.args[2].name, set()).add(node.args[0].name)
        casts.anew.update(self.forward)
        #: by name, those that are cast -> the element types of their operands
        self.elements: dict[str, tuple[str, str]] = {n.name: (self.format.element,) * 2 for n in forward}
        for node in graph.nodes:
            if node.op == EXPERT_MM and node.backward and node.args[2].name in self.forward:
                self.elements[node.name] = self.format.gradient, self.format.element
            elif node.op == _OUTER and node.backward and self._of_matrix(node):
                self.elements[node.name] = self.format.element, self.format.gradient
        self.sent = self._sent(graph)

    def steps_of(self, node: Node) -> list[Node] | None:
        """What stands in the place of a node, None for the node itself."""
        steps = Steps(node, lambda: self.casts.name(f"{node.name}_product"))
        if node.name in self.sent:
            self._dispatch(steps, self.sent[node.name])
        elif node.name not in self.elements:
            return None
        elif node.op == _OUTER:
            self._outer(steps)
        else:
            self._multiply(steps)
        return steps.made

    def _fits(self, node: Node) -> bool:
        """Whether a product can be of 8 bits."""
        rows, matrices = self.types[node.args[0].name], self.types[node.args[2].name]
        word = max(WORD, self.format.block)
        return {rows.dtype, matrices.dtype} <= set(FLOATS) and not any(n % word for n in matrices.shape[1:])

    def _of_matrix(self, node: Node) -> bool:
        """Whether outer products make the gradient of matrices that are cast, and are cast, too."""
        rows, shape = node.args[0].name, first_type(node).shape
        made = any(rows in taken and self.types[m].shape == shape for m, taken in self.forward.items())
        return made and self.format.weight_gradient and not self.format.block

    def _sent(self, graph: Graph) -> dict[str, str]:
        """By name, dispatches of rows that products alone read, all by one cast -> its element type. Tokens
        are cast before they travel, where the cast of a row is that of its token."""
        result: dict[str, str] = {}
        for node in graph.nodes:
            if node.op != _DISPATCH or node.name in graph.outputs:
                continue
            users = [n for n in graph.nodes if node.name in refs_of(n)]
            kinds = {self._element_of(n, node.name) for n in users}
            if len(kinds) == 1 and "" not in kinds:
                result[node.name] = kinds.pop()
        return result

    def _element_of(self, user: Node, rows: str) -> str:
        """To what a product casts rows, "" for other users and for scales that are not of single rows."""
        taken = [a.name for a in user.args[:2] if isinstance(a, Ref)]
        if user.name not in self.elements or taken.count(rows) != 1:
            return ""
        by_row = user.op == EXPERT_MM or self.format.whole
        return self.elements[user.name][taken.index(rows)] if by_row else ""

    def _dispatch(self, steps: Steps, element: str) -> None:
        """Tokens cast, and their codes and scales dispatched."""
        node, type_ = steps.node, first_type(steps.node)
        rows, chosen, slots = node.args
        scale, cast = self.casts.of(steps, rows.name, 1, element)
        of_slots = self.casts.scale_type(type_, 1)
        if of_slots.filled is not None:
            out = self.casts.name(f"{node.name}_scale")
            scale = steps.add(_DISPATCH, (scale, chosen, slots), of_slots, out=out)
        codes = replace(type_, dtype=element)
        cast = steps.add(_DISPATCH, (cast, chosen, slots), codes, out=self.casts.name(f"{node.name}_f8"))
        self.casts.keep(steps, node.name, 1, element, (scale, cast))

    def _multiply(self, steps: Steps) -> None:
        node, (rows, matrices) = steps.node, self.elements[steps.node.name]
        x, slots, weight, transposed = node.args
        (sx, qx) = self.casts.of(steps, x.name, 1, rows)
        (sw, qw) = self.casts.of(steps, weight.name, 2 if transposed else 1, matrices)
        out = first_type(node)
        args = (sx, sw, qx, slots, qw, transposed, Dtype(out.dtype))
        steps.add(SCALED_EXPERT_MM, args, out, out=node.name)

    def _outer(self, steps: Steps) -> None:
        node, kinds = steps.node, self.elements[steps.node.name]
        x, grad, slots, count, transposed = node.args
        (sx, qx), (sg, qg) = (
            self.casts.by_expert(steps, rows.name, slots, count, kind)
            for rows, kind in zip((x, grad), kinds, strict=True)
        )
        out = first_type(node)
        args = (sx, sg, qx, qg, slots, count, transposed, Dtype(out.dtype))
        steps.add(SCALED_EXPERT_OUTER, args, out, out=node.name)
