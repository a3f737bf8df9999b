"""What passes over mixtures of experts have in common."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.errors import UsageError
from autoshard.ir import Node, Origin

#: route tokens to one expert at a time, in a loop of the model's that is not one mixture
_LOOP_ROUTES = frozenset(("autoshard.route_one.default", "autoshard.route_part.default"))


def loop_route(nodes: Iterable[Node]) -> Node | None:
    """The first op that routes tokens to experts in a loop, if there is one."""
    return next((node for node in nodes if node.op in _LOOP_ROUTES), None)


def has_grouped_rows(nodes: Iterable[Node]) -> bool:
    """Whether alike rows of experts are grouped (`passes.simplify.group_rows`)."""
    return any(t is not None and t.share != 1.0 for node in nodes for t in node.types)


def refusal(what: str, why: str, hint: str, origin: Origin | None = None) -> UsageError:
    """That a pass cannot be applied to the mixtures of a model. origin: of the op that stands against it."""
    return UsageError(what, where="" if origin is None else origin.source, why=why, hint=hint)
