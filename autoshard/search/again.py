"""Which calls to compute again so that what is placed fits: layer by layer, the cheapest bytes first.

Every layer of a kind frees the same bytes for the same seconds, so a choice is how many calls of each
segment run again and by which policy: a small knapsack, solved over all policies with the calls filled in
order of seconds per byte (Galvatron chooses per layer, too: Miao et al., VLDB 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Literal

from autoshard.search.plan import Recompute
from autoshard.search.setting import Setting
from autoshard.search.terms import Profile

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


def fill(taken: Profile, setting: Setting, budget: float) -> Setting | None:
    """The setting with the cheapest recomputation that fits the budget; None if none fits."""
    bare = replace(setting, recompute={})
    if bare.held(taken).total <= budget:
        return bare
    options = _options(taken, setting)
    best: tuple[float, Setting] | None = None
    for chosen in _choices(options):
        filled = _filled(taken, bare, chosen, budget)
        if filled is not None:
            seconds = filled.step(taken).total
            if best is None or seconds < best[0]:
                best = (seconds, filled)
    return None if best is None else best[1]


def marginal_price(taken: Profile, setting: Setting) -> float:
    """Seconds per byte of the dearest recomputation that a setting uses; 0.0 if it uses none."""
    options = _options(taken, replace(setting, recompute={}))
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


def _filled(taken: Profile, bare: Setting, chosen: Sequence[_Option], budget: float) -> Setting | None:
    """Calls added in order of price until the assignment fits."""
    recompute: dict[str, Recompute] = {}
    for option in sorted(chosen, key=lambda o: (o.price, o.segment)):
        if option.freed <= 0:
            continue
        over = replace(bare, recompute=recompute).held(taken).total - budget
        if over <= 0:
            break
        # the first call frees nothing: what it makes again is held once
        calls = min(bare.calls[option.segment], ceil(over / option.freed) + 1)
        recompute[option.segment] = Recompute(option.policy, calls)
    filled = replace(bare, recompute=recompute)
    return filled if filled.held(taken).total <= budget else None


def _options(taken: Profile, setting: Setting) -> dict[str, list[_Option]]:
    seconds: dict[tuple[str, bool], float] = {}
    for key, value in taken.seconds.items():
        if key.kind in ("work", "talk") and not key.backward and key.segment in setting.calls:
            at = (key.segment, key.cheap)
            seconds[at] = seconds.get(at, 0.0) + value
    kept: dict[tuple[str, bool], float] = {}
    extra: dict[tuple[str, bool], float] = {}
    for held, value in taken.bytes.items():
        if held.segment in setting.calls:
            if held.kind == "kept":
                kept[held.segment, held.cheap] = kept.get((held.segment, held.cheap), 0.0) + value
            elif held.kind in ("extra", "input"):
                for full in (False, True):
                    if (held.kind == "input" and (full or held.cheap)) or (held.kind == "extra" and not full):
                        extra[held.segment, full] = extra.get((held.segment, full), 0.0) + value
    found: dict[str, list[_Option]] = {}
    for segment, calls in setting.calls.items():
        cheap, dear = kept.get((segment, True), 0.0), kept.get((segment, False), 0.0)
        fast, slow = seconds.get((segment, True), 0.0), seconds.get((segment, False), 0.0)
        less, least = cheap - extra.get((segment, False), 0.0), cheap + dear - extra.get((segment, True), 0.0)
        found[segment] = [
            _Option(segment, "selective", less / calls, fast / calls),
            _Option(segment, "full", least / calls, (fast + slow) / calls),
        ]
    return found
