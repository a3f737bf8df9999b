"""The figures of devices and links that calibration may change, and clusters with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import exp, log

from autoshard.cluster.cluster import Cluster, Device


@dataclass(frozen=True)
class Figures:
    """efficiency: device -> part of the peak that the best product alone reaches. sustained: part of that in
    training, hour after hour, on a device with as many FLOP/s per watt as an A100. throttle: a device
    with x times as many sustains x ** -throttle of that, as power bounds its clock (1/3 if its voltage
    fell with its clock and an operation always took the same energy; newer chips need less). depth: see
    `Kernels`, of an A100; that of others goes with their FLOP per byte of memory bandwidth, as tiles
    begin and end by moving bytes. traffic, attention, attention_backward, narrow, dispatch, eager: likewise.
    overlap: see `Device`. inside, outside: part of the bandwidth that collectives reach on links within
    the outermost level, and on it."""

    efficiency: Mapping[str, float] = field(hash=False)
    sustained: float = 0.9
    throttle: float = 0.2
    depth: float = 200.0
    traffic: float = 0.8
    attention: float = 0.55
    attention_backward: float = 0.45
    narrow: float = 0.9
    dispatch: float = 6e-6
    eager: float = 60e-6
    overlap: float = 0.8
    inside: float = 0.75
    outside: float = 0.8


#: how far from its start a figure is believed to be, as the standard deviation of its logarithm
SPREAD: Mapping[str, float] = {
    "efficiency": 0.07,
    "sustained": 0.15,
    "throttle": 0.4,
    "depth": 0.7,
    "traffic": 0.12,
    "attention": 0.25,
    "attention_backward": 0.25,
    "narrow": 0.08,
    "dispatch": 0.5,
    "eager": 0.5,
    "overlap": 0.12,
    "inside": 0.15,
    "outside": 0.25,
}
#: figures that are not parts of a whole
_FREE = frozenset(("depth", "dispatch", "eager"))
#: FLOP/s per watt of an A100: 312e12 in 400 W
_A100 = 312e12 / 400
#: FLOP per byte of memory bandwidth of an A100 of 80 GB
_A100_BALANCE = 312e12 / 2.039e12


def names_of(figures: Figures) -> list[tuple[str, str]]:
    """(figure, device or "") of everything that may be changed, in a fixed order."""
    shared = [(f.name, "") for f in fields(Figures) if f.name != "efficiency"]
    return [*(("efficiency", device) for device in sorted(figures.efficiency)), *shared]


def value_of(figures: Figures, name: tuple[str, str]) -> float:
    figure, device = name
    return figures.efficiency[device] if device else float(getattr(figures, figure))


def moved(figures: Figures, steps: Mapping[tuple[str, str], float]) -> Figures:
    """Figures times e to the power of steps; parts of a whole stay at most 1."""
    efficiency = dict(figures.efficiency)
    shared: dict[str, float] = {}
    for name, step in steps.items():
        value = exp(log(value_of(figures, name)) + step)
        figure, device = name
        value = value if figure in _FREE else min(1.0, value)
        if device:
            efficiency[device] = value
        else:
            shared[figure] = value
    return replace(figures, efficiency=efficiency, **shared)


def applied(cluster: Cluster, figures: Figures) -> Cluster:
    """The cluster with these figures in place of its own; its peaks and bandwidths stay."""
    device = cluster.device
    kernels = replace(
        device.kernels,
        depth=figures.depth * _balance(device) / _A100_BALANCE,
        traffic=figures.traffic,
        attention=figures.attention,
        attention_backward=figures.attention_backward,
        narrow=figures.narrow,
        dispatch=figures.dispatch,
        eager=figures.eager,
    )
    efficiency = figures.efficiency.get(device.name, device.matmul_efficiency)
    *inner, outer = cluster.levels
    levels = [replace(level, efficiency=figures.inside) for level in inner]
    levels.append(replace(outer, efficiency=figures.outside))
    efficiency = min(1.0, efficiency * figures.sustained * _density(device) ** -figures.throttle)
    device_ = replace(device, matmul_efficiency=efficiency, kernels=kernels, overlap=figures.overlap)
    return replace(cluster, device=device_, levels=tuple(levels))


def _density(device: Device) -> float:
    """FLOP/s per watt, of that of an A100; 1 where the power is not known."""
    return device.half_flops / device.kernels.watts / _A100 if device.kernels.watts else 1.0


def _balance(device: Device) -> float:
    """FLOP that a device does while it moves a byte. To begin and to end, a tile reads and writes memory: the
    products that would take as long are as many as this times the bytes."""
    return device.half_flops / device.memory_bandwidth
