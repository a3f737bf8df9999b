"""Alike rows of experts travel as their mean, and each gets back what it differs by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_runner import errors_of
from lockstep_check import RTOL
from ranks import HERE, run_ranks
from slow_links import without_latency
from test_chunk_experts import _nodes, _program, _small
from torch import nn

import autoshard
from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Cluster, Mesh
from autoshard.errors import UsageError
from autoshard.ir import Node
from autoshard.ir.lowered import LoweredSegment
from autoshard.ir.similar_rows import LSH_GROUPS, SEED, RowGroups
from autoshard.planner.analysis import Analysis, analyse
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.runtime.shard_utils import shard_tensor
from autoshard.search.plan.plan_json import plan_from_json, plan_to_json
from autoshard.simulate.behaviour import behaviour_on
from autoshard.simulate.op_work import Ops
from autoshard.verify.lockstep import verify
from autoshard.verify.rows_alone import with_rows_alone
from autoshard.verify.static import verify_static

pytest.importorskip("transformers")
from expert_modules import ExpertModules, Layer

#: of so few columns, rows of two hashes are often alike
ALLOW, HASHES = "lsh-moe:0.7:1", 1
_ops = torch.ops.autoshard


class _Grouped(nn.Module):
    """What a layer of `expert_modules` is with grouped rows, written out. parts: the tokens of each rank,
    which groups its own."""

    def __init__(self, layer: Layer, parts: Sequence[torch.Tensor], hashes: int) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = layer.norm, layer.gate, layer.experts
        self.parts, self.hashes, self.rows, self.sent = parts, hashes, 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, -2)
        made = torch.cat([self._part(tokens[part]) for part in self.parts])
        return x + made[torch.cat(list(self.parts)).argsort()].view_as(x)

    def _part(self, tokens: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.gate(tokens), 2)
        weights = weights.softmax(-1)
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        codes = _codes(tokens.detach(), self.hashes)
        for token, row in enumerate(chosen.tolist()):
            for choice, expert in enumerate(row):
                groups.setdefault((expert, codes[token]), []).append((token, choice))
        self.rows, self.sent = self.rows + chosen.numel(), self.sent + len(groups)
        out = [torch.zeros_like(row) for row in tokens]
        for (expert, _), pairs in groups.items():
            mean = torch.stack([tokens[token] for token, _ in pairs]).mean(0)
            made = self.experts[expert](mean)
            for token, choice in pairs:
                out[token] = out[token] + weights[token, choice] * (made + tokens[token] - mean)
        return torch.stack(out)


def _codes(tokens: torch.Tensor, hashes: int) -> list[int]:
    """Equal numbers for tokens whose hashes are: as if all chose one expert."""
    one = torch.zeros(len(tokens), 1, dtype=torch.long)
    before = _ops.lsh_groups(tokens, one, 1, hashes, SEED)[:, 0].tolist()
    return [k - n for k, n in enumerate(before)]


def _model(layers: int = 2) -> tuple[ExpertModules, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    # many experts and few tokens, which travel to them
    model = ExpertModules(layers, width=16, experts=16, vocab=32).double()
    ids = torch.randint(0, 32, (8, 8))
    return model, {"input_ids": ids, "labels": ids}


def _analysed(model: nn.Module, inputs: Any, allow: str = ALLOW, **more: Any) -> Analysis:
    return analyse(capture(model, (), inputs), allow=allow, **more)


def _parts(program: Program, tokens: int) -> list[torch.Tensor]:
    """Which tokens each rank groups, of ranks with the same tokens once."""
    mesh = Mesh.parse(program.mesh)
    segment = next(s for s in program.lowered.segments.values() if _grouping(s))
    layout = segment.layouts[_grouping(segment)[0].name]
    coords = product(*map(range, mesh.sizes))
    parts = (shard_tensor(torch.arange(tokens), layout, mesh.sizes, at).tolist() for at in coords)
    return [torch.tensor(part) for part in dict.fromkeys(map(tuple, parts))]


def _grouping(segment: LoweredSegment) -> list[Node]:
    return [n for n in segment.graph.nodes if n.op == LSH_GROUPS]


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [("ep=4", 4), ("ep=2,fsdp=2", 4), ("ep=2,tp=2", 4), ("dp=2,tp=2", 4), ("tp=2", 2), ("cp=2,ep=2", 2)],
)
def test_equal_to_the_function_written_out(mesh: str, parts: int) -> None:
    model, inputs = _model()
    program = _program(_analysed(model, inputs), mesh, allow=ALLOW)
    assert verify_static(program).ok
    if "ep" in mesh:
        assert len(_nodes(program, "comm.expert_dispatch")) == 2
    tokens = _parts(program, inputs["labels"].numel())
    assert len(tokens) == parts
    plain = errors_of(model, inputs, program)
    model.zero_grad()
    model.layers = nn.ModuleList(_Grouped(layer, tokens, HASHES) for layer in model.layers)
    errors = errors_of(model, inputs, program)
    assert set(errors) == {"loss", *dict(model.named_parameters())}
    assert all(0.1 < each.sent / each.rows < 0.9 for each in model.layers)
    assert max(plain.values()) > 1e-3
    assert max(errors.values()) < 1e-9


@pytest.mark.parametrize("mesh", ["ep=4", "ep=2,fsdp=2"])
def test_rows_that_are_alone_are_the_models(mesh: str) -> None:
    model, inputs = _model()
    inputs = dict.fromkeys(inputs, torch.arange(32).view(8, 4))
    program = _program(_analysed(model, inputs, "lsh-moe:0.9:9"), mesh, allow="lsh-moe:0.9:9")
    assert max(errors_of(model, inputs, program).values()) < 1e-9


def test_equal_rows_are_the_models() -> None:
    """One row of each expert and rank is sent for all tokens."""
    model, inputs = _model(layers=1)
    inputs = dict.fromkeys(inputs, torch.full((8, 8), 3))
    program = _program(_analysed(model, inputs), "ep=4", allow=ALLOW)
    assert max(errors_of(model, inputs, program).values()) < 1e-9


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek"])
def test_models_of_transformers(name: str) -> None:
    """With all rows alone they are the model's, also where experts have biases; grouped, they are not."""
    model, inputs = _small(name)
    program = _program(_analysed(model, inputs, "lsh-moe:0.5:2"), "ep=4", allow="lsh-moe:0.5:2")
    assert verify_static(program).ok
    assert max(errors_of(model, inputs, with_rows_alone(program)).values()) < RTOL
    model.zero_grad()
    assert max(errors_of(model, inputs, program).values()) > RTOL


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_choices_that_are_no_expert(dtype: torch.dtype) -> None:
    """They give nothing, and are in no group; all of them may be none."""
    x = torch.randn(6, 8, dtype=dtype)
    x[1] = x[0]
    weights = torch.rand(6, 2, dtype=torch.float64)
    for chosen in ([[0, 1], [0, 4], [-1, 1], [2, 0], [9, -1], [1, 2]], [[-1, 4]] * 6):
        given = torch.tensor(chosen)
        groups = _ops.lsh_groups(x, given, 4, 9, SEED)
        inside = (given >= 0) & (given < 4)
        assert torch.equal(groups < 0, ~inside)
        means = _ops.group_means(x, groups)
        assert len(means) == len(_ops.group_choices(given, groups)) == int((groups == 0).sum())
        # what experts make is twice the mean: a row's own share stays where it is alone
        found = _ops.ungroup(2 * means, x, means, weights, groups)
        wanted = 2 * x.double() * (weights * inside).sum(-1, keepdim=True)
        torch.testing.assert_close(
            found.double(), wanted, rtol=2**-7 if dtype != torch.float64 else 1e-12, atol=0
        )
        back = _ops.ungroup_to_weights(x, 2 * means, x, means, weights, groups)
        assert torch.equal(back == 0, ~inside)


def test_groups_have_one_expert_and_equal_hashes() -> None:
    x = torch.randn(40, 8, dtype=torch.float64)
    chosen = torch.randint(0, 3, (40, 2))
    codes = _codes(x, 1)
    groups = _ops.lsh_groups(x, chosen, 3, 1, SEED).reshape(-1).tolist()
    keys = [(int(expert), codes[pair // 2]) for pair, expert in enumerate(chosen.reshape(-1))]
    assert groups == [pair - keys.index(key) for pair, key in enumerate(keys)]
    assert max(groups) > 0


@pytest.mark.parametrize(
    "allow", ["lsh-moe", "lsh-moe:0", "lsh-moe:1", "lsh-moe:0.2:0", "lsh-moe:0.2:10", "lsh-moe:x"]
)
def test_words_that_say_nothing(allow: str) -> None:
    with pytest.raises(UsageError, match="cannot be allowed"):
        RowGroups.parse(allow)


def test_a_model_without_experts() -> None:
    joint = capture(nn.Linear(4, 4), (torch.randn(4, 4),), {})
    with pytest.raises(UsageError, match="no experts that tokens can be exchanged for"):
        analyse(joint, allow=ALLOW)


@pytest.mark.parametrize("more", [{"expert_chunks": 2}, {"replicate_experts": "1"}])
def test_what_goes_with_groups_of_all_tokens_alone(more: dict[str, Any]) -> None:
    model, inputs = _small("mixtral")
    with pytest.raises(UsageError, match="its rows are grouped"):
        _analysed(model, inputs, **more)
    with pytest.raises(UsageError, match="neither chunks nor replicas"):
        autoshard.plan(model, "ep=4", example_inputs=inputs, allow=ALLOW, **more)


def test_weights_before_what_is_not_linear() -> None:
    class Early(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = self.norm(x).flatten(0, -2)
            weights, chosen = torch.topk(self.gate(tokens), 2)
            out = torch.zeros_like(tokens)
            for number, expert in enumerate(self.experts):
                token, choice = torch.where(chosen == number)
                out[token] += expert(weights[token, choice, None] * tokens[token])
            return x + out.view_as(x)

    model, inputs = _model(layers=1)
    model.layers[0] = Early(16, 16, 0.0).double()
    with pytest.raises(UsageError, match="rows of experts cannot be grouped"):
        _analysed(model, inputs)


def test_what_is_allowed_where() -> None:
    model, inputs = _small("mixtral")
    planned = autoshard.plan(model, "ep=4", example_inputs=inputs, allow=ALLOW)
    assert plan_from_json(plan_to_json(planned.plan)).allow == ALLOW
    compile_analysed(planned, allow=f"{ALLOW},int8-weights")
    with pytest.raises(UsageError, match="plan again"):
        compile_analysed(planned, allow="lsh-moe:0.1")
    with pytest.raises(UsageError, match="a plan is the same"):
        autoshard.plan(model, "ep=4", example_inputs=inputs, allow="int8-weights")


def test_fewer_rows_take_less_and_are_told_by_the_program(tmp_path: Path) -> None:
    model, inputs = _small("mixtral")
    cluster, seconds = without_latency(), []
    for allow in ("lsh-moe:0.9:1", "lsh-moe:0.1:1"):
        program = _program(_analysed(model, inputs, allow), "ep=4", allow=allow)
        seconds.append(sum(_sent(program, cluster)))
    assert seconds[1] == pytest.approx(seconds[0] / 9, rel=0.05)
    save_program(program, tmp_path / "program")
    again = load_program(tmp_path / "program")
    assert again.allow == allow
    for name, segment in program.lowered.segments.items():
        assert again.lowered.segments[name].graph.types() == segment.graph.types()


def _sent(program: Program, cluster: Cluster) -> list[float]:
    """Bytes of rows that a rank sends."""
    ops = Ops(Mesh.parse(program.mesh), (0,), behaviour_on(cluster.device))
    return [
        sum(ops.sent_tokens(n, s.placed()))
        for s in program.lowered.segments.values()
        for n in s.graph.nodes
        if n.op in ("comm.expert_dispatch.default", "comm.expert_combine.default")
    ]


def test_the_verifier_tells_what_grouping_changes() -> None:
    model, inputs = _small("mixtral")
    program = _program(_analysed(model, inputs), "ep=4", allow=ALLOW)
    found = verify(program, model, (), inputs, steps=1)
    assert found.ok and "rows of experts not grouped" in found.reference
    (groups,) = found.rounded
    assert groups.kind == "group" and 0 < groups.share < 1 and groups.mean > 0
    assert found.cast_loss and found.cast_loss[0] != found.losses[0]


def test_four_processes() -> None:
    assert "rows in groups are equal" in run_ranks([str(HERE / "grouped_rows_worker.py")])
