"""Rows that a mask chooses, added up: programs equal eager for other masks than the one of the trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import CaptureError
from autoshard.verify.lockstep import verify

T: TypeAlias = torch.Tensor
#: of a net, hidden states and others [4, 6, 8], labels and a mask [4, 6]
Fn: TypeAlias = Callable[["Net", T, T, T, T], T]
WIDTH, CLASSES = 8, 5


class Net(nn.Module):
    def __init__(self, fn: Fn) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fn, self.body, self.head = fn, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.5)

    def forward(self, x: T, y: T, labels: T, mask: T) -> T:
        return self.fn(self, self.body(x), y, labels, mask)


def batch(kind: int) -> tuple[T, T, T, T]:
    draw = torch.Generator().manual_seed(kind)
    x, y = (torch.randn(4, 6, WIDTH, generator=draw) for _ in range(2))
    mask = torch.rand(4, 6, generator=draw) > (0.4, 0.7, -1.0, 2.0)[kind]
    if kind == 3:
        mask[2, 3] = True  # one row
    return x, y, torch.randint(CLASSES, (4, 6), generator=draw), mask


def scattered(net: Net, h: T, y: T, labels: T, mask: T) -> T:
    out = torch.zeros_like(y)
    out[mask] = net.norm(h[mask]) + y[mask]
    return out.square().mean()


def replaced(net: Net, h: T, y: T, labels: T, mask: T) -> T:
    h = h.clone()
    h[mask] = h[mask] * 2
    return h.square().mean()


def negated(net: Net, h: T, y: T, labels: T, mask: T) -> T:
    """Of a float that changes in place between two masks that are written alike."""
    y = y.clone()
    first = h[y[..., 0] > 0].mean()
    y.neg_()
    return first + h[y[..., 0] > 0].sum()


def by_places(net: Net, h: T, y: T, labels: T, mask: T) -> T:
    places = mask.view(-1).nonzero().squeeze(-1)
    return F.cross_entropy(net.head(h).view(-1, CLASSES)[places], labels.view(-1)[places])


TOTALS: Mapping[str, Fn] = MappingProxyType(
    {
        "mean": lambda net, h, y, labels, mask: (h - y).square()[mask].mean(),
        "mean of rows": lambda net, h, y, labels, mask: (h - y).square().mean(-1)[mask].mean(),
        "mean of features": lambda net, h, y, labels, mask: h[mask].mean(0).square().sum(),
        "sum over a count": lambda net, h, y, labels, mask: h[mask].square().sum() / (mask.sum() * WIDTH),
        "sum over numel": lambda net, h, y, labels, mask: h[mask].square().sum() / h[mask].numel(),
        "rows by shape": lambda net, h, y, labels, mask: h[mask].sum() / y[mask].shape[0],
        "cross entropy": lambda net, h, y, labels, mask: F.cross_entropy(net.head(h)[mask], labels[mask]),
        "late head": lambda net, h, y, labels, mask: F.cross_entropy(
            net.head(net.norm(F.gelu(h[mask]))), labels[mask], label_smoothing=0.1, ignore_index=2
        ),
        "views of a mask": lambda net, h, y, labels, mask: F.cross_entropy(
            net.head(h).view(-1, CLASSES)[mask.view(-1) == 1], labels.flatten()[mask.view(-1) == 1]
        ),
        "labels that count": lambda net, h, y, labels, mask: F.cross_entropy(
            net.head(h)[labels != 2], labels[labels != 2], reduction="sum"
        ),
        "places": by_places,
        "losses of rows": lambda net, h, y, labels, mask: (
            F.cross_entropy(net.head(h)[mask], labels[mask], reduction="none") * y[mask][:, 0].abs()
        ).sum(),
        "negative log": lambda net, h, y, labels, mask: F.nll_loss(
            net.head(h).log_softmax(-1)[mask], labels[mask], ignore_index=1
        ),
        "gathered": lambda net, h, y, labels, mask: (
            -net.head(h).log_softmax(-1)[mask].gather(-1, labels[mask][:, None]).mean()
        ),
        "squares": lambda net, h, y, labels, mask: F.mse_loss(h[mask], y[mask]),
        "one mask and the others": lambda net, h, y, labels, mask: (
            F.l1_loss(h[~mask], y[~mask]) + F.smooth_l1_loss(h[mask], y[mask])
        ),
        "binary": lambda net, h, y, labels, mask: F.binary_cross_entropy_with_logits(
            h[mask, 0], (labels[mask] > 2).float()
        ),
        "divergence": lambda net, h, y, labels, mask: F.kl_div(
            net.head(h)[mask].log_softmax(-1), net.head(y)[mask].softmax(-1).detach(), reduction="batchmean"
        ),
        "similarity": lambda net, h, y, labels, mask: F.cosine_similarity(h[mask], y[mask], dim=-1).mean(),
        "elements": lambda net, h, y, labels, mask: torch.masked_select((h - y).abs(), y > 0).mean(),
        "hinge": lambda net, h, y, labels, mask: F.relu(1 - h[..., 0][labels > 2]).sum(),
        "tables": lambda net, h, y, labels, mask: (
            F.embedding(labels[mask], net.head.weight).mean() + h.mean()
        ),
        "accuracy": lambda net, h, y, labels, mask: (
            h.mean() + (net.head(h)[mask].argmax(-1) == labels[mask]).float().mean()
        ),
        "advantages": lambda net, h, y, labels, mask: (
            (h[..., 0] - h[..., 0][mask].mean()) / (h[..., 0][mask].std() + 1e-4) * y[..., 0]
        ).sum(),
        "variances": lambda net, h, y, labels, mask: (
            h[mask].var(dim=0, unbiased=False).sum() + h[mask].std(-1).mean() + h[mask].var(correction=0)
        ),
        "labels": lambda net, h, y, labels, mask: h.mean() * labels.masked_select(mask).float().mean(),
        "scattered": scattered,
        "replaced": replaced,
        "negated": negated,
        # what other rows hold makes no infinity, forward or backward
        "roots of zeros": lambda net, h, y, labels, mask: (h * mask[..., None])[mask].norm(dim=-1).mean(),
        "logarithms": lambda net, h, y, labels, mask: (
            torch.where(mask, h[..., 0].exp(), 0.0)[mask].log().sum()
        ),
        "infinite": lambda net, h, y, labels, mask: F.mse_loss(
            h[mask], torch.where(mask[..., None], y, float("inf"))[mask]
        ),
    }
)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("name", TOTALS)
def test_equal_to_eager(name: str, mesh: str) -> None:
    given = batch(0)
    model = Net(TOTALS[name])
    program = autoshard.compile(model, autoshard.plan(model, mesh, example_inputs=given)).program
    for kind in (1, 2, 3):
        report = verify(program, Net(TOTALS[name]), batch(kind), {}, steps=1)
        assert report.ok, (kind, report.worst())


@pytest.mark.parametrize("name", ["squares", "late head", "one mask and the others", "scattered"])
def test_microbatches_divide_by_the_rows_of_all(name: str) -> None:
    model, given = Net(TOTALS[name]), batch(1)
    plan = autoshard.plan(model, "dp=2", example_inputs=given, microbatches=2)
    report = verify(autoshard.compile(model, plan).program, model, given, {}, steps=1)
    assert report.ok, report.worst()


def test_dropout_of_rows() -> None:
    """Masks are of all rows: those of one rank and of many are the same."""
    model = Net(lambda net, h, y, labels, mask: net.drop(h[mask]).square().mean())
    plans = [autoshard.plan(model, mesh, example_inputs=batch(0)) for mesh in ("dp=1", "dp=2,tp=2")]
    one, program = (autoshard.compile(model, plan).program for plan in plans)
    report = verify(program, model, batch(1), {}, steps=1, one_rank=one)
    assert report.ok, report.worst()


def two_masks(net: Net, h: T, y: T, labels: T, mask: T) -> T:
    return F.mse_loss(h[mask], y[~mask])


def changed_mask(net: Net, h: T, y: T, labels: T, mask: T) -> T:
    mask = mask.clone()
    first = h[mask]
    mask &= labels > 1
    return F.mse_loss(first, y[mask])


def changed_view(net: Net, h: T, y: T, labels: T, mask: T) -> T:
    mask = mask.clone()
    flat, first = mask.view(-1), h[mask]
    mask[0] = True
    return F.mse_loss(first, y.flatten(0, 1)[flat])


REFUSED: Mapping[str, Fn] = MappingProxyType(
    {
        "two masks": two_masks,
        "a changed mask": changed_mask,
        "a changed view": changed_view,
        "returned": lambda net, h, y, labels, mask: h[mask],
        "places returned": lambda net, h, y, labels, mask: h[torch.where(mask)],
        "mixed": lambda net, h, y, labels, mask: (h[mask] @ y[mask].T).mean(),
        "a softmax over rows": lambda net, h, y, labels, mask: h[mask].softmax(0).square().sum(),
        "sorted rows": lambda net, h, y, labels, mask: h[mask].sort(0).values[0].sum(),
        "flat": lambda net, h, y, labels, mask: h[mask].view(-1)[:4].sum(),
        "some": lambda net, h, y, labels, mask: h[mask][:2].sum(),
        "rows of rows": lambda net, h, y, labels, mask: h[mask][labels[mask] > 1].sum(),
        "the greatest": lambda net, h, y, labels, mask: h[mask].max(),
        "a spread of some kind": lambda net, h, y, labels, mask: h[mask].std(0, False, True).sum(),
        "beside others": lambda net, h, y, labels, mask: (h[mask] + y.view(-1, WIDTH)).sum(),
        "normed over rows": lambda net, h, y, labels, mask: F.batch_norm(
            h[mask], None, None, training=True
        ).sum(),
        "rows beside rows": lambda net, h, y, labels, mask: F.mse_loss(h[mask][:, :1], y[mask][:, 0]),
        "turned round": lambda net, h, y, labels, mask: (h[mask].flip(1, 0) * y[mask]).sum(),
        "a mask that broadcasts": lambda net, h, y, labels, mask: torch.masked_select(
            h @ h.mT, mask[:, None]
        ).sum(),
        "places of a matrix": lambda net, h, y, labels, mask: h.sum() * mask.nonzero(as_tuple=False).sum(),
        "attention": lambda net, h, y, labels, mask: F.scaled_dot_product_attention(
            h[mask].unsqueeze(0).unsqueeze(0), h.unsqueeze(0), h.unsqueeze(0)
        ).sum(),
        "a weighted mean": lambda net, h, y, labels, mask: F.cross_entropy(
            net.head(h)[mask], labels[mask], weight=torch.ones(CLASSES)
        ),
        "as a number": lambda net, h, y, labels, mask: h.sum() * float(h[mask].shape[0]),
        "at least one": lambda net, h, y, labels, mask: h[mask].sum() / max(1, h[mask].shape[0]),
    }
)


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_how_many_rows_there_are_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"depends on values|asks for the value"):
        autoshard.plan(Net(REFUSED[name]), "dp=2", example_inputs=batch(0))
