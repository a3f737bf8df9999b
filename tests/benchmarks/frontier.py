"""Partitions of parameters on machines with slow networks: ZeRO-3, ZeRO++ and the three-level partition.

Two published comparisons, simulated. ZeRO++ (G. Wang et al., 2023): 18B on 384 V100s; four times fewer bytes
between nodes, 2.16 times the throughput where a node has a single network card. Three levels ("Scaling Large
Language Model Training on Frontier with Low-Bandwidth Partitioning", arXiv 2501.04266): 20B on 384 GCDs, 1.71
times the throughput of ZeRO++, scaling efficiency 0.94. The papers' batches are not known here: what is
simulated is said in the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from autoshard.api import plan
from autoshard.cluster import Cluster, Mesh, load_cluster
from autoshard.ir import Call, Node
from autoshard.ir.collectives import axes_of, is_message
from autoshard.options import PassOptions
from autoshard.passes.partition.hierarchy import AxisLevels
from autoshard.passes.partition.hpz_secondary_shards import NO_SECONDARY, Secondary
from autoshard.planner.hierarchy_choice import HierarchyOption
from autoshard.planner.lowering import lay_out
from autoshard.planner.planned import Planned
from autoshard.program.program import Program
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.pricing import Pricer
from autoshard.simulate.step import estimate_step
from autoshard.simulate.work import CollectiveWork
from autoshard.validate.models import Architecture, on_meta

#: of the collectives that DeepSpeed runs beside computing
OVERLAP = Behaviour(
    gathers_overlap=True, gradients_overlap=True, late_waits=False, name="collectives beside computing"
)
ROUNDED = "int8-weights,int4-gradients"
GPT_20B = Architecture("gpt2", 44, 6144, 64, 64, 24576, 50304, 2048)
GPT_18B = Architecture("gpt2", 40, 6144, 48, 48, 24576, 50304, 2048)


@dataclass(frozen=True)
class Partition:
    """levels: how the only axis is taken apart, () for a flat one. allow: precision of what travels."""

    name: str
    levels: tuple[tuple[str, int], ...] = ()
    secondary: Secondary = NO_SECONDARY
    allow: str = ""


@dataclass(frozen=True)
class Row:
    """A partition on so many devices. seconds: of a step; tokens: per device and second; peak: bytes.

    crossing: bytes that come into a node over the network, per step, divided by those of the parameters.
    """

    name: str
    devices: int
    tokens: int
    microbatches: int
    seconds: float
    per_second: float
    peak: float
    crossing: float


def partitions(devices: int, node: int, network: str, pair: int = 1) -> tuple[Partition, ...]:
    """ZeRO-3; ZeRO++: weights of 8 bits, a second copy inside the node, gradients of 4 bits in two hops; and,
    where a node has pairs of dies, three levels, with all bits and with fewer."""
    net, inside, two = (f"fsdp_{n}" for n in (network, "node", "package"))
    apart = ((net, devices // node), (inside, node))
    found = [
        Partition("ZeRO-3"),
        Partition("ZeRO++", apart, Secondary((net,)), ROUNDED),
    ]
    if pair > 1:
        levels = ((net, devices // node), (inside, node // pair), (two, pair))
        split = Secondary((net, inside), True, (net,))
        found += [
            Partition("three levels", levels, split),
            Partition("three levels, rounded", levels, split, ROUNDED),
        ]
    return tuple(found)


def frontier(devices: int, tokens: int, microbatches: int) -> list[Row]:
    """The partitions of 20B on Frontier. tokens: of a device in a microbatch."""
    cluster = load_cluster("mi250x-frontier")
    wish = _wish(GPT_20B, cluster, devices, tokens)
    return [
        _row(p, wish, cluster, microbatches, tokens, OVERLAP) for p in partitions(devices, 8, "slingshot", 2)
    ]


def dgx2(tokens: int, devices: int = 384) -> list[tuple[int, list[Row]]]:
    """(network cards in use, ZeRO-3 and ZeRO++) of 18B on DGX-2 nodes.

    The programs are those for a single card: with fast networks ours would reduce some gradients by
    all-reduce, which neither of the two does, and would round less.
    """
    wish = _wish(GPT_18B, _dgx2(1), devices, tokens, torch.float16)
    # no kernel of attention for V100 keeps its scores to itself
    behaviour = replace(OVERLAP, attention="unfused")
    parts = partitions(devices, 16, "infiniband")
    return [(c, [_row(p, wish, _dgx2(c), 1, tokens, behaviour) for p in parts]) for c in CARDS]


def _dgx2(cards: int) -> Cluster:
    cluster = load_cluster("v100-dgx2")
    inner, outer = cluster.levels
    return replace(cluster, levels=(inner, replace(outer, shared_by=16 // cards)))


def _wish(
    shape: Architecture, cluster: Cluster, devices: int, tokens: int, dtype: torch.dtype = torch.bfloat16
) -> Planned:
    """Every parameter split over all devices, and gathered anew for every use."""
    model, inputs = on_meta(shape, devices, tokens, dtype)
    wish = plan(
        model, f"fsdp={devices}", example_inputs=inputs, cluster=cluster, memory=2**50, recompute=False
    )
    params = {place: replace(s, keep=False, late=s.stored == s.use) for place, s in wish.plan.params.items()}
    return replace(wish, plan=replace(wish.plan, params=params))


def _row(
    part: Partition, wish: Planned, cluster: Cluster, microbatches: int, tokens: int, how: Behaviour
) -> Row:
    wish = replace(wish, plan=replace(wish.plan, microbatches=microbatches))
    levels = (AxisLevels("fsdp", part.levels),) if part.levels else ()
    way = HierarchyOption(part.name, levels, part.secondary)
    # what runs beside computing is said by the behaviour, as for other people's code
    wanted = PassOptions(allow=part.allow, overlap=False)
    program = lay_out(wish.plan, wish.analysis, wish.cluster, way, wanted)
    step = estimate_step(program, cluster, behaviour=how)
    ranks = Mesh.parse(program.mesh).world_size
    return Row(
        part.name,
        ranks,
        tokens,
        microbatches,
        step.seconds,
        microbatches * tokens / step.seconds,
        step.fullest.peak,
        crossing(program, cluster) / parameter_bytes(program),
    )


def parameter_bytes(program: Program) -> float:
    """Bytes of all parameters, as they are gathered."""
    return float(sum(p.type.nbytes for p in program.signature.ports if p.kind == "param"))


def crossing(program: Program, cluster: Cluster) -> float:
    """Bytes that come into a node over the network in a step.

    The axis that crosses the network is the first one. A ring through all ranks of a flat axis enters a node
    once; of an axis that only crosses the network, every rank of a node has a ring of its own.
    """
    mesh = Mesh.parse(program.mesh)
    rings = prod(mesh.sizes[1:])
    pricer = Pricer(program, cluster)
    first, size = mesh.names[0], mesh.sizes[0]
    lowered = program.lowered
    total = 0.0
    for part in lowered.parts:
        times = 1 if part.phase in ("gather", "reduce") else program.microbatches
        for item in lowered.of(part):
            segment = lowered.segments[item.segment] if isinstance(item, Call) else None
            nodes = segment.graph.nodes if segment else (item,)
            values = segment.placed() if segment else lowered.values
            for node in nodes:
                if not isinstance(node, Node) or not is_message(node) or first not in axes_of(node):
                    continue
                for work in pricer.ops.work(node, values):
                    if isinstance(work, CollectiveWork) and work.axis == 0:
                        twice = 2 if work.kind == "all_reduce" else 1
                        total += times * rings * twice * work.nbytes * (size - 1) / size
    return total


#: (tokens of a device in a microbatch, microbatches)
BATCHES = ((2048, 1), (2048, 8), (512, 8))
CARDS, TOKENS = (1, 2, 4, 8), (1024, 2048)


def rows_of_frontier(say: Callable[[str], None]) -> Iterator[list[Row]]:
    """All partitions for every batch, on 16 and on 384 devices."""
    for tokens, microbatches in BATCHES:
        for devices in (16, 384):
            say(f"20B on {devices} GCDs, {microbatches} x {tokens} tokens")
            yield frontier(devices, tokens, microbatches)


def rows_of_dgx2(say: Callable[[str], None]) -> Iterator[tuple[int, list[Row]]]:
    """(network cards, ZeRO-3 and ZeRO++), for every number of cards and tokens."""
    for tokens in TOKENS:
        say(f"18B on 384 V100, {tokens} tokens")
        yield from dgx2(tokens)
