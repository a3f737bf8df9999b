"""Which calls to recompute so that what is placed fits: layer by layer, the cheapest bytes first.

Every layer of a kind frees the same bytes for the same seconds, so a choice is how many calls of each
segment are recomputed by which policy: a knapsack over all policies, filled in order of seconds per byte
 (Galvatron chooses per layer, too: Miao et al., VLDB 2023).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, inf
from typing import Literal

from autoshard.cost.step_time import StepSums, step_time
from autoshard.search.plan.plan import Recompute
from autoshard.search.problem.cost_terms import OF_ACTIVATIONS, AssignmentCosts, Bytes, Time
from autoshard.search.solve.step_config import IN_BACKWARD, OF_STATE, StepConfig

#: kinds of layers that each get a policy of their own; those beyond share the last one's
_KINDS = 4


@dataclass(frozen=True)
class _Option:
    """What recomputing one call of a segment frees, and costs."""

    segment: str
    policy: Literal["selective", "full"]
    freed: float
    seconds: float

    @property
    def price(self) -> float:
        return self.seconds / self.freed if self.freed > 0 else float("inf")


#: nothing beside a profile
_NOTHING = AssignmentCosts({}, {})


def choose_recompute(usage: AssignmentCosts, setting: StepConfig, budget: float) -> StepConfig | None:
    """The setting with the cheapest recomputation that fits the budget; None if none fits."""
    plan = RecomputePlanner(usage, setting.calls).best(setting, budget)
    return None if plan is None else plan[0]


class RecomputePlanner:
    """Recomputation for one profile, in many settings and beside many others without recomputation.

    calls: how often each forward segment of a layer is called, in every setting that is asked about. What a
    segment holds and takes depends on what of it is recomputed and on nothing else that does.
    """

    def __init__(self, taken: AssignmentCosts, calls: Mapping[str, int]) -> None:
        self.usage, self.calls = taken, calls
        #: the part of it that belongs to parameters
        self._state = AssignmentCosts({}, {k: n for k, n in taken.bytes.items() if k.kind in OF_STATE})
        #: bytes of activations of each segment, and of no segment that may be recomputed
        self._of_segment: dict[str, list[tuple[Bytes, float]]] = {name: [] for name in calls}
        self._others: list[tuple[Bytes, float]] = []
        for key, n in taken.bytes.items():
            if key.kind not in OF_STATE:
                self._of_segment.get(key.segment, self._others).append((key, n))
        #: what parts hold, by all that this depends on
        self._cache: dict[Hashable, tuple[float, float]] = {}

    @cached_property
    def choices(self) -> list[list[_Option]]:
        """Options that free anything, the cheapest bytes first, one policy per kind of layer."""
        options = []
        for chosen in _choices(_options(self.usage, self.calls)):
            ordered = sorted(chosen, key=lambda o: (o.price, o.segment))
            options.append([option for option in ordered if option.freed > 0])
        return options

    def best(
        self,
        setting: StepConfig,
        budget: float,
        beside: AssignmentCosts = _NOTHING,
        plain: StepSums | None = None,
    ) -> tuple[StepConfig, float] | None:
        """(the setting with the cheapest recomputation that fits the budget, seconds of a step), or None.

        beside: what is taken as well: seconds of other kinds, and bytes of state alone. plain: all seconds,
        with nothing recomputed, if they are known.
        """
        bare = setting if not setting.recompute else replace(setting, recompute={})
        state = self.state_bytes(bare, beside)
        if state > budget:
            return None
        windows = bare.windows(self._state) + bare.windows(beside)
        sums = bare.sums(self.usage, beside) if plain is None else plain
        if state + self._activations(bare, {}, windows) <= budget:
            return bare, step_time(sums, bare.overlap_model).total
        best: tuple[dict[str, Recompute], float] | None = None
        for chosen in self.choices:
            recompute = self._filled(bare, chosen, state, windows, budget)
            if recompute is not None:
                seconds = step_time(sums + self._more(recompute), bare.overlap_model).total
                if best is None or seconds < best[1]:
                    best = recompute, seconds
        return None if best is None else (replace(bare, recompute=best[0]), best[1])

    def state_bytes(self, setting: StepConfig, beside: AssignmentCosts) -> float:
        """Bytes of parameters, gradients and optimizer; beside: see `best`."""
        return setting.state_bytes(beside, setting.state_bytes(self._state))

    def _filled(
        self, bare: StepConfig, chosen: Sequence[_Option], state: float, windows: float, budget: float
    ) -> dict[str, Recompute] | None:
        """Calls added in order of price until the assignment fits."""
        recompute: dict[str, Recompute] = {}
        held = self._activations(bare, recompute, windows)
        for option in chosen:
            over = state + held - budget
            if over <= 0:
                break
            # the first call frees nothing: what it recomputes is held once
            calls = min(self.calls[option.segment], ceil(over / option.freed) + 1)
            recompute[option.segment] = Recompute(option.policy, calls)
            held = self._activations(bare, recompute, windows)
        return recompute if state + held <= budget else None

    def _activations(self, bare: StepConfig, recompute: Mapping[str, Recompute], windows: float) -> float:
        """Bytes of activations where some calls are recomputed; but for windows the same on many meshes."""
        pipe = bare.pipe
        # all that a setting says of them, see `StepConfig.bytes_weight`
        key = (bare.flight, bare.waiting, pipe.splits_backward, pipe.ranks > 1, bare.sending, bare.optimistic)
        late, early = self._part(bare, key, "", None)
        for name in self.calls:
            more = self._part(bare, key, name, recompute.get(name))
            late, early = late + more[0], early + more[1]
        return max(late, windows + early)

    def _part(
        self, bare: StepConfig, key: Hashable, segment: str, recompute: Recompute | None
    ) -> tuple[float, float]:
        """Of one segment, or of no segment that may be recomputed (""); see `StepConfig.activations`."""
        at = (key, segment, recompute and (recompute.policy, recompute.calls))
        cached = self._cache.get(at)
        if cached is None:
            held = self._of_segment[segment] if segment else self._others
            late, early = sum([bare.bytes_weight_with(k, recompute) * n for k, n in held]), 0.0
            if bare.pipe.splits_backward:
                early = sum([bare.waitless.bytes_weight_with(k, recompute) * n for k, n in held])
            elif not segment:
                early = -inf
            cached = self._cache[at] = late, early
        return cached

    def _more(self, recompute: Mapping[str, Recompute]) -> StepSums:
        """Seconds of what is recomputed."""
        sums = dict.fromkeys(IN_BACKWARD.values(), 0.0)
        for name, chosen in recompute.items():
            share = chosen.calls / self.calls[name]
            for cheap in (True, False) if chosen.policy == "full" else (True,):
                for kind, counted in IN_BACKWARD.items():
                    sums[counted] += share * self.usage.seconds.get(Time(kind, False, name, cheap), 0.0)
        return StepSums(**sums)


def marginal_price(taken: AssignmentCosts, setting: StepConfig) -> float:
    """Seconds per byte of the dearest recomputation that a setting uses; 0.0 if it uses none."""
    options = _options(taken, setting.calls)
    prices = [
        o.price
        for name, recompute in setting.recompute.items()
        for o in options[name]
        if recompute.calls and o.policy == recompute.policy and o.freed > 0
    ]
    return setting.microbatches * max(prices, default=0.0)


def _choices(options: Mapping[str, list[_Option]]) -> list[list[_Option]]:
    """One policy per kind of layer, in all combinations."""
    names = list(options)
    first, rest = names[:_KINDS], names[_KINDS:]
    choices = []
    for combo in product(*(options[n] for n in first)):
        policy = combo[-1].policy if combo else "full"
        choices.append([*combo, *(o for n in rest for o in options[n] if o.policy == policy)])
    return choices


def _options(taken: AssignmentCosts, calls: Mapping[str, int]) -> dict[str, list[_Option]]:
    seconds: dict[tuple[str, bool], float] = {}
    for key, value in taken.seconds.items():
        if key.kind in OF_ACTIVATIONS and not key.backward and key.segment in calls:
            at = (key.segment, key.cheap)
            seconds[at] = seconds.get(at, 0.0) + value
    kept: dict[tuple[str, bool], float] = {}
    extra: dict[tuple[str, bool], float] = {}
    for held, value in taken.bytes.items():
        if held.segment in calls:
            if held.kind == "kept":
                kept[held.segment, held.cheap] = kept.get((held.segment, held.cheap), 0.0) + value
            elif held.kind in ("extra", "input"):
                for full in (False, True):
                    if (held.kind == "input" and (full or held.cheap)) or (held.kind == "extra" and not full):
                        extra[held.segment, full] = extra.get((held.segment, full), 0.0) + value
    options: dict[str, list[_Option]] = {}
    for segment, count in calls.items():
        cheap, dear = kept.get((segment, True), 0.0), kept.get((segment, False), 0.0)
        fast, slow = seconds.get((segment, True), 0.0), seconds.get((segment, False), 0.0)
        less, least = cheap - extra.get((segment, False), 0.0), cheap + dear - extra.get((segment, True), 0.0)
        options[segment] = [
            _Option(segment, "selective", less / count, fast / count),
            _Option(segment, "full", least / count, (fast + slow) / count),
        ]
    return options
