"""Everything that is checked of a program without running it, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

from autoshard.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.errors import VerificationError
from autoshard.ir import Call
from autoshard.ir.boundaries import check_parts
from autoshard.ir.units import bytes_text
from autoshard.program.program import Program
from autoshard.rules.local import MeshShape
from autoshard.rules.registry import RULES
from autoshard.rules.user import Rules, rule_table
from autoshard.verify.host_values import check_hosted, uses_host
from autoshard.verify.locate import Locator
from autoshard.verify.memory import fit, fit_host
from autoshard.verify.operators import OpChecker
from autoshard.verify.order import Moves, check_order
from autoshard.verify.plan import broken_plan, can_be_compared
from autoshard.verify.ports import broken_results, broken_shards
from autoshard.verify.result import Checked, Finding, ProgramLocation, Rule, StaticReport
from autoshard.verify.step_scope import broken_steps
from autoshard.verify.translation_validation import Followed, Walk
from autoshard.verify.value_numbering import TermTable

#: more findings than this help nobody
_MOST = 20


def verify_static(
    program: Program, *, rules: Rules = None, cluster: Cluster | None = None, moves: Moves | None = None
) -> StaticReport:
    """Prove what can be proved of all ranks' programs without running them; what is broken is reported.

    rules: the user's own. cluster: whose memory the program must fit, None to leave that out. moves: what
    the pipeline's ranks do, if not what follows from the program.
    """
    started = perf_counter()
    work = _Work(program)
    try:
        check_parts(program.lowered)
    except VerificationError as error:
        work.find("stages", 1, "parts", [Finding("step", error.what, ProgramLocation(), error.where)])
    else:
        _text(work, rules)
        _pipeline(work, moves)
        if uses_host(program):
            hosted = check_hosted(program)
            work.find("host memory", hosted.moved, "stores and loads", hosted.findings)
        if cluster is not None:
            _memory(work, cluster)
    full = Mesh.parse(program.full_mesh)
    locator = Locator(program)
    located = tuple(locator.located(f) for f in work.findings[:_MOST])
    return StaticReport(
        program.full_mesh, full.world_size, tuple(work.checked), located, perf_counter() - started
    )


@dataclass
class _Work:
    """What is put together on the way."""

    program: Program
    checked: list[Checked] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def find(
        self,
        name: str,
        count: int,
        of: str,
        result: Iterable[Finding],
        note: str = "",
        *,
        covered: bool = True,
    ) -> None:
        """Note a group of rules, and what was found."""
        own = list(result)
        self.findings += own
        self.checked.append(Checked(name, count, of, len(own), note, covered))


def _text(work: _Work, rules: Rules) -> None:
    """Placements, function, ends: what the text says."""
    program = work.program
    mesh = Mesh.parse(program.mesh)
    shape = MeshShape(mesh.names, mesh.sizes)
    ports = program.signature.ports
    work.find("shards", len(ports), "inputs", broken_shards(program, shape))
    if program.original is None:
        note = "the program was stored without its model: compile it again"
        work.find("placements", 0, "ops", (), note, covered=False)
        work.find("function", 0, "terms", (), note, covered=False)
        return
    if can_be_compared(program, rules):
        work.find("plan", 1, "fingerprint", broken_plan(program, rules))
    terms = TermTable(program.original, ports)
    judge = OpChecker(rule_table(RULES, rules), shape)
    slices = None if program.stages is None else program.stages.slices
    followed = Walk(program.lowered, {p.name for p in ports}, terms, judge, slices).run()
    by = list(_grouped(followed))
    calls = sum(isinstance(i, Call) for i in program.lowered.main)
    work.find(
        "placements",
        followed.nodes,
        f"ops in {calls} calls",
        [f for name, f in by if name == "placements"],
    )
    note = f"values of {followed.rounded} are rounded: equal but for that" if followed.rounded else ""
    moved = [f for name, f in by if name == "collectives"]
    work.find("collectives", followed.moves, "collectives", moved, note)
    wrong = [f for name, f in by if name == "function"]
    wrong += broken_results(program, terms, followed.own)
    what = f"ops of the model, {len(program.signature.results)} results"
    note = f"{followed.kernels} calls of kernels, and what follows from them, are not compared"
    covered = not followed.kernels
    work.find("function", terms.statements, what, wrong, "" if covered else note, covered=covered)
    alone = f"each microbatch computes by itself {'; '.join(program.alone)}" if program.alone else ""
    broken = broken_steps(program, terms, followed.own)
    work.find("once a step", len(program.lowered.parts), "parts", broken, alone)


#: which group of rules a broken rule belongs to
_GROUP: dict[Rule, str] = {
    "placement": "placements",
    "partial": "placements",
    "arguments": "placements",
    "interface": "placements",
    "collective": "collectives",
}


def _grouped(followed: Followed) -> Iterator[tuple[str, Finding]]:
    return ((_GROUP.get(f.rule, "function"), f) for f in followed.findings)


def _pipeline(work: _Work, moves: Moves | None) -> None:
    """Schedule and messages."""
    ordered = check_order(work.program, moves)
    first = [f for f in ordered.findings if f.rule == "schedule"]
    rest = [f for f in ordered.findings if f.rule != "schedule"]
    work.find("schedule", ordered.actions, "actions", first)
    work.find("messages", ordered.messages, "messages", rest)


def _memory(work: _Work, cluster: Cluster) -> None:
    result = fit(work.program, cluster)
    broken = result.finding
    note = f"{bytes_text(result.peak)} of {bytes_text(result.room)}, simulated on {cluster.name}"
    work.find("memory", 1, "fullest rank", [broken] if broken is not None else [], note)
    if work.program.offload:
        host = fit_host(work.program, cluster)
        note = f"{bytes_text(host.peak)} of {bytes_text(host.room)} of a node, simulated on {cluster.name}"
        over = [] if host.finding is None else [host.finding]
        work.find("memory of the host", 1, "node", over, note)
