"""The pass that makes kernels of norms: what it finds in models, what it leaves alone, and equal numbers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family
from lockstep_check import RTOL, compare_step, lockstep_step, relative_error
from pipelines import cuts_of
from pipelines import planned as pipelined
from planned import planned
from torch import nn
from typer.testing import CliRunner

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cli.main import app
from autoshard.cluster import Mesh, load_cluster
from autoshard.ir import Call, Dtype, Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue, StagePart
from autoshard.ir.placement import Layout, P, R, Shard
from autoshard.passes.fuse.fuse_kernels import fuse_kernels
from autoshard.passes.pipeline import NUMBERED
from autoshard.planner.analysis import analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.rules.local import MeshShape
from autoshard.runtime.prepared_steps import PreparedSegment
from autoshard.runtime.resolve import RankView
from autoshard.search.plan.plan import Pipeline, Recompute
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.op_work import Ops
from autoshard.simulate.work import MemoryWork
from autoshard.verify.static import verify_static

FORWARD = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
BACKWARD = ("rms_norm_backward", "layer_norm_backward")


def found(lowered: Lowered) -> dict[str, int]:
    """How often a step calls each op of a kernel."""
    calls = [i.segment for i in lowered.main if isinstance(i, Call)]
    nodes = [n for name in calls for n in lowered.segments[name].graph.nodes]
    ops = [n.op.split(".")[1] for n in nodes if n.op.startswith("autoshard.")]
    return {op: n for op, n in Counter(ops).items() if op in (*FORWARD, *BACKWARD)}


@functools.cache
def program(name: str, mesh: str, kernels: bool = True) -> Program:
    return compile_analysed(planned(name, mesh), kernels=kernels)


# Two layers each. The sum before a layer's first norm stands in the layer before it, in another segment.
COUNTS = {
    ("llama", "dp=4"): {"rms_norm": 3, "add_rms_norm": 2, "rms_norm_backward": 5},
    ("mixtral", "fsdp=4"): {"rms_norm": 3, "add_rms_norm": 2, "rms_norm_backward": 5},
    ("t5", "dp=4"): {"rms_norm": 6, "add_rms_norm": 6, "rms_norm_backward": 12},
    ("gpt2", "dp=2,tp=2"): {"add_layer_norm": 2, "layer_norm_backward": 4},
    ("vit", "fsdp=4"): {"add_layer_norm": 2, "layer_norm_backward": 4},
    ("bert", "dp=4"): {"add_layer_norm": 4},
}


@pytest.mark.parametrize(("name", "mesh"), COUNTS, ids=str)
def test_matches(name: str, mesh: str) -> None:
    assert found(program(name, mesh).lowered) == COUNTS[name, mesh]
    assert not found(program(name, mesh, False).lowered)


def test_slices_between_the_halves_of_a_norm() -> None:
    """Where tensor parallel ranks work on parts of the sequence, both halves are found in all layers."""
    counts = found(program("llama", "dp=2,tp=2").lowered)
    assert counts["rms_norm_backward"] >= 4 and counts["rms_norm"] + counts["add_rms_norm"] >= 4


@pytest.mark.parametrize(("name", "mesh"), [("llama", "dp=2,tp=2"), ("t5", "tp=4"), ("gpt2", "fsdp=4")])
def test_numbers_are_those_of_the_model(name: str, mesh: str) -> None:
    model, inputs = family(name).make()
    errors = compare_step(program(name, mesh), model, inputs)
    assert max(errors.values()) < RTOL, errors


def test_forward_keeps_less() -> None:
    """The normalised rows and wider copies are made again: forward hands less to backward."""

    def kept(made: Program) -> int:
        lowered = made.lowered
        calls = [i for i in lowered.main if isinstance(i, Call)]
        used = {a for c in calls if c.backward for a in c.args}
        return sum(
            lowered.values[o].type.nbytes for c in calls if not c.backward for o in c.outs if o in used
        )

    less, more = kept(program("llama", "dp=4")), kept(program("llama", "dp=4", False))
    rows = 5 * 8 * 12 * 32 * 4
    assert less <= more - rows


class Plain(nn.Module):
    """A norm between two products, with a sum before it that is used again."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 16), norm, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.a(x)
        return (h + self.b(self.norm(h))).float().square().mean()


def test_layer_norms_in_half_precision() -> None:
    """Both halves become kernels, so that statistics are fp32, as they are on a GPU; in all layers."""
    model, inputs = family("gpt2").make()
    analysis = analyse(capture(model.bfloat16(), (), inputs))
    plan = plan_analysed(analysis, [Mesh.parse("dp=4")], load_cluster("cpu-gloo"))
    made = compile_analysed(plan, kernels=True)
    assert found(made.lowered) == {"layer_norm": 3, "add_layer_norm": 2, "layer_norm_backward": 5}
    for segment in made.lowered.segments.values():
        for node in segment.graph.nodes:
            assert "native_layer_norm" not in node.op
            if node.op.endswith("layer_norm.default"):
                assert [t.dtype for t in node.types[-2:] if t] == ["f32", "f32"]
        names = dict(segment.graph.inputs)
        for node in segment.graph.nodes:
            if "layer_norm_backward" in node.op:
                assert {names[node.args[2].name].dtype, names[node.args[3].name].dtype} == {"f32"}
    outs = []
    for one in (made, compile_analysed(plan, kernels=False)):
        lockstep, env = lockstep_step(one, model, inputs)
        outs.append({r.target: lockstep.whole(env[r.value], r.value) for r in one.signature.results})
    for target in outs[0]:
        assert relative_error(outs[0][target].float(), outs[1][target].float()) < 5e-2, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norms_without_a_bias(dtype: torch.dtype) -> None:
    """The kernel of the gradient gives that of a bias all the same; it goes nowhere."""
    torch.manual_seed(0)
    model = Plain(nn.LayerNorm(16, bias=False)).to(dtype)
    x = torch.randn(4, 3, 16).to(dtype)
    analysis = analyse(capture(model, (x,), {}))
    plan = plan_analysed(analysis, [Mesh.parse("dp=2")], load_cluster("cpu-gloo"))
    made, plain = (compile_analysed(plan, kernels=k) for k in (True, False))
    assert found(made.lowered) == {"add_layer_norm": 1, "layer_norm_backward": 1}
    for segment in made.lowered.segments.values():
        for node in segment.graph.nodes:
            if "layer_norm_backward" in node.op:
                assert (
                    node.types[1]
                    == node.types[2]
                    == TensorType((16,), "f32" if dtype == torch.float32 else "bf16")
                )
                assert segment.layouts[node.outs[1]] == segment.layouts[node.outs[2]]
                assert not any(node.outs[2] in refs_of(n) for n in segment.graph.nodes)
    assert verify_static(made).ok
    _equal(made, plain, model, x)


class Gemma(nn.Module):
    """Multiplies in fp32, by one more than its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        rows = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (rows * (1.0 + self.w.float())).type_as(x)


class Squares(nn.Module):
    """Operands the other way round, a square by multiplication, the weight first."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        return self.w * (rstd * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "norm", [lambda: nn.RMSNorm(16, eps=1e-6), Gemma, Squares], ids=["torch", "gemma", "squares"]
)
def test_ways_to_write_it(norm: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Plain(norm()).to(dtype)
    x = torch.randn(4, 3, 16).to(dtype)
    analysis = analyse(capture(model, (x,), {}))
    plan = plan_analysed(analysis, [Mesh.parse("dp=2")], load_cluster("cpu-gloo"))
    made, plain = (compile_analysed(plan, kernels=k) for k in (True, False))
    counts = found(made.lowered)
    if norm is Squares and dtype == torch.bfloat16:
        assert not counts  # the square is rounded: nothing here is computed in fp32
        return
    assert counts["add_rms_norm"] == 1
    if norm is not Squares:
        assert counts["rms_norm_backward"] == 1
    _equal(made, plain, model, x)


def _equal(made: Program, plain: Program, model: nn.Module, x: torch.Tensor) -> None:
    outs = []
    for one in (made, plain):
        lockstep, env = lockstep_step(one, model, {"x": x})
        outs.append({r.target: lockstep.whole(env[r.value], r.value) for r in one.signature.results})
    allowed = 1e-5 if x.dtype == torch.float32 else 3e-2
    for target in outs[0]:
        assert relative_error(outs[0][target].float(), outs[1][target].float()) < allowed, target


class Twice(nn.Module):
    """Two norms of one sum, beside each other, as in GPT-NeoX."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.one, self.two = norm(16), norm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.a(x)
        return (h + self.b(self.one(h)) + self.c(self.two(h))).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm], ids=["rms", "layer"])
def test_two_norms_of_one_sum(norm: Any, dtype: torch.dtype) -> None:
    """The sum becomes part of one of them only, and their gradients arrive at it one after the other."""
    torch.manual_seed(0)
    model = Twice(norm).to(dtype)
    x = torch.randn(4, 3, 16).to(dtype)
    analysis = analyse(capture(model, (x,), {}))
    plan = plan_analysed(analysis, [Mesh.parse("dp=2")], load_cluster("cpu-gloo"))
    made, plain = (compile_analysed(plan, kernels=k) for k in (True, False))
    counts = found(made.lowered)
    assert counts["add_rms_norm" if norm is nn.RMSNorm else "add_layer_norm"] == 1
    assert counts["rms_norm_backward" if norm is nn.RMSNorm else "layer_norm_backward"] >= 1
    _equal(made, plain, model, x)


# graphs by hand

H = 8
SPLIT: Layout = (Shard(0),)
WIDE, STAT = TensorType((4, H), "f32"), TensorType((4, 1), "f32")


def node(op: str, args: tuple[Any, ...], out: str, type_: TensorType, **kwargs: Any) -> Node:
    return Node(op, args, tuple(kwargs.items()), (out,), (type_,))


def chain(divisor: float = H, eps: Any = 1e-6, dims: tuple[int, ...] = (-1,)) -> list[Node]:
    """y = w * (x * rsqrt(mean(x^2) + eps)) of x = a + b."""
    return [
        node("aten.add.Tensor", (Ref("a"), Ref("b")), "x", WIDE),
        node("aten.pow.Tensor_Scalar", (Ref("x"), 2), "square", WIDE),
        node("aten.sum.dim_IntList", (Ref("square"), dims, True), "total", STAT),
        node("aten.div.Tensor", (Ref("total"), divisor), "mean", STAT),
        node("aten.add.Tensor", (Ref("mean"), eps), "shifted", STAT),
        node("aten.rsqrt.default", (Ref("shifted"),), "rstd", STAT),
        node("aten.mul.Tensor", (Ref("x"), Ref("rstd")), "rows", WIDE),
        node("aten.mul.Tensor", (Ref("w"), Ref("rows")), "y", WIDE),
    ]


def lowered_of(nodes: list[Node], outputs: tuple[str, ...] = ("y",), layout: Layout = SPLIT) -> Lowered:
    inputs = (("a", WIDE), ("b", WIDE), ("w", TensorType((H,), "f32")))
    graph = Graph("main_fwd", inputs, tuple(nodes), outputs)
    layouts: dict[str, Layout] = {n: layout for n in graph.types()}
    layouts["w"] = (R,)
    call = Call("main_fwd", ("a", "b", "w"), tuple(f"{o}_out" for o in outputs), "", False)
    values = {n: PlacedValue(t, layouts[n]) for n, t in inputs}
    values |= {f"{o}_out": PlacedValue(graph.types()[o], layouts[o]) for o in outputs}
    segment = LoweredSegment(graph, layouts, {})
    parts = (StagePart(0, "forward", 0, 1),)
    return Lowered({"main_fwd": segment}, (call,), values, call.outs, parts)


def fused(lowered: Lowered) -> Lowered:
    return fuse_kernels(lowered, MeshShape(("dp",), (2,)), 1e9)


def run(lowered: Lowered, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    graph = lowered.segments["main_fwd"].graph
    view = RankView(("dp",), (1,), (0,))
    segment = PreparedSegment(graph, view, lambda *_: None, torch.device("cpu"))  # type: ignore[arg-type, return-value]
    return segment([values[n] for n, _ in graph.inputs], 0)


def ops(lowered: Lowered) -> list[str]:
    return [n.op.split(".")[1] for n in lowered.segments["main_fwd"].graph.nodes]


def test_chain() -> None:
    made = fused(lowered_of(chain()))
    assert ops(made) == ["add_rms_norm"]
    why = made.segments["main_fwd"].why["x"]
    # 2 rows of 32 B on a rank. The kernel: a, b, sum and y, its statistics, the weight. The chain, op by op:
    # 10 times the rows, 8 times the statistics, the weight
    before, after = 10 * 64 + 8 * 8 + 32, 4 * 64 + 8 + 32
    told = f"kernel: moves {after / 2**20:.3g} MiB, not {before / 2**20:.3g} MiB"
    assert why == f"{told}: {(before - after) / 1e9 * 1e6:.3g} us less"


@pytest.mark.parametrize("inner", ["square", "total", "shifted", "rows", "x", "rstd"])
def test_what_others_use_stays(inner: str) -> None:
    """Whatever of the chain is used elsewhere is still there, with the same numbers."""
    before = lowered_of([*chain(), node("aten.neg.default", (Ref(inner),), "other", WIDE)], ("other", "y"))
    after = fused(before)
    assert "add_rms_norm" in ops(after)
    torch.manual_seed(0)
    values = {"a": torch.randn(4, H), "b": torch.randn(4, H), "w": torch.randn(H)}
    for one, other in zip(run(before, values), run(after, values), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_results_of_the_segment_stay() -> None:
    before = lowered_of(chain(), ("rstd", "rows", "y", "x"))
    after = fused(before)
    assert ops(after) == ["add_rms_norm", "mul"]
    assert after.main == before.main


@pytest.mark.parametrize(
    "other",
    [
        chain(divisor=H - 1),
        chain(eps=1),
        chain(dims=(0,)),
        [*chain()[:5], node("aten.sqrt.default", (Ref("shifted"),), "rstd", STAT), *chain()[6:]],
        [*chain()[:1], node("aten.pow.Tensor_Scalar", (Ref("x"), 3), "square", WIDE), *chain()[2:]],
        [*chain()[:6], node("aten.mul.Tensor", (Ref("a"), Ref("rstd")), "rows", WIDE), *chain()[7:]],
    ],
    ids=["divisor", "eps", "dims", "sqrt", "cube", "other rows"],
)
def test_what_is_no_norm_is_left_alone(other: list[Node]) -> None:
    before = lowered_of(other)
    assert fused(before) == before


@pytest.mark.parametrize("layout", [(Shard(1),), (P,)], ids=["split rows", "partial sums"])
def test_rows_must_be_whole(layout: Layout) -> None:
    before = lowered_of(chain(), layout=layout)
    assert fused(before) == before


def test_a_weight_made_of_the_sum_is_not_taken_in() -> None:
    """A sum that the weight depends on must be there before the norm: only the norm becomes one op."""
    weight = node("aten.sum.dim_IntList", (Ref("x"), (0,)), "made", TensorType((H,), "f32"))
    nodes = [*chain()[:-1], weight, node("aten.mul.Tensor", (Ref("rows"), Ref("made")), "y", WIDE)]
    made = fused(lowered_of(nodes))
    assert ops(made) == ["add", "sum", "rms_norm"]


def test_a_gather_between_rows_and_weight_stands_in_the_way() -> None:
    gather = node("comm.all_gather.default", (Ref("rows"), "dp", 0), "whole", WIDE)
    nodes = [*chain()[:-1], gather, node("aten.mul.Tensor", (Ref("w"), Ref("whole")), "y", WIDE)]
    before = lowered_of(nodes)
    assert fused(before) == before


def test_a_cast_of_integers_is_no_rounding() -> None:
    cast = node(
        "aten._to_copy.default", (Ref("rows"),), "narrow", TensorType((4, H), "i32"), dtype=Dtype("i32")
    )
    nodes = [*chain()[:-1], cast, node("aten.mul.Tensor", (Ref("w"), Ref("narrow")), "y", WIDE)]
    before = lowered_of(nodes)
    assert fused(before) == before


# beside other passes


def test_recomputed_norms() -> None:
    """Backward finds its norm in the segment that computes a layer again."""
    plan = planned("llama", "dp=4")
    again = replace(plan, plan=replace(plan.plan, recompute={"layers_fwd": Recompute("full", 2)}))
    made = compile_analysed(again, kernels=True)
    # forward and again: two norms a layer; those computed again are fused, too
    assert found(made.lowered)["rms_norm_backward"] == 5
    model, inputs = family("llama").make()
    errors = compare_step(made, model, inputs)
    assert max(errors.values()) < RTOL, errors


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pipelines(schedule: str) -> None:
    """Norms and their gradients are found in the stages, also where the gradients of weights come later."""
    plan = pipelined("llama-deep", "dp=2")
    cuts = cuts_of(plan.analysis.folded, 2)
    cut = replace(plan.plan, pipeline=Pipeline(2, 0, schedule, 1, cuts), microbatches=2)
    counts = found(compile_analysed(replace(plan, plan=cut), kernels=True).lowered)
    assert counts["rms_norm_backward"] >= 10 and counts["rms_norm"] + counts["add_rms_norm"] >= 10


def test_programs_are_read_back(tmp_path: Path) -> None:
    """Printed, stored and parsed, a program has the same kernels; the pass's dump and notes are there."""
    made = program("llama", "dp=2,tp=2")
    save_program(made, tmp_path / "program")
    read = load_program(tmp_path / "program")
    assert found(read.lowered) == found(made.lowered)
    assert "add_rms_norm" in made.dumps[NUMBERED["fuse_kernels"]]
    assert "# kernel: moves" in program_text(made)
    assert NUMBERED["fuse_kernels"] not in program("llama", "dp=2,tp=2", False).dumps


TARGET = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return self.down(self.norm(x + self.up(x))).square().mean()


def block():
    return Block(), torch.randn(4, 16)
"""


def test_command_line_leaves_kernels_out(tmp_path: Path) -> None:
    (tmp_path / "target.py").write_text(TARGET)
    target, out = f"{tmp_path / 'target.py'}:block", tmp_path / "program"
    command = ["compile", target, "--mesh", "dp=2", "-o", str(out), "--without", "kernels"]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    assert "add_rms_norm" not in (out / "program.py").read_text()


def test_simulation_prices_kernels_by_their_cost() -> None:
    """What `simulate` counts for a kernel is what its cost function says, of a rank's part."""
    made = program("llama", "dp=4").lowered
    segment = made.segments["layers_bwd"]
    node = next(n for n in segment.graph.nodes if "rms_norm_backward" in n.op)
    work = Ops(Mesh.parse("dp=4"), (0,), Behaviour()).work(node, segment.placed())
    # a rank has 2 of 8 sequences: gradients, x and the sum around, a statistic per row, two weights, in fp32
    rows = 2 * 12
    assert [w.nbytes for w in work if isinstance(w, MemoryWork)] == [4 * (4 * rows * 32 + rows + 2 * 32)]
