"""Functions on residues that are no sums or products: some law of each holds, the rest is a hash."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
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
)
from autoshard.auditing.rendezvous import reduced as reduced_numbers


def is_count(x: Tensor) -> Tensor:
    """Which residues are small whole numbers, of either sign."""
    return _signed(x).abs() < COUNTS


def _signed(x: Tensor) -> Tensor:
    """Residues as numbers on both sides of 0."""
    return torch.where((x > P // 2) & x.isfinite(), x - P, x)


@dataclass
class ResidueTable:
    """Residues that stand for others."""

    _keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    _values: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def add(self, keys: Tensor, values: Tensor) -> None:
        """What each key stands for; the first of equal keys counts."""
        keys, values = (x.reshape(-1) for x in torch.broadcast_tensors(keys, values))
        known = keys.isfinite()  # memory that nothing was written to may hold NaN, which has no order
        keys, values = torch.cat([self._keys, keys[known]]), torch.cat([self._values, values[known]])
        keys, order = keys.sort(stable=True)
        first = torch.ones_like(keys, dtype=torch.bool)
        first[1:] = keys[1:] != keys[:-1]
        self._keys, self._values = keys[first], values[order][first]

    def find(self, keys: Tensor) -> Tensor | None:
        """What keys stand for, None unless all are known: that one is by chance is likely among many."""
        if not len(self._keys) or not keys.numel():
            return None
        at = torch.searchsorted(self._keys, keys.contiguous()).clamp(max=len(self._keys) - 1)
        return self._values[at] if bool((self._keys[at] == keys).all()) else None


@dataclass
class Functions:
    """Laws that hold: sqrt(x)^2 = x; exp(x - log s) = exp(x) / s; max, min and comparisons are those of one
    order of all residues, in which -x and x lie on both sides of 0. exp(x + y) = exp(x) exp(y) does not.

    slope: makes the order, a residue. One object serves the reference and all ranks.
    """

    slope: int
    _roots: ResidueTable = field(default_factory=ResidueTable)
    _logs: ResidueTable = field(default_factory=ResidueTable)
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
        self._logs.add(out, x)
        return out

    def exp(self, x: Tensor) -> Tensor:
        """The exponential."""
        known = self._exps.find(torch.where(x == -torch.inf, 0.0, x))
        out = torch.where(x == 0, 1.0, hashed("exp", x) if known is None else known)
        return torch.where(x == -torch.inf, 0.0, out)

    def difference(self, a: Tensor, b: Tensor) -> Tensor:
        """a - b."""
        out = reduced(a - b)
        under = self._logs.find(b)
        if under is not None:
            self._exps.add(out, product(self.exp(a), inverse(under)))
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
