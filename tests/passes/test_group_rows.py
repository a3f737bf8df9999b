"""Alike rows of experts travel as their mean, and each gets back what it differs by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from architecture_runner import errors_of
from test_chunk_experts import _nodes, _program
from torch import nn

from autoshard.capture.capture import capture
from autoshard.cluster import Mesh
from autoshard.ir import Node
from autoshard.ir.lowered import LoweredSegment
from autoshard.ir.similar_rows import LSH_GROUPS, SEED
from autoshard.planner.analysis import Analysis, analyse
from autoshard.program.program import Program
from autoshard.runtime.shard_utils import shard_tensor
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
