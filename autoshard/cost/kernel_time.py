"""Seconds of work on a device by the shape of it: tiles in waves, depth, traffic."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf, prod

from autoshard.cluster.cluster import Device
from autoshard.cost.compute import flop_rate
from autoshard.ir import DTYPES

#: (rows, columns) of smaller tiles as parts of the largest, with the part of its rate that they reach: each
#: byte that a tile reads serves fewer products. Assumed; NVIDIA, "Matrix multiplication background user's
#: guide", section 3.1, has the reason.
_TILES = ((1.0, 1.0, 1.0), (0.5, 1.0, 0.92), (0.5, 0.5, 0.75), (0.25, 0.5, 0.55))

#: bytes of a number that is added to others
_PART = 4
#: bytes that rows are aligned to, and what a large product that is not keeps of its rate
_WORD, _UNALIGNED = 16, 0.4


def product_seconds(
    batch: int,
    rows: int,
    columns: int,
    depth: int,
    dtype: str,
    nbytes: float,
    device: Device,
    *,
    turned: tuple[bool, bool] = (False, False),
) -> float:
    """Seconds of ``batch`` products [rows, depth] @ [depth, columns] that move nbytes. turned: whether each
    of the factors lies in memory by its other dim.

    The tiles of the result run in waves, one tile per multiprocessor; the last wave may be nearly empty, and
    the edge tiles as well (NVIDIA, "Matrix multiplication background user's guide", sections 3.2 and 3.3). A
    short sum does not fill the pipeline of a tile: the rate is depth / (depth + kernels.depth) of the best,
    for types slower than those of 16 bits, and where rows are not aligned, with as much less in place of
    kernels.depth. Where there are fewer tiles than multiprocessors, several of these share a sum and add up
    what they have ("split-K": NVIDIA, CUTLASS documentation, "Efficient GEMM in CUDA", parallelized
    reductions). The size of tiles and the split are those that do best. Never below the time for the traffic.
    """
    rate = flop_rate(dtype, device, matmul=True)
    rate *= reached_rate(batch, rows, columns, depth, dtype, device, turned=turned)
    work = 2.0 * batch * rows * columns * depth / rate
    busy = max(work, traffic_seconds(nbytes, device, launch=False))
    return busy + device.launch_overhead if busy else 0.0


def reached_rate(
    batch: int,
    rows: int,
    columns: int,
    depth: int,
    dtype: str,
    device: Device,
    *,
    turned: tuple[bool, bool] = (False, False),
) -> float:
    """Part of `flop_rate` that products reach which wait for no traffic but that of split sums; see
    `product_seconds`."""
    aligned = aligned_rate(batch, rows, columns, depth, dtype, device, turned=turned)
    best, flop = sustained(dtype, device), 2.0 * batch * rows * columns * depth
    if not flop:
        return best
    peak = flop_rate(dtype, device, matmul=True)

    def reached(tile: tuple[float, float, float], split: int) -> float:
        used = _used(batch * split, rows, columns, device, tile)
        rate = best * aligned * used * filled(depth / split, dtype, device, aligned)
        # each part is written and read once more, in f32
        parts = 2.0 * _PART * split * batch * rows * columns if split > 1 else 0.0
        return 1.0 / (1.0 / rate + peak * traffic_seconds(parts, device, launch=False) / flop)

    return max(
        reached(tile, split) for tile in _TILES for split in _splits(batch, rows, columns, device, tile)
    )


def sustained(dtype: str, device: Device) -> float:
    """Part of `flop_rate` that the clock under load leaves to products, or to those of 8 bits of theirs, and,
    as is assumed, to those of 4."""
    return device.kernels.clock * (device.kernels.narrow if dtype in ("f8", "f4") else 1.0)


def filled(depth: float, dtype: str, device: Device, aligned: float = 1.0) -> float:
    """Part of its rate that a product reaches whose sums are so long; aligned: see `aligned_rate`."""
    return depth / (depth + aligned * begin_and_end(dtype, device)) if depth else 1.0


def begin_and_end(dtype: str, device: Device) -> float:
    """Length of a sum that takes as long as beginning and ending a tile, which is no slower for types whose
    products are; what those of 8 bits lose is in kernels.narrow."""
    peaks = device.peak_flops
    return device.kernels.depth * min(1.0, peaks.get(dtype, peaks["f32"]) / device.half_flops)


def aligned_rate(
    batch: int, rows: int, columns: int, depth: int, dtype: str, device: Device, *, turned: tuple[bool, bool]
) -> float:
    """Part of the rate where rows, of either factor or of the result, do not lie in memory at whole 16 bytes,
    as matrix units want them (NVIDIA, "Matrix multiplication background user's guide", section 3.1). turned:
    see `product_seconds`.

    Of many small products at once the vector units do them; a large one keeps, as is assumed, two fifths.
    """
    vector = device.peak_flops["f32"]
    peak = device.peak_flops.get(dtype, vector)
    width = DTYPES[dtype][1] if dtype in DTYPES else 1
    lies = (rows if turned[0] else depth, depth if turned[1] else columns, columns)
    if peak <= vector or not any(length * width % _WORD for length in lies):
        return 1.0
    return vector / peak if batch > 1 else max(_UNALIGNED, vector / peak)


def _splits(
    batch: int, rows: int, columns: int, device: Device, tile: tuple[float, float, float]
) -> Iterator[int]:
    """Into how many parts sums may be divided: no more than give every multiprocessor something to do."""
    tiles, at_once = _tiles(batch, rows, columns, device, tile)
    split = 1
    yield split
    while 2 * split * tiles <= at_once:
        split *= 2
        yield split


def _used(batch: int, rows: int, columns: int, device: Device, tile: tuple[float, float, float]) -> float:
    """Part of the best rate that tiles of a size reach; 1.0 where none are known to run side by side."""
    tiles, at_once = _tiles(batch, rows, columns, device, tile)
    if not at_once:
        return 1.0
    return _inside(rows, columns, device, tile) * (tiles / at_once) / ceil(tiles / at_once)


def edge_rate(rows: float, columns: float, device: Device) -> float:
    """Part of the best rate that products of so many rows (inf for any number of them) and columns reach, as
    far as tiles are not filled at the edges; 1.0 where none are known to run side by side."""
    if not device.kernels.multiprocessors or not (rows and columns):
        return 1.0
    return max(_inside(rows, columns, device, tile) for tile in _TILES)


def _inside(rows: float, columns: float, device: Device, tile: tuple[float, float, float]) -> float:
    """Part of the best rate that tiles of a size reach, by how much of them lies inside the result."""
    pairs = zip((rows, columns), _sides(rows, columns, device, tile), strict=True)
    return tile[2] * prod(1.0 if n == inf else n / (ceil(n / side) * side) for n, side in pairs)


def _sides(
    rows: float, columns: float, device: Device, tile: tuple[float, float, float]
) -> tuple[float, float]:
    """(rows, columns) of a tile, which lies either way."""
    sides = device.kernels.tile[0] * tile[0], device.kernels.tile[1] * tile[1]
    return sides[::-1] if rows < columns else sides


def _tiles(
    batch: int, rows: int, columns: int, device: Device, tile: tuple[float, float, float]
) -> tuple[int, float]:
    """(tiles of a size in a result, how many of them run at once, 0 if that has no end)."""
    kernels = device.kernels
    down, across = _sides(rows, columns, device, tile)
    # a multiprocessor holds as many small tiles as one large one
    at_once = kernels.multiprocessors * prod(kernels.tile) / (down * across)
    return batch * ceil(rows / down) * ceil(columns / across), at_once


def attention_seconds(
    flop: float, nbytes: float, dtype: str, backward: bool, device: Device, *, native: bool = True
) -> float:
    """Seconds of one fused attention kernel (Dao et al., FlashAttention, 2022): FLOP at the part of the peak
    that it reaches, or its traffic. native: whether it is written for the device."""
    rate = attention_rate(dtype, backward, device, native=native)
    busy = max(flop / rate, traffic_seconds(nbytes, device, launch=False))
    return busy + device.kernels.attention_start + device.launch_overhead


def attention_rate(dtype: str, backward: bool, device: Device, *, native: bool = True) -> float:
    """FLOP/s of fused attention."""
    kernels = device.kernels
    part = kernels.attention_backward if backward else kernels.attention
    part *= 1.0 if native else kernels.attention_earlier
    return device.peak_flops.get(dtype, device.peak_flops["f32"]) * part * kernels.clock


def traffic_seconds(nbytes: float, device: Device, *, launch: bool = True, starts: bool = True) -> float:
    """Seconds of a kernel that moves nbytes, at kernels.traffic of the bandwidth, or half (small).

    What fits in caches (kernels.cache) is moved faster. starts: whether it has to reach the bandwidth first,
    which a part of a kernel has not.
    """
    if not nbytes:
        return 0.0
    kernels = device.kernels
    near = min(nbytes, kernels.cache)
    busy = (nbytes - near + near / kernels.cached + starts * kernels.small) / device.traffic
    return busy + (device.launch_overhead if launch else 0.0)
