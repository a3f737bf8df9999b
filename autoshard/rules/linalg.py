"""Linear algebra: matrices stay whole, the dims before them may be split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Builder, Dims, Factored, RuleFn, broadcast


def _batched(
    kept: Sequence[int], made: Sequence[int], ins: Sequence[TensorType], outs: Sequence[TensorType | None]
) -> Factored:
    """kept, made: how many last dims of each input and of each output stay whole. What is before them is the
    same everywhere, or is broadcast; an output without elements has no dims."""
    leads = [t.shape[: len(t.shape) - n] for t, n in zip(ins, kept, strict=True)]
    rank = max(map(len, leads))
    sizes = [max((s[k - rank + len(s)] for s in leads if k >= rank - len(s)), default=1) for k in range(rank)]
    build = Builder()
    common = build.dims(sizes)
    fixed: set[int] = set()

    def laid(shape: Sequence[int], lead: int) -> Dims:
        before = zip(common[rank - lead :] if lead else (), shape[:lead], strict=True)
        own = build.dims(shape[lead:])
        fixed.update(f for d in own for f in d)
        return (*(d if n != 1 else () for d, n in before), *own)

    inputs = tuple(laid(t.shape, len(s)) for t, s in zip(ins, leads, strict=True))
    outputs = tuple(
        None if t is None else laid(t.shape, len(t.shape) - n if prod(t.shape) else 0)
        for t, n in zip(outs, made, strict=True)
    )
    return Factored(tuple(build.sizes), inputs, outputs, frozenset(fixed))


def _matrices(kept: Sequence[int], made: Sequence[int]) -> RuleFn:
    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        return _batched(kept[: len(ins)], made, ins, node.types)

    return rule


def solve(node: Node, ins: Sequence[TensorType]) -> Factored:
    """a [..., n, n], b [..., n, k] or, of the same leading dims, [..., n] -> x like b, and its factors."""
    a, b = ins
    vector = len(b.shape) == 1 or (len(b.shape) == len(a.shape) - 1 and b.shape == a.shape[:-1])
    kept = 1 if vector else 2
    return _batched((2, kept), (kept, 2, 1, 0), ins, node.types)


def cross(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Vectors of three elements along a dim."""
    out = node.types[0]
    assert out is not None
    dim = node.kwarg("dim", node.arg(2, "dim", -1)) % len(out.shape) - len(out.shape)
    return broadcast(ins, node.types, fixed_dims=[dim], linear=((0,), (1,)))


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "aten.linalg_cholesky_ex.default": _matrices((2,), (2, 0)),
        "aten.cholesky.default": _matrices((2,), (2,)),
        "aten.cholesky_solve.default": _matrices((2, 2), (2,)),
        "aten.cholesky_inverse.default": _matrices((2,), (2,)),
        "aten._linalg_solve_ex.default": solve,
        "aten.linalg_inv_ex.default": _matrices((2,), (2, 0)),
        "aten.linalg_pinv.atol_rtol_tensor": _matrices((2, 0, 0), (2,)),
        "aten._linalg_det.default": _matrices((2,), (0, 2, 1)),
        "aten._linalg_slogdet.default": _matrices((2,), (0, 0, 2, 1)),
        "aten._linalg_eigh.default": _matrices((2,), (1, 2)),
        "aten.linalg_eig.default": _matrices((2,), (1, 2)),
        "aten._linalg_eigvals.default": _matrices((2,), (1,)),
        "aten._linalg_svd.default": _matrices((2,), (2, 1, 2)),
        "aten.linalg_qr.default": _matrices((2,), (2, 2)),
        "aten.linalg_householder_product.default": _matrices((2, 1), (2,)),
        "aten.linalg_lu.default": _matrices((2,), (2, 2, 2)),
        "aten.linalg_lu_factor_ex.default": _matrices((2,), (2, 1, 0)),
        "aten.linalg_lu_solve.default": _matrices((2, 1, 2), (2,)),
        "aten.lu_unpack.default": _matrices((2, 1), (2, 2, 2)),
        "aten.linalg_matrix_exp.default": _matrices((2,), (2,)),
        "aten.triangular_solve.default": _matrices((2, 2), (2, 2)),
        "aten.linalg_cross.default": cross,
    }
)
