"""What a simulated step comes to: time and its parts, rates, what a budget of tokens costs, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from autoshard.cluster.cluster import Cluster, usable_memory
from autoshard.cluster.mesh import Mesh
from autoshard.ir.units import bytes_text
from autoshard.program.program import Program
from autoshard.simulate.device_memory import DeviceMemory
from autoshard.simulate.step import StepEstimate


@dataclass(frozen=True)
class Rates:
    """items: tokens or samples of one step, and their name. per_second: on all devices together."""

    what: str
    items: int
    per_second: float
    devices: int


@dataclass(frozen=True)
class Bill:
    """What a number of tokens takes. steps: whole ones. hours: of all devices together, each counted.

    money: hours times the price of a device hour, None without a price.
    """

    tokens: float
    steps: int
    days: float
    hours: float
    money: float | None


def items_of(program: Program) -> tuple[str, int]:
    """(what a step has, how many): tokens are the elements of the first input of integers [batch, positions],
    else samples count."""
    ports = [p for p in program.signature.ports if p.kind == "input"]
    batched = [p for p in ports if p.target in program.signature.batch_inputs] or ports
    tokens = [p.type.shape for p in batched if p.type.dtype in ("i64", "i32") and len(p.type.shape) == 2]
    what = "tokens" if tokens else "samples"
    samples = next((p.type.shape[0] for p in batched if p.type.shape), 1)
    each = prod(tokens[0]) if tokens else samples
    return what, each * program.microbatches


def rates(program: Program, estimate: StepEstimate) -> Rates:
    what, items = items_of(program)
    world = Mesh.parse(program.full_mesh).world_size
    return Rates(what, items, items / estimate.seconds if estimate.seconds else 0.0, world)


def bill(rate: Rates, estimate: StepEstimate, tokens: float, price: float | None) -> Bill:
    """price: money for one device and hour."""
    steps = -(-int(tokens) // rate.items)
    seconds = steps * estimate.seconds
    hours = seconds / 3600 * rate.devices
    return Bill(tokens, steps, seconds / 86400, hours, None if price is None else hours * price)


def parts_of(estimate: StepEstimate) -> list[tuple[str, float]]:
    """(name, seconds) of what a step is spent on, in the order of a table."""
    spent = estimate.spent
    axes = [(f"exposed communication, {name}", s) for name, s in spent.axes.items() if s > 0]
    rows = [("compute", spent.compute), *axes, ("exposed communication, p2p", spent.p2p)]
    return [*rows, ("bubble", spent.bubble), ("optimizer", spent.update)]


def memory_of(estimate: StepEstimate) -> list[tuple[str, float]]:
    """(name, bytes) of what the fullest rank holds at its peak."""
    row = estimate.fullest
    resident = row.at_peak
    return [
        ("parameters", resident.parameters),
        ("gradients", resident.gradients),
        ("optimizer state", resident.optimizer),
        ("saved for backward", resident.activations),
        ("temporaries", row.peak - resident.total),
    ]


def host_of(estimate: StepEstimate) -> list[tuple[str, float]]:
    """(name, bytes) of what the rank that offloads most keeps in host memory; empty if nothing is there."""
    if not estimate.host:
        return []
    return list(asdict(max(estimate.host, key=lambda held: held.total)).items())


def _keyed(rows: list[tuple[str, float]]) -> dict[str, float]:
    """Labels as keys: ``exposed_communication_dp``."""
    return {name.replace(", ", "_").replace(" ", "_"): value for name, value in rows}


def device_text(memory: DeviceMemory) -> str:
    """What the caching allocator and what is beside it take of a device, and whether that fits."""
    parts = f"CUDA context {bytes_text(memory.context)} + NCCL buffers {bytes_text(memory.communicators)}"
    text = (
        f"{bytes_text(memory.total)} of {bytes_text(memory.capacity)}: reserved by the caching allocator "
        f"{bytes_text(memory.reserved)} + {parts}"
    )
    growing = f"{bytes_text(memory.expandable)} reserved with expandable_segments:True"
    return f"{text}; {growing}: {_VERDICTS[memory.verdict]}"


_VERDICTS = {
    "fits": "fits",
    "flushes": "fits, but only by giving cached segments back, which is slow; set expandable_segments:True",
    "expandable": "does not fit unless PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is set",
    "over": "does not fit, though the tensors do: plan with less --memory",
}


def as_json(
    program: Program,
    cluster: Cluster,
    estimate: StepEstimate,
    rate: Rates,
    cost: Bill | None,
    device: DeviceMemory | None = None,
) -> Mapping[str, Any]:
    """The whole simulation as one document; seconds, bytes, FLOP."""
    row = estimate.fullest
    return {
        "mesh": program.full_mesh,
        "cluster": cluster.name,
        "devices": rate.devices,
        "microbatches": program.microbatches,
        "step_seconds": estimate.seconds,
        "breakdown_seconds": _keyed(parts_of(estimate)),
        "mfu": estimate.mfu,
        "model_flop": estimate.model_flop,
        "items": rate.what,
        "items_per_step": rate.items,
        "items_per_second": rate.per_second,
        "items_per_second_per_device": rate.per_second / rate.devices,
        "training": None
        if cost is None
        else {
            "tokens": cost.tokens,
            "steps": cost.steps,
            "days": cost.days,
            "device_hours": cost.hours,
            "cost": cost.money,
        },
        "memory": {
            "rank": row.rank,
            "peak_bytes": row.peak,
            "usable_bytes": usable_memory(cluster.device),
            "fits": row.peak <= usable_memory(cluster.device) and (device is None or device.fits),
            "resident_bytes": _keyed(memory_of(estimate)),
            **({"host_bytes": dict(host_of(estimate))} if estimate.host else {}),
            **({} if device is None else {"device": {**asdict(device), "total": device.total}}),
        },
    }
