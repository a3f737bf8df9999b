"""What static verification says: findings, and what was checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: the rules that a program can break, by what they are about
Rule = Literal[
    "placement",  # an op on placements that its rule does not allow
    "partial",  # a pending sum reaches an op that is not linear in it
    "arguments",  # local sizes or offsets of an op are not those of its placements
    "collective",  # a collective does not do what the placements around it say
    "interface",  # what a call is given, or gives, is not what the segment says
    "function",  # something is computed that the model does not compute
    "result",  # a result is not that of the model
    "gradient",  # a gradient does not end as its parameter lies, or is not a full sum
    "shards",  # shards do not cover a tensor exactly
    "schedule",  # the actions of a pipeline are not complete, in order, or able to run
    "message",  # a send without its receive, out of order, or of something else
    "step",  # something is done once a step that belongs into every microbatch, or the other way
    "memory",  # more than the device has
    "plan",  # the plan is that of another model, mesh or target
    "host",  # used in host memory without a load, loaded without a store
]


@dataclass(frozen=True, slots=True)
class ProgramLocation:
    """A place in a program.

    stage, phase, slice: of the part, stage -1 if it is of none. item: number of the instruction in main, -1
    if none. segment, number: the node inside the segment that is called. value: what it is about. rank: of
    the pipeline, action: of that rank, where it is about the schedule.
    """

    value: str = ""
    stage: int = -1
    phase: str = ""
    slice: int = 0
    item: int = -1
    segment: str = ""
    number: int = -1
    rank: int = -1
    action: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. what: one sentence. why: what would be right."""

    rule: Rule
    what: str
    at: ProgramLocation
    why: str = ""


@dataclass(frozen=True, slots=True)
class Located:
    """A finding with its place in words.

    ranks: of the full mesh, as text (``ranks 8-15 (stage 1)``). line: of the program's text, 0 if there is
    none. text: that line. source: the user's line, "" if unknown.
    """

    finding: Finding
    ranks: str
    line: int
    text: str
    source: str
    file: str = "program.py"


@dataclass(frozen=True, slots=True)
class Checked:
    """One group of rules. count: of what was looked at. note: what of it is not covered, or a figure."""

    name: str
    count: int
    of: str
    broken: int
    note: str = ""
    covered: bool = True


@dataclass(frozen=True)
class StaticReport:
    """The outcome for one program. seconds: that it took."""

    mesh: str
    ranks: int
    checked: tuple[Checked, ...]
    findings: tuple[Located, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def uncovered(self) -> tuple[Checked, ...]:
        """What could not be decided, with the reason in the note."""
        return tuple(c for c in self.checked if not c.covered)
