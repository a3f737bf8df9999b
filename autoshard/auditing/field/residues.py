"""Arithmetic modulo a prime on tensors of float64, whose elements are integers below it: exact, so that two
formulas that are equal give equal results, in whatever order they add up.

A number that is no such integer stands for its residue: -1 for P - 1, 0.25 for the inverse of 4. Infinities
stay what they are, as masks need them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

#: a Mersenne prime: products of two residues fit 64 bits, and 2 to any power is 2 to the rest by 31
P = 2**31 - 1
#: a float is the fraction with the smallest denominator that rounds to it, if that is at most this
_DENOMINATOR = 1 << 17
_LIMB = 1 << 16
#: numbers below this are taken for counts, such as of tokens or steps: random residues are larger
COUNTS = 1 << 20


class InexactError(Exception):
    """A step does something that has no exact form. what: for people; line: of the user's code."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.line = what, ""


def residues(x: Tensor) -> Tensor:
    """The residue that each number of a tensor stands for; infinities and NaN stay.

    Raises InexactError for complex numbers, which are two residues each.
    """
    if x.is_complex():
        raise InexactError("complex numbers have an exact form in products alone")
    x = x.detach().to(torch.float64)
    if not x.numel() or bool(((x >= 0) & (x < P) & (x == x.floor())).all()):
        return x
    return torch.from_numpy(_encoded(x.numpy(force=True).reshape(-1))).reshape(x.shape)


def residue(number: float) -> float:
    """The residue that a number stands for."""
    return float(_encoded(np.array([number], np.float64))[0])


def _encoded(x: np.ndarray) -> np.ndarray:
    out = x.copy()
    with np.errstate(invalid="ignore"):
        known = ~np.isfinite(x) | ((x >= 0) & (x < P) & (x == np.floor(x)))
    if not known.all():
        out[~known] = _residues_of_reals(x[~known])
    return out


def _residues_of_reals(x: np.ndarray) -> np.ndarray:
    top, bottom = _fractions(np.abs(x))
    simple = bottom > 0
    mantissa, exponent = np.frexp(np.abs(x))
    dyadic = _times((mantissa * 2.0**53).astype(np.int64) % P, np.left_shift(1, (exponent - 53) % 31) % P)
    inverse = _power(np.where(simple, bottom, 1), P - 2)
    value = np.where(simple, _times(top % P, inverse), dyadic)
    result: np.ndarray = np.where(x < 0, (P - value) % P, value).astype(np.float64)
    return result


def _fractions(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first convergent of each number's continued fraction that rounds to it; denominator 0 if none."""
    top, bottom = np.zeros(len(x), np.int64), np.zeros(len(x), np.int64)
    before, last = (np.zeros(len(x)), np.ones(len(x))), (np.ones(len(x)), np.zeros(len(x)))
    rest = x.copy()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for _ in range(24):
            full = np.floor(rest)
            before, last = last, (full * last[0] + before[0], full * last[1] + before[1])
            fits = (last[1] <= _DENOMINATOR) & (last[0] < 2.0**53) & (bottom == 0)
            fits &= np.abs(last[0] / last[1] - x) <= 2.0**-52 * x
            top[fits], bottom[fits] = last[0][fits], last[1][fits]
            rest = 1 / (rest - full)
            if bottom.all() or not (last[1] <= _DENOMINATOR).any():
                break
    return top, bottom


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    result: np.ndarray = a.astype(np.int64) * b.astype(np.int64) % P
    return result


def _power(base: np.ndarray, exponent: int) -> np.ndarray:
    result = np.ones_like(base, np.int64)
    base = base.astype(np.int64) % P
    while exponent:
        if exponent & 1:
            result = result * base % P
        base = base * base % P
        exponent >>= 1
    return result


def reduced(x: Tensor) -> Tensor:
    """A sum of residues, below 2^53, as a residue."""
    return torch.where(x.isfinite(), torch.remainder(x, P), x)


def without_infinities(x: Tensor) -> Tensor:
    """0 in place of infinities and NaN."""
    return torch.where(x.isfinite(), x, 0.0)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Element by element, broadcast."""
    finite = a.isfinite() & b.isfinite()
    if bool(finite.all()):
        return (a.long() * b.long() % P).double()
    safe = [without_infinities(x).long() for x in (a, b)]
    return torch.where(finite, (safe[0] * safe[1] % P).double(), a * b)


def power(x: Tensor, exponent: int) -> Tensor:
    """x to an integer; inverses for negative ones, of which that of 0 is 0."""
    safe = without_infinities(x)
    values = _power(safe.numpy(force=True), exponent % (P - 1)).astype(np.float64)
    result = torch.from_numpy(np.where(safe.numpy(force=True) == 0, 0.0 if exponent else 1.0, values))
    return torch.where(x.isfinite(), result, x**exponent)


def inverse(x: Tensor) -> Tensor:
    """1 / x."""
    return power(x, -1)


def bilinear(op: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """A product that sums, such as of matrices, by parts of 16 bits: all sums stay below 2^53."""
    parts = [(x.div(_LIMB, rounding_mode="floor"), torch.remainder(x, _LIMB)) for x in (a, b)]
    high, cross, other, low = (reduced(op(u, v)) for u in parts[0] for v in parts[1])
    middle = product(reduced(cross + other), torch.tensor(float(_LIMB)))
    return reduced(product(high, torch.tensor(float(_LIMB**2 % P))) + middle + low)


def hashed(name: str, *arguments: Tensor) -> Tensor:
    """A function of which nothing is known but that equal arguments give equal results."""
    state = torch.tensor(int.from_bytes(name.encode(), "little") % P, dtype=torch.int64)
    for x in arguments:
        state = _mixed(state + (x + 0.0).view(torch.int64))
    return (state.bitwise_and(2**62 - 1) % P).double()


def _mixed(x: Tensor) -> Tensor:
    """Bits of 64-bit integers spread over all of them (Steele and others, SplitMix, 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 0x1E3779B97F4A7C15)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 29)


def random_residues(count: int, seed: int) -> np.ndarray:
    """Residues of which no two are equal, and none is small."""
    draw = np.random.default_rng(seed)
    values = draw.integers(COUNTS, P, count)
    while len(np.unique(values)) < count:
        _, first = np.unique(values, return_index=True)
        repeated = np.ones(count, bool)
        repeated[first] = False
        values[repeated] = draw.integers(COUNTS, P, int(repeated.sum()))
    return values.astype(np.float64)
