"""Cast the operands of products with parameters to 8 or 4 bits, in forward and in backward (`ir.scaled`).

A product x @ W of forward, and those that make the gradients of x and of W, multiply casts of their operands
with scales that are computed where they are needed ("dynamic"). A cast is a value as any other: what is
gathered, saved for backward or reduced may be the cast of a value in place of the value, and scales are the
largest over all ranks that hold a part, so that a program on many ranks computes what it does on one.

Which products: those of matrices of parameters whose sizes are multiples of 16 (of a block, if that is more),
of experts too (`cast_experts`), but for the head, after which no other product with a parameter comes; or
those of the modules that are named.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from autoshard.capture.expand_repeats import expand_repeats
from autoshard.capture.repeat_op import REPEAT, RepeatKey
from autoshard.errors import UsageError
from autoshard.ir import Dtype, Graph, Joint, Node, Ref, TensorType, refs_of
from autoshard.ir.scaled import FORMATS, SCALED_MM, WORD, ProductFormat
from autoshard.passes.rewrite import Steps, first_type
from autoshard.passes.simplify.cast_experts import EXPERT_MM, ExpertProducts
from autoshard.passes.simplify.operand_casts import FLOATS, OperandCasts
from autoshard.passes.simplify.pack_operands import PackedOperands

_MM, _ADDMM, _ADD = "aten.mm.default", "aten.addmm.default", "aten.add.Tensor"


@dataclass(frozen=True)
class ProductCasts:
    """Which products are cast, and how. modules: globs of module paths; () for all but the head."""

    format: ProductFormat
    modules: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> ProductCasts | None:
        """``float8-rowwise``, ``mxfp8:*.mlp.*,*.o_proj``; None for ""."""
        name, _, globs = text.partition(":")
        return ProductCasts(FORMATS[name], tuple(filter(None, globs.split(",")))) if name else None


def cast_products(joint: Joint, products: ProductCasts | None) -> Joint:
    """The same model with such products; layers of which only some have them are written out. Raises
    UsageError if there are none."""
    if products is None:
        return joint
    try:
        return _cast(joint, products)
    except _LayersDifferError:
        return _cast(expand_repeats(joint), products)


class _LayersDifferError(Exception):
    """Calls of one layer graph differ in which products are cast."""


def _cast(joint: Joint, products: ProductCasts) -> Joint:
    places: dict[int, list[str]] = {}
    for node in joint.graph.nodes:
        if node.op == REPEAT:
            places.setdefault(RepeatKey.parse(node.args[1]).body, []).append(node.origin.fqn)
    weights = {p.name for p in joint.ports if p.kind == "param"}
    outside = _Casting(joint.graph, weights, products, [""], headed=True)
    inside = [
        _Casting(
            body.joint.graph,
            {p.name for p in body.joint.ports if p.kind == "param"},
            products,
            [f"{place}." for place in places.get(number, [])],
        )
        for number, body in enumerate(joint.bodies)
    ]
    if not any(each.forward or each.experts.forward for each in (outside, *inside)):
        raise UsageError(
            "no product of the model is cast",
            why="none of matrices of parameters has sizes that are multiples of "
            f"{max(WORD, products.format.block)}"
            + (f" and lies in {', '.join(products.modules)}" if products.modules else " before the head"),
            hint="leave --products out, or name other modules: --products 'float8-rowwise:*.mlp.*'",
        )
    bodies = tuple(
        replace(body, joint=replace(body.joint, graph=casting.graph()))
        for body, casting in zip(joint.bodies, inside, strict=True)
    )
    return replace(joint, graph=outside.graph(), bodies=bodies)


class _Casting:
    """The products of one graph, and the graph with their casts.

    places: what is before the paths of its modules. headed: whether its last products are heads.
    """

    def __init__(
        self,
        graph: Graph,
        weights: set[str],
        products: ProductCasts,
        places: Sequence[str],
        headed: bool = False,
    ) -> None:
        self.before, self.weights, self.products = graph, weights, products
        self.casts = OperandCasts(graph, products.format, weights)
        self.views, self.types = self.casts.views, self.casts.types
        self.packed = PackedOperands(self.casts)
        #: parameter -> values that it is multiplied with
        self.forward: dict[str, set[str]] = {}
        heads = self._heads() if headed else set[str]()
        for node in graph.nodes:
            if node.backward or node.op not in (_MM, _ADDMM):
                continue
            sides = self._operands(node)
            for weight, other in (sides, sides[::-1]):
                matrix = self.views.weight(weight, weights)
                taken = matrix and not self.views.weight(other, weights) and self._plain(node)
                if taken and self._fits(matrix) and self._chosen(node, places, heads):
                    self.forward.setdefault(matrix, set()).add(self.views.root(other))
        self.experts = ExpertProducts(graph, self.casts, lambda node: self._chosen(node, places, heads))

    def graph(self) -> Graph:
        nodes: list[Node] = []
        for node in self.before.nodes:
            if (steps := self.experts.steps_of(node)) is not None:
                nodes += steps
                continue
            gradients = self._gradients(node)
            nodes += [node] if gradients is None else self._cast(node, gradients)
        return replace(self.before, nodes=tuple(nodes))

    def _operands(self, node: Node) -> tuple[str, str]:
        a, b = node.args[-2:]
        return a.name, b.name

    def _plain(self, node: Node) -> bool:
        """Whether a product is one of two float matrices."""
        types = (self.types[v] for v in self._operands(node))
        return all(t.dtype in FLOATS and len(t.shape) == 2 for t in types) and not node.kwargs

    def _fits(self, weight: str) -> bool:
        """Whether the products with a parameter can be of 8 bits."""
        word = max(WORD, self.products.format.block)
        return all(n % word == 0 for n in self.types[weight].shape)

    def _heads(self) -> set[str]:
        """Nodes of forward after which no product with a parameter comes."""
        before: set[str] = set()
        heads: set[str] = set()
        for node in reversed([n for n in self.before.nodes if not n.backward]):
            last = before.isdisjoint(node.outs)
            if last:
                heads.add(node.name)
            multiplies = node.op == EXPERT_MM or (
                node.op in (_MM, _ADDMM) and any(self.views.weight(r, self.weights) for r in refs_of(node))
            )
            if not last or multiplies or node.op == REPEAT:
                before.update(refs_of(node))
        return heads

    def _chosen(self, node: Node, places: Sequence[str], heads: Collection[str]) -> bool:
        globs = self.products.modules
        if not globs:
            return node.name not in heads
        said = {any(fnmatchcase(place + node.origin.fqn, g) for g in globs) for place in places}
        if len(said) > 1:
            raise _LayersDifferError
        return any(said)

    def _gradients(self, node: Node) -> tuple[bool, bool] | None:
        """Which operands of a product that is cast are gradients of results, None for any other node."""
        if node.op not in (_MM, _ADDMM) or not self._plain(node):
            return None
        operands = self._operands(node)
        weights = [self.views.weight(v, self.weights) for v in operands]
        roots = [self.views.root(v) for v in operands]
        for k, weight in enumerate(weights):
            if weight and not weights[1 - k] and weight in self.forward:
                if not node.backward:
                    return (False, False) if roots[1 - k] in self.forward[weight] else None
                return k == 1, k == 0
        if not node.backward or not self.products.format.weight_gradient:
            return None
        new = first_type(node).shape
        for weight, others in self.forward.items():
            shape = self.types[weight].shape
            for k in range(2):
                if roots[k] in others and new in (shape, shape[::-1]) and roots[1 - k] not in others:
                    self._check_tokens(node)
                    return k == 1, k == 0
        return None

    def _check_tokens(self, node: Node) -> None:
        """UsageError for a sum over tokens that are no full blocks: of some batches they would be."""
        tokens, block = self.types[self._operands(node)[0]].shape[1], self.products.format.block
        if block and tokens % block:
            raise UsageError(
                f"{tokens:,} tokens are no blocks of {block}, over which operands share a scale",
                where=node.origin.source or node.origin.fqn,
                why="the gradient of a parameter is a sum over tokens",
                hint=f"pad sequences to a multiple of {block}, or use float8-rowwise",
            )

    def _cast(self, node: Node, gradients: tuple[bool, bool]) -> list[Node]:
        steps = Steps(node, lambda: self.casts.name(f"{node.name}_product"))
        a, b = self._operands(node)
        how, added = self.products.format, node.op == _ADDMM
        name = None if added else node.name
        if how.packed:
            product = self.packed.product(steps, a, b, gradients, name)
        else:
            kinds = [how.gradient if gradient else how.element for gradient in gradients]
            product = self._scaled(steps, a, b, kinds, name)
        if added:
            steps.add(_ADD, (product, node.args[0]), first_type(node), out=node.name)
        return steps.made

    def _scaled(self, steps: Steps, a: str, b: str, dtypes: Sequence[str], name: str | None) -> Ref:
        """The product of operands in 8 bits."""
        (sa, qa), (sb, qb) = self._operand(steps, a, 1, dtypes[0]), self._operand(steps, b, 0, dtypes[1])
        out = first_type(steps.node)
        return steps.add(SCALED_MM, (sa, sb, qa, qb, Dtype(out.dtype)), out, out=name)

    def _operand(self, steps: Steps, value: str, dim: int, element: str) -> tuple[Ref, Ref]:
        """(scale, cast) of an operand that is summed over a dim."""
        matrix, turned = self.views.turned(value)
        made = self.casts.of(steps, matrix, 1 - dim if turned else dim, element)
        if not turned:
            return made
        type_ = self.types[matrix]
        types = self.casts.scale_type(type_, 1 - dim), replace(type_, dtype=element)
        scale, cast = (self._transposed(steps, x, t) for x, t in zip(made, types, strict=True))
        return scale, cast

    def _transposed(self, steps: Steps, x: Ref, type_: TensorType) -> Ref:
        if set(type_.shape) == {1}:
            return x
        out = self.casts.name(f"{x.name}_t")
        return steps.add("aten.t.default", (x,), replace(type_, shape=type_.shape[::-1]), out=out)
