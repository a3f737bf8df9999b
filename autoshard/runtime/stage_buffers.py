"""Which pipeline ranks have the values that programs give a buffer.

Programs of one module may cut its stages at other places. A rank that no update reaches has old values.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.errors import UsageError
from autoshard.program.holders import holders_of
from autoshard.program.program import Program


class StageBuffers:
    """Of all programs of a module."""

    def __init__(self) -> None:
        #: target -> ranks that use it, and that have its values, of those that are updated
        self._users: dict[str, set[int]] = {}
        self._current: dict[str, set[int]] = {}

    def admit(self, program: Program) -> None:
        """Another program of the module.

        Raises UsageError, the same on all ranks, if a rank would use a buffer that it has no values of.
        """
        if program.stages is None:
            return
        owner = program.stages.schedule.owner
        ports = [p for p in program.signature.ports if p.kind == "buffer"]
        none: Mapping[str, tuple[int, ...]] = {p.target: () for p in ports}
        stages = holders_of(program, none)
        updated = {r.target for r in program.signature.results if r.kind == "buffer"}
        for port in ports:
            using = {owner[s] for s in stages[port.name]}
            all_using = self._users.get(port.target, set()) | using
            current = self._current.get(port.target)
            if port.target in updated:
                current = using if current is None else current & using
            if current is not None and not all_using <= current:
                raise UsageError(
                    f"no program for this call keeps {port.target} on the pipeline ranks that have it",
                    why=f"ranks {sorted(current)} have its values, and ranks {sorted(all_using)} use it",
                    hint="parallelize a second model for such calls",
                )
            self._users[port.target] = all_using
            if current is not None:
                self._current[port.target] = current
