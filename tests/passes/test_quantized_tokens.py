"""Tokens that go to their experts with 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from architecture_runner import errors_of
from slow_links import slow_cluster

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Cluster, Mesh
from autoshard.errors import UsageError
from autoshard.ir import Node
from autoshard.passes.partition.quantize_collectives import Precision
from autoshard.planner.analysis import analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.search.plan.plan import Recompute
from autoshard.simulate.step import estimate_step
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static

pytest.importorskip("transformers")


def _model() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, **heads, num_local_experts=16, num_experts_per_tok=2)
    ids = torch.randint(0, 32, (4, 16))
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


def _program(cluster: Cluster, allow: str, mesh: str = "ep=4") -> Program:
    model, inputs = _model()
    planned = plan_analysed(analyse(capture(model, (), inputs)), [Mesh.parse(mesh)], cluster, reasons=False)
    return compile_analysed(planned, allow=allow)


def _exchanges(program: Program) -> list[Node]:
    nodes = (n for s in program.lowered.segments.values() for n in s.graph.nodes)
    return [n for n in nodes if n.op.startswith("comm.expert_")]


@pytest.mark.parametrize("nodes_of", [0, 2])
def test_rows_there_have_8_bits_and_sums_back_all(nodes_of: int) -> None:
    """Forward's dispatch alone; its second hop sends the same bytes on; the loss of precision is told."""
    program = _program(slow_cluster(1e5, nodes_of), "int8-tokens")
    short = {n.op.split(".")[1] for n in _exchanges(program) if n.kwarg("bits", 0)}
    assert short == {"expert_dispatch"} | ({"expert_relay"} if nodes_of else set())
    assert not any(n.backward for n in _exchanges(program) if n.kwarg("bits", 0))
    static = verify_static(program)
    assert static.ok and any("rounded" in c.note for c in static.checked)
    model, inputs = _model()
    report = verify(program, model, (), inputs, steps=2)
    assert report.ok, report.worst()
    (rounded,) = report.rounded
    assert (rounded.what, rounded.bits) == ("tokens", 8) and 0 < rounded.worst < 0.01
    errors = errors_of(model, inputs, program)
    assert errors["loss"] < 1e-3 and 1e-4 < max(errors.values()) < 0.05


def test_forward_that_is_computed_again_sees_the_same_tokens() -> None:
    """Layers are recomputed: their dispatch rounds as in forward; that of gradients does not round."""
    model, inputs = _model()
    analysis = analyse(capture(model, (), inputs))
    planned = plan_analysed(analysis, [Mesh.parse("ep=4")], slow_cluster(1e5, 2), reasons=False)
    plan = replace(planned.plan, recompute={"layers_fwd": Recompute("full", 2)})
    program = compile_analysed(replace(planned, plan=plan), allow="int8-tokens")
    dispatches = [n for n in _exchanges(program) if n.op == "comm.expert_dispatch.default"]
    assert len(dispatches) == 3 and sum(bool(n.kwarg("bits", 0)) for n in dispatches) == 2
    assert max(errors_of(model, inputs, program).values()) < 0.05


def test_faster_by_half_of_what_is_sent_there() -> None:
    """One of a layer's four large messages: rows of fp32 with a byte for each element."""
    cluster = slow_cluster(1e5, 2)
    exact, short = (estimate_step(_program(cluster, allow), cluster).seconds for allow in ("", "int8-tokens"))
    assert short < 0.98 * exact


def test_nothing_is_rounded_without_the_wish_or_where_it_does_not_pay() -> None:
    for program in (_program(slow_cluster(1e5, 2), ""), _program(slow_cluster(1e15), "int8-tokens")):
        assert not any(n.kwarg("bits", 0) for n in _exchanges(program))


def test_the_wish() -> None:
    assert str(Precision.parse("int8-tokens,int4-weights")) == "int4-weights,int8-tokens"
    with pytest.raises(UsageError, match="'int4-tokens' cannot be allowed"):
        Precision.parse("int4-tokens")


@pytest.mark.parametrize(
    "told", [(("bits", 4), ("group", 64)), (("bits", 8),), (("bits", 8), ("group", 2.0))]
)
def test_other_numbers_of_bits_are_found(told: tuple[tuple[str, object], ...]) -> None:
    program = _program(slow_cluster(1e5, 2), "int8-tokens")
    segments = {}
    for name, segment in program.lowered.segments.items():
        nodes = tuple(
            replace(n, kwargs=(*(k for k in n.kwargs if k[0] not in ("bits", "group")), *told))
            if n.kwarg("bits", 0)
            else n
            for n in segment.graph.nodes
        )
        segments[name] = replace(segment, graph=replace(segment.graph, nodes=nodes))
    report = verify_static(replace(program, lowered=replace(program.lowered, segments=segments)))
    assert not report.ok and any("bits" in str(f) for f in report.findings)
