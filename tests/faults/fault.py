"""What a fault is: a program in which something is wrong, and what the verifier must say of it.

Faults are made so that they change what is computed, or what waits for what: a program that is merely written
in another way is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoshard.program.messages import RankAction
from autoshard.program.program import Program

Moves = tuple[tuple[RankAction, ...], ...]


@dataclass(frozen=True)
class Fault:
    """A program with one fault, as it would be read from its folder.

    rules: of which the verifier must name one. near: of which the place it names must contain one (a value, a
    segment, a part or an action). moves: of the pipeline, if the fault is in them. memory: whether only the
    memory of the device is at fault.
    """

    program: Program
    rules: frozenset[str]
    near: tuple[str, ...]
    moves: Moves | None = None
    memory: bool = False


#: puts one fault of its kind wherever it can be
Mutation = Callable[[Program], Iterator[Fault]]

#: programs (by name) with the text of a whole step, and with a pipeline
TEXT = ("flat", "odd", "experts", "pipeline", "again", "sliced")
PIPES = ("pipeline", "bubble", "tied")


@dataclass(frozen=True)
class Kind:
    """One kind of fault. on: the programs (by name) that it can be put into."""

    mutate: Mutation
    on: tuple[str, ...]

    @property
    def told(self) -> str:
        """What it does, in words."""
        return (self.mutate.__doc__ or "").split("\n")[0].rstrip(".")


def rules(*names: str) -> frozenset[str]:
    """Names of rules."""
    return frozenset(names)
