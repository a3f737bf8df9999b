"""The programs into which faults are put, and what the static verifier says of each fault."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from families import family
from faults.fault import Fault, Kind
from faults.kinds import KINDS, some
from looping import LinearAttention, loop_inputs
from pipelines import paired, pipeline
from planned import analysed, planned
from planned import program as flat
from sliced import program_of
from slow_links import ring_cluster, without_latency

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Cluster, Mesh, load_cluster
from autoshard.planner.analysis import analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.search.plan.plan import Recompute
from autoshard.search.problem.pins import Pin
from autoshard.search.select.request import SearchRequest
from autoshard.verify.result import StaticReport
from autoshard.verify.static import verify_static

CLUSTER = "cpu-gloo"
_RINGS = MappingProxyType(
    {
        "ring": "llama-long",
        "reach": "mistral-window",
        "reach-zigzag": "gemma3-windows",
        "ring-documents": "llama-packed",
    }
)


@functools.cache
def good(name: str) -> Program:
    """A program without a fault."""
    if name == "flat":
        return flat("gpt2", "dp=2,tp=2")
    if name == "odd":
        return flat("gpt2-odd", "dp=2,tp=2")
    if name == "experts":
        return flat("mixtral", "fsdp=2,tp=2")
    if name == "dropout":
        return flat("gpt2-dropout", "dp=2,tp=2")
    if name == "context":
        return flat("llama-long", "cp=4", "h100-dgx")
    if name == "merged":
        return flat("bart-long", "cp=4", "h100-dgx")
    if name == "halos":
        return flat("mamba2-long", "cp=4", "h100-dgx")
    if name == "documents":
        return flat("gemma2-packed", "cp=4", "h100-dgx")
    if name in _RINGS:
        model, inputs = family(_RINGS[name]).make()
        found = analyse(capture(model, (), inputs))
        return compile_analysed(plan_analysed(found, [Mesh.parse("cp=4")], ring_cluster()))
    if name == "loop":
        looped = analyse(capture(LinearAttention().double(), (), loop_inputs(24)))
        return compile_analysed(plan_analysed(looped, [Mesh.parse("dp=2,tp=2")], ring_cluster()))
    if name == "tiles":
        model, inputs = family("llama").make()
        found = analyse(capture(model, (), inputs), tile_rows=5)
        return compile_analysed(plan_analysed(found, [Mesh.parse("dp=2,tp=2")], load_cluster(CLUSTER)))
    if name == "kept":
        return _changed("llama", "fsdp=4", keep=True)
    if name == "again":
        return _changed("llama", "dp=2,tp=2", again=True)
    if name == "vocabulary":
        return _pinned("llama", "dp=2,tp=2", "*embed_tokens.weight=tp:S(0)", "lm_head.weight=tp:S(0)")
    if name == "exchange":
        return _exchanging("fsdp=2,tp=2")
    if name == "grouped":
        return _exchanging("ep=4", allow="lsh-moe:0.5")
    if name == "chunks":
        return _exchanging("ep=4", expert_chunks=2)
    if name == "pipeline":
        return pipeline("llama", 2, "fsdp=2,tp=2", "1f1b", 4, 1, 0, True)
    if name in ("sliced", "masked"):
        return program_of("llama" if name == "sliced" else "llama+padding", 2, "tp=2", 4, 2)
    if name == "pairs":
        return paired(microbatches=2)
    if name == "bubble":
        return pipeline("gpt2", 2, "tp=2", "zb-h1", 4)
    assert name == "tied"
    return pipeline("gpt2", 2, "dp=2", "1f1b", 4)


def _changed(name: str, mesh: str, *, keep: bool = False, again: bool = False) -> Program:
    """A program whose gathered parameters are kept, or whose layers are computed again in backward."""
    made = planned(name, mesh)
    plan = made.plan
    if keep:
        params = {k: replace(p, keep=p.stored != p.use) for k, p in plan.params.items()}
        plan = replace(plan, params=params)
    if again:
        plan = replace(plan, recompute={"layers_fwd": Recompute("full", 2)})
    return compile_analysed(replace(made, plan=plan))


def _pinned(name: str, mesh: str, *pins: str) -> Program:
    """A program with some parameters placed by hand."""
    ask = SearchRequest(pins=tuple(map(Pin.parse, pins)))
    found = plan_analysed(analysed(name), [Mesh.parse(mesh)], load_cluster(CLUSTER), request=ask)
    return compile_analysed(found)


def _exchanging(mesh: str, **how: Any) -> Program:
    """A program whose rows travel to their experts: many of these, few tokens, messages without latency."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        intermediate_size=128,
        vocab_size=96,
        num_local_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).train()
    joint = capture(model, (), family("mixtral").inputs())
    analysis = analyse(joint, **how)
    return compile_analysed(plan_analysed(analysis, [Mesh.parse(mesh)], without_latency()))


def tiny(cluster: Cluster) -> Cluster:
    """The cluster with almost no memory."""
    return replace(cluster, device=replace(cluster.device, memory_bytes=1024))


def report_of(fault: Fault) -> StaticReport:
    """What the verifier says of a fault."""
    cluster = tiny(load_cluster(CLUSTER)) if fault.memory else None
    return verify_static(fault.program, moves=fault.moves, cluster=cluster)


@dataclass(frozen=True)
class Tally:
    """Faults of one kind: put in, caught, of those by a fitting rule, and near their place."""

    kind: str
    told: str
    faults: int
    caught: int
    ruled: int
    placed: int
    rules: tuple[str, ...]
    missed: tuple[str, ...]


def tally(name: str, kind: Kind, most: int) -> Tally:
    """Put faults of a kind into every program that it can be put into, and count what comes of it."""
    faults = [(on, f) for on in kind.on for f in some(kind, good(on), most)]
    caught = ruled = placed = 0
    rules: dict[str, None] = {}
    missed: list[str] = []
    for on, fault in faults:
        report = report_of(fault)
        if report.ok:
            missed.append(f"{on}: {fault.near}")
            continue
        caught += 1
        fitting = [f for f in report.findings if f.finding.rule in fault.rules]
        rules.update(dict.fromkeys(f.finding.rule for f in fitting))
        if not fitting:
            missed.append(f"{on}: {fault.near} told as {report.findings[0].finding}")
            continue
        ruled += 1
        if any(is_near(fault, f) for f in fitting):
            placed += 1
        else:
            missed.append(f"{on}: {fault.near} told at {fitting[0]}")
    return Tally(name, kind.told, len(faults), caught, ruled, placed, tuple(rules), tuple(missed))


def is_near(fault: Fault, found: object) -> bool:
    """Whether what is told names the place of the fault: a value, segment, part or action of it."""
    return not fault.near or any(word in str(found) for word in fault.near)


def main() -> None:
    """Print the table of all kinds of fault: at most so many of each kind in each program."""
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    rows: list[Tally] = []
    print(f"| fault | put in | caught | by the rule | at the place | rules |\n|{' --- |' * 6}")
    for name, kind in KINDS.items():
        row = tally(name, kind, most)
        rows.append(row)
        figures = f"{row.faults} | {row.caught} | {row.ruled} | {row.placed}"
        print(f"| {row.kind}: {row.told} | {figures} | {', '.join(row.rules)} |", flush=True)
    total = [sum(getattr(r, k) for r in rows) for k in ("faults", "caught", "ruled", "placed")]
    print(f"| {len(rows)} kinds | {' | '.join(map(str, total))} | |")
    for row in rows:
        for miss in row.missed:
            print(f"missed: {row.kind}: {miss}")


if __name__ == "__main__":
    main()
