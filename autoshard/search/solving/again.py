"""Which calls to compute again so that what is placed fits: layer by layer, the cheapest bytes first.

Every layer of a kind frees the same bytes for the same seconds, so a choice is how many calls of each
segment run again and by which policy: a small knapsack, solved over all policies with the calls filled in
order of seconds per byte (Galvatron chooses per layer, too: Miao et al., VLDB 2023).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil
from typing import Literal

from autoshard.search.plans.plan import Recompute
from autoshard.search.problem.terms import Profile
from autoshard.search.solving.setting import OF_STATE, Setting

#: kinds of layers that each get a policy of their own; those beyond share the last one's
_KINDS = 4


@dataclass(frozen=True)
class _Option:
    """What running one call of a segment again frees, and costs."""

    segment: str
    policy: Literal["selective", "full"]
    freed: float
    seconds: float

    @property
    def price(self) -> float:
        return self.seconds / self.freed if self.freed > 0 else float("inf")


#: nothing beside a profile
_NOTHING = Profile({}, {})


def fill(taken: Profile, setting: Setting, budget: float) -> Setting | None:
    """The setting with the cheapest recomputation that fits the budget; None if none fits."""
    found = Filling(taken, setting.calls).best(setting, budget)
    return None if found is None else found[0]


class Filling:
    """Recomputation for one profile, in many settings and beside many others that run nothing again.

    calls: how often each forward segment of a layer is called, in every setting that is asked about.
    """

    def __init__(self, taken: Profile, calls: Mapping[str, int]) -> None:
        self.taken, self.calls = taken, calls
        #: the part of it that belongs to parameters
        self._state = Profile({}, {k: n for k, n in taken.bytes.items() if k.kind in OF_STATE})
        #: bytes of activations (see `Setting.activations`) by all that they depend on
        self._held: dict[Hashable, tuple[float, float]] = {}

    @cached_property
    def choices(self) -> list[list[_Option]]:
        """Options that free anything, the cheapest bytes first, one policy per kind of layer."""
        found = []
        for chosen in _choices(_options(self.taken, self.calls)):
            ordered = sorted(chosen, key=lambda o: (o.price, o.segment))
            found.append([option for option in ordered if option.freed > 0])
        return found

    def best(
        self, setting: Setting, budget: float, beside: Profile = _NOTHING, plain: float | None = None
    ) -> tuple[Setting, float] | None:
        """(the setting with the cheapest recomputation that fits the budget, seconds of a step), or None.

        beside: what is taken as well: seconds of other kinds, and bytes of state alone. plain: seconds of a
        step that runs nothing again, if they are known.
        """
        bare = setting if not setting.recompute else replace(setting, recompute={})
        state = self.state_bytes(bare, beside)
        if state > budget:
            return None
        windows = bare.windows(self._state) + bare.windows(beside)
        if state + self._activations(bare, windows) <= budget:
            return bare, bare.step(self.taken, beside).total if plain is None else plain
        best: tuple[Setting, float] | None = None
        for chosen in self.choices:
            filled = self._filled(bare, chosen, state, windows, budget)
            if filled is not None:
                seconds = filled.step(self.taken, beside).total
                if best is None or seconds < best[1]:
                    best = (filled, seconds)
        return best

    def state_bytes(self, setting: Setting, beside: Profile) -> float:
        """Bytes of parameters, gradients and optimizer; beside: see `best`."""
        return setting.state_bytes(beside, setting.state_bytes(self._state))

    def _activations(self, bare: Setting, windows: float) -> float:
        """Bytes of activations with nothing run again."""
        return self._running(bare, {}, windows)

    def _filled(
        self, bare: Setting, chosen: Sequence[_Option], state: float, windows: float, budget: float
    ) -> Setting | None:
        """Calls added in order of price until the assignment fits."""
        again: dict[str, Recompute] = {}
        held = self._activations(bare, windows)
        for option in chosen:
            over = state + held - budget
            if over <= 0:
                break
            # the first call frees nothing: what it makes again is held once
            calls = min(self.calls[option.segment], ceil(over / option.freed) + 1)
            again[option.segment] = Recompute(option.policy, calls)
            held = self._running(bare, again, windows)
        if state + held > budget:
            return None
        return replace(bare, recompute=again) if again else bare

    def _running(self, bare: Setting, again: Mapping[str, Recompute], windows: float) -> float:
        """Bytes of activations where some calls run again; but for windows the same on many meshes."""
        pipe, calls = bare.pipe, tuple([(name, r.policy, r.calls) for name, r in again.items()])
        # all that a setting says of them, see `Setting.bytes_weight`
        key = (bare.flight, bare.waiting, pipe.splits_backward, pipe.ranks > 1, bare.sending, bare.optimistic)
        found = self._held.get((*key, calls))
        if found is None:
            running = replace(bare, recompute=dict(again)) if again else bare
            found = self._held[*key, calls] = running.activations(self.taken)
        late, early = found
        return max(late, windows + early)


def marginal_price(taken: Profile, setting: Setting) -> float:
    """Seconds per byte of the dearest recomputation that a setting uses; 0.0 if it uses none."""
    options = _options(taken, setting.calls)
    prices = [
        o.price
        for name, again in setting.recompute.items()
        for o in options[name]
        if again.calls and o.policy == again.policy and o.freed > 0
    ]
    return setting.microbatches * max(prices, default=0.0)


def _choices(options: Mapping[str, list[_Option]]) -> list[list[_Option]]:
    """One policy per kind of layer, in all combinations."""
    names = list(options)
    first, rest = names[:_KINDS], names[_KINDS:]
    found = []
    for combo in product(*(options[n] for n in first)):
        policy = combo[-1].policy if combo else "full"
        found.append([*combo, *(o for n in rest for o in options[n] if o.policy == policy)])
    return found


def _options(taken: Profile, calls: Mapping[str, int]) -> dict[str, list[_Option]]:
    seconds: dict[tuple[str, bool], float] = {}
    for key, value in taken.seconds.items():
        if key.kind in ("work", "talk") and not key.backward and key.segment in calls:
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
    found: dict[str, list[_Option]] = {}
    for segment, count in calls.items():
        cheap, dear = kept.get((segment, True), 0.0), kept.get((segment, False), 0.0)
        fast, slow = seconds.get((segment, True), 0.0), seconds.get((segment, False), 0.0)
        less, least = cheap - extra.get((segment, False), 0.0), cheap + dear - extra.get((segment, True), 0.0)
        found[segment] = [
            _Option(segment, "selective", less / count, fast / count),
            _Option(segment, "full", least / count, (fast + slow) / count),
        ]
    return found
