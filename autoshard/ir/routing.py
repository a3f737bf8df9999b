"""How often tokens choose each expert, and what that means for the rank with most of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from statistics import mean

from autoshard.errors import UsageError

#: random placements over which the load of a skew without names is averaged
_SAMPLES = 64


@dataclass(frozen=True)
class Routing:
    """How often experts are chosen.

    layers: per layer the tokens of each expert, in any unit and in the order of experts; () if all have as
    many. ordered: whether that is the order of the model's experts; else counts say how unlike they are, and
    loads are averages over placements. worst: every token chooses experts of one rank. round_robin: tokens
    choose experts in turn, so that those of a token follow each other, as gates do that force balance.
    replicas: per layer, or in one row for all, experts that every rank computes for its own tokens; slots of
    these are counted apart (`of_replicas`).
    """

    layers: tuple[tuple[float, ...], ...] = ()
    ordered: bool = True
    worst: bool = False
    round_robin: bool = False
    replicas: tuple[tuple[int, ...], ...] = ()

    def owners(self, chosen: int, experts: int, ways: int) -> float:
        """Among how many of ``ways`` equal parts the experts of a token are on average, if all parts had as
        many tokens as the fullest.

        chosen: experts of a token, drawn one by one. Raises what `load` raises.
        """
        if self.round_robin:
            width = -(-experts // ways)
            rounds = range(lcm(chosen, experts) // chosen)
            firsts = [chosen * k % experts for k in rounds]
            each = (len({(first + k) % experts // width for k in range(chosen)}) for first in firsts)
            return mean(each)
        share = min(1.0, self.load(chosen, experts, ways) / ways)
        return ways * (1.0 - (1.0 - share) ** chosen)

    def load(self, chosen: int, experts: int, ways: int) -> float:
        """Slots of the fullest of ``ways`` equal parts of the experts over the average, a mean over layers.

        chosen: experts of a token. Raises UsageError if there are counts of another number of experts.
        """
        if self.replicas and self.layers:
            return self._beside_replicas(experts, ways)
        if ways == 1:
            return 1.0
        if self.worst:
            return ways * min(chosen, -(-experts // ways)) / chosen
        return mean(self._load(counts, experts, ways) for counts in self.layers) if self.layers else 1.0

    def _with_replicas(self) -> list[tuple[tuple[float, ...], tuple[int, ...]]]:
        """Per layer its counts and its replicas."""
        layers, rows = self.layers, self.replicas
        if len(layers) > 1 < len(rows) != len(layers):
            raise UsageError(f"the routing has {len(layers)} layers, and the model {len(rows)}")
        number = max(len(layers), len(rows))
        return [(layers[k % len(layers)], rows[k % len(rows)]) for k in range(number)]

    def _beside_replicas(self, experts: int, ways: int) -> float:
        """Load with replicas, of their slots or of those of others."""
        loads = []
        for counts, row in self._with_replicas():
            near = [counts[e] for e in row if e < len(counts)]
            if experts == (len(row) + 1) * len(counts):
                loads.append(fullest(near, ways) * sum(near) / sum(counts) * len(counts) / len(row))
            else:
                far = [0.0 if e in row else n for e, n in enumerate(counts)]
                loads.append(self._load(tuple(far), experts, ways) * sum(far) / sum(counts))
        return mean(loads)

    def _load(self, counts: tuple[float, ...], experts: int, ways: int) -> float:
        if len(counts) != experts:
            raise UsageError(f"the routing has {len(counts)} experts, and the model {experts}")
        if self.ordered:
            return fullest(counts, ways)
        draw = random.Random(0)
        return mean(fullest(draw.sample(counts, experts), ways) for _ in range(_SAMPLES))

    def fullest_layer(self, ways: int) -> Routing:
        """That of the layer with the fullest of ``ways`` parts alone."""
        if not self.layers:
            return self
        if not self.replicas:
            return replace(self, layers=(max(self.layers, key=lambda counts: fullest(counts, ways)),))
        alone = [replace(self, layers=(c,), replicas=(row,)) for c, row in self._with_replicas()]
        return max(alone, key=lambda layer: layer.load(1, len(layer.layers[0]), ways))


EVEN = Routing()


def of_replicas(chosen: int, experts: int, replicas: int) -> tuple[int, int]:
    """What `TensorType.filled` is of slots of so many replicated experts, that of all slots being (chosen,
    experts): the same share, told apart by its terms."""
    return chosen * (replicas + 1), experts * (replicas + 1)


def parse_replicas(text: str) -> tuple[tuple[int, ...], ...]:
    """Experts of each layer from ``3,17;0,5``; one row is for all layers. Raises UsageError."""
    try:
        return tuple(tuple(map(int, row.split(","))) for row in text.split(";")) if text else ()
    except ValueError:
        raise UsageError(f"{text!r} are no experts of layers", hint="3,17;0,5, or COUNTS.json:2") from None


def most_chosen(layers: Sequence[Sequence[float]], number: int) -> str:
    """The experts that are chosen most often, as `parse_replicas` takes them. layers: tokens of experts."""
    rows = (sorted(sorted(range(len(c)), key=lambda e: (-c[e], e))[:number]) for c in layers)
    return ";".join(",".join(map(str, row)) for row in rows)


def zipf(exponent: float, experts: int) -> tuple[float, ...]:
    """Counts of experts whose n-th is chosen n ** -exponent times as often as the first."""
    return tuple((n + 1) ** -exponent for n in range(experts))


def fullest(counts: Sequence[float], ways: int) -> float:
    """The largest sum of ``ways`` contiguous parts of equal length, over the average."""
    width = -(-len(counts) // ways)
    sums = [sum(counts[k * width : (k + 1) * width]) for k in range(ways)]
    total = sum(counts)
    return ways * max(sums) / total if total else 1.0


def placed_by_load(counts: Sequence[float], ways: int, moves: int | None = None) -> tuple[int, ...]:
    """Which expert stands at each place, so that the fullest of ``ways`` parts has little.

    By swaps of an expert of the fullest part with one of another, each the one that leaves the least in the
    fuller of the two. moves: experts that may change their part, two in a swap; None for as many as help.
    """
    width = -(-len(counts) // ways)
    parts = [list(range(len(counts)))[k * width : (k + 1) * width] for k in range(ways)]
    sums = [sum(counts[e] for e in part) for part in parts]
    for _ in range(len(counts) ** 2 if moves is None else moves // 2):
        full = max(range(ways), key=lambda k: sums[k])
        best: tuple[float, float, int, int, int] | None = None
        for other in (k for k in range(ways) if k != full):
            for a, mine in enumerate(parts[full]):
                for b, theirs in enumerate(parts[other]):
                    more = counts[mine] - counts[theirs]
                    after = max(sums[full] - more, sums[other] + more)
                    if after < sums[full] * (1 - 1e-9) and (best is None or after < best[0]):
                        best = after, more, other, a, b
        if best is None:
            break
        _, more, other, a, b = best
        parts[full][a], parts[other][b] = parts[other][b], parts[full][a]
        sums[full], sums[other] = sums[full] - more, sums[other] + more
    return tuple(e for part in parts for e in part)
