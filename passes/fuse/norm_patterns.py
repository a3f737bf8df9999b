"""Normalisations in the form in which models trace them, found by what feeds what.

RMSNorm is a chain of small ops whose order and casts differ from model to model; its backward is what
autograd makes of that chain. Both are followed from one op that cannot be missing: the reciprocal root, and
its cube.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from autoshard.ir import Arg, Dtype, Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.views import RESHAPES

_ADD, _MUL = "aten.add.Tensor", "aten.mul.Tensor"
_SUM, _CAST, _POW = "aten.sum.dim_IntList", "aten._to_copy.default", "aten.pow.Tensor_Scalar"
_WIDE = ("f32", "f64")
Pair: TypeAlias = "tuple[str, str]"


class UseIndex:
    """Who makes and who uses each value of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.types: Mapping[str, TensorType] = graph.types()
        self.makers: dict[str, Node] = {o: n for n in graph.nodes for o in n.outs}
        self.users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(refs_of(node)):
                self.users.setdefault(name, []).append(node)
        self.outputs = frozenset(graph.outputs)

    def made_by(self, value: Arg, *ops: str) -> Node | None:
        """The node that makes a value, if it is one of these ops."""
        node = self.makers.get(value.name) if isinstance(value, Ref) else None
        return node if node is not None and node.op in ops else None

    def used_by(self, name: str, *ops: str) -> list[Node]:
        return [n for n in self.users.get(name, ()) if n.op in ops]

    def only_use(self, name: str, *ops: str) -> Node | None:
        """The node that uses a value, if it is one of these ops and nothing else does."""
        users = self.users.get(name, [])
        alone = len(users) == 1 and name not in self.outputs and users[0].op in ops
        return users[0] if alone else None

    def uncast(self, name: str) -> str:
        """The value that this one is only a copy of in another floating type; itself if it is none."""
        node = self.makers.get(name)
        if node is None or not _is_cast(node):
            return name
        source = node.args[0].name
        return source if self.types[source].is_float else name

    def casts(self, name: str, dtype: str) -> list[str]:
        """Copies of a value in an element type."""
        return [
            n.name for n in self.used_by(name, _CAST) if _is_cast(n) and self.types[n.name].dtype == dtype
        ]

    def depends(self, name: str, on: str) -> bool:
        """Whether one value is made from another."""
        seen: set[str] = set()
        todo = [name]
        while todo:
            value = todo.pop()
            if value == on:
                return True
            if value in self.makers and value not in seen:
                seen.add(value)
                todo += refs_of(self.makers[value])
        return False


@dataclass(frozen=True)
class Forward:
    """An RMSNorm: y = x * rstd * weight.

    wide: x in the type in which it is normalised (x itself if that is its own). rows: x * rstd, in all
    types in which it is there. parts: of the sum that x is. chain: values that the kernel makes unnecessary.
    """

    x: str
    wide: str
    rstd: str
    rows: tuple[str, ...]
    weight: str
    y: str
    eps: float
    narrow: bool
    parts: Pair | None
    chain: tuple[str, ...]


@dataclass(frozen=True)
class Backward:
    """The gradient of an RMSNorm with the sum after it.

    raw: values that must be x, in whatever type. rows: that must be x * rstd, None without a gradient of the
    weight. dw: that gradient, [H] or [1, ..., H]. more: what is added to the gradient of x.
    """

    grad: str
    weight: str
    rstd: str
    raw: tuple[str, ...]
    rows: str | None
    more: str | None
    dx: str
    dw: str | None
    chain: tuple[str, ...]


def forwards(index: UseIndex) -> Iterator[Forward]:
    """All RMSNorms of a graph."""
    for node in index.graph.nodes:
        if node.op == "aten.rsqrt.default":
            result = _forward(index, node)
            if result is not None:
                yield result


def _forward(index: UseIndex, rsqrt: Node) -> Forward | None:
    shifted = index.made_by(rsqrt.args[0], _ADD, "aten.add.Scalar")
    eps = shifted.args[1] if shifted and not shifted.kwargs and len(shifted.args) == 2 else None
    if shifted is None or not isinstance(eps, float):
        return None
    squares = _mean(index, shifted.args[0])
    if squares is None:
        return None
    power, between = squares
    wide = _squared(power)
    if wide is None:
        return None
    x = index.uncast(wide)
    chain = [power.name, *between, shifted.name, rsqrt.name]
    full, source = index.types[wide], index.types[x]
    if full.dtype not in _WIDE or index.types[rsqrt.name].dtype != full.dtype:
        return None
    for node in index.used_by(rsqrt.name, _MUL):
        other = _other(node, rsqrt.name)
        if other not in (x, wide) or index.types[node.name] != full:
            continue
        end = _weighted(index, node.name, source)
        if end is not None and not index.depends(end[0], rsqrt.name):
            weight, y, rows, narrow, more = end
            kept = [wide] if wide != x else []
            return Forward(
                x,
                wide,
                rsqrt.name,
                rows,
                weight,
                y,
                eps,
                narrow,
                _parts(index, x, weight),
                (*kept, *chain, *rows, *more, y),
            )
    return None


def _mean(index: UseIndex, value: Arg) -> tuple[Node, tuple[str, ...]] | None:
    """(the node whose mean over the last dim a value is, values in between)."""
    mean = index.made_by(value, "aten.mean.dim")
    if mean is not None:
        full = mean
        names: tuple[str, ...] = (mean.name,)
    else:
        share = index.made_by(value, "aten.div.Tensor", "aten.div.Scalar")
        total = index.made_by(share.args[0], _SUM) if share else None
        if share is None or total is None:
            return None
        full, names = total, (total.name, share.name)
        width = index.types[total.args[0].name].shape[-1]
        if share.args[1] != width or share.kwargs:
            return None
    source = index.makers.get(full.args[0].name)
    rank = len(index.types[full.args[0].name].shape)
    over_last = full.arg(1, "dim") in ((-1,), (rank - 1,)) and full.arg(2, "keepdim", False) is True
    if source is None or not over_last or full.kwarg("dtype") is not None:
        return None
    return source, names


def _squared(node: Node) -> str | None:
    """The value that a node squares."""
    if node.op == _POW and node.args[1] == 2:
        return str(node.args[0].name)
    if node.op == _MUL and isinstance(node.args[0], Ref) and node.args[0] == node.args[1]:
        return node.args[0].name
    if node.op == "aten.square.default":
        return str(node.args[0].name)
    return None


def _weighted(
    index: UseIndex, rows: str, x: TensorType
) -> tuple[str, str, tuple[str, ...], bool, tuple[str, ...]] | None:
    """(weight, y, rows in their types, narrow, values in between) of normalised rows."""
    for name in (rows, *index.casts(rows, x.dtype)):
        for node in index.used_by(name, _MUL):
            weight = _other(node, name)
            if weight is None or index.types[weight].shape != x.shape[-1:]:
                continue
            out = index.types[node.name]
            if out == x:
                return weight, node.name, tuple(dict.fromkeys((rows, name))), name != rows, ()
            cast = next(iter(index.casts(node.name, x.dtype)), None)
            if name == rows and cast and index.only_use(node.name, _CAST) and out.shape == x.shape:
                return weight, cast, (rows,), False, (node.name,)
    return None


def _parts(index: UseIndex, x: str, weight: str) -> Pair | None:
    """The two values of one type whose sum x is."""
    node = index.makers.get(x)
    if node is None or node.op != _ADD or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    if not isinstance(a, Ref) or not isinstance(b, Ref) or index.depends(weight, x):
        return None
    same = index.types[a.name] == index.types[b.name] == index.types[x]
    return (a.name, b.name) if same else None


def backwards(index: UseIndex) -> Iterator[Backward]:
    """All gradients of RMSNorms in a graph."""
    for node in index.graph.nodes:
        if node.op == _POW and node.args[1] == 3:
            result = _backward(index, node)
            if result is not None:
                yield result


def _backward(index: UseIndex, cube: Node) -> Backward | None:
    """From rstd^3: its product with -1/2 the sum of (gradient of the rows) * x, spread over the row."""
    rstd = cube.args[0].name
    for slope in index.used_by(cube.name, _MUL):
        halved = index.makers.get(_other(slope, cube.name) or "")
        if halved is None or halved.op not in ("aten.mul.Scalar", _MUL) or halved.args[1] != -0.5:
            continue
        total = index.made_by(halved.args[0], _SUM)
        product = index.made_by(total.args[0], _MUL) if total else None
        if total is None or product is None or total.arg(2, "keepdim", False) is not True:
            continue
        full = index.types[product.name]
        if total.args[1] not in ((-1,), (len(full.shape) - 1,)):
            continue
        spread = _spread(index, slope.name, full)
        if spread is None:
            continue
        tilt, repeated, between = spread
        for rows_grad, raw in _orders(product):
            for direct in index.used_by(rows_grad, _MUL):
                if _other(direct, rows_grad) != rstd or direct is product:
                    continue
                chain = (cube.name, halved.name, slope.name, total.name, product.name, *between)
                result = _ended(index, rstd, rows_grad, (raw, repeated), direct.name, tilt, chain)
                if result is not None:
                    return result
    return None


def _spread(index: UseIndex, slope: str, full: TensorType) -> tuple[str, str, tuple[str, ...]] | None:
    """(slope * 2 x / H over full rows, x, values in between) of the gradient of a mean of squares."""
    value, names, divided = slope, [], False
    while True:
        nodes = index.used_by(value, "aten.expand.default", "aten.div.Scalar", "aten.div.Tensor")
        if len(nodes) != 1:
            break
        node = nodes[0]
        if node.op != "aten.expand.default":
            if divided or node.args[1] != full.shape[-1]:
                return None
            divided = True
        value = node.name
        names.append(value)
    if not divided:
        return None
    for node in index.used_by(value, _MUL):
        double = index.makers.get(_other(node, value) or "")
        if double is None or double.op not in ("aten.mul.Scalar", _MUL) or double.args[1] != 2.0:
            continue
        if index.types[node.name] != full or not isinstance(double.args[0], Ref):
            continue
        power = index.makers.get(double.args[0].name)
        once = power is not None and power.op == _POW and power.args[1] == 1.0
        x = power.args[0].name if once and power is not None else double.args[0].name
        inner = (power.name,) if once and power is not None else ()
        return node.name, x, (*names, *inner, double.name, node.name)
    return None


def _ended(
    index: UseIndex,
    rstd: str,
    rows_grad: str,
    raw: Pair,
    direct: str,
    tilt: str,
    chain: tuple[str, ...],
) -> Backward | None:
    """The rest of a gradient: where it starts from, its sum, and the gradient of the weight."""
    start = index.makers.get(index.uncast(rows_grad))
    if start is None or start.op != _MUL:
        return None
    width = index.types[rows_grad].shape[-1:]
    pair = next(((g, w) for g, w in _orders(start) if index.types[w].shape == width), None)
    if pair is None or index.types[pair[0]].shape != index.types[rows_grad].shape:
        return None
    scaled, weight = pair
    grad = index.uncast(scaled)
    added = _added(index, direct, tilt)
    if added is None:
        return None
    dx, more, between = added
    dw, rows, weights = _weight_gradient(index, (grad, scaled), weight)
    names = (rows_grad, start.name, *((scaled,) if scaled != grad else ()), direct, tilt)
    return Backward(grad, weight, rstd, raw, rows, more, dx, dw, (*chain, *names, *between, *weights))


def _added(index: UseIndex, direct: str, tilt: str) -> tuple[str, str | None, tuple[str, ...]] | None:
    """(gradient of x, what else is in it, values in between) from its two terms."""
    one, two = _only_cast(index, direct), _only_cast(index, tilt)
    between = [*(v for v in (one, two) if v not in (direct, tilt))]
    for node in index.used_by(one, _ADD):
        if node.kwargs:
            continue
        if _other(node, one) == two:
            end = _only_cast(index, node.name)
            between += [node.name, *([end] if end != node.name else [])]
            last = index.only_use(end, _ADD)
            more = _other(last, end) if last is not None and not last.kwargs else None
            if last is None or more is None or index.types[more] != index.types[end]:
                return end, None, tuple(between)
            if index.types[last.name] != index.types[end] or index.depends(more, end):
                return end, None, tuple(between)
            return last.name, more, (*between, last.name)
    # the terms join a sum one after the other
    for first, second in ((one, two), (two, one)):
        joined = index.only_use(first, _ADD)
        more = _other(joined, first) if joined is not None and not joined.kwargs else None
        last = index.only_use(joined.name, _ADD) if joined is not None else None
        if joined is None or more is None or last is None or last.kwargs:
            continue
        same = index.types[more] == index.types[first] == index.types[last.name]
        if _other(last, joined.name) == second and same and not index.depends(more, first):
            return last.name, more, (*between, joined.name, last.name)
    return None


def _weight_gradient(
    index: UseIndex, grads: Pair, weight: str
) -> tuple[str | None, str | None, tuple[str, ...]]:
    """(gradient of the weight, the rows it is made from, values in between); None where it is not there."""
    wanted = index.types[weight]
    for grad in dict.fromkeys(grads):
        for node in index.used_by(grad, _MUL):
            rows = _other(node, grad)
            if rows is None or index.types[rows].shape != index.types[grad].shape:
                continue
            total = index.only_use(node.name, _SUM)
            lead = tuple(range(len(index.types[grad].shape) - 1))
            if total is None or total.args[1] != lead or total.kwarg("dtype") is not None:
                continue
            names = [node.name, total.name]
            while index.types[names[-1]] != wanted:
                step = index.only_use(names[-1], *RESHAPES, _CAST)
                if step is None:
                    break
                names.append(step.name)
            if index.types[names[-1]] == wanted:
                return names[-1], rows, tuple(names)
            if index.types[total.name].dtype == wanted.dtype:
                return total.name, rows, (node.name, total.name)
    return None, None, ()


def _only_cast(index: UseIndex, name: str) -> str:
    """A value in another floating type, if that is all it is used for; itself otherwise."""
    node = index.only_use(name, _CAST)
    return node.name if node is not None and _is_cast(node) and index.types[node.name].is_float else name


def _is_cast(node: Node) -> bool:
    return (
        node.op == _CAST and [k for k, _ in node.kwargs] == ["dtype"] and isinstance(node.kwargs[0][1], Dtype)
    )


def _orders(node: Node) -> Iterator[Pair]:
    """Both orders of the two values that a node takes."""
    if len(node.args) == 2 and all(isinstance(a, Ref) for a in node.args):
        a, b = (str(x.name) for x in node.args)
        yield a, b
        if a != b:
            yield b, a


def _other(node: Node, name: str) -> str | None:
    """What a node of two values takes beside one of them."""
    return next((b for a, b in _orders(node) if a == name), None)
