"""What the program of a deep model holds and takes, from programs without most of its equal layers.

Along equal layers of an action bytes change by the same from one to the next, so whatever is the most is
there at the first or the last of them; both are in the shorter programs (`passes/stages/truncate_layers.py`).
What is held at each of their instructions is linear in how many layers there are; if their peak rises with
one layer more by the most that any of these does, it goes on like that, to the byte. Seconds are those of a
steady state, on which one and two more layers have to agree, and which no messages hold up later: a part
takes with each layer more at least as much longer as all its messages do. Where messages drift against the
ops beside them by a little from layer to layer, what comes of it in the end is not seen: a share of a
thousandth at most in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from math import isclose

from autoshard.ir import Folded
from autoshard.passes.pipeline import LoweringOptions
from autoshard.passes.stages.truncate_layers import Shortened, Shorter
from autoshard.simulate.saved_for_backward import ResidentBytes

#: what every program does for an op of a layer takes so many times as long as what it does for each call
_ONCE = 3
#: sums of the same numbers in another order differ by less than this share
_ROUNDING = 1e-9
#: seconds of more layers agree to this share
_STEADY = 1e-6


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step. parts: of everything that runs at once, its seconds and those of its messages."""

    seconds: float
    parts: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class TruncatedRun:
    """At a program without a pipeline. held, bytes, along: see `simulate.peaks`. step: simulates a step."""

    held: ResidentBytes
    bytes: float
    along: tuple[tuple[Sequence[str], Sequence[float]], ...]
    step: Callable[[], SimulatedStep]


@dataclass(frozen=True)
class DepthExtrapolation:
    """The same of the full program. step: seconds, None if it does not fit."""

    held: ResidentBytes
    bytes: float
    step: float | None


def extrapolate_depth(
    folded: Folded,
    options: LoweringOptions,
    look: Callable[[Folded, LoweringOptions], TruncatedRun],
    budget: float,
) -> DepthExtrapolation | None:
    """The program of a deep model; None where that takes as long as to look at it, or says nothing.

    look: at the program of a model that is placed in a way. budget: bytes.
    """
    shorter = Shorter(folded, options.flow, options.plan)
    first = shorter.model()
    if first is None or not _is_worth_it(folded, first):
        return None

    def at(short: Shortened) -> TruncatedRun:
        return look(short.folded, options.of(short))

    gaps, base = first.gaps, at(first)
    more: list[TruncatedRun] = []
    for number in range(len(gaps)):
        longer = shorter.model(more=1, at=number)
        if longer is None:
            return None
        more.append(at(longer))
        if not _rises_most(base, more[-1]):
            return None
    often = [gap.blocks for gap in gaps]
    bytes_ = _ahead(base.bytes, [m.bytes for m in more], often)
    held = _held_ahead(base.held, [m.held for m in more], often)
    if bytes_ > budget:
        return DepthExtrapolation(held, bytes_, None)
    longest = shorter.model(more=2)
    if longest is None:
        return None
    last, twice = at(longest), [2] * len(gaps)
    if not isclose(last.bytes, _ahead(base.bytes, [m.bytes for m in more], twice), rel_tol=_ROUNDING):
        return None
    step, steps = base.step(), [m.step() for m in more]
    seconds = [s.seconds for s in steps]
    steady = isclose(last.step().seconds, _ahead(step.seconds, seconds, twice), rel_tol=_STEADY)
    if not steady or any(_is_held_up(step, s) for s in steps):
        return None
    return DepthExtrapolation(held, bytes_, _ahead(step.seconds, seconds, often))


def _is_worth_it(whole: Folded, short: Shortened) -> bool:
    """Whether programs with one more layer at each of the gaps, and with more at all, are looked at faster
    than the whole one."""
    each = {name: len(graph.nodes) for name, graph in whole.segments.items()}
    once = _ONCE * sum(each.values())
    long, least = (sum(each[call.segment] for call in f.calls) for f in (whole, short.folded))
    return (2 + len(short.gaps)) * (once + 2 * least) < long


def _rises_most(base: TruncatedRun, more: TruncatedRun) -> bool:
    """Whether the peak rises by as much as what is held at any instruction does."""
    rises = [rise for a, b in zip(base.along, more.along, strict=True) for rise in _rises(*a, *b)]
    return more.bytes - base.bytes >= max(rises) - _ROUNDING * more.bytes


def _is_held_up(base: SimulatedStep, more: SimulatedStep) -> bool:
    """Whether messages become longer than all that is beside them as more layers follow."""
    pairs = zip(base.parts, more.parts, strict=True)
    return any(b[1] - a[1] > b[0] - a[0] + _STEADY * more.seconds for a, b in pairs)


def _rises(
    labels: Sequence[str], bytes_: Sequence[float], longer: Sequence[str], more: Sequence[float]
) -> Iterator[float]:
    """By how much more is held at each instruction of an action that has more of them somewhere."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(labels, longer, strict=False))
    before = sum(1 for _ in alike)
    yield from (b - a for a, b in zip(bytes_[:before], more, strict=False))
    yield from (b - a for a, b in zip(reversed(bytes_[before:]), reversed(more), strict=False))


def _ahead(base: float, more: Sequence[float], often: Sequence[int]) -> float:
    """What becomes of a number with so many blocks more at each of the gaps. more: with one at each."""
    return base + sum(n * (value - base) for value, n in zip(more, often, strict=True))


def _held_ahead(base: ResidentBytes, more: Sequence[ResidentBytes], often: Sequence[int]) -> ResidentBytes:
    names = [field.name for field in fields(ResidentBytes)]
    return ResidentBytes(*(_ahead(getattr(base, n), [getattr(m, n) for m in more], often) for n in names))
