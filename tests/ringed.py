"""Programs with rings wherever there can be one, whatever they cost."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from planned import analysed

from autoshard.api import compile_analysed
from autoshard.cluster import Cluster, Mesh, load_cluster
from autoshard.ir.collectives import is_ring
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.search.problem.pins import Pin
from autoshard.search.select.request import SearchRequest

#: weights by columns, then by rows: what lies between layers is then divided along the sequence
_PINS = {
    "llama": (
        "*.q_proj.weight=tp:S(0)",
        "*.o_proj.weight=tp:S(1)",
        "*.gate_proj.weight=tp:S(0)",
        "*.up_proj.weight=tp:S(0)",
        "*.down_proj.weight=tp:S(1)",
    ),
    "gpt2": (
        "*.c_attn.weight=tp:S(1,outer=3)",
        "*.attn.c_proj.weight=tp:S(0)",
        "*.c_fc.weight=tp:S(1)",
        "*.mlp.c_proj.weight=tp:S(0)",
    ),
}


def even_cluster() -> Cluster:
    """Devices for which computing and messages take about as long, without latencies."""
    base = load_cluster("cpu-gloo")
    device = replace(
        base.device,
        peak_flops={name: 1e9 for name in base.device.peak_flops},
        memory_bandwidth=1e12,
        launch_overhead=0.0,
        overlap=1.0,
    )
    levels = tuple(replace(level, latency=0.0, bandwidth=1e8) for level in base.levels)
    return replace(base, name="even", device=device, levels=levels)


@contextmanager
def free_rings() -> Iterator[None]:
    """Rings cost nothing while this lasts, so that all of them are worth it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoshard.planner.node_costs.alone", lambda *_: 0.0)
        yield


@functools.cache
def planned(name: str, mesh: str) -> Planned:
    """A plan whose weights are divided over tp."""
    pins = tuple(map(Pin.parse, _PINS.get(name, ())))
    # what is hidden behind computing is not free, or backward would hide all that rings are for
    ask = SearchRequest(pins=pins, overlap=0.97)
    return plan_analysed(analysed(name), [Mesh.parse(mesh)], even_cluster(), request=ask, reasons=False)


@functools.cache
def ringed(name: str, mesh: str) -> Program:
    with free_rings():
        return compile_analysed(planned(name, mesh), ring=True)


def rings_in(program: Program) -> Counter[tuple[str, str]]:
    """(segment, kind) of the rings of a program."""
    return Counter(
        (name, node.op.split(".")[1])
        for name, segment in program.lowered.segments.items()
        for node in segment.graph.nodes
        if is_ring(node)
    )
