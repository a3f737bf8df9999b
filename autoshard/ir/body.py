"""A repeated layer as a captured model holds it: traced once, called where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from autoshard.ir.joint import Joint, Port


@dataclass(frozen=True)
class Body:
    """A layer traced on its own.

    feeds: the ports that a call gives values to, in the order of its tensors. outputs: values of the
    layer's outputs, by position. tangents: port names, in the order of the outputs that have a gradient.
    grads: values of the gradients, in the order of the feeds that have one. sites: dropout calls inside.
    """

    joint: Joint
    feeds: tuple[Port, ...]
    outputs: tuple[str, ...]
    tangents: tuple[str, ...]
    grads: tuple[tuple[int, str], ...]
    sites: int

    def away(self) -> set[str]:
        """Parameters, by their names in the layer, that `passed` leaves out of ops that are apart."""
        return {self.feeds[k].target for k in set(range(len(self.feeds))) - set(self.passed(apart=True))}

    def passed(self, *, apart: bool) -> tuple[int, ...]:
        """Positions of the feeds that the op of a call is given.

        apart: without the parameters that have a gradient, but for the first.
        """
        away = [k for k, _ in self.grads if self.feeds[k].kind == "param"][1:] if apart else []
        return tuple(k for k in range(len(self.feeds)) if k not in away)


#: per call of a body, what its op is not given: position among the feeds -> name of the parameter
Away: TypeAlias = Mapping[int, Mapping[int, str]]
NONE_AWAY: Away = MappingProxyType({})
