"""What is decided beside placements: microbatches and recomputation, as weights on the terms of a problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Literal

from autoshard.cost.step_time import Exposure, Overlap, StepSums, StepTime, exposure_of, step_time, weights
from autoshard.search.plan.plan import Recompute
from autoshard.search.problem.cost_terms import (
    AssignmentCosts,
    ByteKind,
    Bytes,
    CostTerms,
    Time,
    TimeKind,
    TimeWeight,
    compose,
)
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.solver.network import Array, CostNetwork


@dataclass(frozen=True)
class RankBytes:
    """Bytes per rank. state: of parameters, gradients, optimizer and gathered copies."""

    state: float
    activations: float

    @property
    def total(self) -> float:
        return self.state + self.activations


@dataclass(frozen=True)
class StepConfig:
    """How a step is run.

    microbatches: how many make a step. calls: how often each forward segment of a layer is called in one.
    recompute: what of a segment is recomputed. optimistic: prices without recomputation but memory as if all
    of it were used, which bounds every choice of it from below. overlap: see `cost.step_time.Overlap`. pipe:
    the pipeline. sending: whether gradients on their way to their reduction count, which stages of a pipeline
    reduce once a step, after the last microbatch.
    """

    microbatches: int
    calls: Mapping[str, int]
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    optimistic: bool = False
    overlap: float = 0.0
    pipe: Pipe = field(default_factory=Pipe)
    sending: bool = True

    @cached_property
    def overlap_model(self) -> Overlap:
        edge = min(1.0, self.pipe.ranks / (self.pipe.ranks + sum(self.calls.values())))
        waits = self.pipe.filling(self.microbatches)
        beside = 0.0 if self.pipe.splits_backward else _BESIDE
        return Overlap(self.microbatches, self.overlap, edge, beside, self.pipe.pace, waits, self.pipe.hops)

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """Collectives once a step that are parts of a program of their own, before its microbatches and after
        them (`passes.overlap.gather_once`, `defer_reductions`); with a single one and no pipeline,
        `early_reductions` puts them into its backward, and gathers are where their layers are."""
        return ("first", "last") if self.microbatches > 1 or self.pipe.ranks > 1 else ()

    @property
    def sums_up(self) -> int:
        """How often a microbatch adds to a gradient: once for each of its slices, if there are others."""
        slices = self.pipe.slices
        return slices if self.microbatches * slices > 1 else 0

    @cached_property
    def flight(self) -> float:
        """How much of what one microbatch keeps in the full model the fullest rank holds."""
        return self.pipe.in_flight(self.microbatches) / self.pipe.ranks

    @cached_property
    def waiting(self) -> tuple[float, float]:
        """The same of a rank that has put off most gradients of parameters: of microbatches that wait for
        these, and of others."""
        waiting, others = self.pipe.waiting(self.microbatches)
        return waiting / self.pipe.ranks, others / self.pipe.ranks

    def recomputing(self, policy: Literal["selective", "full"]) -> StepConfig:
        """The same with every call of every layer recomputed by one policy."""
        return replace(self, recompute={name: Recompute(policy, n) for name, n in self.calls.items()})

    def recomputed_share(self, segment: str, cheap: bool) -> float:
        """Which part of the calls of a forward segment is recomputed."""
        chosen = self.recompute.get(segment)
        if self.optimistic or chosen is None or (chosen.policy == "selective" and not cheap):
            return 0.0
        return chosen.calls / self.calls[segment]

    def bytes_weight(self, key: Bytes) -> float:
        """How much of these bytes is held at the peak."""
        return self.bytes_weight_with(key, self.recompute.get(key.segment))

    def bytes_weight_with(self, key: Bytes, chosen: Recompute | None) -> float:
        """The same if this is what of its segment is recomputed.

        While a call is recomputed, what it makes is held once.
        """
        calls = self.calls.get(key.segment, 0)
        if key.kind == "state":
            return 1 / self.pipe.ranks
        if key.kind == "window":
            # each rank of a pipeline has its own layers; where gradients of parameters wait, most is held
            # when those of activations are made and nothing is gathered any more
            return 0.0 if self.pipe.splits_backward else 1.0
        if key.kind == "sums":
            return 1 / self.pipe.ranks if self.sums_up else 0.0
        if key.kind == "sent":
            return float(self.sending and self.pipe.ranks == 1)
        if key.kind == "waiting":
            return self.waiting[0]
        flight = self.flight
        if self.pipe.splits_backward and key.late is not None:
            return sum(self.waiting) if key.late else self.waiting[1]
        if key.kind == "held":
            return flight
        if key.kind == "kept":
            if not calls:
                return flight
            if self.optimistic:
                return min(flight, 1 / calls / self.pipe.slices)
            if chosen is None or not chosen.calls or (chosen.policy == "selective" and not key.cheap):
                return flight
            if self.pipe.splits_backward:
                # what backward recomputes waits for the gradients of parameters, on the fullest rank
                # for as many microbatches as it would have been kept for
                return flight
            # what is recomputed is made for one microbatch, or one slice of it, at a time
            return min(flight, flight * (calls - chosen.calls) / calls + 1 / calls / self.pipe.slices)
        if self.optimistic or chosen is None or not calls:
            return 0.0
        full = chosen.policy == "full"
        needed = not full if key.kind == "extra" else full or key.cheap
        return flight * chosen.calls / calls if needed else 0.0

    def weights(self, bound: Exposure) -> StepSums:
        """See `cost.step_time.weights`."""
        if bound not in self._weights:
            self._weights[bound] = weights(self.overlap_model, bound)
        return self._weights[bound]

    @cached_property
    def _weights(self) -> dict[Exposure, StepSums]:
        return {}

    def time_weight(self, bound: Exposure) -> TimeWeight:
        """The weight of every kind of seconds; see `cost.step_time.weights`."""
        w = self.weights(bound)

        def weight(key: Time) -> float:
            match key.kind:
                case "work":
                    if key.backward:
                        return w.work_backward
                    return w.work_forward + self.recomputed_share(key.segment, key.cheap) * w.work_backward
                case "again":
                    return self.recomputed_share(key.segment, key.cheap) * w.work_backward
                case "talk" | "exchange":
                    backward = w.talk_backward if key.kind == "talk" else w.talk
                    if key.backward:
                        return backward
                    return w.talk + self.recomputed_share(key.segment, key.cheap) * backward
                case "gather":
                    return w.gather_backward if key.backward else w.gather_forward
                case "inline":
                    return w.talk
                case "reduce":
                    return w.reduce
                case "sum":
                    return self.sums_up * w.work_backward
                case "first":
                    return w.once if "first" in self.apart else w.first
                case "last":
                    return w.once if "last" in self.apart else w.last
                case "once":
                    return w.once
                case "update":
                    return w.update

        return weight

    def network(self, terms: CostTerms, bound: Exposure, allowed: Sequence[Array | None] = ()) -> CostNetwork:
        """The cost network of this setting for a given exposure."""
        return compose(terms, self.time_weight(bound), self.bytes_weight, allowed)

    def sums(self, *usage: AssignmentCosts) -> StepSums:
        """Seconds by what they overlap with, of all profiles together."""
        sums = dict.fromkeys(StepSums.__dataclass_fields__, 0.0)
        recomputes = bool(self.recompute)
        for profile in usage:
            for key, seconds in profile.seconds.items():
                kind = key.kind
                if kind in IN_BACKWARD:
                    if kind != "again":
                        sums[IN_BACKWARD[kind] if key.backward else _IN_FORWARD[kind]] += seconds
                    if recomputes and not key.backward:
                        sums[IN_BACKWARD[kind]] += self.recomputed_share(key.segment, key.cheap) * seconds
                elif kind == "gather":
                    sums["gather_backward" if key.backward else "gather_forward"] += seconds
                elif kind == "inline":
                    sums["talk"] += seconds
                elif kind == "sum":
                    sums["work_backward"] += self.sums_up * seconds
                elif kind in self.apart:
                    sums["once"] += seconds
                else:
                    sums[kind] += seconds
        return StepSums(**sums)

    def exposure(self, usage: AssignmentCosts) -> Exposure:
        """Which overlaps are bound by communication."""
        return exposure_of(self.sums(usage), self.overlap_model)

    def step(self, *usage: AssignmentCosts) -> StepTime:
        """A step that takes all of these profiles."""
        return step_time(self.sums(*usage), self.overlap_model)

    def recompute_seconds(self, usage: AssignmentCosts) -> float:
        """Of a step, what recomputing adds."""
        return self.step(usage).total - replace(self, recompute={}).step(usage).total

    def held(self, usage: AssignmentCosts) -> RankBytes:
        """Bytes at the peak."""
        return RankBytes(self.state_bytes(usage), self.activation_bytes(usage, self.windows(usage)))

    def state_bytes(self, usage: AssignmentCosts, more: float = 0.0) -> float:
        """Bytes of parameters and what belongs to them, on top of ``more``."""
        weights = self._state_weights
        return sum([weights[k.kind] * n for k, n in usage.bytes.items() if k.kind in weights], more)

    @cached_property
    def _state_weights(self) -> Mapping[str, float]:
        return {kind: self.bytes_weight(Bytes(kind)) for kind in OF_STATE}

    def windows(self, usage: AssignmentCosts) -> float:
        """Bytes of gathered parameters that a rank holds, but not where it holds most of gradients that wait;
        0 where none waits."""
        if not self.pipe.splits_backward:
            return 0.0
        return sum((n for k, n in usage.bytes.items() if k.kind == "window"), 0.0)

    def activation_bytes(self, usage: AssignmentCosts, windows: float = 0.0) -> float:
        """Bytes of everything else at the peak. windows: see `windows`."""
        late, early = self.activations(usage)
        return max(late, windows + early)

    def activations(self, usage: AssignmentCosts) -> tuple[float, float]:
        """Bytes of everything else: where most gradients of parameters wait, and, but for windows, on the
        first rank of a pipeline as it begins its first backward, where none does yet; the peak, and nothing,
        where none ever waits."""
        total = sum((self.bytes_weight(k) * n for k, n in usage.bytes.items() if k.kind not in OF_STATE), 0.0)
        return total, (self.waitless.activations(usage)[0] if self.pipe.splits_backward else -inf)

    @cached_property
    def waitless(self) -> StepConfig:
        """The same with as many microbatches in flight, of which no gradient waits."""
        return replace(self, pipe=replace(self.pipe, schedule="1f1b", chunks=1))


def least_state(terms: CostTerms, setting: StepConfig) -> float:
    """Bytes of parameters, gradients and optimizer per rank that no placements go below."""
    of_variable: dict[int, Array] = {}
    for key, table in terms.bytes.items():
        weight = setting.bytes_weight(key) if key.kind in OF_STATE else 0.0
        for variable, held in table.items() if weight else ():
            of_variable[variable] = of_variable.get(variable, 0.0) + weight * held
    return sum(float(held.min()) for held in of_variable.values())


#: bytes that belong to parameters
OF_STATE: tuple[ByteKind, ...] = ("state", "window", "sums")
#: share of the computing of backward that makes gradients of parameters, where each op has two to make
_BESIDE = 0.5
#: where seconds of these kinds count
_IN_FORWARD: Mapping[TimeKind, str] = {"work": "work_forward", "talk": "talk", "exchange": "talk"}
IN_BACKWARD: Mapping[TimeKind, str] = {
    "work": "work_backward",
    "again": "work_backward",
    "talk": "talk_backward",
    "exchange": "talk",
}
