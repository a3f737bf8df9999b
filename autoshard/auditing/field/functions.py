"""Functions on residues that are no sums or products: some law of each holds, the rest is a hash."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, reduce
from math import isfinite

import torch
from torch import Tensor

from autoshard.auditing.field.residues import (
    COUNTS,
    P,
    hashed,
    inverse,
    power,
    product,
    reduced,
    residue,
    residues,
    without_infinities,
)
from autoshard.auditing.rendezvous import reduced as reduced_numbers

#: sums whose terms are kept: an exponential is taken soon after one
_RECENT = 16


def is_count(x: Tensor) -> Tensor:
    """Which residues are small integers, of either sign."""
    return _signed(x).abs() < COUNTS


def _signed(x: Tensor) -> Tensor:
    """Residues as numbers on both sides of 0."""
    return torch.where((x > P // 2) & x.isfinite(), x - P, x)


@dataclass
class ResidueTable:
    """Residues that stand for others: sorted parts, of which each is more than twice as long as the next, so
    that what is added is sorted few times."""

    _parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, keys: Tensor, values: Tensor) -> None:
        """What each key stands for; the first of equal keys counts."""
        keys, values = (x.reshape(-1) for x in torch.broadcast_tensors(keys, values))
        known = keys.isfinite()  # memory that nothing was written to may hold NaN, which has no order
        part = _first_of_each(keys[known], values[known])
        if not len(part[0]):
            return
        while self._parts and len(self._parts[-1][0]) <= 2 * len(part[0]):
            before = self._parts.pop()
            part = _first_of_each(torch.cat([before[0], part[0]]), torch.cat([before[1], part[1]]))
        self._parts.append(part)

    def find(self, keys: Tensor) -> Tensor | None:
        """What keys stand for, None unless all are known: that one is by chance is likely among many."""
        if not keys.numel() or bool(self.look(keys.reshape(-1)[:1])[1]):
            return None
        values, missing = self.look(keys)
        return None if bool(missing.any()) else values

    def look(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """What each key stands for, and which are missing."""
        keys = keys.contiguous()
        values, missing = torch.zeros_like(keys), torch.ones_like(keys, dtype=torch.bool)
        for known, those in self._parts:
            at = torch.searchsorted(known, keys).clamp(max=len(known) - 1)
            here = missing & (known[at] == keys)
            values, missing = torch.where(here, those[at], values), missing & ~here
        return values, missing


def _first_of_each(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted, of equal keys the first."""
    keys, order = keys.sort(stable=True)
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    return keys[first], values[order][first]


@dataclass(frozen=True)
class SumOf:
    """A tensor that was computed as a + b, or a - b."""

    out: Tensor
    a: Tensor
    b: Tensor
    minus: bool

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        return self.out.reshape(-1).sort()

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The terms of each element of some values, None unless all but 0 are sums here."""
        keys, order = self._sorted
        if not len(keys):
            return None
        at = torch.searchsorted(keys, x.contiguous()).clamp(max=len(keys) - 1)
        if not bool(((keys[at] == x) | (x == 0)).all()):
            return None
        return tuple(t.expand(self.out.shape).reshape(-1)[order][at] for t in (self.a, self.b))  # type: ignore[return-value]


@dataclass
class Functions:
    """Laws that hold: sqrt(x)^2 = x; exp(log s) = s; exp(-x) = 1 / exp(x); exp(x - y) = exp(x) / exp(y) and
    exp(x + y) = exp(x) exp(y) where a sum has just been computed or a term is a logarithm; sigmoid(x) = 1 /
    (1 + exp(-x)); max, min and comparisons are those of one order of all residues, in which -x and x lie on
    both sides of 0.

    slope: makes the order, a residue. One object serves the reference and all ranks.
    """

    slope: int
    _roots: ResidueTable = field(default_factory=ResidueTable)
    _sums: deque[SumOf] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _exps: ResidueTable = field(default_factory=ResidueTable)

    def __post_init__(self) -> None:
        zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        self._roots.add(zero, zero)
        self._exps.add(zero, one)

    def place(self, x: Tensor) -> Tensor:
        """Where residues are in the order: numbers that torch compares. Counts are in that of numbers."""
        x = residues(x)
        at = _signed(product(x, torch.tensor(self.slope, dtype=torch.float64)))
        return torch.where(is_count(x), _signed(x), at + at.sign() * COUNTS)

    def at_place(self, place: Tensor) -> Tensor:
        """The residues that are there."""
        number = place.abs() < COUNTS
        other, over = residues(place - place.sign() * COUNTS), pow(self.slope, -1, P)
        return torch.where(number, residues(place), product(other, torch.tensor(over, dtype=torch.float64)))

    def sign(self, x: Tensor) -> Tensor:
        """1, 0 or -1."""
        return self.place(x).sign()

    def is_positive(self, x: Tensor) -> Tensor:
        """Stands for 1 where x is above 0 and for 0 elsewhere: a hash, so that neither hides what x is."""
        return torch.where(is_count(x), (_signed(x) > 0).double(), hashed("positive", x))

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        """A hash for the same reason."""
        bounds = [torch.tensor(bound, dtype=torch.float64) for bound in (low, high)]
        return torch.where(is_count(x), residues(_signed(x).clamp(*bounds)), hashed("clamp", x, *bounds))

    def sqrt(self, x: Tensor) -> Tensor:
        """The square root."""
        root = torch.where(x <= 1, x, hashed("sqrt", x))
        self._roots.add(root, x)
        return root

    def rsqrt(self, x: Tensor) -> Tensor:
        """One over the square root."""
        root = inverse(self.sqrt(x))
        self._roots.add(root, inverse(x))
        return root

    def power(self, x: Tensor, exponent: float) -> Tensor:
        """x to a number."""
        if exponent in (0.5, -0.5):
            return self.sqrt(x) if exponent > 0 else self.rsqrt(x)
        if exponent != int(exponent):
            return hashed(f"power {exponent}", x)
        under = self._roots.find(x) if abs(exponent) > 1 else None
        if under is None:
            return power(x, int(exponent))
        half, odd = divmod(int(exponent), 2)
        return product(power(under, half), x) if odd else power(under, half)

    def number(self, x: float) -> Tensor:
        """A number, maybe the root of a fraction."""
        if not isfinite(x * x):
            return torch.tensor(residue(x), dtype=torch.float64)
        square = Fraction(x * x).limit_denominator(1 << 10)
        if x > 0 and square and abs(float(square) - x * x) <= 2.0**-51 * x * x and not _is_fraction(x):
            return self.sqrt(torch.tensor(residue(float(square)), dtype=torch.float64))
        return torch.tensor(residue(x), dtype=torch.float64)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a times b."""
        out = product(a, b)
        other = self._roots.find(b) if b.dim() == 0 or a.shape == b.shape else None
        under = self._roots.find(a) if other is not None else None
        if other is not None and under is not None:
            self._roots.add(out, product(under, other))
            if bool((a == b).all()):
                return under.expand(out.shape)
        return out

    def quotient(self, a: Tensor, b: Tensor) -> Tensor:
        """a over b."""
        over, under = inverse(b), self._roots.find(b)
        if under is not None:
            self._roots.add(over, inverse(under))
        return self.product(a, over)

    def log(self, x: Tensor) -> Tensor:
        """The logarithm."""
        out = torch.where(x == 1, 0.0, hashed("log", x))
        out = torch.where(x == 0, -torch.inf, out)
        self._exps.add(out, x)
        return out

    def exp(self, x: Tensor) -> Tensor:
        """The exponential."""
        return self._exp(x, list(self._sums))

    def _exp(self, x: Tensor, sums: list[SumOf]) -> Tensor:
        """sums: that are older than x."""
        finite = without_infinities(x)
        value, missing = self._exps.look(finite)
        if bool(missing.any()):  # each residue has one value, also when terms are no longer kept
            value = torch.where(missing, self._new_exp(finite, sums), value)
            self._exps.add(finite, value)
        out = torch.where(finite == 0, 1.0, value)
        return torch.where(x.isfinite(), out, torch.exp(x))

    def _new_exp(self, x: Tensor, sums: list[SumOf]) -> Tensor:
        while sums:
            each = sums.pop()
            terms = each.terms(x)
            if terms is not None:
                over, other = self._exp(terms[0], list(sums)), self._exp(terms[1], list(sums))
                return product(over, inverse(other) if each.minus else other)
        value, negative = hashed("exp", torch.minimum(x, P - x)), x > P // 2  # of x and -x alike
        value[negative] = inverse(value[negative])
        return value

    def sigmoid(self, x: Tensor) -> Tensor:
        """The logistic function."""
        power = self.exp(x)
        out = product(power, inverse(reduced(power + 1)))
        return torch.where(x == torch.inf, 1.0, out)

    def sum(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b."""
        return self._sum(reduced(a + b), a, b, minus=False)

    def difference(self, a: Tensor, b: Tensor) -> Tensor:
        """a - b."""
        return self._sum(reduced(a - b), a, b, minus=True)

    def _sum(self, out: Tensor, a: Tensor, b: Tensor, minus: bool) -> Tensor:
        """Keep the exponential of a sum with a logarithm; of others, what they are sums of, for a while."""
        if any(bool((x == 0).all()) for x in (a, b)):
            return out
        known = [self._exps.find(without_infinities(x)) for x in (a, b)]
        if any(power is not None for power in known):
            over, other = (
                self.exp(x) if power is None else power for x, power in zip((a, b), known, strict=True)
            )
            self._exps.add(out, product(over, inverse(other) if minus else other))
        else:
            self._sums.append(SumOf(out, a, b, minus))
        return out

    def unknown(self, name: str, x: Tensor) -> Tensor:
        """A function without laws but its values at 0, 1 and -1 where those are whole."""
        out = hashed(name, x)
        real = getattr(torch, name, None) or getattr(torch.special, name, None)
        if real is None:
            return out
        for number in (0.0, 1.0, -1.0):
            value = float(real(torch.tensor(number, dtype=torch.float64)))
            if value.is_integer():
                out = torch.where(x == number % P, value % P, out)
        return out

    def reduced(self, parts: list[Tensor], reduction: str) -> Tensor:
        """The result of a reduction over ranks."""
        if not parts[0].is_floating_point():
            return reduced_numbers(parts, reduction)
        known = [residues(x) for x in parts]
        if reduction in ("sum", "avg"):
            total = reduced(torch.stack(known).sum(0))
            return total if reduction == "sum" else product(total, inverse(torch.tensor(float(len(parts)))))
        if reduction == "product":
            return reduce(product, known)
        return self.at_place(reduced_numbers([self.place(x) for x in known], reduction))


def _is_fraction(x: float) -> bool:
    return float(Fraction(x).limit_denominator(1 << 10)) == x
