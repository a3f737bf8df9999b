"""What optimizers take that need matrices, which go to one rank each and come back: Muon, SOAP, Shampoo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod

from autoshard.cluster.cluster import Device
from autoshard.cost.compute import flop_rate
from autoshard.cost.link import AxisLink
from autoshard.cost.recipe import ORTHOGONAL_BYTES, Recipe
from autoshard.ir import DTYPES, Folded, TensorType, refs_of
from autoshard.ir.views import VIEWS


def without_tables(recipe: Recipe, folded: Folded) -> Recipe:
    """A recipe for a model, whose lookups AdamW updates, and what has as many rows as the largest: heads."""
    if not recipe.needs_matrices:
        return recipe
    ports = {p.name: p for p in folded.joint.ports if p.kind == "param"}
    tables = set()
    for call in folded.calls:
        graph = folded.segments[call.segment]
        given = {name: arg for (name, _), arg in zip(graph.inputs, call.args, strict=True) if arg in ports}
        for node in graph.nodes:
            refs = list(refs_of(node))
            if node.op in VIEWS and refs and refs[0] in given:
                given[node.name] = given[refs[0]]
            elif node.op == "aten.embedding.default" and refs[0] in given:
                tables.add(given[refs[0]])
    rows = max((ports[name].type.shape[0] for name in tables), default=0)
    matrices = (p for p in ports.values() if len(p.type.shape) == 2)
    kept = (p.target for p in matrices if p.name in tables or p.type.shape[0] == rows)
    return replace(recipe, tables=frozenset(kept))


def iteration_flop(shape: Sequence[int]) -> int:
    """FLOP of an iteration of Newton-Schulz for matrices [..., rows, columns]: two products of [low, low] by
    [low, high], one of [low, low] by [low, low] (Jordan et al., "Muon", 2024)."""
    low, high = sorted(shape[-2:])
    return 2 * prod(shape[:-2]) * low * low * (2 * high + low)


def preconditioning_flop(recipe: Recipe, shape: Sequence[int]) -> float:
    """FLOP of a step of SOAP or Shampoo for matrices [..., rows, columns]; bases or roots are counted evenly
    over the steps that they serve.

    A product with a matrix on either side, or the update of both factors, is 2 m n (m + n). SOAP has four of
    these and Shampoo two; what they compute every 10 steps is told in `cost.recipe`.
    """
    per = recipe.preconditioners
    if per is None:
        return 0.0
    *batch, m, n = shape
    return prod(batch) * (per.products * 2 * m * n * (m + n) + per.renewed * (m**3 + n**3) / per.every)


def owner_seconds(recipe: Recipe, type_: TensorType, device: Device, links: Sequence[AxisLink]) -> float:
    """Seconds of a rank for matrices [..., rows, columns] that all ranks share.

    recipe: that of the parameter. links: of all axes that parameters lie on. Ranks have equal shares of the
    products; messages of one round run beside the products of another (`runtime.optim.owners`). QR and
    symmetric decompositions are priced as products.
    """
    if not recipe.needs_matrices:
        return 0.0
    ranks = prod(link.size for link in links)
    bandwidth = min((link.alone for link in links if link.size > 1), default=inf)
    if recipe.preconditioners is None:
        flop = recipe.iterations * iteration_flop(type_.shape)
        moved = 2 * ORTHOGONAL_BYTES * type_.numel  # there and back
        return max(flop / flop_rate("bf16", device, matmul=True), moved / bandwidth) / ranks
    nbytes = DTYPES[type_.dtype][1] * type_.numel
    seconds = preconditioning_flop(recipe, type_.shape) / flop_rate("f32", device, matmul=True)
    moved = 3 * nbytes  # gradient and parameter there, the parameter back
    updated = (3 + 2 * recipe.moments) * nbytes / device.traffic
    return (max(seconds, moved / bandwidth) + updated) / ranks
