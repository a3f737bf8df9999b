"""What rings gain: steps with products in chunks beside their gathers and reduce-scatters, and without.

Simulated, on layers whose weights are divided as Megatron-LM does it (Shoeybi et al., 2019; along the
sequence in between, Korthikanti et al., 2022). Both programs are of the same plan; rings are where the prices
of their chunks say that a segment gets shorter (`passes/partition/ring_products.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autoshard.api import compile_analysed, plan
from autoshard.cluster import Cluster, Mesh, load_cluster
from autoshard.ir import Call
from autoshard.ir.collectives import ALL_GATHER_MM, MM_REDUCE_SCATTER, is_ring
from autoshard.program.program import Program
from autoshard.simulate.estimate import Estimator
from autoshard.simulate.step import estimate_step
from autoshard.validate.models import Architecture, on_meta
from benchmarks.cases import GPT3_175B, LLAMA3_8B

_CHUNKED = tuple(op.split(".")[1] for op in (ALL_GATHER_MM.op, MM_REDUCE_SCATTER.op))
_PINS = {
    "llama": (
        *(f"*.{name}_proj.weight=tp:S(0)" for name in ("q", "k", "v", "gate", "up")),
        *(f"*.{name}_proj.weight=tp:S(1)" for name in ("o", "down")),
    ),
    "gpt2": (
        "*.c_attn.weight=tp:S(1,outer=3)",
        "*.attn.c_proj.weight=tp:S(0)",
        "*.c_fc.weight=tp:S(1)",
        "*.mlp.c_proj.weight=tp:S(0)",
    ),
}


@dataclass(frozen=True)
class Stack:
    """Some layers of a model with its embedding and head. batch: sequences of so many tokens."""

    name: str
    model: Architecture
    batch: int
    seq: int


@dataclass(frozen=True)
class Side:
    """A program. seconds: of a step; exposed: of them, messages that no computing hides.

    rings: how many run in a step. messages, nbytes: that a rank sends; every hop of a ring is a message.
    """

    seconds: float
    exposed: float
    rings: int
    messages: int
    nbytes: float


@dataclass(frozen=True)
class RingRow:
    """A stack on some devices, without rings and with them where they pay."""

    stack: Stack
    cluster: str
    mesh: str
    apart: Side
    ringed: Side


#: (cluster, mesh), all inside a node: over NVSwitch, to a die's partner, over the slower links of packages
PLACES = (
    ("h100-dgx", "tp=8"),
    ("a100-selene", "tp=8"),
    ("mi250x-frontier", "tp=2"),
    ("mi250x-frontier", "tp=8"),
)
LAYERS = 8
STACKS = tuple(
    Stack(name, replace(model, layers=LAYERS), batch, seq)
    for name, model, seq in (("Llama-3 8B", LLAMA3_8B, 8192), ("GPT-3 175B", GPT3_175B, 2048))
    for batch in (1, 4)
)


def rows(say: Callable[[str], None]) -> Iterator[RingRow]:
    """All stacks everywhere."""
    for cluster, mesh in PLACES:
        for stack in STACKS:
            say(f"{LAYERS} layers of {stack.name}, {stack.batch} x {stack.seq} tokens on {cluster}, {mesh}")
            yield row_of(stack, load_cluster(cluster), mesh)


def row_of(stack: Stack, cluster: Cluster, mesh: str) -> RingRow:
    """One stack, in any memory: its layers are what is measured, not where they fit."""
    model, inputs = on_meta(stack.model, stack.batch, stack.seq)
    planned = plan(
        model,
        mesh,
        example_inputs=inputs,
        cluster=cluster,
        memory=2**50,
        recompute=False,
        pins=_PINS[stack.model.kind],
    )
    apart, ringed = (_side(compile_analysed(planned, ring=on), cluster) for on in (False, True))
    return RingRow(stack, cluster.name, mesh, apart, ringed)


def _side(program: Program, cluster: Cluster) -> Side:
    step = estimate_step(program, cluster)
    mesh = Mesh.parse(program.mesh)
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    sent = Estimator(program, cluster).traffic()
    hops = [t.count * (sizes[t.axis] - 1 if t.kind in _CHUNKED else 1) for t in sent]
    return Side(step.seconds, step.spent.exposed, _rings(program), sum(hops), sum(t.wire for t in sent))


def _rings(program: Program) -> int:
    """Calls of rings in a step of one microbatch."""
    lowered = program.lowered
    calls = [item.segment for item in lowered.main if isinstance(item, Call)]
    return sum(is_ring(node) for name in calls for node in lowered.segments[name].graph.nodes)
