"""Layers that may differ, against models whose layers are not folded together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from planned import analysed
from test_repeat import truth
from torch import nn

from autoshard.analysis import analyse
from autoshard.cluster import Mesh, load_cluster
from autoshard.cost.step_time import Exposure
from autoshard.ir.flow import flow_of
from autoshard.passes.capture import capture
from autoshard.rules.digits import find_digits
from autoshard.rules.registry import rules_for
from autoshard.search.networks.chain import Chain
from autoshard.search.networks.repeat import Room, least
from autoshard.search.networks.solve import solve
from autoshard.search.plans.plan import Recompute
from autoshard.search.problem.problem import Model
from autoshard.search.reasons.unrolled import NotAChain, Run, Spread, runs_of, spread_of, unroll
from autoshard.search.reasons.untied import chain_of, policies_of, untied_bound, untied_from
from autoshard.search.solving.problems import Posed, layer_calls, pose
from autoshard.search.solving.setting import Setting
from autoshard.search.solving.tune import tune

EXPOSURES = (Exposure(0.0, 0.0, 0.0, 0.0), Exposure(0.3, 0.5, 0.7, 1.0))


class Straight(nn.Module):
    """A layer whose output node takes its input, so that one pair of variables has costs of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() * self.scale.tanh() + x


class Bent(nn.Module):
    """A layer of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self, straight: int, bent: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Straight() for _ in range(straight))
        self.others = nn.ModuleList(Bent() for _ in range(bent))
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in [*self.layers, *self.others]:
            x = layer(x)
        return self.last(x).square().mean()


def _llama(layers: int, tie: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=32,
            intermediate_size=88,
            vocab_size=96,
            max_position_embeddings=32,
            tie_word_embeddings=tie,
        )
    )


def _gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_head=4, n_embd=32, vocab_size=97, n_positions=32, **rates)
    )


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "llama-2": lambda: _llama(2),
    "llama-3": lambda: _llama(3),
    "llama-4": lambda: _llama(4),
    "llama-3-tied": lambda: _llama(3, tie=True),
    "gpt2-2": lambda: _gpt2(2),
    "gpt2-4": lambda: _gpt2(4),
}

#: layers of each kind
STACKS = {"stack": (4, 0), "two-kinds": (3, 4)}


@functools.cache
def model_of(name: str) -> Model:
    torch.manual_seed(0)
    if name in STACKS:
        return analyse(capture(Stack(*STACKS[name]), (torch.randn(8, 16),), {})).model
    if name not in MAKERS:
        return analysed(name).model
    ids = torch.randint(3, 96, (8, 12))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    return analyse(capture(MAKERS[name](), (), inputs)).model


def unfolded(model: Model, run: Run) -> Model:
    """The model with a segment of its own for every call of the run."""
    segments, calls = {}, []
    for number, call in enumerate(model.folded.calls):
        name = f"{call.segment}_{number}" if call.label in run.labels else call.segment
        segments[name] = replace(model.folded.segments[call.segment], name=name)
        calls.append(replace(call, segment=name))
    folded = replace(model.folded, segments=segments, calls=tuple(calls))
    flow = flow_of(folded)
    rules, _ = rules_for(folded)
    return Model(folded, flow, rules, find_digits(folded, flow, rules))


def posed_of(model: Model, mesh: str) -> tuple[Posed, Setting]:
    setting = Setting(2, layer_calls(model.folded), overlap=0.8)
    return pose(model, Mesh.parse(mesh), load_cluster("h100-dgx"), setting), setting


@functools.cache
def posed(name: str, mesh: str) -> tuple[Posed, Setting]:
    return posed_of(model_of(name), mesh)


def tied_chain(name: str, mesh: str, price: float, *, recompute: bool) -> tuple[Posed, Setting, Chain]:
    problem, setting = posed(name, mesh)
    run = runs_of(problem.model.folded)[0]
    policies = policies_of(setting, run, recompute=recompute, price=price)
    return problem, setting, chain_of(unroll(problem, run), policies, EXPOSURES[1], price)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, "dp=2,tp=2") for name in ("llama-2", "llama-4", "gpt2-2", "mixtral", "bert", "stack")),
        *((name, "dp=2,fsdp=2,tp=2") for name in ("llama-3", "gpt2-4")),
        *((name, "tp=4") for name in ("llama-3-tied", "gpt2-4", "bert", "stack")),
    ],
)
def test_equals_a_model_whose_layers_are_not_folded(name: str, mesh: str) -> None:
    """Seconds without a price: bytes of an unfolded model are counted per layer, gathered copies too."""
    folded, setting = posed(name, mesh)
    (run,) = runs_of(folded.model.folded)
    loose, own = posed_of(unfolded(folded.model, run), mesh)
    assert folded.strict == loose.strict
    for exposure in EXPOSURES:
        wanted = solve(own.network(loose.problem.terms, exposure, loose.allowed))
        tied = solve(setting.network(folded.problem.terms, exposure, folded.allowed))
        found = untied_bound(folded, setting, exposure, recompute=False, recover=True)
        assert found.exact
        assert found.layers == len(run.labels)
        assert wanted.gap == 0
        assert found.seconds == pytest.approx(wanted.seconds, rel=1e-10)
        assert found.seconds <= tied.seconds * (1 + 1e-12)
        assert found.answer is not None
        assert found.answer.seconds == pytest.approx(wanted.seconds, rel=1e-10)
        assert len(found.answer.copies) == found.layers


def test_layers_of_small_models_do_differ() -> None:
    """Else the comparison above would say little."""
    folded, setting = posed("gpt2-4", "dp=2,fsdp=2,tp=2")
    found = untied_bound(folded, setting, EXPOSURES[1], recompute=False, recover=True)
    tied = solve(setting.network(folded.problem.terms, EXPOSURES[1], folded.allowed))
    assert found.seconds is not None
    assert found.answer is not None
    assert found.seconds < tied.seconds * (1 - 1e-3)
    assert len(set(found.answer.copies)) > 1


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "fsdp=2,tp=4"])
def test_one_kind_of_layer_at_a_time(mesh: str) -> None:
    """The layers of the other kind stay alike, as in the problem."""
    folded, setting = posed("two-kinds", mesh)
    runs = runs_of(folded.model.folded)
    assert [len(run.labels) for run in runs] == [4, 3]
    for run in runs:
        loose, own = posed_of(unfolded(folded.model, run), mesh)
        wanted = solve(own.network(loose.problem.terms, EXPOSURES[1], loose.allowed))
        found = untied_bound(folded, setting, EXPOSURES[1], recompute=False, run=run)
        assert found.exact
        assert found.seconds == pytest.approx(wanted.seconds, rel=1e-10)


@pytest.mark.parametrize("name", ["llama-3", "gpt2-4", "stack"])
@pytest.mark.parametrize("price", [0.0, 1e-12, 1e-9])
def test_alike_layers_cost_what_they_cost_together(name: str, price: float) -> None:
    """Every assignment of the problem, given to all copies, costs the same; odd runs hold a little less."""
    problem, setting, chain = tied_chain(name, "dp=2,fsdp=2,tp=2", price, recompute=False)
    unrolled = unroll(problem, runs_of(problem.model.folded)[0])
    network = setting.network(problem.problem.terms, EXPOSURES[1], problem.allowed).at_price(price)
    solution = solve(network)
    inner = [s for s, (each, _) in zip(solution.states, unrolled.share, strict=True) if each]
    outer = [s for s, (_, rest) in zip(solution.states, unrolled.share, strict=True) if rest]
    taken = chain.seconds_of(outer, [(0, inner)] * chain.copies)
    if chain.copies % 2 == 0 or not price:
        assert taken == pytest.approx(solution.seconds, rel=1e-12)
    else:
        assert taken <= solution.seconds * (1 + 1e-12)


@pytest.mark.parametrize("price", [1e-12, 1e-9])
@pytest.mark.parametrize("name", ["stack", "two-kinds", "gpt2-4"])
def test_the_chain_equals_itself_written_out(name: str, price: float) -> None:
    """With bytes priced, every layer free to place and to run again as it likes."""
    _, _, chain = tied_chain(name, "fsdp=2,tp=2", price, recompute=False)
    assert least(chain).lower_bound == pytest.approx(truth(chain), rel=1e-10)
    _, _, mixed = tied_chain(name, "fsdp=2,tp=2", price, recompute=True)
    assert len(mixed.kinds) == 3
    found = least(mixed)
    assert found.exact
    assert found.seconds == pytest.approx(found.lower_bound, rel=1e-10)
    for kind in mixed.kinds:
        assert found.lower_bound <= least(replace(mixed, kinds=(kind,))).lower_bound * (1 + 1e-12)
    if name != "gpt2-4":  # of which many would have to be written out
        assert found.lower_bound == pytest.approx(truth(mixed), rel=1e-10)


@pytest.mark.parametrize("name", ["llama-3", "gpt2-4"])
@pytest.mark.parametrize("share", [0.55, 0.7, 0.9])
def test_no_plan_of_the_planner_is_below(name: str, share: float) -> None:
    """Whatever the planner finds under a budget, with its recomputation."""
    problem, setting = posed(name, "fsdp=2,tp=2")
    budget = share * problem.free.bytes
    placed = tune(problem.problem, setting, budget)
    exposure = placed.setting.exposure(placed.taken)
    for price in (0.0, placed.solution.multiplier, 1e-11):
        found = untied_bound(problem, setting, exposure, price=price, budget=budget)
        assert found.seconds is not None
        assert found.seconds <= placed.seconds * (1 + 1e-12)
        small = untied_bound(problem, setting, exposure, price=price, budget=budget, room=Room(1, 1, 1))
        assert small.seconds is not None
        assert not small.exact
        assert small.seconds <= found.seconds + 1e-12 * placed.seconds


@pytest.mark.parametrize("share", [None, 0.6])
def test_the_bound_for_a_plan(share: float | None) -> None:
    """Close to the plan where it is the best for layers that are alike, too."""
    problem, setting = posed("gpt2-4", "fsdp=2,tp=2")
    budget = None if share is None else share * problem.free.bytes
    placed = tune(problem.problem, setting, budget)
    found = untied_from(problem, placed, budget)
    assert found.layers == 4
    assert found.seconds is not None
    assert 0.8 * placed.seconds < found.seconds <= placed.seconds * (1 + 1e-12)
    once = untied_bound(problem, placed.setting, placed.setting.exposure(placed.taken), budget=budget)
    assert once.seconds is not None
    assert found.seconds >= once.seconds


def test_what_cannot_be_taken_apart_is_said() -> None:
    problem, setting = posed("t5", "dp=2,tp=2")
    found = untied_bound(problem, setting, EXPOSURES[0])
    assert (found.seconds, found.reason) == (None, "no two layers in a row are alike")
    problem, setting = posed("llama-3", "dp=2,tp=2")
    half = replace(setting, recompute={"layers_fwd": Recompute("full", 2)})
    found = untied_bound(problem, half, EXPOSURES[0], recompute=False)
    assert (found.seconds, found.reason) == (None, "only some of the layers run again")
    run = runs_of(problem.model.folded)[0]
    part = Run(run.labels[:2], run.segments)
    assert untied_bound(problem, setting, EXPOSURES[0], run=part).seconds is not None
    flow = problem.model.flow
    key = next(k for k, group in flow.classes.items() if len(group.ports) == 3)
    thinner = replace(flow.classes[key], ports=flow.classes[key].ports[:2])
    torn = replace(problem.model, flow=replace(flow, classes=flow.classes | {key: thinner}))
    with pytest.raises(NotAChain, match="others of the run have not"):
        unroll(replace(problem, model=torn), run)


def test_costs_of_two_kinds_between_two_variables() -> None:
    """The output of a layer takes its input, and the next layer's input takes that output."""
    problem, _ = posed("stack", "dp=2,tp=2")
    unrolled = unroll(problem, runs_of(problem.model.folded)[0])
    mixed = [r for r in unrolled.joined.values() if len({(x.flow is None) for x in r}) > 1]
    assert mixed
    network = posed("stack", "dp=2,tp=2")[1].network(problem.problem.terms, EXPOSURES[1])
    for reasons in mixed:
        pair = tuple(sorted((reasons[0].source, reasons[0].target)))
        weight = posed("stack", "dp=2,tp=2")[1].time_weight(EXPOSURES[1])
        table = network.edges[pair[0], pair[1]]
        parts = list(unrolled.parts((pair[0], pair[1]), table, weight))
        assert len(parts) == len(reasons)
        assert np.allclose(sum(part for _, part in parts), table)


def test_spreads() -> None:
    events = {(-1, 0): 2, (-1, 1): 1, (-1, 2): 1, (0, 1): 1, (1, 2): 1, (1, 1): 1, (2, 0): 1}
    found = spread_of(events, 3)
    assert found == Spread(onward=1 / 8, a_every=1 / 8, a_first=1 / 8, lost=2 / 8)
    assert found.turned() == Spread(back=1 / 8, b_every=1 / 8, b_first=1 / 8, lost=2 / 8)
    assert found.turned().turned() == found
