"""What there is to decide: one variable per op, per shared value, per parameter, input and output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, cast

from autoshard.ir.flow import Place
from autoshard.ir.placement import Layout
from autoshard.rules.states import OpState


@dataclass(frozen=True, slots=True)
class ParamState:
    """How a parameter is stored and used.

    stored: between steps (and so its optimizer state). use: gathered for computing.
    keep: whether the gathered copy stays for the full step (ZeRO-1, ZeRO-2) or is regathered for
        every use (ZeRO-3); of no meaning when stored and use are the same.
    late: whether the gradient is added up as it is made and reduced once, in the last microbatch
        (ZeRO-1, and data parallelism), or reduced in each of them (ZeRO-2, ZeRO-3).
    """

    stored: Layout
    use: Layout
    keep: bool
    late: bool = False


@dataclass(frozen=True, slots=True)
class NodeVar:
    """The way an op runs. segment, number: which node."""

    segment: str
    number: int
    states: tuple[OpState, ...]


@dataclass(frozen=True, slots=True)
class ValueVar:
    """The layout in which a value with several uses (or a segment's input) is offered to them."""

    place: Place
    states: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class ParamVar:
    """The strategy of a class of parameters (or buffers and constants, which only have one copy)."""

    place: Place
    states: tuple[ParamState, ...]


@dataclass(frozen=True, slots=True)
class PortVar:
    """The layout of a model input or a tangent."""

    place: Place
    states: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class ResultVar:
    """The layout of a model output (or input gradient, or new buffer value)."""

    number: int
    states: tuple[Layout, ...]


Variable: TypeAlias = NodeVar | ValueVar | ParamVar | PortVar | ResultVar

V = TypeVar("V", bound=Variable)


def with_states(variable: V, states: tuple[Any, ...]) -> V:
    """The variable with other states."""
    variable_: V = replace(cast("Any", variable), states=states)
    return variable_
