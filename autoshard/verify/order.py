"""Do the ranks of a pipeline come to the end of a step, and does every message meet its receive.

Ranks of one stage run one text without branches, so all members of a mesh axis' group issue the same
collectives in the same order; no rank of another stage is in such a group. What is left is between stages:
values sent from action to action, and gradients of parameters that several of them hold. Both are followed
action by action, once per pipeline rank, however many ranks a stage has.

Sends do not wait; receives are posted in order, per pair of ranks, and wait for their message. So a rank
goes on as soon as everything has been sent that its next action takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from autoshard.errors import VerificationError
from autoshard.ir import Call
from autoshard.ir.boundaries import ends_of, wires_of
from autoshard.ir.lowered import Lowered, PartBoundary, Phase
from autoshard.program.holders import holders_of
from autoshard.program.messages import RankAction, StageSend, moves_of, phases_of
from autoshard.program.program import PipelineStages, Program
from autoshard.rules.stops import stops_of
from autoshard.schedules.check import check
from autoshard.schedules.schedule import Schedule, in_turns
from autoshard.verify.result import Finding, ProgramLocation

#: moves of every pipeline rank
Moves = Sequence[Sequence[RankAction]]
_Key = tuple[int, str, int]


@dataclass(frozen=True)
class Ordered:
    """What came of it. actions, messages: how many there are in a step."""

    findings: tuple[Finding, ...]
    actions: int
    messages: int


def check_order(program: Program, moves: Moves | None = None) -> Ordered:
    """Check the schedule of a program and what its ranks send each other.

    moves: what the ranks do, if not what follows from the program.
    """
    result = list(_schedule(program))
    if result:
        return Ordered(tuple(result), 0, 0)
    try:
        rows = moves_of(program) if moves is None else moves
    except KeyError as error:
        missing = Finding(
            "message", f"nothing sends {error.args[0]}", ProgramLocation(), "a stage takes it all the same"
        )
        return Ordered((missing,), 0, 0)
    traffic = _Traffic(program, rows)
    result = [*traffic.pairs(), *traffic.contents()]
    result += traffic.progress()
    result += _shared(program)
    return Ordered(tuple(result), sum(map(len, rows)), sum(len(m.sends) for row in rows for m in row))


def _schedule(program: Program) -> Iterator[Finding]:
    """The schedule itself, and whether it is one for these stages."""
    stages = 1 + max(p.stage for p in program.lowered.parts)
    if program.stages is None:
        if stages > 1:
            yield Finding("schedule", f"there are {stages} stages and no schedule", ProgramLocation())
        return
    schedule = program.stages.schedule
    try:
        check(schedule)
    except VerificationError as error:
        action = error.what.split(" ")[0]
        rank = next((r for r, row in enumerate(schedule.actions) if action in map(str, row)), -1)
        yield Finding("schedule", error.what, ProgramLocation(rank=rank, action=action), error.where)
        return
    slices = 1 + max(p.slice for p in program.lowered.parts)
    given = (schedule.stages, schedule.microbatches, schedule.slices)
    if given != (stages, program.microbatches, slices):
        yield Finding(
            "schedule",
            f"it is for {given[0]} stages, {given[1]} microbatches of {given[2]} slices",
            ProgramLocation(),
            f"the program has {stages}, {program.microbatches} and {slices}",
        )
    split = any(p.phase == "weight" for p in program.lowered.parts)
    if split != schedule.splits_backward:
        yield Finding(
            "schedule", "the schedule and the program split backward differently", ProgramLocation()
        )
    yield from _turns(program, program.stages)


def _turns(program: Program, stages: PipelineStages) -> Iterator[Finding]:
    """Of actions that run as one: as many for each as it stops."""
    owner = stages.schedule.owner
    for pair, (forward, backward) in stages.schedule.pairs.items():
        taken = stages.turns.get(pair, ())
        given = [taken.count(part) for part in (0, 1)]
        stops = [_stops(program, pair[0], "forward"), _stops(program, pair[1], "backward", "weight")]
        if given != [1 + n for n in stops]:
            at = ProgramLocation(rank=owner[forward.stage], stage=forward.stage, action=str(forward))
            why = f"{forward} stops {stops[0]} times, {backward} {stops[1]} times, and then they end"
            told = f"{forward} and {backward}, which run as one, have {given[0]} and {given[1]} turns"
            yield Finding("schedule", told, at, why)


def _stops(program: Program, stage: int, *phases: Phase) -> int:
    lowered = program.lowered
    parts = [part for part in lowered.of_stage[stage] if part.phase in phases]
    calls = [item for part in parts for item in lowered.of(part) if isinstance(item, Call)]
    return sum(1 + len(stops_of(lowered.segments[call.segment].graph.nodes)) for call in calls)


class _Traffic:
    """The moves of a program, with what each part takes and makes."""

    def __init__(self, program: Program, rows: Moves) -> None:
        self.program, self.rows = program, rows
        self.lowered: Lowered = program.lowered
        self.schedule: Schedule | None = program.stages.schedule if program.stages is not None else None
        self.owner = self.schedule.owner if self.schedule is not None else (0,)
        ends: dict[_Key, PartBoundary] = {
            (p.stage, p.phase, p.slice): ends_of(self.lowered, p) for p in self.lowered.parts
        }
        ports = {p.name for p in program.signature.ports}
        self.makes = {key: frozenset(end.makes) for key, end in ends.items()}
        self.foreign = self._foreign(ends, ports)
        self.sources = {
            (w.value, w.target): (w.source, w.phase, w.slice) for w in wires_of(self.lowered, ports)
        }

    def _foreign(self, ends: Mapping[_Key, PartBoundary], ports: set[str]) -> dict[_Key, tuple[str, ...]]:
        """Part -> values that it uses and that its stage does not make."""
        own: dict[int, set[str]] = {}
        for key, end in ends.items():
            own.setdefault(key[0], set()).update(end.makes)
        return {
            key: tuple(v for v in e.uses if v not in ports and v not in own[key[0]])
            for key, e in ends.items()
        }

    # -- sends and receives ------------------------------------------------------------------------

    def pairs(self) -> Iterator[Finding]:
        """Every message is sent once and received once, in the same order on both sides of a pair."""
        sent: dict[tuple[int, int], list[tuple[StageSend, RankAction]]] = {}
        taken: dict[tuple[int, int], list[tuple[StageSend, RankAction]]] = {}
        for rank, row in enumerate(self.rows):
            for move in row:
                for m in move.sends:
                    if m.sender != rank:
                        yield _told(
                            f"rank {rank} sends {m.value} in the name of rank {m.sender}", rank, move, m
                        )
                    sent.setdefault((m.sender, m.receiver), []).append((m, move))
                for m in move.receives:
                    if m.receiver != rank:
                        yield _told(
                            f"rank {rank} takes {m.value}, which is sent to {m.receiver}", rank, move, m
                        )
                    taken.setdefault((m.sender, m.receiver), []).append((m, move))
        for pair in sorted({*sent, *taken}):
            yield from self._pair(pair, sent.get(pair, []), taken.get(pair, []))

    def _pair(
        self,
        pair: tuple[int, int],
        sent: Sequence[tuple[StageSend, RankAction]],
        taken: Sequence[tuple[StageSend, RankAction]],
    ) -> Iterator[Finding]:
        # the receiver posts what it takes by number, however its actions take it
        posted = sorted(taken, key=lambda entry: entry[0].number)
        for place, (m, move) in enumerate(sent):
            if m.number != place:
                why = f"it is message {place} from rank {pair[0]} to rank {pair[1]}, and called {m.number}"
                yield _told(f"{m.value} is sent out of order", pair[0], move, m, why)
                return
            if place >= len(posted):
                yield _told(f"{m.value} is sent to rank {pair[1]}, which never receives it", pair[0], move, m)
                return
            other, where = posted[place]
            if other != m:
                why = f"rank {pair[0]} sends {m.value} of microbatch {m.microbatch} in {move.action}"
                told = f"{other.value} of microbatch {other.microbatch} is expected as message {place}"
                yield _told(told, pair[1], where, other, why)
                return
        for m, move in posted[len(sent) :]:
            yield _told(f"{m.value} is expected from rank {pair[0]}, which never sends it", pair[1], move, m)
            return

    def contents(self) -> Iterator[Finding]:
        """Every action has what it takes, of its own microbatch, and sends what it has."""
        for rank, row in enumerate(self.rows):
            yield from self._actions(rank, row)
            have: dict[int, dict[str, tuple[int, str, int] | None]] = {}
            for move in row:
                action = move.action
                env = have.setdefault(action.microbatch, {})
                for m in move.receives:
                    if m.microbatch != action.microbatch:
                        why = f"the action is of microbatch {action.microbatch}"
                        told = f"{m.value} of microbatch {m.microbatch} is received for another"
                        yield _told(told, rank, move, m, why)
                    env[m.value] = None
                for phase in move.phases:
                    key = (action.stage, phase, action.slice)
                    for value in self.foreign.get(key, ()):
                        if value not in env:
                            yield _told(f"{value} is used before it has arrived", rank, move, None, "", value)
                            return
                    env.update(dict.fromkeys(self.makes.get(key, ()), key))
                for m in move.sends:
                    if m.value not in env:
                        yield _told(f"{m.value} is sent before it is made", rank, move, m)
                    elif m.microbatch != action.microbatch:
                        why = f"the action is of microbatch {action.microbatch}"
                        yield _told(f"{m.value} is sent as of microbatch {m.microbatch}", rank, move, m, why)

    def _actions(self, rank: int, row: Sequence[RankAction]) -> Iterator[Finding]:
        """The rank does what the schedule says."""
        if self.schedule is None:
            return
        wanted = self.schedule.actions[rank]
        for place, action in enumerate(wanted):
            if place >= len(row) or row[place].action != action:
                given = str(row[place].action) if place < len(row) else "nothing"
                at = ProgramLocation(rank=rank, action=str(action), stage=action.stage)
                yield Finding("schedule", f"rank {rank} does {given} in place of {action}", at)
                return
            if row[place].phases != phases_of(action, self.schedule):
                at = ProgramLocation(rank=rank, action=str(action), stage=action.stage)
                yield Finding("schedule", f"{action} runs {', '.join(row[place].phases) or 'nothing'}", at)
                return
        if len(row) > len(wanted):
            at = ProgramLocation(rank=rank, action=str(row[len(wanted)].action))
            yield Finding("schedule", f"rank {rank} does {row[len(wanted)].action} after its last action", at)

    # -- progress ----------------------------------------------------------------------------------

    def progress(self) -> Iterator[Finding]:
        """Run the actions with a queue of ranks that may go on."""
        sent: dict[tuple[int, int], int] = {}
        rows = [in_turns(row, attrgetter("paired")) for row in self.rows]
        at = [0] * len(rows)
        queue, waiting = list(range(len(self.rows))), dict[int, tuple[RankAction, StageSend]]()
        while queue:
            rank = queue.pop()
            row = rows[rank]
            while at[rank] < len(row):
                needed = ((move, m) for move in row[at[rank]] for m in move.receives)
                missing = next((n for n in needed if sent.get((n[1].sender, rank), 0) <= n[1].number), None)
                if missing is not None:
                    waiting[rank] = missing
                    break
                at[rank] += 1
                for m in (m for move in row[at[rank] - 1] for m in move.sends):
                    sent[m.sender, m.receiver] = sent.get((m.sender, m.receiver), 0) + 1
                    if m.receiver in waiting and waiting[m.receiver][1].sender == rank:
                        del waiting[m.receiver]
                        queue.append(m.receiver)
        if waiting:
            yield _stuck(waiting)


def _stuck(waiting: Mapping[int, tuple[RankAction, StageSend]]) -> Finding:
    """The circle in which ranks wait, or the rank that waits for one that is done.

    waiting: rank -> its action, and the message that it waits for.
    """
    path = [min(waiting)]
    while path[-1] in waiting and waiting[path[-1]][1].sender not in path:
        path.append(waiting[path[-1]][1].sender)
    if path[-1] in waiting:
        path = path[path.index(waiting[path[-1]][1].sender) :]
    at = [(rank, *waiting[rank]) for rank in path if rank in waiting]
    told = [f"rank {rank} in {move.action} for rank {missing.sender}" for rank, move, missing in at]
    return _told(f"ranks wait for each other: {', '.join(told)}", path[0], *waiting[path[0]])


def _told(
    what: str, rank: int, move: RankAction, message: StageSend | None, why: str = "", value: str = ""
) -> Finding:
    stage = move.action.stage
    phase = move.phases[0] if move.phases else ""
    name = message.value if message is not None else value
    at = ProgramLocation(name, stage, phase, move.action.slice, rank=rank, action=str(move.action))
    return Finding("message", what, at, why)


def _shared(program: Program) -> Iterator[Finding]:
    """Gradients that stages share are added up over groups of pipeline ranks, one after the other."""
    if program.stages is None:
        return
    owner = program.stages.schedule.owner
    holders = holders_of(program)
    ports = {p.target: p.name for p in program.signature.ports if p.kind == "param"}
    rows: dict[int, list[tuple[str, tuple[int, ...]]]] = {
        r: [] for r in range(len(program.stages.schedule.actions))
    }
    for result in program.signature.results:
        if result.kind != "grad" or result.target not in ports:
            continue
        ranks = tuple(sorted({owner[s] for s in holders[ports[result.target]]}))
        if len(ranks) > 1:
            for rank in ranks:
                rows[rank].append((result.target, ranks))
    yield from rendezvous(rows)


def rendezvous(rows: Mapping[int, Sequence[tuple[str, tuple[int, ...]]]]) -> Iterator[Finding]:
    """Whether collectives over groups of ranks come to an end: each starts when all its ranks are at it.

    rows: rank -> (name, ranks of the group), in the order in which that rank issues them.
    """
    at = dict.fromkeys(rows, 0)
    waiting = {rank for rank, row in rows.items() if row}
    moved = True
    while waiting and moved:
        moved = False
        for rank in sorted(waiting):
            if at[rank] >= len(rows[rank]):
                waiting.discard(rank)
                continue
            here = rows[rank][at[rank]]
            group = here[1]
            if all(r in rows and at[r] < len(rows[r]) and rows[r][at[r]] == here for r in group):
                moved = True
                for r in group:
                    at[r] += 1
    stuck = sorted(r for r in waiting if at[r] < len(rows[r]))
    if stuck:
        name, group = rows[stuck[0]][at[stuck[0]]]
        others = [
            r for r in group if r in rows and (at[r] >= len(rows[r]) or rows[r][at[r]] != (name, group))
        ]
        yield Finding(
            "message",
            f"ranks {', '.join(map(str, group))} do not all come to the sum of {name}",
            ProgramLocation(name, rank=stuck[0]),
            f"rank {others[0]} is elsewhere" if others else "",
        )
