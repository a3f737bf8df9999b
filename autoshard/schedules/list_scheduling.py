"""List scheduling: play a pipeline forward in time, and at every free moment of a rank take what is best.

The schedule is what was played. Cheap and greedy: see `autoshard.schedules.searched` for many of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.errors import UsageError
from autoshard.schedules.placement import local_stages
from autoshard.schedules.schedule import Action, Kind, Schedule
from autoshard.schedules.timeline import StageCosts

#: Bytes that come and go are sums of fractions: by this share a cap may be passed before it counts.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Rule:
    """What a free rank takes first.

    order: the kinds from best to worst; B counts as I. late_forward, late_backward: of two stages of a
    rank, whether forward (backward) prefers the later one. split: backward in two parts.
    patience: how long a rank rather waits, as a share of what it would start, for better work that is
    known to arrive.
    """

    order: str = "IFW"
    late_forward: bool = True
    late_backward: bool = True
    split: bool = True
    patience: float = 0.0

    def __str__(self) -> str:
        full = self.order if self.split else self.order.replace("W", "").replace("I", "B")
        sides = "late" if self.late_forward else "early", "late" if self.late_backward else "early"
        return f"{full}, {sides[0]} forward, {sides[1]} backward, patience {self.patience:g}"


class ListScheduler:
    """Plays rules. cap: bytes per rank; base and one microbatch of each stage of the rank must fit in it."""

    def __init__(
        self, owner: tuple[int, ...], ranks: int, microbatches: int, costs: StageCosts, cap: Sequence[float]
    ) -> None:
        self.owner, self.ranks, self.microbatches, self.costs = owner, ranks, microbatches, costs
        self.cap = tuple(c - b for c, b in zip(cap, costs.base, strict=True))
        self.local = local_stages(owner, ranks)
        # Room that a forward must leave: one microbatch in each later stage of its rank. With it the
        # earliest unfinished microbatch can always go on, so nobody waits for memory forever.
        self.reserve = [
            sum(costs.held[t] for t in self.local[rank] if t > stage) for stage, rank in enumerate(owner)
        ]

    def run(self, rule: Rule) -> tuple[Schedule, float]:
        """The schedule that a rule plays, named after it, and its makespan in seconds.

        Raises UsageError if the cap is too small.
        """
        return self._played(_Run(self, rule), str(rule))

    def refilled(self, schedule: Schedule, patience: float) -> tuple[Schedule, float]:
        """A schedule of this placement that fits the cap, with its weight gradients put where a rank would
        wait, or where a forward needs the room; patience as in `Rule`. And its makespan in seconds.

        Forwards and input gradients keep their order, so that the room is always found: the schedule given
        had it with no more weight gradients than can be done by then. Raises UsageError if it did not.
        """
        return self._played(_Refill(self, schedule, patience), f"{schedule.name}, refilled")

    def _played(self, run: _Run, name: str) -> tuple[Schedule, float]:
        schedule = run.schedule(name)
        return schedule, max(end + update for end, update in zip(run.free, self.costs.update, strict=True))


class _Run:
    """The state of a run: times are seconds, -1 is "not known yet"."""

    def __init__(self, given: ListScheduler, rule: Rule) -> None:
        self.given, self.rule = given, rule
        stages, m = len(given.owner), given.microbatches
        self.last = stages - 1
        self.inputs = [[0.0] * m if s == 0 else [-1.0] * m for s in range(stages)]
        self.grads = [[0.0] * m if s == self.last else [-1.0] * m for s in range(stages)]
        self.done = {kind: [0] * stages for kind in "FIW"}
        self.held = [0.0] * given.ranks
        self.free = [0.0] * given.ranks
        self.rows: list[list[Action]] = [[] for _ in range(given.ranks)]
        self.stream = [0.0] * (given.ranks * given.ranks)
        self.events = [(0.0, rank) for rank in range(given.ranks)]
        self.rank_of_kind = {kind: rule.order.index(kind) for kind in "FIW"}
        costs = given.costs
        self.seconds = {"F": costs.forward, "W": costs.backward_weight}
        self.seconds["I"] = costs.backward_input if rule.split else costs.backward

    def schedule(self, name: str) -> Schedule:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.free[rank]:
                self.step(now, rank)
        given = self.given
        due = len(given.owner) * given.microbatches * (3 if self.rule.split else 2)
        if sum(map(len, self.rows)) != due:
            raise UsageError(
                "the ranks cannot go on",
                where=f"list scheduling, {name}",
                why="a rank has not the room for one microbatch of each of its stages",
            )
        return Schedule(name, given.microbatches, given.owner, tuple(map(tuple, self.rows)))

    def step(self, now: float, rank: int) -> None:
        """Start the best work that is ready, or come back when something better arrives."""
        ready: tuple[tuple[int, int], str, int] | None = None
        coming: list[tuple[float, tuple[int, int], str, int]] = []
        for key, kind, stage, time in self.choices(rank):
            if time > now:
                coming.append((time, key, kind, stage))
            elif ready is None or key < ready[0]:
                ready = key, kind, stage
        if ready is None:
            if coming:
                heapq.heappush(self.events, (min(coming)[0], rank))
            return
        if self.rule.patience and coming:
            until = now + self.rule.patience * self.seconds[ready[1]][ready[2]]
            better = [time for time, key, _, _ in coming if time <= until and key[0] < ready[0][0]]
            if better:
                heapq.heappush(self.events, (min(better), rank))
                return
        self.start(now, rank, ready[1], ready[2])

    def choices(self, rank: int) -> list[tuple[tuple[int, int], str, int, float]]:
        """What a rank could do next: its priority (small is good), kind, stage, and when it may start."""
        result: list[tuple[tuple[int, int], str, int, float]] = []
        rule, given, m = self.rule, self.given, self.given.microbatches
        for stage in given.local[rank]:
            f, i, w = self.done["F"][stage], self.done["I"][stage], self.done["W"][stage]
            if f < m and self.inputs[stage][f] >= 0.0 and self.fits(rank, stage):
                side = -stage if rule.late_forward else stage
                result.append(((self.rank_of_kind["F"], side), "F", stage, self.inputs[stage][f]))
            if i < f and self.grads[stage][i] >= 0.0:
                side = -stage if rule.late_backward else stage
                result.append(((self.rank_of_kind["I"], side), "I", stage, self.grads[stage][i]))
            if rule.split and w < i:
                result.append(((self.rank_of_kind["W"], w), "W", stage, 0.0))
        return result

    def fits(self, rank: int, stage: int) -> bool:
        """Whether a forward of a stage leaves the room that later stages of the rank need."""
        taken = self.held[rank] + self.given.costs.held[stage] + self.given.reserve[stage]
        return taken <= self.given.cap[rank] * (1 + ROUNDING)

    def start(self, now: float, rank: int, kind: str, stage: int) -> None:
        costs = self.given.costs
        m = self.done[kind][stage]
        self.done[kind][stage] += 1
        end = now + self.seconds[kind][stage]
        self.free[rank] = end
        # A rank chooses only when it is free, so what ends meanwhile can be booked at once.
        if kind == "F":
            self.held[rank] += costs.held[stage]
        elif kind == "W":
            self.held[rank] -= costs.held_weight[stage]
        else:
            self.held[rank] -= costs.held[stage] - (costs.held_weight[stage] if self.rule.split else 0.0)
        shown: Kind = "F" if kind == "F" else "W" if kind == "W" else "I" if self.rule.split else "B"
        self.rows[rank].append(Action(shown, stage, m))
        heapq.heappush(self.events, (end, rank))
        if kind == "F" and stage < self.last:
            self.hand_over(rank, stage + 1, self.inputs, m, end, costs.send_forward[stage])
        elif kind == "I" and stage:
            self.hand_over(rank, stage - 1, self.grads, m, end, costs.send_backward[stage - 1])

    def hand_over(
        self, rank: int, stage: int, table: list[list[float]], m: int, end: float, wire: float
    ) -> None:
        """Give a result to the next stage; over a link if that is on another rank."""
        other = self.given.owner[stage]
        if other == rank:
            table[stage][m] = end
            return
        pair = rank * self.given.ranks + other
        self.stream[pair] = max(self.stream[pair], end) + wire
        table[stage][m] = self.stream[pair]
        if self.free[other] <= table[stage][m]:
            heapq.heappush(self.events, (table[stage][m], other))


class _Refill(_Run):
    """Forwards and input gradients as in a schedule, weight gradients anew."""

    def __init__(self, given: ListScheduler, schedule: Schedule, patience: float) -> None:
        super().__init__(given, Rule(patience=patience))
        self.order = [[a for a in row if a.kind != "W"] for row in schedule.actions]
        self.at = [0] * given.ranks

    def choices(self, rank: int) -> list[tuple[tuple[int, int], str, int, float]]:
        result: list[tuple[tuple[int, int], str, int, float]] = []
        if self.at[rank] < len(self.order[rank]):
            action = self.order[rank][self.at[rank]]
            time = (self.inputs if action.kind == "F" else self.grads)[action.stage][action.microbatch]
            if time >= 0.0 and (action.kind != "F" or self.fits(rank, action.stage)):
                result.append(((0, 0), action.kind, action.stage, time))
        for stage in self.given.local[rank]:
            if self.done["W"][stage] < self.done["I"][stage]:
                result.append(((1, self.done["W"][stage]), "W", stage, 0.0))
        return result

    def fits(self, rank: int, stage: int) -> bool:
        taken = self.held[rank] + self.given.costs.held[stage]
        return taken <= self.given.cap[rank] * (1 + ROUNDING)

    def start(self, now: float, rank: int, kind: str, stage: int) -> None:
        self.at[rank] += kind != "W"
        super().start(now, rank, kind, stage)
