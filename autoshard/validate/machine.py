"""The cluster that a row was measured on: an entry of the catalog with the figures that the row states."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import log
from typing import Any

from autoshard.cluster import Cluster, load_cluster
from autoshard.cluster.cluster import Device, Level
from autoshard.errors import UsageError
from autoshard.validate.rows import Run

#: sizes of memory that differ by less are one device, sold as GB and counted by its driver
SAME_MEMORY = 0.05
#: rates that differ by less are the same figure, rounded
_SAME_RATE = 0.02
#: ``8x200Gb/s HDR IB``: cards of a node
_CARDS = re.compile(r"(\d+)\s*x\s*\d+\s*Gb/s", re.IGNORECASE)


@dataclass(frozen=True)
class RunMachine:
    """notes: what was assumed, for the report."""

    cluster: Cluster
    notes: tuple[str, ...] = ()


def machine_of(run: Run) -> RunMachine:
    """The cluster of a run. Raises UsageError for a GPU that is not known and not described by the row."""
    entry, notes = _entry(run)
    base = load_cluster(entry["cluster"])
    device = replace(base.device, **{k: v for k, v in entry.items() if k.startswith("memory_")})
    efficiency = min(1.0, entry.get("sustained", 1.0) * device.matmul_efficiency)
    device = replace(device, matmul_efficiency=efficiency)
    own = device.kernels
    own = replace(own, watts=entry.get("watts", own.watts), best=entry.get("best", own.best))
    device = replace(device, kernels=own)
    if "power" in entry:
        # dynamic power grows with the cube of the clock, as the voltage falls with it
        device = replace(device, kernels=replace(device.kernels, clock=entry["power"] ** (1 / 3)))
    levels, told = _levels(run, base, entry.get("nvlink"))
    cluster = replace(
        base, name=f"{base.name} as {run.gpu}", device=_device(device, run), levels=levels, devices=None
    )
    return RunMachine(cluster, (*notes, *told))


@cache
def _table(kind: str) -> tuple[dict[str, Any], ...]:
    text = files("autoshard.validate").joinpath("gpus.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)[kind])


def _reach(network: str) -> float:
    """What messages reach of the rate of a network, of what they reach of the catalog's."""
    words = network.lower()
    return next((float(entry["reach"]) for entry in _table("network") if entry["match"] in words), 1.0)


def catalog_name(gpu: str) -> str | None:
    """The catalog's entry with a GPU of that name, None if there is none."""
    entry = _known(gpu)
    return None if entry is None else str(entry["cluster"])


def _known(gpu: str) -> dict[str, Any] | None:
    name = gpu.upper().removeprefix("NVIDIA ").removeprefix("AMD ").replace(" ", "-")
    fitting = [entry for entry in _table("gpu") if name.startswith(entry["name"].upper())]
    return max(fitting, key=lambda entry: len(entry["name"]), default=None)


def _entry(run: Run) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The entry of a GPU, else that of the one with the nearest peak."""
    match = _known(run.gpu)
    if match is not None:
        return match, ()
    gpus = _table("gpu")
    if run.peak_flops is None or run.gpu_memory is None:
        raise UsageError(
            f"no GPU of the catalog is called {run.gpu!r}",
            where=run.id,
            why=f"known: {', '.join(entry['name'] for entry in _table('gpu'))}",
            hint="give the row peak_tflops and gpu_mem_gb, or a cluster file for all rows",
        )
    peak = run.peak_flops

    def distance(entry: dict[str, Any]) -> float:
        return abs(log(_dense(load_cluster(entry["cluster"]).device, run) / peak))

    near = min(gpus, key=distance)
    same = "memory bandwidth, efficiency and latencies are those of"
    return near, (f"{run.gpu} is not in the catalog: {same} {near['name']}",)


def _dense(device: Device, run: Run) -> float:
    """FLOP/s of the type that the row's peak is of."""
    kind = "f8" if run.fp8 and "f8" in device.peak_flops else "bf16"
    return device.peak_flops.get(kind, device.peak_flops.get("f16", device.peak_flops["f32"]))


def _device(device: Device, run: Run) -> Device:
    """The device with the row's memory and peak, where these are other figures."""
    memory = run.gpu_memory
    if memory is not None and abs(memory / device.memory_bytes - 1) > SAME_MEMORY:
        device = replace(device, memory_bytes=int(memory))
    if run.peak_flops is None:
        return device
    factor = run.peak_flops / _dense(device, run)
    if run.fp8 and "f8" not in device.peak_flops:
        return device
    if abs(factor - 1) > _SAME_RATE:
        peaks = {k: v if k in ("f32", "f64") else factor * v for k, v in device.peak_flops.items()}
        device = replace(device, peak_flops=peaks)
    return device


def _domain(run: Run) -> int | None:
    """GPUs that are joined by NVLink; as many in every domain of a job that does not fit one of them."""
    domain, tray = run.nvlink or run.node, run.node or 1
    if not domain or run.gpus <= domain or run.gpus % tray:
        return domain
    return next(n for n in range(domain - domain % tray, 0, -tray) if run.gpus % n == 0)


def _levels(run: Run, base: Cluster, nvlink: float | None) -> tuple[tuple[Level, ...], Sequence[str]]:
    """The catalog's levels with the row's sizes and rates."""
    notes: list[str] = []
    *inside, outer = base.levels
    node = _domain(run)
    if inside:
        last = inside[-1]
        size = node or last.size
        inside = [level for level in inside[:-1] if level.size and size and level.size < size]
        if size and size > 1:
            inside.append(replace(last, size=size, bandwidth=run.intra or nvlink or last.bandwidth))
    per_node = run.node or (inside[-1].size if inside else None)
    if run.inter is not None and per_node:
        match = _CARDS.search(run.network)
        cards = int(match.group(1)) if match else per_node // outer.shared_by
        cards = max(1, min(cards, per_node))
        rate = _reach(run.network) * run.inter / cards
        outer = replace(outer, bandwidth=rate, shared_by=per_node // cards)
    elif run.node and run.gpus > run.node:
        notes.append(f"the network between nodes is that of {base.name}")
    return (*inside, outer), notes
