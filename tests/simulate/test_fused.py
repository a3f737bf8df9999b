"""What Inductor makes one kernel of: told by `explain`, and its values neither written nor read."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from planned import program

from autoshard.cluster import load_cluster
from autoshard.ir import refs_of
from autoshard.ir.views import VIEWS
from autoshard.program.program import Program
from autoshard.report.explain import explain_name
from autoshard.report.explain_text import explanation_lines
from autoshard.rules.chains import CHAINED, FusedKernels
from autoshard.simulate.pricing import Pricer
from autoshard.simulate.step import estimate_step

H100 = load_cluster("h100-dgx")


@cache
def llama(codegen: str = "") -> Program:
    return replace(program("llama", "dp=2,tp=2"), codegen=codegen)


def test_a_step_is_shorter_by_what_is_not_moved() -> None:
    llamas = llama("interpreter"), llama("inductor")
    plain, fused = (Pricer(p, H100) for p in llamas)
    total = 0.0
    for name, segment in llamas[0].lowered.segments.items():
        graph, values = segment.graph, segment.placed()
        chains = FusedKernels.of(graph.nodes, graph.outputs)
        touched = [
            n for n in graph.nodes if n.op in CHAINED and chains.of_node(n).unmoved & {*n.outs, *refs_of(n)}
        ]
        saved = sum(
            plain.node(n, values).compute - plain.node(n, values, chains.of_node(n)).compute for n in touched
        )
        assert plain.segment(name).compute - fused.segment(name).compute == pytest.approx(saved)
        total += saved
    assert total > 0
    slow, quick = (estimate_step(p, H100) for p in llamas)
    assert quick.seconds < slow.seconds
    assert quick.fullest.peak == slow.fullest.peak


def test_the_device_decides() -> None:
    """Programs are compiled on GPUs alone, if nothing is said."""
    for cluster, codegen in ((H100, "inductor"), (load_cluster("cpu-gloo"), "interpreter")):
        told, by_device = (estimate_step(llama(name), cluster) for name in (codegen, ""))
        assert by_device.seconds == told.seconds


def test_kernels_of_a_layer() -> None:
    graph = llama().lowered.segments["layers_fwd"].graph
    nodes = graph.nodes
    by_name = {n.name: n for n in nodes}
    fused = FusedKernels.of(nodes, graph.outputs)
    kernels = {n.name: fused.beside(nodes, n.name) for n in nodes}
    for name, kernel in kernels.items():
        assert not kernel or (by_name[name].op in VIEWS or name in kernel)
        assert all(by_name[op].op in CHAINED and kernels[op] == kernel for op in kernel)
    assert all(not kernels[n.name] for n in nodes if n.op == "aten.mm.default")
    norm = max(kernels.values(), key=len)
    assert {by_name[op].op for op in norm} >= {
        "aten.pow.Tensor_Scalar",
        "aten.rsqrt.default",
        "aten.mul.Tensor",
    }


def test_explain_says_what_was_fused() -> None:
    texts = [
        "\n".join(explanation_lines(explain_name(p, H100, "model.layers.0.input_layernorm")))
        for p in (llama("interpreter"), llama("inductor"))
    ]
    assert "one kernel of Inductor" not in texts[0]
    (line,) = [line for line in texts[1].splitlines() if "one kernel of Inductor" in line]
    assert "pow" in line and "rsqrt" in line and "mul" in line
