"""Values in host memory: only stored there, only loaded from there, and gradients where parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.ir import Call, Node, refs_of
from autoshard.ir.boundaries import wires_of
from autoshard.ir.lowered import StagePart, uses_of
from autoshard.ir.offload import HOST_OPS, LOAD, STORE
from autoshard.program.host_values import moves_to_host
from autoshard.program.program import Program
from autoshard.verify.result import Finding, ProgramLocation

_PHASES = ("gather", "count", "forward", "backward", "weight", "reduce")


@dataclass
class Hosted:
    """What came of it. moved: values that stores and loads move."""

    findings: list[Finding] = field(default_factory=list)
    moved: int = 0


def check_hosted(program: Program) -> Hosted:
    """What is in host memory must be loaded before it is used, and what is not must be stored first."""
    return _Check(program).run()


def uses_host(program: Program) -> bool:
    """Whether anything of a program is in host memory."""
    return bool(program.offload) or moves_to_host(program.lowered)


class _Check:
    """One program, stage by stage: which values are in host memory after each instruction."""

    def __init__(self, program: Program) -> None:
        self.program, self.lowered = program, program.lowered
        self.out = Hosted()
        ports = program.signature.ports
        away = program.offload.parameters
        self.ports = {p.name: away and p.kind == "param" for p in ports}
        self.own: dict[int, dict[str, bool]] = {p.stage: {} for p in self.lowered.parts}
        self._told: set[tuple[str, str, str]] = set()

    def run(self) -> Hosted:
        for part in sorted(self.lowered.parts, key=_turn):
            for number in range(part.start, part.stop):
                self._item(number, part)
        self._wires()
        self._results()
        return self.out

    def _item(self, number: int, part: StagePart) -> None:
        item, own = self.lowered.main[number], self.own[part.stage]
        at = ProgramLocation(item.outs[0] if item.outs else "", part.stage, part.phase, part.slice, number)
        known = {v: own.get(v, self.ports.get(v, False)) for v in uses_of(item)}
        if not isinstance(item, Call):
            own.update(self._node(item, known, at, "", -1))
            return
        segment = self.lowered.segments[item.segment].graph
        env = {inner: known[v] for (inner, _), v in zip(segment.inputs, item.args, strict=True)}
        for place, node in enumerate(segment.nodes):
            env |= self._node(node, env, at, item.segment, place)
        own.update((out, env[inner]) for out, inner in zip(item.outs, segment.outputs, strict=True))

    def _node(
        self, node: Node, host: Mapping[str, bool], at: ProgramLocation, segment: str, place: int
    ) -> dict[str, bool]:
        """Which of its results are in host memory."""
        where = ProgramLocation(node.outs[0], at.stage, at.phase, at.slice, at.item, segment, place)
        for value in dict.fromkeys(refs_of(node)):
            if node.op == STORE and host[value]:
                self._tell(f"{value} is stored and is in host memory already", where, segment or at.value)
            elif node.op == LOAD and not host[value]:
                self._tell(f"{value} is loaded and nothing has stored it", where, segment or at.value)
            elif node.op not in HOST_OPS and host[value]:
                why = "what computes takes values on the device"
                self._tell(f"{value} is in host memory and is used without a load", where, segment, why)
        if node.op in HOST_OPS:
            self.out.moved += len(node.outs)
        return dict.fromkeys(node.outs, node.op == STORE)

    def _wires(self) -> None:
        """Ranks of a pipeline send each other what is on their devices."""
        for wire in wires_of(self.lowered, self.ports):
            if self.own[wire.source].get(wire.value):
                at = ProgramLocation(wire.value, wire.source, wire.phase, wire.slice)
                self._tell(f"{wire.value} is sent to stage {wire.target} from host memory", at, "")

    def _results(self) -> None:
        away = self.program.offload.parameters
        for result in self.program.signature.results:
            wanted = away and result.kind == "grad"
            for stage, own in self.own.items():
                if own.get(result.value, wanted) != wanted:
                    lies = "on the device" if wanted else "in host memory"
                    why = "its parameter is in host memory" if wanted else "it is handed out on the device"
                    self._tell(
                        f"{result.kind} {result.target} ends {lies}",
                        ProgramLocation(result.value, stage),
                        "",
                        why,
                    )

    def _tell(self, what: str, at: ProgramLocation, segment: str, why: str = "") -> None:
        """Once per place in the text."""
        key = (segment, at.value, what)
        if key not in self._told:
            self._told.add(key)
            self.out.findings.append(Finding("host", what, at, why))


def _turn(part: StagePart) -> tuple[int, int, int]:
    up = part.phase in ("gather", "count", "forward", "reduce")
    order = part.slice if part.phase == "forward" else -part.slice
    return _PHASES.index(part.phase), order, part.stage if up else -part.stage
