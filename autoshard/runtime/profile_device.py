"""What one device can do, measured: matrix products, memory, the launch of an op."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import median
from types import MappingProxyType

import torch

from autoshard.cluster.cluster import Device
from autoshard.errors import UsageError

Say = Callable[[str], None]

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
)
#: a timing covers as many calls as take this long, in seconds: far more than the clock and a launch take
_WINDOW = 5e-3
#: sides of matrix products; larger ones follow only while a product takes less than this many seconds
_SIDES, _LONGEST = (256, 512, 1024, 2048, 4096, 8192), 0.05
#: bytes copied to measure memory: beyond caches, on the CPU those of a share of a server
_COPIED = MappingProxyType({"cpu": 64 * 2**20, "cuda": 2**30})
_LAUNCHES = 1000


@dataclass(frozen=True)
class Products:
    """Matrix products of one dtype: FLOP/s of the fastest single timing, the median rate of the shape that
    was fastest by median, and that shape (m, k, n)."""

    peak: float
    sustained: float
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Measured:
    """A device and where its figures come from: figure -> text."""

    device: Device
    sources: Mapping[str, str]


def measure_device(device: torch.device, sharing: int, repeats: int, say: Say) -> Measured:
    """Measure a device; this takes seconds. sharing: processes among which the memory of a CPU is divided.

    peak_flops is the fastest product seen, so that matmul_efficiency, what is sustained at the best shape as
    a share of it (the median over dtypes), is at most 1. Dtypes that torch cannot multiply on the
    device are left out, and said. Raises UsageError if f32 is among them.
    """
    products: dict[str, Products] = {}
    for name, dtype in DTYPES.items():
        found = _products(device, dtype, repeats)
        if found is None:
            say(f"no matrix product in {name} on {device.type}")
            continue
        products[name] = found
        say(f"{name}: {found.peak / 1e9:.4g} GFLOP/s at best, {found.sustained / 1e9:.4g} sustained")
    if "f32" not in products:
        raise UsageError("matrix products in f32 do not run", where=str(device))
    copied = _COPIED[device.type]
    bandwidth = _memory_bandwidth(device, copied, repeats)
    overhead = _launch_overhead(device, repeats)
    say(f"memory {bandwidth / 1e9:.4g} GB/s, launch of an op {overhead * 1e6:.3g} us")
    shapes = ", ".join(f"{name} {'x'.join(map(str, p.shape))}" for name, p in products.items())
    efficiency = median(p.sustained / p.peak for p in products.values())
    memory, memory_source = _memory_bytes(device, sharing)
    peaks = {name: p.peak for name, p in products.items()}
    measured = Device(_name(device), memory, peaks, bandwidth, efficiency, overhead)
    sources = {
        "memory_bytes": memory_source,
        "peak_flops": f"measured: fastest of torch's matrix products, m x k x n; best shapes: {shapes}",
        "memory_bandwidth": f"measured: copy of {copied >> 20} MiB, read and written, median of {repeats}",
        "matmul_efficiency": f"measured: median of {repeats} at the best shape over peak, median of dtypes",
        "launch_overhead": f"measured: torch.add on 8 elements, mean of {_LAUNCHES}, median of {repeats}",
    }
    return Measured(measured, sources)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clock(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds per call, one entry per repeat; each repeats the call until the clock is good enough."""

    def run(times: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            call()
        synchronize(device)
        return (time.perf_counter() - start) / times

    run(1)
    times = max(1, ceil(_WINDOW / run(1)))
    return [run(times) for _ in range(repeats)]


def _products(device: torch.device, dtype: torch.dtype, repeats: int) -> Products | None:
    """The best over square products and ones with a wide inside; None if torch has none of this dtype."""
    fastest, sustained, best = 0.0, 0.0, (0, 0, 0)
    for side in _SIDES:
        longest = 0.0
        for m, k, n in ((side, side, side), (side, 4 * side, side)):
            a = torch.randn(m, k, device=device).to(dtype)
            b = torch.randn(k, n, device=device).to(dtype)
            out = torch.empty(m, n, device=device, dtype=dtype)
            try:
                times = _clock(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, repeats)  # type: ignore[misc]
            except RuntimeError as error:
                if "not implemented" in str(error):
                    return None
                raise
            flop = 2.0 * m * k * n
            fastest = max(fastest, flop / min(times))
            if flop / median(times) > sustained:
                sustained, best = flop / median(times), (m, k, n)
            longest = max(longest, median(times))
        if longest > _LONGEST:
            break
    return Products(fastest, sustained, best)


def _memory_bandwidth(device: torch.device, nbytes: int, repeats: int) -> float:
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / median(_clock(lambda: target.copy_(source), device, repeats))


def _launch_overhead(device: torch.device, repeats: int) -> float:
    """Seconds of an op that has next to nothing to do, one after the other."""
    small = torch.ones(8, device=device)
    out = torch.empty_like(small)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            torch.add(small, small, out=out)

    return median(_clock(launches, device, repeats)) / _LAUNCHES


def _memory_bytes(device: torch.device, sharing: int) -> tuple[int, str]:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1], "reported by the driver: total memory of the device"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total // sharing, f"reported by the system: {total} bytes, shared by {sharing} processes"


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, threads: {torch.get_num_threads()}"
