"""Memory of the device."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.program.program import Program
from faults.fault import Fault, Kind, rules


def too_small(program: Program) -> Iterator[Fault]:
    """The device has less memory than the fullest rank holds."""
    yield Fault(program, rules("memory"), (), memory=True)


KINDS: dict[str, Kind] = {
    "too little memory": Kind(too_small, ("flat", "pipeline")),
}
