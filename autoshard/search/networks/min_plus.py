"""Powers of matrices in the (min, +) semiring, and the best way through them."""

from __future__ import annotations

import numpy as np

from autoshard.search.networks.network import Array

#: entries of a sum that is minimised at once
_CHUNK = 2_000_000


class Squares:
    """The ``exponent``-th min-plus power of matrices [way, from, to], and the way back through it."""

    def __init__(self, matrix: Array, exponent: int) -> None:
        self.squares = [matrix]
        self.products = 0
        #: (power of two, the product of everything up to here), from the left
        self.pieces: list[tuple[int, Array]] = []
        for level in range(exponent.bit_length()):
            if level:
                self.squares.append(self._times(self.squares[-1], self.squares[-1]))
            if exponent >> level & 1:
                left = self.pieces[-1][1] if self.pieces else None
                here = self.squares[level]
                self.pieces.append((level, here if left is None else self._times(left, here)))
        self.power = self.pieces[-1][1]

    def _times(self, a: Array, b: Array) -> Array:
        self.products += 1
        return min_plus(a, b)

    def between(self, way: int, a: int, b: int) -> list[int]:
        """The states on the best way from a to b, without the two."""
        found: list[int] = []
        for position in range(len(self.pieces) - 1, 0, -1):
            level = self.pieces[position][0]
            left, right = self.pieces[position - 1][1], self.squares[level]
            middle = int((left[way, a] + right[way, :, b]).argmin())
            found = [middle, *self._inside(level, way, middle, b), *found]
            b = middle
        return [*self._inside(self.pieces[0][0], way, a, b), *found]

    def _inside(self, level: int, way: int, a: int, b: int) -> list[int]:
        if not level:
            return []
        half = self.squares[level - 1]
        middle = int((half[way, a] + half[way, :, b]).argmin())
        return [*self._inside(level - 1, way, a, middle), middle, *self._inside(level - 1, way, middle, b)]


def min_plus(a: Array, b: Array) -> Array:
    """The product of matrices in the (min, +) semiring: [..., i, j] of min over k of a[i, k] + b[k, j]."""
    turned = np.ascontiguousarray(b.swapaxes(-1, -2))
    step = max(1, _CHUNK // max(1, turned.size))
    made = np.empty((*a.shape[:-1], b.shape[-1]))
    for at in range(0, a.shape[-2], step):
        part = slice(at, at + step)
        made[..., part, :] = (a[..., part, None, :] + turned[..., None, :, :]).min(axis=-1)
    return made
