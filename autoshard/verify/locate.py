"""From a place in a program to what a reader looks for: ranks, the line of the text, the user's line."""

from __future__ import annotations

from functools import cached_property

from autoshard.cluster.mesh import Mesh
from autoshard.errors import VerificationError
from autoshard.ir import Call
from autoshard.ir.boundaries import part_name
from autoshard.program.program import Program
from autoshard.program.text import program_text
from autoshard.verify.result import Finding, Located, ProgramLocation


class Locator:
    """Finds places in the text of one program, which is only written if something is looked for."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def _lines(self) -> list[str]:
        try:
            return program_text(self.program).splitlines()
        except VerificationError:
            return []  # so broken that it has no text

    def located(self, finding: Finding) -> Located:
        """The finding with its place in words."""
        at = finding.at
        number = self._line(at)
        text = self._lines[number - 1].strip() if number else ""
        # a program that cannot be run has its schedule in a file of its own
        file = "schedule.json" if at.action and not number else "program.py"
        return Located(finding, self._ranks(at), number, text, self._source(at), file)

    def _line(self, at: ProgramLocation) -> int:
        """Line of the text, from 1; 0 if the place has none."""
        if at.segment and at.number >= 0:
            name = self.program.lowered.segments[at.segment].graph.nodes[at.number].outs[0]
            return self._after(f"def {at.segment}(", name)
        part = next(
            (
                p
                for p in self.program.lowered.parts
                if (p.stage, p.phase, p.slice) == (at.stage, at.phase, at.slice)
            ),
            None,
        )
        if part is not None:
            head = f"def {part_name(self.program.lowered, part)}("
            if at.item >= 0:
                item = self.program.lowered.main[at.item]
                name = item.outs[0] if item.outs else item.segment if isinstance(item, Call) else ""
                return self._after(head, name)
            return self._after(head, at.value) or self._after(head, "")
        return self._after("", at.value) if at.value else 0

    def _after(self, head: str, name: str) -> int:
        """The first line that makes ``name`` behind a line that begins with ``head``."""
        inside = not head
        for number, line in enumerate(self._lines, 1):
            if not inside:
                inside = line.startswith(head)
                if inside and not name:
                    return number
                continue
            if head and (line.startswith("def ") or number == len(self._lines)):
                return 0
            words = line.strip()
            if words.startswith((f"{name}: ", f"({name},", f"({name})", f"{name},", f"{name} =")):
                return number
            if " = " in words and f" {name}," in words.split(" = ")[0] + ",":
                return number
            if " = " in words and f"{name})" in words.split(" = ")[0].replace("(", " ").split():
                return number
        return 0

    def _ranks(self, at: ProgramLocation) -> str:
        """Which ranks of the full mesh run it, as text."""
        full = Mesh.parse(self.program.full_mesh)
        stages = self.program.stages
        if stages is None:
            return "all ranks" if full.world_size > 1 else "rank 0"
        pipe = at.rank if at.rank >= 0 else stages.schedule.owner[at.stage] if at.stage >= 0 else -1
        if pipe < 0:
            return "all ranks"
        own = [r for r in range(full.world_size) if full.coords(r)[stages.position] == pipe]
        word = f"stage {at.stage}" if at.stage >= 0 else f"pipeline rank {pipe}"
        return f"ranks {spans(own)} ({word})" if len(own) > 1 else f"rank {own[0]} ({word})"

    def _source(self, at: ProgramLocation) -> str:
        """The user's line, or else the layer or the parameter."""
        program = self.program
        label = ""
        if 0 <= at.item < len(program.lowered.main):
            item = program.lowered.main[at.item]
            label = item.label if isinstance(item, Call) else ""
        if at.segment and at.number >= 0:
            notes = program.notes.get(at.segment, ())
            note = notes[at.number] if at.number < len(notes) else None
            if note is not None and (note.source or note.fqn):
                return f"{note.source} ({label or note.fqn})" if note.source else note.fqn
        port = next((p for p in program.signature.ports if p.name == at.value), None)
        result = next((r for r in program.signature.results if r.value == at.value), None)
        named = port.target if port is not None else result.target if result is not None else ""
        return label or named or self._made(at.value)

    def _made(self, value: str) -> str:
        """Where in the user's code a value of main comes from: the last line of the call that makes it."""
        program = self.program
        for item in program.lowered.main:
            if not value or value not in item.outs or not isinstance(item, Call):
                continue
            graph = program.lowered.segments[item.segment].graph
            inner = graph.outputs[item.outs.index(value)]
            for node, note in zip(graph.nodes, program.notes.get(item.segment, ()), strict=False):
                if inner in node.outs and (note.source or note.fqn):
                    return note.source or note.fqn
            return item.label
        return ""


def spans(ranks: list[int]) -> str:
    """``0-3,8-11``"""
    result: list[tuple[int, int]] = []
    for rank in ranks:
        if result and result[-1][1] == rank - 1:
            result[-1] = (result[-1][0], rank)
        else:
            result.append((rank, rank))
    words = [str(a) if a == b else f"{a}-{b}" for a, b in result]
    return ",".join(words) if len(words) <= 4 else f"{','.join(words[:3])},...,{words[-1]}"
