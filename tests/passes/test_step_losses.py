"""A step of several microbatches has the loss and the gradients of the whole batch, however it is reduced."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import family
from pipelines import model_and_batch, pipeline
from ranks import HERE, run_ranks
from step_losses import BALANCE, LOSSES, TOLD, Counted, Net, batch
from torch import nn

import autoshard
from autoshard import api
from autoshard.errors import UsageError
from autoshard.ir import Node
from autoshard.ir.lowered import with_parts
from autoshard.passes.simplify.scale_terms import TOTAL
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.verify.lockstep import Batch, Ranks, StepResult, verify
from autoshard.verify.single_rank import single_rank_program
from autoshard.verify.static import verify_static

#: mesh, schedule (none without pp), microbatches
WAYS = (
    ("pp=2", "1f1b", 4),
    ("pp=2", "interleaved", 2),
    ("pp=2,dp=2", "zb-h1", 2),
    ("dp=2", "", 4),
    ("pp=2", "gpipe", 8),
)


def made(model: nn.Module, inputs: dict[str, Any], mesh: str, schedule: str, microbatches: int) -> Program:
    if schedule:
        found = api.plan(
            model,
            mesh,
            example_inputs=inputs,
            cluster="cpu-gloo",
            schedule=schedule,
            microbatches=microbatches,
        )
        return api.compile_analysed(found)
    found = api.plan(model, mesh, example_inputs=inputs, cluster="cpu-gloo")
    size = len(next(iter(inputs.values()))) // microbatches
    return api.compile_analysed(
        replace(found, plan=replace(found.plan, microbatches=microbatches, batch=size))
    )


def check(program: Program, model: nn.Module, inputs: dict[str, Any]) -> None:
    found = verify(program, model, (), inputs, steps=2)
    assert found.ok, found.worst()
    proved = verify_static(program)
    assert proved.ok, proved.findings[0]


@pytest.mark.parametrize("loss", TOLD)
def test_what_depends_on_a_sample_by_its_number_is_told(loss: str) -> None:
    with pytest.warns(UserWarning, match=r"microbatches are not quite the whole batch: .*step_losses.py:\d+"):
        made(Net(loss), batch(), *WAYS[0])


class OneByOne(nn.Module):
    """Takes its samples one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([v.square().sum() for v in self.layer(x)]).mean()


def test_a_graph_that_depends_on_the_batch_is_refused_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"another graph for microbatches(.|\n)*test_step_losses.py:\d+"):
        made(OneByOne(), {"x": torch.randn(8, 8)}, "dp=2", "", 2)


@pytest.mark.parametrize("loss", [n for n in LOSSES if n != BALANCE and n not in TOLD])
def test_every_reduction(loss: str) -> None:
    model, inputs = Net(loss), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(made(model, inputs, *WAYS[0]), model, inputs)


@pytest.mark.parametrize("loss", ["labels", "class weights", "all elements", "several"])
@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_in_every_way(way: tuple[str, str, int], loss: str) -> None:
    model, inputs = Net(loss), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(made(model, inputs, *way), model, inputs)


@pytest.mark.parametrize("tensor", [False, True])
def test_the_number_of_items_of_the_whole_batch(tensor: bool) -> None:
    model, inputs = Counted("sum"), batch()
    items = int((inputs["labels"] != -100).sum())
    given = {**inputs, "num_items_in_batch": torch.tensor(items) if tensor else items}
    check(made(model, given, *WAYS[0]), model, given)


@pytest.mark.parametrize("items", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_transformers(name: str, items: bool) -> None:
    model, inputs = family(name).make()
    inputs["labels"][:2] = -100
    inputs["labels"][2:4, 3:] = -100
    if items:
        inputs["num_items_in_batch"] = (inputs["labels"] != -100).sum()
    if name != "bert" or not items:
        check(made(model, inputs, "pp=2,dp=2", "1f1b", 4), model, inputs)


def test_a_step_without_labels_gives_no_number_as_eager_does() -> None:
    model, inputs = Net("labels"), batch()
    inputs["labels"][:] = -100
    assert model(**inputs).isnan()
    found = verify(made(model, inputs, *WAYS[0]), model, (), inputs, steps=0)
    assert found.ok and found.losses[0] != found.losses[0]


def test_what_is_no_sum_is_told_and_averaged() -> None:
    """The term alone is averaged; what adds up does so beside it."""
    model, inputs = Net(BALANCE), batch()
    with pytest.warns(UserWarning, match=r"pow at \S*step_losses.py:\d+ \(it is not linear"):
        program = made(model, inputs, *WAYS[0])
    assert len(program.alone) == 1
    one = single_rank_program(program, model, inputs)
    found = verify(program, model, (), inputs, steps=2, one_rank=one)
    assert found.ok, found.worst()

    def logits(ids: torch.Tensor) -> torch.Tensor:
        x = model.embed(ids)
        for layer in model.layers:
            x = x + layer(x)
        return model.head(x)  # type: ignore[no-any-return]

    whole = F.cross_entropy(logits(inputs["ids"]).flatten(0, 1), inputs["labels"].flatten())
    pieces = [logits(ids).mean((0, 1)).square().sum() for ids in inputs["ids"].chunk(4)]
    wanted = whole + sum(pieces) / 4
    assert abs(found.losses[0] - float(wanted.detach())) < 1e-5
    wanted.backward()
    step = stepped(program, model, inputs)
    for name, p in model.named_parameters():
        assert torch.allclose(step.grads[name], p.grad, atol=1e-6), name  # type: ignore[arg-type]


class Normed(nn.Module):
    """Statistics of the batch inside, labels that are ignored at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(x), labels)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


def test_statistics_of_a_microbatch_beside_labels_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model, inputs = Normed(), {"x": torch.randn(24, 8), "labels": torch.randint(0, 5, (24,))}
    inputs["labels"][:6], inputs["labels"][6:9] = -100, -100
    with pytest.warns(UserWarning, match="by itself"):
        program = made(model, inputs, "dp=2", "", 4)
    found = stepped(program, model, inputs)
    pieces = zip(inputs["x"].chunk(4), inputs["labels"].chunk(4), strict=True)
    each = [F.cross_entropy(model.logits(x), y, reduction="sum") for x, y in pieces]
    wanted = sum(each[1:], each[0]) / (inputs["labels"] != -100).sum()
    wanted.backward()
    assert abs(sum(map(float, found.outputs.values())) - float(wanted.detach())) < 1e-5
    for name, p in model.named_parameters():
        assert torch.allclose(found.grads[name], p.grad, atol=1e-5), name  # type: ignore[arg-type]


def stepped(program: Program, model: nn.Module, inputs: dict[str, Any]) -> StepResult:
    """A step of all ranks in lockstep."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    initial = {n: x.detach().clone() for n, x in state.items()}
    return Ranks(program, initial, Batch(program, (), inputs), 0).step()


class Mixing(nn.Module):
    """Samples of the batch seen beside each other: a loss of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.out(torch.tanh(self.layer(x)))
        return F.cross_entropy(y @ x.t(), torch.arange(len(x)))


def test_samples_that_are_mixed_are_told() -> None:
    torch.manual_seed(0)
    model, inputs = Mixing(), {"x": torch.randn(12, 8)}
    with pytest.warns(UserWarning, match="mixes the samples"):
        program = made(model, inputs, "dp=1", "", 3)
    found = verify(program, model, (), inputs, steps=1, one_rank=single_rank_program(program, model, inputs))
    assert found.ok, found.worst()
    wanted = torch.stack([model(x) for x in inputs["x"].chunk(3)]).mean()
    assert abs(found.losses[0] - float(wanted.detach())) < 1e-5


def test_a_program_says_what_it_computes_alone(tmp_path: Path) -> None:
    model, inputs = Net(BALANCE), batch()
    with pytest.warns(UserWarning):
        program = made(model, inputs, *WAYS[0])
    save_program(program, tmp_path / "program")
    again = load_program(tmp_path / "program")
    assert (again.alone, again.sums) == (program.alone, program.sums) and again.alone
    with pytest.raises(autoshard.UsageError, match="for every microbatch by itself"):
        verify(again, model, (), inputs)


def test_a_call_alone_is_that_of_its_own_batch() -> None:
    """A program of microbatches, called for one of them: nothing is divided by their number."""
    model, inputs = Net("several"), batch()
    program = made(model, inputs, "dp=2", "", 2)
    one = {k: x[4:] for k, x in inputs.items()}
    found = verify(program, model, (), one, steps=1)
    assert found.ok, found.worst()


def test_no_labels_in_a_microbatch_of_a_deep_model() -> None:
    model, inputs = model_and_batch("gpt2-deep", 3)
    assert (inputs["labels"][:4] == -100).all()
    check(made(model, inputs, "pp=2,tp=2", "1f1b", 3), model, inputs)


def test_totals_stand_where_they_are_added_up() -> None:
    """Else every microbatch would divide by its own."""
    model, inputs = Net("labels"), batch()
    program = made(model, inputs, *WAYS[0])
    lowered = program.lowered

    def plain(node: Node) -> Node:
        return replace(node, op="aten.clone.default") if node.op == TOTAL else node

    segments = {
        name: replace(s, graph=replace(s.graph, nodes=tuple(map(plain, s.graph.nodes))))
        for name, s in lowered.segments.items()
    }
    none = verify_static(replace(program, lowered=replace(lowered, segments=segments)))
    assert any("is no total" in f.finding.what for f in none.findings)
    count = next(p for p in lowered.parts if p.phase == "count" and p.stop > p.start)
    where = next(p for p in lowered.parts if p.phase == "forward" and p.stage == count.stage)
    pieces = []
    for part in lowered.parts:
        own = [*lowered.of(count), *lowered.of(where)] if part == where else list(lowered.of(part))
        pieces.append((part, [] if part == count else own))
    late = verify_static(replace(program, lowered=with_parts(lowered, pieces)))
    assert any("makes a total of one microbatch" in f.finding.what for f in late.findings)


def test_on_gloo(tmp_path: Path) -> None:
    save_program(pipeline("llama-deep", 2, "dp=2", "1f1b", 4), tmp_path / "program")
    arguments = [str(tmp_path / "rows.json"), str(tmp_path / "program")]
    run_ranks([str(HERE / "step_losses_worker.py"), *arguments])
    rows = json.loads((tmp_path / "rows.json").read_text())
    wrong = [row for row in rows if not row["error"] < 1e-4]
    assert len(rows) >= 8 and not wrong, wrong
