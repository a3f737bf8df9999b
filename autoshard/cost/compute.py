"""What one op costs on one device: the roofline model."""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt

from autoshard.cluster.cluster import RATES, Device
from autoshard.errors import UsageError, nearest

Array = npt.NDArray[np.float64]


@overload
def compute_seconds(
    flops: float, bytes_moved: float, dtype: str, device: Device, *, matmul: bool
) -> float: ...
@overload
def compute_seconds(
    flops: Array, bytes_moved: Array, dtype: str, device: Device, *, matmul: bool
) -> Array: ...
@overload
def compute_seconds(
    flops: float | Array, bytes_moved: float | Array, dtype: str, device: Device, *, matmul: bool
) -> float | Array: ...
def compute_seconds(
    flops: float | Array, bytes_moved: float | Array, dtype: str, device: Device, *, matmul: bool
) -> float | Array:
    """Seconds of one op: launch overhead + max(flops / rate, bytes_moved / reached memory bandwidth).

    flops: FLOP (a multiply-add counts two). bytes_moved: bytes read and written in device memory. Both may
    be arrays. An op that does neither (a view) costs nothing. Source: S. Williams, A. Waterman,
    D. Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
    """
    work, traffic = np.asarray(flops, dtype=np.float64), np.asarray(bytes_moved, dtype=np.float64)
    rate = flop_rate(dtype, device, matmul=matmul)
    result = roofline(work, traffic, rate, device.traffic, device.launch_overhead)
    return result if isinstance(flops, np.ndarray) or isinstance(bytes_moved, np.ndarray) else float(result)


def roofline(flops: Array, nbytes: Array, rate: float, bandwidth: float, start: float) -> Array:
    """Seconds of ops that do so many FLOP at ``rate`` (FLOP/s) and move so many bytes at ``bandwidth``
    (bytes/s), each after ``start`` seconds; 0 for one that does neither."""
    busy = np.maximum(flops / rate, nbytes / bandwidth)
    return np.where(busy > 0, busy + start, 0.0)


def flop_rate(dtype: str, device: Device, *, matmul: bool) -> float:
    """FLOP/s of an op: matrix units times their efficiency, or vector units.

    Vector units do narrow floats at the rate of f32 at best. Dtypes that the device has no rate for run at
    that of f32; it may have rates for more than tensors are stored in (``f8``).
    """
    if dtype not in RATES:
        raise UsageError(f"there is no dtype {dtype!r}", hint=nearest(dtype, RATES))
    vector = device.peak_flops["f32"]
    peak = device.peak_flops.get(dtype, vector)
    return peak * device.matmul_efficiency if matmul else min(peak, vector)
