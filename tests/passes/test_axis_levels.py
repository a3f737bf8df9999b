"""Keys that go round an axis, and exchanges of tokens, on the levels of an axis over several nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from architecture_runner import errors_of
from families import family
from lockstep_check import RTOL
from slow_links import ring_cluster, slow_cluster
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh
from autoshard.ir import Node
from autoshard.ir.lowered import Lowered
from autoshard.passes.pipeline import NUMBERED
from autoshard.planner.analysis import analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.rules.attention import is_windowed
from autoshard.verify.static import verify_static

#: programs whose keys go round in backward as well, where others have them already
BACKWARD = (("llama-long", "cp=4", 0), ("llama-long", "cp=8", 4))
RINGS, SENDS = "comm.ring_attention", "comm.expert_"


def _nodes(program: Program, op: str) -> list[Node]:
    return [n for s in program.lowered.segments.values() for n in s.graph.nodes if n.op.startswith(op)]


def _program(name: str, mesh: str, cluster: Any) -> tuple[Program, nn.Module, dict[str, torch.Tensor]]:
    model, inputs = family(name).make()
    analysis = analyse(capture(model, (), inputs))
    planned = plan_analysed(analysis, [Mesh.parse(mesh)], cluster, reasons=False)
    return compile_analysed(planned), model, inputs


@pytest.mark.parametrize(
    ("name", "mesh", "nodes_of", "inside"),
    [
        ("llama-long", "cp=4", 0, None),
        ("llama-long", "cp=4", 2, 2),
        ("llama-long", "cp=8", 4, 4),
        ("llama-long", "cp=2,tp=2", 0, None),
        ("llama-long", "fsdp=2,cp=2", 2, None),
        ("llama-long-padded", "cp=4", 2, 2),
        ("bert-long", "cp=4", 2, 2),
        ("gpt2-long", "cp=4", 0, None),
    ],
)
def test_keys_go_round(name: str, mesh: str, nodes_of: int, inside: int | None) -> None:
    """Causal in a zigzag, and not; keys of groups of heads; hidden by padding; on one level and on two."""
    program, model, inputs = _program(name, mesh, ring_cluster(nodes_of))
    rings = _nodes(program, RINGS)
    assert rings and not any("sdpa" in n.op and not n.backward for n in _nodes(program, "autoshard."))
    if (name, mesh, nodes_of) in BACKWARD:
        assert not _nodes(program, "autoshard.sdpa")
    assert {n.kwarg("inside", None) for n in rings} == {inside}
    assert verify_static(program).ok
    assert max(errors_of(model, inputs, program).values()) < RTOL


@pytest.mark.parametrize(
    ("name", "mesh", "nodes_of", "said"),
    [
        ("mistral-window", "cp=4", 0, (100, False, 1)),
        ("mistral-window", "cp=4", 2, (100, False, 1)),
        ("mistral-window", "seq=4", 0, (100, False, 1)),
        ("mistral-window-padded", "cp=4", 0, (100, False, 1)),
        ("gemma3-windows", "cp=4", 0, (100, True, 2)),
        ("gemma3-windows", "cp=2,tp=2", 0, (100, True, 1)),
        ("gemma3-windows-padded", "cp=4", 2, (100, True, 2)),
        ("modernbert-padded", "cp=4", 0, (51, False, 1)),
    ],
)
def test_keys_go_as_far_as_a_window(name: str, mesh: str, nodes_of: int, said: tuple[int, bool, int]) -> None:
    """(window, zigzag, hops): models whose layers all have windows keep the order of positions, those with
    other causal layers a zigzag. On one level, also where others have two."""
    program, model, inputs = _program(name, mesh, ring_cluster(nodes_of))
    rings = [n for n in _nodes(program, RINGS) if is_windowed(n)]
    assert {n.args[5:] for n in rings} == {said} and not any(n.kwargs for n in rings)
    assert verify_static(program).ok
    assert max(errors_of(model, inputs, program).values()) < RTOL


@pytest.mark.parametrize(
    ("name", "mesh", "nodes_of"),
    [
        ("llama-packed", "cp=4", 0),
        ("llama-packed", "cp=4", 2),
        ("llama-packed", "fsdp=2,cp=2", 0),
        ("mistral-window-packed", "cp=4", 0),
        ("gemma3-windows-packed", "cp=4", 2),
        ("gemma2-packed", "cp=2,tp=2", 0),
    ],
)
def test_documents_go_round(name: str, mesh: str, nodes_of: int) -> None:
    """Keys of packed documents, with windows and soft caps, too; as many hops as for one document."""
    program, model, inputs = _program(name, mesh, ring_cluster(nodes_of))
    rings = _nodes(program, RINGS)
    assert rings and all(len(n.args[0]) == (7 if "backward" in n.op else 4) for n in rings)
    assert verify_static(program).ok
    assert max(errors_of(model, inputs, program).values()) < RTOL


@pytest.mark.parametrize("mesh", ["ep=4", "fsdp=2,ep=4"])
def test_tokens_go_once_to_each_node(mesh: str) -> None:
    """Equal to eager, and fewer bytes on the slow level."""
    program, model, inputs = _program("mixtral", mesh, slow_cluster(1e5, 2))
    sends = _nodes(program, SENDS)
    assert sends and {n.kwarg("inside", None) for n in sends} == {2}
    assert NUMBERED["axis_levels"] in program.dumps
    assert verify_static(program).ok
    assert max(errors_of(model, inputs, program).values()) < RTOL


def test_tokens_go_straight_where_that_is_faster() -> None:
    """All links are alike: a second message would only cost."""
    program, _, _ = _program("mixtral", "ep=4", slow_cluster())
    assert {n.kwarg("inside", None) for n in _nodes(program, SENDS)} == {None}


@pytest.mark.parametrize(
    ("name", "cluster"), [("llama-long", ring_cluster(2)), ("mixtral", slow_cluster(1e5, 2))]
)
@pytest.mark.parametrize("inside", [3, 0, True, "2"])
def test_levels_that_are_none_are_found(name: str, cluster: Any, inside: object) -> None:
    program, _, _ = _program(name, "cp=4" if name == "llama-long" else "ep=4", cluster)
    report = verify_static(replace(program, lowered=_told(program.lowered, inside)))
    assert not report.ok and any("levels" in str(f) for f in report.findings)


def _told(lowered: Lowered, inside: object) -> Lowered:
    """With another number of ranks in a node."""
    segments = {}
    for name, segment in lowered.segments.items():
        nodes = tuple(
            replace(n, kwargs=(("inside", inside),)) if n.kwarg("inside", None) else n
            for n in segment.graph.nodes
        )
        segments[name] = replace(segment, graph=replace(segment.graph, nodes=nodes))
    return replace(lowered, segments=segments)
