"""What a model may do along a sequence that is divided into slices: masks, dropout, odd outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import UsageError
from autoshard.planner.analysis import analyse
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.planner.source import Source
from autoshard.program.program import Program
from autoshard.search.plan.plan import Cut, Pipeline
from autoshard.verify.lockstep import needs_one_rank, verify

BATCH, SEQ, WIDTH, VOCAB, HEADS = 4, 16, 16, 31, 2
#: ids [b, s] -> a mask for the scores, or None for one that is causal by its name
Mask = Callable[[torch.Tensor], torch.Tensor | None]


class Layer(nn.Module):
    def __init__(self, mask: Mask, dropout: float) -> None:
        super().__init__()
        self.mask, self.qkv, self.out = mask, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (y.view(b, s, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        mask = self.mask(ids)
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.drop(self.out(made.transpose(1, 2).reshape(b, s, WIDTH)))


class Tiny(nn.Module):
    """A language model of two layers; after: what is done with the logits before the loss."""

    def __init__(
        self,
        mask: Mask = lambda ids: None,
        dropout: float = 0.0,
        between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.between, self.loss = between, loss or _next_token
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Parameter(0.1 * torch.randn(SEQ, WIDTH))
        self.first, self.second = Layer(mask, dropout), Layer(mask, dropout)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(self.embed(input_ids) + self.positions, input_ids)
        x = self.second(self.between(x), input_ids)
        return {"loss": self.loss(self.head(x), labels)}


def _next_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    wanted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.reshape(-1, VOCAB), wanted.reshape(-1))


def _batch(count: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(0, VOCAB, (BATCH * count, SEQ))
    return {"input_ids": ids, "labels": ids.clone()}


def _planned(model: nn.Module, mesh: str) -> Planned:
    analysis = analyse(capture(model, (), _batch(1)))
    found = plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("cpu-gloo"), reasons=False)
    return replace(found, source=Source(model, (), _batch(1)))


def _program(model: nn.Module, slices: int, mesh: str = "dp=1") -> Program:
    """Two stages, cut somewhere in the middle, two microbatches."""
    found = _planned(model, mesh)
    calls = [c for c in found.analysis.folded.calls if not c.backward]
    places = [
        Cut(k, n.name) for k, c in enumerate(calls) for n in found.analysis.folded.segments[c.segment].nodes
    ]
    pipeline = Pipeline(2, 0, "seq1f1b", 1, (places[len(places) // 2],), slices)
    return compile_analysed(replace(found, plan=replace(found.plan, pipeline=pipeline, microbatches=2)))


def _check(model: nn.Module, slices: int = 4, mesh: str = "dp=1") -> None:
    program, one_rank = _program(model, slices, mesh), None
    if needs_one_rank(program):
        alone = _planned(model, "dp=1")
        one_rank = compile_analysed(replace(alone, plan=replace(alone.plan, microbatches=2)))
    found = verify(program, model, (), _batch(2), steps=2, one_rank=one_rank)
    assert found.ok, found.worst()


def _refused(model: nn.Module, why: str) -> None:
    with pytest.raises(UsageError, match="into slices") as refused:
        _program(model, 4)
    assert why in str(refused.value) and "test_slice_models.py:" in str(refused.value)


def _ages(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(x.shape[1])
    return at[:, None], at[None, :]


def _window(ids: torch.Tensor) -> torch.Tensor:
    query, key = _ages(ids)
    return (key <= query) & (key > query - 5)


def _packed(ids: torch.Tensor) -> torch.Tensor:
    """Documents in one sequence: positions with a token of the same kind."""
    query, key = _ages(ids)
    kind = ids < VOCAB // 2
    return ((query >= key) & (kind[:, :, None] == kind[:, None, :]))[:, None] | (query == key)


def _never_empty(ids: torch.Tensor) -> torch.Tensor:
    query, key = _ages(ids)
    return (query >= key) & ((ids[:, None, :] != 7) | (ids[:, :, None] >= 0))[:, None]


def _tril(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(SEQ, SEQ, dtype=torch.bool).tril()


MASKS: dict[str, Mask] = {"window": _window, "of the data": _never_empty, "tril": _tril}


@pytest.mark.parametrize("name", sorted(MASKS))
def test_masks_that_are_causal(name: str) -> None:
    torch.manual_seed(0)
    _check(Tiny(MASKS[name]))


def _prefix(ids: torch.Tensor) -> torch.Tensor:
    query, key = _ages(ids)
    return (key <= query) | (key < 6)


def _ahead(ids: torch.Tensor) -> torch.Tensor:
    query, key = _ages(ids)
    return key <= query + 1


def _bias(ids: torch.Tensor) -> torch.Tensor:
    query, key = _ages(ids)
    return (key - query).float()


LATER: dict[str, Mask] = {
    "prefix": _prefix,
    "one ahead": _ahead,
    "by the data": _packed,
    "numbers": _bias,
    "tril above": lambda ids: torch.ones(SEQ, SEQ, dtype=torch.bool).tril(1),
    "all": lambda ids: torch.ones(SEQ, SEQ, dtype=torch.bool),
}


@pytest.mark.parametrize("name", sorted(LATER))
def test_masks_that_may_show_what_comes_later_are_refused(name: str) -> None:
    torch.manual_seed(0)
    _refused(Tiny(LATER[name]), "its mask may let positions look at others behind their slice")


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2"])
def test_dropout_drops_what_it_drops_in_one_piece(mesh: str) -> None:
    torch.manual_seed(0)
    _check(Tiny(dropout=0.3), mesh=mesh)


def test_dropout_of_a_divided_sequence_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(UsageError, match="dropout cannot be divided along one dim over an axis"):
        _program(Tiny(dropout=0.3), 4, "tp=2")


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2", "fsdp=2"])
def test_gradients_put_together_of_slices(mesh: str) -> None:
    """Positions are a parameter whose gradient is divided along the sequence itself."""
    torch.manual_seed(0)
    _check(Tiny(), slices=2, mesh=mesh)


def test_what_mixes_positions_is_refused() -> None:
    torch.manual_seed(0)
    _refused(Tiny(between=lambda x: x - x.mean(1, keepdim=True)), "needs the whole sequence")
    _refused(Tiny(between=lambda x: x.flip(1)), "needs the whole sequence")
    _refused(Tiny(between=lambda x: x + x.cumsum(1)), "needs the whole sequence")


def _of_a_part(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2", "tp=2"])
def test_logits_may_be_put_together_for_the_loss(mesh: str) -> None:
    torch.manual_seed(0)
    _check(Tiny(loss=_of_a_part), mesh=mesh)


def test_a_loss_that_is_no_sum() -> None:
    """What only the end of forward needs as a whole waits for all slices."""
    torch.manual_seed(0)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        spread = logits.square().mean()
        return _next_token(logits, labels) + 0.1 * spread.sqrt() + spread * spread

    _check(Tiny(loss=loss), slices=2)
