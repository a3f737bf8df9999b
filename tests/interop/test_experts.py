"""Mixture of experts: the ops, how Hugging Face models come to use them, and what programs move."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from math import isfinite, isinf, prod
from typing import Any

import pytest
import torch
from lockstep_check import RTOL, compare_step
from planned import program
from slow_links import slow_cluster, without_latency
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.capture.hf_experts import experts_forward
from autoshard.cluster import Mesh, load_cluster
from autoshard.cost.collective import seconds
from autoshard.cost.on_mesh import cost_model
from autoshard.ir import Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import axes_of
from autoshard.ir.placement import Layout, P, R, Shard, chunk
from autoshard.options import PassOptions
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.known_ops import known_ops
from autoshard.program.parse import parse_program
from autoshard.program.program import Program
from autoshard.program.text import axis_names, program_text
from autoshard.rules.core import Factored
from autoshard.rules.registry import RULES
from autoshard.rules.states import OpState, op_states
from autoshard.runtime.exchange import ExpertExchange, Hop
from autoshard.runtime.lockstep.in_process import InProcess, Table
from autoshard.runtime.resolve import RankView
from autoshard.runtime.transport.transport import Arrival
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.estimate import Estimator
from autoshard.simulate.op_work import Ops
from autoshard.verify.static import verify_static

f64 = torch.float64
#: expert 1 has no token; 4 and -1 are none of the experts
CHOSEN = torch.tensor([[3, 0], [0, 2], [4, 3], [0, -1], [3, 2]])
_ops = torch.ops.autoshard


def _tensors(transposed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, dtype=f64, generator=make)
    weight = torch.randn((4, 6, 3) if transposed else (4, 3, 6), dtype=f64, generator=make)
    return x, weight, torch.rand(5, 2, dtype=f64, generator=make)


def _by_hand(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Per token the weighted sum of what its experts make of it."""
    rows = []
    for row, numbers, scales in zip(x, CHOSEN.tolist(), scale, strict=True):
        made = [
            each * (row @ (weight[n].t() if transposed else weight[n]))
            for n, each in zip(numbers, scales, strict=True)
            if 0 <= n < 4
        ]
        rows.append(torch.stack(made).sum(0))
    return torch.stack(rows)


# -- the ops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
def test_tokens_meet_their_experts(transposed: bool) -> None:
    x, weight, scale = (t.requires_grad_() for t in _tensors(transposed))
    chosen = _ops.choices(CHOSEN)
    slots = _ops.route(chosen, 4)
    assert len(slots) == 8
    rows = _ops.expert_mm(_ops.dispatch(x, chosen, slots), slots, weight, transposed)
    found = _ops.combine(rows * _ops.dispatch_weights(scale, chosen, slots)[:, None], chosen, slots)
    wanted = _by_hand(x, weight, scale, transposed)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, weight, scale), grad),
        torch.autograd.grad(wanted, (x, weight, scale), grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_table_of_experts() -> None:
    table = torch.randn(4, 3, dtype=f64, requires_grad=True)
    slots = _ops.route(CHOSEN, 4)
    found = _ops.expert_rows(table, slots)
    wanted = table[torch.tensor([0, 0, 0, 2, 2, 3, 3, 3])]
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(y, table, grad)[0] for y in (found, wanted))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("wide", [2, 5])
def test_columns_are_put_back(wide: int) -> None:
    x = torch.randn(4, 3, 6, requires_grad=True)
    part = x[..., 1:wide:2]
    grad = torch.randn_like(part)
    (wanted,) = torch.autograd.grad(part, x, grad)
    assert torch.equal(_ops.put_columns(grad, 6, 1, wide, 2), wanted)


def test_a_rank_without_tokens_or_experts() -> None:
    x, weight, _ = _tensors(False)
    none = _ops.route(CHOSEN[:0], 4)
    assert none.shape == (0,)
    assert _ops.expert_mm(x[:0], none, weight, False).shape == (0, 6)
    assert not _ops.expert_outer(x[:0], x[:0], none, 4, False).any()
    assert _ops.route_part(CHOSEN, 0, 4).shape == (0,)
    elsewhere = _ops.route_part(CHOSEN, 2, 5)
    assert not _ops.combine(x[:0], CHOSEN, elsewhere).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_groups_are_those_of_each_expert(dtype: torch.dtype, transposed: bool) -> None:
    """Experts without rows among them, which have a gradient of zeros."""
    make = torch.Generator().manual_seed(0)
    chosen = torch.tensor([[0, 3], [3, 5], [0, 5], [5, 6], [3, 0]])
    slots = _ops.route(chosen, 8)
    x, grad = (torch.randn(len(slots), n, generator=make).to(dtype) for n in (16, 24))
    weight = torch.randn(8, *((24, 16) if transposed else (16, 24)), generator=make).to(dtype)
    wide = [t.double() for t in (x, grad, weight)]
    made = _ops.expert_mm(x, slots, weight, transposed), _ops.expert_outer(x, grad, slots, 8, transposed)
    by_one = (
        _ops.expert_mm(wide[0], slots, wide[2], transposed),
        _ops.expert_outer(wide[0], wide[1], slots, 8, transposed),
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(made, by_one, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    assert not made[1][1].any() and not made[1][7].any()


def test_half_precision_is_summed_in_single() -> None:
    """What sums of a token in bfloat16 would lose one by one."""
    chosen = torch.arange(64).reshape(1, 64)
    slots = _ops.route(chosen, 64)
    rows = torch.ones(64, 1, dtype=torch.bfloat16) * 1.0078125
    few = _ops.route_part(chosen, 63, 0)
    wanted = (rows[:63].float().sum(0)).to(torch.bfloat16)
    assert torch.equal(_ops.combine(rows[:63], chosen, few)[0], wanted)
    assert torch.equal(_ops.combine(rows, chosen, slots)[0], rows.float().sum(0).to(torch.bfloat16))


def test_adding_ops_of_parts_are_well_formed() -> None:
    x, index = torch.randn(4, 3), torch.tensor([0, 3, 3, 1, 0])
    ops = torch.ops.autoshard
    torch.library.opcheck(ops.index_add_part.default, (x, [index], torch.randn(5, 3), [5]))
    torch.library.opcheck(ops.scatter_add_part.default, (x[:, 0], 0, index, torch.randn(5), [5]))
    whole = ops.scatter_add_part(x[:, 0], 0, index, torch.ones(5), [0])
    torch.testing.assert_close(whole, x[:, 0] + torch.tensor([2.0, 1.0, 0.0, 2.0]))
    later = ops.scatter_add_part(x[:, 0], 0, index, torch.ones(5), [5])
    torch.testing.assert_close(later, torch.tensor([2.0, 1.0, 0.0, 2.0]))


# -- Hugging Face --------------------------------------------------------------------------------------


def _mixtral() -> nn.Module:
    from transformers.models.mixtral import modeling_mixtral as source

    sizes = {"hidden_size": 6, "intermediate_size": 10, "num_local_experts": 4}
    return source.MixtralExperts(source.MixtralConfig(**sizes))


def _gpt_oss() -> nn.Module:
    """Biases, matrices laid the other way, gate and up in turns."""
    from transformers.models.gpt_oss import modeling_gpt_oss as source

    sizes = {"hidden_size": 6, "intermediate_size": 10, "num_local_experts": 4}
    return source.GptOssExperts(source.GptOssConfig(**sizes))


def _nemotron() -> nn.Module:
    """No gate."""
    from transformers.models.nemotron_h import modeling_nemotron_h as source

    sizes = {"hidden_size": 6, "moe_intermediate_size": 10, "n_routed_experts": 4, "moe_latent_size": None}
    return source.NemotronHExperts(source.NemotronHConfig(**sizes))


def _muse() -> nn.Module:
    """A norm after every expert."""
    from transformers.models.muse_spark import modeling_muse_spark as source

    sizes = {"moe_hidden_size": 6, "moe_intermediate_size": 10, "num_local_experts": 4}
    return source.MuseSparkExperts(source.MuseSparkTextConfig(**sizes))


def _routed(experts: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seven tokens with two experts each: hidden states, experts, weights."""
    make = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 6, dtype=f64, generator=make)
    index = torch.stack([torch.randperm(experts, generator=make)[:2] for _ in range(7)])
    return hidden, index, torch.rand(7, 2, dtype=f64, generator=make)


def _filled(module: nn.Module) -> Any:
    make = torch.Generator().manual_seed(2)
    module = module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, dtype=f64, generator=make) / 2)
    return module


def _results(run: Callable[..., torch.Tensor], module: nn.Module, index: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of hidden states, weights of the router, and parameters."""
    hidden, _, weights = _routed()
    leaves = [hidden.requires_grad_(), weights.requires_grad_(), *module.parameters()]
    out = run(module, hidden, index, weights)
    wave = torch.linspace(-1, 1, out.numel(), dtype=f64).reshape(out.shape)
    return [out, *torch.autograd.grad(out, leaves, wave)]


@pytest.mark.parametrize("make", [_mixtral, _gpt_oss, _nemotron, _muse])
def test_same_as_the_loop_of_the_model(make: Callable[[], nn.Module]) -> None:
    pytest.importorskip("transformers")
    module = _filled(make())
    module.config._experts_implementation = "eager"
    index = _routed()[1]
    wanted = _results(type(module).forward, module, index)
    for found, right in zip(_results(experts_forward, module, index), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)  # a norm of a model's may count in f32


@pytest.mark.parametrize("make", [_mixtral, _gpt_oss])
def test_experts_that_transformers_holds_elsewhere(make: Callable[[], nn.Module]) -> None:
    """Numbers past the last expert stand for those of other ranks: they add nothing and get no gradient."""
    moe = pytest.importorskip("transformers.integrations.moe")
    module = _filled(make())
    module._is_expert_parallel = True
    index = _routed(6)[1].clamp(max=4)
    assert (index == 4).any()
    wanted = _results(moe.batched_mm_experts_forward, module, index)
    for found, right in zip(_results(experts_forward, module, index), wanted, strict=True):
        torch.testing.assert_close(found, right)


def _small(implementation: str = "grouped_mm", **options: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    few = {"intermediate_size": 24, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**{**sizes, **heads, **few, **options})).train()
    model.config._experts_implementation = implementation
    labels = torch.randint(0, 64, (4, 6))
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    return model, {"input_ids": torch.randint(0, 64, (4, 6)), "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
def test_capture_uses_the_op_and_leaves_no_trace(implementation: str) -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    model, inputs = _small(implementation)
    before = dict(model.config.__dict__)
    known = set(moe.ALL_EXPERTS_FUNCTIONS)
    ops = [node.op for node in capture(model, (), inputs).graph.nodes]
    assert ops.count("autoshard.expert_mm.default") == 8  # up and down, forward and backward, two layers
    assert ops.count("autoshard.expert_outer.default") == 4
    assert not {"aten.sort.default", "aten.sort.stable", "aten.argsort.default"} & set(ops)
    assert model.config.__dict__ == before
    assert set(moe.ALL_EXPERTS_FUNCTIONS) == known


def test_an_implementation_of_the_users_stays() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")

    def doubled(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden * 2

    moe.ALL_EXPERTS_FUNCTIONS["mine"] = doubled
    try:
        model, inputs = _small("mine")
        ops = [node.op for node in capture(model, (), inputs).graph.nodes]
    finally:
        del moe.ALL_EXPERTS_FUNCTIONS["mine"]
    assert "autoshard.expert_mm.default" not in ops


# -- programs ------------------------------------------------------------------------------------------


class _Loss(nn.Module):
    """The loss alone, so that router logits get no gradients of their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(loss=self.model(**inputs).loss)


def _moved(made: Program, axis: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(op, value, shape) of what is gathered or exchanged over an axis and is no parameter."""
    params = {p.name for p in made.signature.ports if p.kind == "param"}
    for name, segment in made.lowered.segments.items():
        calls = [c for c in made.lowered.main if getattr(c, "segment", None) == name]
        inputs = [n for n, _ in segment.graph.inputs]
        held = {n for k, n in enumerate(inputs) if all(c.args[k] in params for c in calls)}
        types = segment.graph.types()
        for node in segment.graph.nodes:
            if node.op.startswith(("comm.all_gather", "comm.all_to_all")) and axis in node.args:
                moved = [r for r in refs_of(node) if r not in held]
                yield from ((node.op, r, types[r].shape) for r in moved)


@pytest.mark.parametrize("mesh", ["fsdp=4", "dp=4"])
def test_tokens_are_not_gathered(mesh: str) -> None:
    assert list(_moved(program("mixtral", mesh), mesh[:-2])) == []


def test_gathered_tokens_would_be_seen() -> None:
    """The activations that tensor parallelism gathers are found by the same search."""
    assert list(_moved(program("mixtral", "tp=4", "h100-dgx"), "tp"))


@pytest.mark.parametrize("mesh", ["fsdp=4", "dp=2,tp=2", "fsdp=2,ep=2", "cp=2,ep=2", "ep=2,tp=2"])
def test_load_balancing_loss(mesh: str) -> None:
    """It counts tokens per expert; with a mask and without, the counts of all axes' ranks add up, once."""
    pytest.importorskip("transformers")
    for masked in (False, True):
        model, inputs = _small(output_router_logits=True, router_aux_loss_coef=0.5)
        if not masked:
            del inputs["attention_mask"]
        loss = _Loss(model)
        analysis = analyse(capture(loss, (), inputs))
        cluster = load_cluster("h100-dgx")
        made = compile_analysed(plan_analysed(analysis, [Mesh.parse(mesh)], cluster, reasons=False))
        if not masked and "ep" not in mesh:
            assert list(_moved(made, mesh.split("=", maxsplit=1)[0])) == []
        errors = compare_step(made, loss, inputs)
        assert "model.model.layers.0.mlp.gate.weight" in errors
        assert max(errors.values()) < RTOL


# -- expert parallelism --------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [
        ((2,), (7, 3)),
        ((3,), (4, 0, 6)),
        ((4,), (1, 2, 3, 4)),
        ((2, 2), (1, 2, 3, 4)),
        ((3, 2), (0, 3, 1, 0, 5, 1)),
    ],
)
def test_tokens_go_to_their_experts_and_come_back(
    sizes: tuple[int, ...], cuts: tuple[int, ...], one: bool
) -> None:
    """Ranks hold different numbers of tokens, one of them none at all. one: all go to the last expert. sizes:
    of the axes, one after the other, that tokens travel over."""
    ways = prod(sizes)
    count = 2 * ways
    names = tuple("ab"[: len(sizes)])
    views = [RankView(names, sizes, coords) for coords in product(*map(range, sizes))]
    make = torch.Generator().manual_seed(3)
    chosen = torch.stack([torch.randperm(count + 1, generator=make)[:2] for _ in range(10)])
    if one:
        chosen = torch.full((10, 1), count - 1)
    x, weight = torch.randn(10, 3, dtype=f64, generator=make), torch.randn(count, 3, 4, dtype=f64)
    held = [weight[start : start + n] for start, n in (chunk(count, ways, k) for k in range(ways))]
    tables: dict[tuple[int, ...], Table] = {}
    for view in views:
        for axis, size in enumerate(sizes):
            tables.setdefault((axis, *without(view.coords, axis)), Table(size))
    messages: list[int] = []

    def hop(rank: int, axis: int) -> Hop:
        coords = views[rank].coords
        over = InProcess(tables[axis, *without(coords, axis)], coords[axis])

        def send(rows: torch.Tensor, sent: Sequence[int], given: Sequence[int]) -> Arrival:
            messages.append(rank)
            return over.exchange(rows, sent, given)

        return Hop(sizes[axis], coords[axis], send)

    def step(rank: int) -> torch.Tensor:
        exchange = ExpertExchange(tuple(hop(rank, axis) for axis in range(len(sizes))))
        own, mine = x.split(cuts)[rank], chosen.split(cuts)[rank]
        slots = exchange.route(count, mine)
        rows = exchange.dispatch(count, own, mine, slots).results()
        rows = _ops.expert_mm(rows, slots, held[rank], False)
        combined: torch.Tensor = exchange.combine(count, rows, mine, slots).results()
        return combined

    slots = _ops.route(chosen, count)
    rows = _ops.expert_mm(_ops.dispatch(x, chosen, slots), slots, weight, False)
    with ThreadPoolExecutor(ways) as pool:
        found = torch.cat(list(pool.map(step, range(ways))))
    torch.testing.assert_close(found, _ops.combine(rows, chosen, slots))
    # counts, choices, tokens there and sums back: who goes where is agreed on once
    assert [messages.count(rank) for rank in range(ways)] == [4 * len(sizes)] * ways


@functools.cache
def _wide() -> tuple[nn.Module, dict[str, torch.Tensor], Analysis]:
    """Many experts for few tokens: it costs less to send rows than to gather matrices."""
    model, inputs = _small(intermediate_size=128, num_local_experts=16)
    return model, inputs, analyse(capture(model, (), inputs))


@functools.cache
def _expert_parallel(mesh: str) -> tuple[Program, nn.Module, dict[str, torch.Tensor]]:
    """A program for a machine without latency."""
    model, inputs, analysis = _wide()
    plan = plan_analysed(analysis, [Mesh.parse(mesh)], without_latency())
    return compile_analysed(plan), model, inputs


@pytest.mark.parametrize(
    "mesh", ["fsdp=4", "dp=4", "dp=2,fsdp=2", "fsdp=2,tp=2", "ep=4", "fsdp=2,ep=2", "dp=2,ep=2", "ep=2,tp=2"]
)
def test_experts_are_split_over_the_axis_that_splits_tokens(mesh: str) -> None:
    pytest.importorskip("transformers")
    made, model, inputs = _expert_parallel(mesh)
    ops = [n.op for s in made.lowered.segments.values() for n in s.graph.nodes]
    # once there and back, forward and backward, one layer's text
    assert ops.count("comm.expert_route.default") == 1
    assert ops.count("comm.expert_dispatch.default") == ops.count("comm.expert_combine.default") == 2
    errors = compare_step(made, model, inputs)
    assert max(errors.values()) < RTOL


def without(coords: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*coords[:axis], *coords[axis + 1 :])


@pytest.mark.parametrize("mesh", ["ep=4", "fsdp=4", "ep=4,tp=2"])
def test_tokens_go_once_to_a_node_and_from_there_to_its_ranks(mesh: str) -> None:
    """By the text of the program, whose placements are proved, and in numbers; fewer bytes leave a node."""
    pytest.importorskip("transformers")
    model, inputs, analysis = _wide()
    cluster = slow_cluster(nodes_of=2 * prod(Mesh.parse(mesh).sizes) // 4)
    plan = plan_analysed(analysis, [Mesh.parse(mesh)], cluster)
    plain, levels = (compile_analysed(plan, passes=PassOptions(hierarchy=h)) for h in ("off", "levels"))
    axis = mesh[:-2].split("=", maxsplit=1)[0]
    nodes = [
        n for s in levels.lowered.segments.values() for n in s.graph.nodes if n.op.startswith("comm.expert")
    ]
    assert nodes and {axes_of(n) for n in nodes} == {(f"{axis}_network", f"{axis}_node")}
    assert verify_static(levels).ok
    assert max(compare_step(levels, model, inputs).values()) < RTOL
    ops = Ops(Mesh.parse(levels.mesh), (0,) * len(Mesh.parse(levels.mesh).sizes), Behaviour())
    near = Ops(Mesh.parse(plain.mesh), (0,) * len(Mesh.parse(plain.mesh).sizes), Behaviour())
    assert _sent(levels, ops)[0] < _sent(plain, near)[0]


def _sent(made: Program, ops: Ops) -> tuple[float, ...]:
    """Bytes of the first dispatch, by axis; of one by node as if it went to every rank."""
    for segment in made.lowered.segments.values():
        for node in segment.graph.nodes:
            if node.op == "comm.expert_dispatch.default":
                return ops.sent_tokens(replace(node, kwargs=()), segment.placed())
    raise AssertionError("no dispatch")


@pytest.mark.parametrize("mesh", ["ep=4", "ep=2,tp=2", "fsdp=2,ep=2"])
def test_experts_and_ranks_without_tokens(mesh: str) -> None:
    """Routers that know but two pairs of experts: most get no token, and neither do some ranks."""
    pytest.importorskip("transformers")
    made, model, inputs = _expert_parallel(mesh)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gate.weight"):
                p.copy_(torch.linspace(-1, 1, len(p))[:, None] * p[:1])
    model.zero_grad()
    model(**inputs).loss.backward()
    experts = [p.grad for n, p in model.named_parameters() if n.endswith("experts.down_proj")]
    assert all(g is not None and not g[2:14].any() and g[0].any() and g[15].any() for g in experts)
    assert max(compare_step(made, model, inputs).values()) < RTOL


def test_sharded_experts_are_neither_gathered_nor_reduced() -> None:
    pytest.importorskip("transformers")
    made, _, _ = _expert_parallel("fsdp=4")
    moved = [
        r
        for segment in made.lowered.segments.values()
        for node in segment.graph.nodes
        if node.op.startswith(("comm.all_gather", "comm.reduce_scatter", "comm.all_reduce"))
        for r in refs_of(node)
        if len(segment.graph.types()[r].shape) == 3 and segment.graph.types()[r].shape[0] == 16
    ]
    assert moved == []
    stored = [made.lowered.values[p.name].layout for p in made.signature.ports if ".experts." in p.target]
    assert len(stored) == 4 and all(str(layout[0]) == "S(0)" for layout in stored)


def test_an_exchange_prints_parses_and_has_a_price() -> None:
    pytest.importorskip("transformers")
    made, _, _ = _expert_parallel("fsdp=2,tp=2")
    text = program_text(made)
    assert "comm.expert_dispatch((" in text and "i64[384*2/16]" in text
    lowered, ports, _ = parse_program(text, axis_names(made.mesh), known_ops())
    for name, segment in lowered.segments.items():
        original = made.lowered.segments[name].graph
        assert [(n.op, n.args, n.kwargs) for n in segment.graph.nodes] == [
            (n.op, n.args, n.kwargs) for n in original.nodes
        ]
    assert [p.name for p in ports] == [p.name for p in made.signature.ports]
    rows = {t.kind: t for t in Estimator(made, load_cluster("h100-dgx")).traffic()}
    assert rows["expert_dispatch"].wire > 0 and rows["expert_combine"].wire > 0


def _dispatch(
    tokens: int, width: int, experts: int, dtype: str
) -> tuple[Factored, list[TensorType], TensorType]:
    """(rule, types given, type made) of a dispatch of tokens of two experts each."""
    x, chosen = TensorType((tokens, width), dtype), TensorType((tokens, 2), "i64", (1, 1))
    slots = TensorType((experts * tokens,), "i64", (2, experts))
    out = TensorType((experts * tokens, width), dtype, (2, experts))
    node = Node("autoshard.dispatch.default", (Ref("x"), Ref("c"), Ref("s")), (), ("y",), (out,))
    return RULES[node.op](node, [x, chosen, slots]), [x, chosen, slots], out


def test_the_price_of_an_exchange() -> None:
    """One all-to-all with a copy of a token for every rank that has an expert of its choice."""
    rule, types, out = _dispatch(4096, 512, 16, "bf16")
    split = (Shard(0),)
    state = OpState((split, split, split), (split,), 4)
    prices = cost_model(load_cluster("h100-dgx"), Mesh.parse("fsdp=4"))
    copies = 4 * (1 - (3 / 4) ** 2)
    sent = seconds("all_to_all", types[0].nbytes / 4 * copies, prices.reshard.links[0])
    assert prices.exchange_seconds(rule, types, [out], state, (4,)) == pytest.approx(sent)
    tokens = (Shard(0, 16),)
    apart = OpState((split, split, tokens), (tokens,), 4)
    assert prices.exchange_seconds(rule, types, [out], apart, (4,)) == 0.0
    assert out.nbytes == 4096 * 2 * 512 * 2  # rows that exist


def test_states_that_exchange() -> None:
    """At most one axis exchanges, and then the experts are split over no other axis."""
    rule, types, out = _dispatch(8, 6, 4, "f32")
    digits = [[(1, n, k)] for k, n in enumerate(rule.sizes)]
    states = op_states(rule, types, [out], digits, (2, 2), lambda axis, classes: True)
    exchanging = [s for s in states if rule.exchanged(s.inputs, s.outputs) is not None]
    assert exchanging
    for state in exchanging:
        split = [axis for axis, p in enumerate(state.inputs[2]) if p == Shard(0)]
        assert len(split) == 1
        assert state.inputs[0][split[0]] == state.outputs[0][split[0]] == Shard(0)  # type: ignore[index]
    assert {s.ways for s in exchanging if s.inputs[0] == (Shard(0), Shard(0))} == {4}
    # an axis that may not split the tokens exchanges nothing
    tokens = {0}
    none = op_states(rule, types, [out], digits, (2,), lambda axis, classes: not classes & tokens)
    assert all(rule.exchanged(s.inputs, s.outputs) is None for s in none)


def test_slots_stay_where_they_are() -> None:
    """No collective joins or cuts them, whatever it would cost."""
    cost = cost_model(load_cluster("h100-dgx"), Mesh.parse("fsdp=4")).reshard
    _, _, rows = _dispatch(8, 8, 4, "f32")
    by_token, by_expert, columns = (Shard(0, 4),), (Shard(0),), (Shard(1),)
    table = cost.table(rows, [by_token, by_expert, columns, (R,), (P,)])
    seconds_between = table.seconds

    def between(a: Layout, b: Layout) -> float:
        return float(seconds_between[table.index[a], table.index[b]])

    assert isinf(between(by_token, by_expert)) and isinf(between(by_expert, (R,)))
    assert isinf(between((P,), by_token))
    assert isfinite(between((P,), (R,))) and isfinite(between(columns, (R,)))


def test_elements_of_rows_are_dropped_by_key_and_column() -> None:
    torch.manual_seed(0)
    x, key = torch.randn(4000, 48, dtype=torch.float64, requires_grad=True), torch.rand(4000)
    drop = torch.ops.autoshard.row_dropout
    out = drop(x, key, 0.25, 0)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(out, x * grad)
    kept = (grad != 0).double()
    assert abs(kept.mean() - 0.75) < 0.01 and (kept.mean(0) - 0.75).abs().max() < 0.03
    assert torch.corrcoef(kept.T).fill_diagonal_(0).abs().max() < 0.08
    assert torch.equal(drop(x[:, 16:], key, 0.25, 16), out[:, 16:])
    assert torch.equal(drop(x[:7], key[:7], 0.25, 0), out[:7])
