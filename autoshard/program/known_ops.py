"""The ops that a program may call: what has a rule, what lowering makes of it, and collectives."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.ir.collectives import COLLECTIVES
from autoshard.ir.offload import HOST_OPS
from autoshard.rules.registry import RULES

_LOWERED = (
    "aten.addmm.default",
    "aten.alias.default",
    "autoshard.add_layer_norm.default",
    "autoshard.add_layer_norm_quantise.default",
    "autoshard.add_rms_norm.default",
    "autoshard.add_rms_norm_quantise.default",
    "autoshard.embedding_part.default",
    "autoshard.embedding_part_backward.default",
    "autoshard.index_add_part.default",
    "autoshard.layer_norm.default",
    "autoshard.layer_norm_backward.default",
    "autoshard.layer_norm_quantise.default",
    "autoshard.rms_norm.default",
    "autoshard.rms_norm_backward.default",
    "autoshard.rms_norm_quantise.default",
    "autoshard.route_part.default",
    "autoshard.scatter_add_part.default",
)


def known_ops(more: Iterable[str] = ()) -> frozenset[str]:
    """``more``: ops that the user brings rules for."""
    return frozenset((*RULES, *_LOWERED, *COLLECTIVES, *HOST_OPS, *more))
