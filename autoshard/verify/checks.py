"""Tensors of a program against those of its reference, and how far rounding may take them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from types import MappingProxyType

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tolerance:
    """What rounding may do. error: worst relative error of a tensor that passes.

    floor: tensors smaller than this part of the largest one of their kind are measured against that part:
    below it no digits are left where terms cancel (the bias of attention keys has gradient zero).
    """

    error: float
    floor: float


FLOAT32 = Tolerance(1e-4, 1e-2)
#: half precision only shows gross mistakes: verify a float32 model of the same architecture too
HALF = Tolerance(5e-2, 1e-1)
#: bits in which parameters, gradients or activations travel -> what that does to the tensors of a small model
QUANTISED: Mapping[int, Tolerance] = MappingProxyType({8: Tolerance(5e-2, 1e-1), 4: Tolerance(3e-1, 3e-1)})


@dataclass(frozen=True)
class Check:
    """One tensor compared. error: largest difference, relative to the largest element of the reference.
    noise: how far rounding parameters moves the reference itself, measured where error is above the limit."""

    kind: str
    name: str
    error: float
    ok: bool
    noise: float = 0.0


def largest(tensors: Tensors) -> float:
    """The largest element of all, 0.0 if there is none."""
    return max((float(x.abs().max()) for x in tensors.values() if x.numel()), default=0.0)


def checks_of(
    kind: str, result: Tensors, wanted: Tensors, tolerance: Tolerance, least: float = 0.0
) -> list[Check]:
    """One check per tensor; one that only one side has fails. least: no tensor is measured against less."""
    biggest = largest({k: v for k, v in wanted.items() if v.is_floating_point()})
    scale = max(tolerance.floor * biggest, least)
    names = dict.fromkeys([*wanted, *result])
    errors = {n: _error(result.get(n), wanted.get(n), scale) for n in names}
    return [Check(kind, n, error, error <= tolerance.error) for n, error in errors.items()]


def _error(result: torch.Tensor | None, wanted: torch.Tensor | None, scale: float) -> float:
    if result is None or wanted is None or result.shape != wanted.shape:
        return inf
    if not wanted.numel():
        return 0.0
    if wanted.is_complex() and result.dtype == wanted.dtype:
        return _error(torch.view_as_real(result), torch.view_as_real(wanted), scale)
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(result, wanted) else inf
    same = (result == wanted) | (result.isnan() & wanted.isnan())
    difference = torch.where(same, 0.0, (result.double() - wanted.double()).abs()).max()
    finite = torch.where(wanted.isfinite(), wanted, 0.0)
    error = float(difference) / max(float(finite.abs().max()), scale, 1e-30)
    return error if isfinite(error) else inf
