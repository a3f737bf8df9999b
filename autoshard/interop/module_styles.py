"""What a plan means for full modules: which weights torch's parallel styles divide over one axis, and how.

A plan decides op by op. The styles of ``torch.distributed.tensor.parallel`` (and those of transformers)
know modules: a linear layer divided by columns or by rows, an embedding divided by rows of its table
or by columns. Here the plan's states of the products with a module's own weight are read as one of these;
what they cannot say is named, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autoshard.ir import Graph, Node, Ref, refs_of
from autoshard.ir.placement import Placement, R, Shard
from autoshard.planner.analysis import Analysis
from autoshard.search.plan.plan import Plan

Kind: TypeAlias = Literal["columns", "rows", "table_columns", "table_rows"]
#: (number of the call in `Folded.calls`, number of the node in its segment)
Site: TypeAlias = tuple[int, int]

MATMUL, TRANSPOSE, LOOKUP = "aten.mm.default", "aten.t.default", "aten.embedding.default"
#: all that a plain embedding, and a plain linear layer, are captured as
_PLAIN_TABLE = frozenset((LOOKUP, "aten.reshape.default"))
_PLAIN_LINEAR = frozenset(
    (MATMUL, TRANSPOSE, "aten.add.Tensor", "aten.reshape.default", "aten._to_copy.default")
)


@dataclass(frozen=True, slots=True)
class Style:
    """How one module is divided over one axis.

    kind: ``columns`` and ``rows`` of a linear layer (its weight is [out, in]: columns split out, as in
    Megatron-LM, arXiv:1909.08053 section 3), ``table_rows`` and ``table_columns`` of an embedding.
    gather_output: the output is made whole at the module's end, else it stays split along its last dim.
    full_input: the module is given its input whole, else split along the last dim.
    """

    kind: Kind
    gather_output: bool = False
    full_input: bool = True


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something of the plan that is left out, for the reader. what: names, as in the model."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class StyledModule:
    """A linear layer's product with its weight, or an embedding's look-up. module, param: full names."""

    module: str
    param: str
    lookup: bool


@dataclass(frozen=True)
class Uses:
    """Where parameters are used in forward. products: those that a style could divide.

    others: parameters that are used otherwise too. busy: modules that do more than their product, and so
    are no plain ``nn.Linear`` or ``nn.Embedding``, which is all that module styles divide.
    """

    products: dict[Site, StyledModule]
    others: frozenset[str]
    busy: frozenset[str]


def parameter_uses(analysis: Analysis) -> Uses:
    """All uses of parameters in the forward half, call by call."""
    params = {p.name: p.target for p in analysis.folded.joint.ports if p.kind == "param"}
    products: dict[Site, StyledModule] = {}
    others: set[str] = set()
    busy: set[str] = set()
    for number, call in enumerate(analysis.folded.calls):
        if call.backward:
            continue
        graph = analysis.folded.segments[call.segment]
        own = {
            inner: params[value]
            for value, (inner, _) in zip(call.args, graph.inputs, strict=True)
            if value in params
        }
        more = {
            plain: {n.origin.fqn for n in graph.nodes if n.op not in plain}
            for plain in (_PLAIN_TABLE, _PLAIN_LINEAR)
        }
        for site, product in _products(graph, own):
            products[number, site] = product
            if graph.nodes[site].origin.fqn in more[_PLAIN_TABLE if product.lookup else _PLAIN_LINEAR]:
                busy.add(product.module)
        others |= _other_uses(graph, own)
    return Uses(products, frozenset(others), frozenset(busy))


def _products(graph: Graph, own: dict[str, str]) -> list[tuple[int, StyledModule]]:
    transposed = {n.name: _ref(n, 0) for n in graph.nodes if n.op == TRANSPOSE}
    result = []
    for number, node in enumerate(graph.nodes):
        if node.op == MATMUL:
            param = own.get(transposed.get(_ref(node, 1), ""))
        elif node.op == LOOKUP:
            param = own.get(_ref(node, 0))
        else:
            continue
        module, _, leaf = (param or "").rpartition(".")
        if param and leaf == "weight":
            result.append((number, StyledModule(module, param, node.op == LOOKUP)))
    return result


def _other_uses(graph: Graph, own: dict[str, str]) -> set[str]:
    """Parameters used as neither a product's weight, its transpose, nor the bias added to that product."""
    products = dict(_products(graph, own))
    values = own | {n.name: own[_ref(n, 0)] for n in graph.nodes if n.op == TRANSPOSE and _ref(n, 0) in own}
    sums = {graph.nodes[k].name: p.module for k, p in products.items() if not p.lookup}
    result: set[str] = set()
    for number, node in enumerate(graph.nodes):
        if number in products or (node.op == TRANSPOSE and _ref(node, 0) in own):
            continue
        refs = list(refs_of(node))
        for param in (values[name] for name in refs if name in values):
            module, _, leaf = param.rpartition(".")
            if leaf != "bias" or all(sums.get(other) != module for other in refs):
                result.add(param)
    return result


def _ref(node: Node, index: int) -> str:
    arg = node.arg(index)
    return arg.name if isinstance(arg, Ref) else ""


def wanted_styles(
    plan: Plan, analysis: Analysis, uses: Uses, axis: int, size: int
) -> tuple[dict[str, Style], list[LeftOut]]:
    """The style of every module whose product the plan divides over a mesh axis (of ``size`` ranks).

    Also, with reasons, the modules that it divides in a way no style can express.
    """
    shared = {name for pair in analysis.folded.joint.tied for name in pair}
    types = {p.target: p.type for p in analysis.folded.joint.ports if p.kind == "param"}
    readings: dict[str, set[Style | str]] = {}
    params: dict[str, str] = {}
    for (number, site), product in uses.products.items():
        segment = analysis.folded.calls[number].segment
        state = plan.nodes[segment, site]
        left, right = (layout[axis] for layout in state.inputs[:2])
        node = analysis.folded.segments[segment].nodes[site]
        read = _read_lookup(left, right, node) if product.lookup else _read_product(left, right)
        readings.setdefault(product.module, set()).add(read)
        params[product.module] = product.param
    styles: dict[str, Style] = {}
    notes: list[LeftOut] = []
    for module, read_as in readings.items():
        if read_as == {""}:
            continue
        style, param = next(iter(read_as)), params[module]
        if param in shared:
            notes.append(
                LeftOut(module, "shares its weight with another module, and module styles would part the two")
            )
        elif len(read_as) > 1:
            notes.append(LeftOut(module, "runs several times a step, and not always divided in the same way"))
        elif isinstance(style, str):
            notes.append(LeftOut(module, style))
        elif module in uses.busy:
            notes.append(
                LeftOut(
                    module,
                    "does more than a product with its weight, so that it is no nn.Linear or "
                    "nn.Embedding, which is all that module styles divide",
                )
            )
        elif uses.others & {f"{module}.weight", f"{module}.bias"}:
            notes.append(LeftOut(module, "its weight or bias is also used outside its own product"))
        elif types[param].shape[_split_dim(style.kind)] % size:
            notes.append(LeftOut(module, f"its weight {types[param]} does not divide evenly by {size}"))
        else:
            styles[module] = style
    return styles, notes


def _split_dim(kind: Kind) -> int:
    """The dim of the weight ([out, in], or [rows, columns] of a table) that a style splits."""
    return 0 if kind in ("columns", "table_rows") else 1


def _read_product(x: Placement, weight: Placement) -> Style | str:
    """A product ``x [m, k] @ weight [k, n]`` as a style; the reason if there is none; "" if it is whole."""
    if weight == Shard(1) and x == R:
        return Style("columns")
    if weight == Shard(0) and x == Shard(1):
        return Style("rows")
    if isinstance(weight, Shard) and weight.inner > 1:
        return f"its ranks hold parts of different sizes, in pieces of {weight.inner}"
    if isinstance(weight, Shard):
        return f"its weight is split inside a fused dim ({_turned(weight)}), which module styles cannot say"
    if isinstance(x, Shard):
        return "each rank takes some of the tokens and the whole weight, which module styles cannot say"
    return ""


def _turned(weight: Shard) -> Shard:
    """The placement of the stored weight [n, k], from that of its transpose."""
    return Shard(1 - weight.dim, weight.outer, weight.inner)


def _read_lookup(table: Placement, ids: Placement, node: Node) -> Style | str:
    if table == Shard(0):
        padding = node.arg(2, "padding_idx", -1)
        if isinstance(padding, int) and padding >= 0:
            return (
                "it has a padding_idx, and torch's row-wise embedding would clear the gradient of other rows"
            )
        return Style("table_rows")
    if table == Shard(1):
        return Style("table_columns")
    if isinstance(table, Shard):
        return f"its table is split inside a fused dim ({table}), which module styles cannot say"
    if isinstance(ids, Shard):
        return "each rank looks up some of the tokens in the whole table, which module styles cannot say"
    return ""


def other_divisions(
    plan: Plan, analysis: Analysis, styled: Mapping[str, Style], noted: Sequence[LeftOut], axis: int
) -> list[LeftOut]:
    """Parameters that the plan splits over the axis but no style divides, beside those noted already."""
    known = {*styled, *(n.what for n in noted)}
    notes: list[LeftOut] = []
    for key, group in analysis.flow.classes.items():
        if group.first.kind != "param":
            continue
        life = plan.params[key]
        stored, use = life.stored[axis], life.use[axis]
        for port in group.ports:
            if port.target.rpartition(".")[0] in known or port.target in known:
                continue
            if use != R:
                notes.append(
                    LeftOut(port.target, f"divided as {use}: its layer is neither nn.Linear nor nn.Embedding")
                )
            elif stored != R:
                notes.append(
                    LeftOut(
                        port.target, "stored in parts and gathered for use, which module styles cannot say"
                    )
                )
    return notes
