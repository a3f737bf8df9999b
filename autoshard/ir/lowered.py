"""A program before it is printed: calls and collectives over values that have layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from autoshard.ir.folded import Call
from autoshard.ir.graph import Graph, Node
from autoshard.ir.types import TensorType
from autoshard.placement import Layout

Instruction: TypeAlias = "Call | Node"


@dataclass(frozen=True)
class Placed:
    """A value's global type and its layout."""

    type: TensorType
    layout: Layout


@dataclass(frozen=True)
class LoweredSegment:
    """A segment with collectives; its graph carries global types.

    layouts: of every value. why: node name -> reason shown in dumps.
    """

    graph: Graph
    layouts: dict[str, Layout]
    why: dict[str, str]


@dataclass(frozen=True)
class Lowered:
    """The whole program.

    main: instructions in order, forward before backward. ports: main value -> type and layout of every
    input of the program. values: the same for all other main values. results: main value of every
    result of the joint graph, in its order.
    """

    segments: dict[str, LoweredSegment]
    main: tuple[Instruction, ...]
    values: dict[str, Placed]
    results: tuple[str, ...]
