"""What one device can do, measured: matrix products, memory, the launch of an op."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from statistics import mean, median
from types import MappingProxyType

import torch

from autoshard.cluster.cluster import Device
from autoshard.cost.kernel_time import product_seconds
from autoshard.errors import UsageError
from autoshard.runtime.profile.host import measure_host
from autoshard.runtime.profile.kernels import measure_gpu_kernels, measure_kernels
from autoshard.runtime.profile.param_handover import measure_handing

Say = Callable[[str], None]
#: seconds that something took here -> what all ranks take it to be; all ask at the same time
Agree = Callable[[Sequence[float]], "list[float]"]

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
)
#: a timing covers as many calls as take this long, in seconds: far more than the clock and a launch take,
#: and on the CPU than the turns take in which processes share a core
_WINDOW = MappingProxyType({"cpu": 2e-2, "cuda": 5e-3})
#: sides of matrix products; larger ones follow only while a product takes less than this many seconds
_SIDES, _LONGEST = (256, 512, 1024, 2048, 4096, 8192), 0.05
#: bytes copied to measure memory: beyond caches, on the CPU those of a share of a server
_COPIED = MappingProxyType({"cpu": 64 * 2**20, "cuda": 2**30})
#: (rows, inputs, outputs) of layers that stand for those of programs on the CPU, and how many of each there
#: are, so that the caches do not hold them all
_LAYERS, _COPIES = ((128, 256, 512), (512, 256, 64)), 16
#: times as long as others these are timed: most of a step is spent in them
_LONGER = 10
#: seconds of copies that the host may take to issue a call
_LEAD_AT_MOST = 1.0
#: launches of a call on a GPU; calls after a layer on the CPU, of each of the copies
_LAUNCHES, _ROUNDS = 40, 8
_LAUNCHED = MappingProxyType(
    {
        "cpu": "five ops on 64 elements, after a layer's product and activation",
        "cuda": "an op on 64 elements, issued ahead",
    }
)


@dataclass(frozen=True)
class Products:
    """Matrix products of one dtype: FLOP/s of the fastest single timing, what is sustained, and the shape
    (m, k, n) that sustains it."""

    peak: float
    sustained: float
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class MeasuredDevice:
    """A device and where its figures come from: figure -> text."""

    device: Device
    sources: Mapping[str, str]


def measure_device(
    device: torch.device, sharing: int, repeats: int, say: Say, agree: Agree = list, share: float = 1.0
) -> MeasuredDevice:
    """Measure a device; this takes seconds. sharing: processes among which the memory of a CPU is divided.
    share: seconds that pass over those that a core computes for a process (`profile_sharing`).

    agree: gives all ranks the same times, so that all work at the same time and find the same; alone, times
    stay as they are. Processes that share cores are measured as they run together.
    matmul_efficiency is what is sustained (at the best shape; on the CPU by layers) as a share of the
    fastest product seen, the median over dtypes, so that it is at most 1; times peak_flops it is what is
    sustained. Dtypes that torch cannot multiply on the device are left out, and said;
    UsageError if f32 is among them. The kernels are measured, too.
    """
    clock = CallTimer(device, repeats, agree, share)
    products: dict[str, Products] = {}
    for name, dtype in DTYPES.items():
        result = _products(clock, dtype)
        if result is None:
            say(f"no matrix product in {name} on {device.type}")
            continue
        products[name] = result
        say(f"{name}: {result.peak / 1e9:.4g} GFLOP/s at best, {result.sustained / 1e9:.4g} sustained")
    if "f32" not in products:
        raise UsageError("matrix products in f32 do not run", where=str(device))
    copied = _COPIED[device.type]
    bandwidth = _memory_bandwidth(clock, copied)
    overhead, look = _launch_overhead(clock)
    dispatch = 0.0
    if device.type == "cuda":
        small = torch.ones(8, 8, device=device)
        few = clock.queued(lambda: [torch.ops.aten.mul.Tensor(small, small) for _ in range(_LAUNCHES)])
        dispatch, overhead = overhead, few / _LAUNCHES
        say(f"the host issues an op in {dispatch * 1e6:.3g} us")
    say(f"memory {bandwidth / 1e9:.4g} GB/s")
    say(f"launch of an op {overhead * 1e6:.3g} us, of a view {look * 1e6:.3g} us")
    shapes = ", ".join(f"{name} {'x'.join(map(str, p.shape))}" for name, p in products.items())
    efficiency = median(p.sustained / p.peak for p in products.values())
    memory, memory_source = _memory_bytes(device, sharing)
    peaks = {name: p.sustained / efficiency for name, p in products.items()}
    how = clock.how
    sources = {
        "memory_bytes": memory_source,
        "peak_flops": "measured: what torch's matrix products, m x k x n, sustain over matmul_efficiency; "
        f"{'layers with their gradients, such as' if device.type == 'cpu' else 'best shapes'}: {shapes}",
        "memory_bandwidth": f"measured: copy of {copied >> 20} MiB, read and written, {how}",
        "matmul_efficiency": f"measured: {how} of these products over the fastest of all, median of dtypes",
        "launch_overhead": f"measured: {_LAUNCHED[device.type]}, {how}",
    }
    measured = Device(_name(device), memory, peaks, bandwidth, efficiency, overhead)
    if device.type == "cpu":
        kernels, sources["kernels"] = measure_kernels(clock, peaks["f32"], bandwidth, overhead)
        say(f"elementwise ops reach {kernels.traffic:.2g} of it, {kernels.cached:.3g} times that in caches")
        kernels = replace(kernels, view=look, hand=measure_handing(clock))
        say(f"a parameter handed over in {kernels.hand * 1e6:.3g} us")
        sources["compiled"] = "programs run op by op on CPUs unless codegen says otherwise"
        sources["overlap"] = "0: gloo copies and reduces on the cores that compute"
        alone = min(float(sharing), share)
        sources["alone"] = "reported by the system: threads of the processes of a node over its cores"
        measured = replace(measured, kernels=kernels, overlap=0.0, alone=alone, compiled=False)
    else:
        half = next(name for name in ("bf16", "f16", "f32") if name in peaks)
        kernels, sources["kernels"] = measure_gpu_kernels(
            clock, DTYPES[half], peaks[half], bandwidth, overhead, dispatch
        )
        say(
            f"attention reaches {kernels.attention:.2g} of the peak, its gradient "
            f"{kernels.attention_backward:.2g}, elementwise ops {kernels.traffic:.2g} of the bandwidth"
        )
        measured = _with_peaks(replace(measured, kernels=kernels), products)
    host, sources["host"] = measure_host(clock, sharing, bandwidth, overhead)
    say(f"host memory {host.bandwidth / 1e9:.4g} GB/s each way, {host.latency * 1e6:.3g} us per copy")
    measured = replace(measured, host=host)
    return MeasuredDevice(measured, sources)


def _with_peaks(device: Device, products: Mapping[str, Products]) -> Device:
    """A device whose peaks are such that the cost of every measured product is what it took."""
    peaks = dict(device.peak_flops)
    for name, product in products.items():
        m, k, n = product.shape
        moved = (m * k + k * n + m * n) * DTYPES[name].itemsize
        seconds = product_seconds(1, m, n, k, name, moved, device) - device.launch_overhead
        peaks[name] *= seconds * product.sustained / (2.0 * m * k * n)
    return replace(device, peak_flops=peaks)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Lead:
    """Copies for a GPU to make while the host issues what is timed behind them: less power than products
    draw, so that clocks stay."""

    def __init__(self, device: torch.device) -> None:
        self._source = torch.ones(_COPIED["cuda"] // 4, device=device)
        self._target = torch.empty_like(self._source)
        self._one = self._seconds()

    def _seconds(self) -> float:
        """Of a copy."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._target.copy_(self._source)
        first.record()
        self._target.copy_(self._source)
        last.record()
        synchronize(self._source.device)
        return first.elapsed_time(last) * 1e-3

    def run(self, seconds: float) -> None:
        """Issue as many as take so long."""
        for _ in range(ceil(seconds / self._one)):
            self._target.copy_(self._source)


class CallTimer:
    """Times calls on a device, on all ranks at once.

    On the CPU a call takes the seconds that a core computes for it (of this thread, which is there all the
    time), times what passes meanwhile: where processes share cores, it is chance when each has its turns.
    """

    def __init__(self, device: torch.device, repeats: int, agree: Agree, share: float = 1.0) -> None:
        """share: seconds that pass over those that a core computes for a process, while all compute."""
        self.device, self.repeats, self.agree, self.share = device, repeats, agree, share

    @property
    def how(self) -> str:
        """What `seconds` gives."""
        return f"{'mean' if self.device.type == 'cpu' else 'median'} of {self.repeats}"

    def now(self) -> float:
        """Seconds from some moment on, all that was begun being done."""
        if self.device.type == "cpu":
            return time.thread_time() * self.share
        synchronize(self.device)
        return time.perf_counter()

    def times(self, call: Callable[[], object], longer: int = 1) -> list[float]:
        """Seconds per call, one entry per repeat; each repeats the call until the clock is good enough, and
        so many times longer."""
        self._run(call, 1)
        first = self.agree([self._run(call, 1)])[0]
        count = max(1, ceil(longer * _WINDOW[self.device.type] / first))
        return self.agree([self._run(call, count) for _ in range(self.repeats)])

    def typical(self, times: Sequence[float]) -> float:
        """The median; on the CPU the mean, as all that disturbs a call counts."""
        return mean(times) if self.device.type == "cpu" else median(times)

    def seconds(self, call: Callable[[], object], longer: int = 1) -> float:
        """Typical seconds per call; see `times`."""
        return self.typical(self.times(call, longer))

    @cached_property
    def _lead(self) -> Lead:
        return Lead(self.device)

    def queued(self, call: Callable[[], object]) -> float:
        """Median seconds of a call on a GPU whose host is ahead of it, as it is in the steps of large models.

        The device is busy with copies while the host issues the calls; if it was done with them before, they
        are timed again behind more.
        """
        self._run(call, 1)
        taken = self._run(call, 1)
        count = max(1, ceil(_WINDOW["cuda"] / taken))
        times: list[float] = []
        seconds = 2 * count * taken
        while len(times) < self.repeats:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._lead.run(seconds)
            first.record()
            for _ in range(count):
                call()
            last.record()
            if first.query() and seconds < _LEAD_AT_MOST:
                seconds *= 2
            else:
                synchronize(self.device)
                times.append(first.elapsed_time(last) * 1e-3 / count)
        return median(self.agree(times))

    def after_work(self, call: Callable[[], object]) -> float:
        """Seconds of a call on the CPU after a layer's product and activation, which fill the caches."""
        rows, inputs, outputs = _LAYERS[0]
        layers = [(torch.randn(rows, inputs), torch.randn(inputs, outputs)) for _ in range(_COPIES)]

        def mean_of(call: Callable[[], object]) -> float:
            taken = 0.0
            for x, weight in layers * _ROUNDS:
                torch.nn.functional.silu(torch.mm(x, weight))
                start = self.now()
                call()
                taken += self.now() - start
            return taken / len(layers * _ROUNDS)

        mean_of(call)
        times = [mean_of(call) - mean_of(lambda: None) for _ in range(self.repeats)]
        return max(0.0, mean(self.agree(times)))

    def _run(self, call: Callable[[], object], count: int) -> float:
        start = self.now()
        for _ in range(count):
            call()
        return (self.now() - start) / count


def _products(clock: CallTimer, dtype: torch.dtype) -> Products | None:
    """The best over square products and ones with a wide inside; None if torch has none of this dtype.

    On the CPU, whose rate depends on how matrices lie in memory, what layers sustain instead of the best.
    """
    device = clock.device
    if clock.agree([float(not _multiplies(dtype, device))])[0]:
        return None
    fastest, sustained, best = 0.0, 0.0, (0, 0, 0)
    for side in _SIDES:
        longest = 0.0
        for m, k, n in ((side, side, side), (side, 4 * side, side)):
            a = torch.randn(m, k, device=device).to(dtype)
            b = torch.randn(k, n, device=device).to(dtype)
            out = torch.empty(m, n, device=device, dtype=dtype)
            times = clock.times(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
            flop, typical = 2.0 * m * k * n, clock.typical(times)
            fastest = max(fastest, flop / min(times))
            if flop / typical > sustained:
                sustained, best = flop / typical, (m, k, n)
            longest = max(longest, typical)
        if longest > _LONGEST:
            break
    if device.type == "cpu":
        sustained, best = min(fastest, _layers(clock, dtype)), _LAYERS[0]
    return Products(fastest, sustained, best)


def _layers(clock: CallTimer, dtype: torch.dtype) -> float:
    """FLOP/s of linear layers one after the other: their products, and those of their gradients."""
    new: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for rows, inputs, outputs in _LAYERS * _COPIES:
        shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
        x, weight, grad = (torch.randn(shape).to(dtype) for shape in shapes)
        new.append((x, weight, grad))

    def run() -> None:
        for x, weight, grad in new:
            torch.mm(x, weight.t())
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

    return sum(6.0 * x.numel() * grad.shape[1] for x, _, grad in new) / clock.seconds(run, _LONGER)


def _multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has matrix products of a dtype."""
    x = torch.ones(8, 8, device=device).to(dtype)
    try:
        torch.mm(x, x)
    except RuntimeError as error:
        if "not implemented" in str(error):
            return False
        raise
    return True


def _memory_bandwidth(clock: CallTimer, nbytes: int) -> float:
    source = torch.ones(nbytes // 4, device=clock.device)
    target = torch.empty_like(source)
    return 2 * nbytes / clock.seconds(lambda: target.copy_(source))


def _launch_overhead(clock: CallTimer) -> tuple[float, float]:
    """Seconds of an op that has next to nothing to do, and of looking at a result in another way; the means
    over a few kinds.

    On the CPU, whose caches hold the code of ops only while nothing else needs the room, after some work.
    """
    small = torch.ones(8, 8, device=clock.device)
    aten = torch.ops.aten
    turned, view = aten.t.default(small), aten.view.default

    def launches() -> list[torch.Tensor]:
        return [
            aten.mul.Tensor(small, small),
            aten.mm.default(small, turned),
            aten.sum.dim_IntList(small, [1], True),
            aten.clone.default(turned, memory_format=torch.contiguous_format),
            aten.cat.default([small, small], 1),
        ]

    def viewed() -> list[torch.Tensor]:
        return [view(result, [result.numel()]) for result in launches()]

    def views() -> None:
        for result in viewed():
            aten.slice.Tensor(aten.unsqueeze.default(result, 1), 0, 0, 8)

    if clock.device.type != "cpu":
        return clock.seconds(lambda: [viewed() for _ in range(_LAUNCHES)]) / (5 * _LAUNCHES), 0.0
    ops, both = clock.after_work(launches), clock.after_work(views)
    return ops / 5, max(0.0, both - ops) / 15


def _memory_bytes(device: torch.device, sharing: int) -> tuple[int, str]:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1], "reported by the driver: total memory of the device"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total // sharing, f"reported by the system: {total} bytes, shared by {sharing} processes"


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, threads: {torch.get_num_threads()}"
