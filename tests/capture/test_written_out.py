"""Functions of torch that are written out in others give what torch's give, and the same gradients."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoshard.ops.bags import embedding_bag
from autoshard.ops.draws import Draws
from autoshard.ops.unchecked import corrcoef, cosine_similarity, cov, gaussian_nll_loss
from autoshard.ops.written_out import diag, fill_diagonal, multilabel_margin_loss, take

f64 = torch.float64


def equal(functions: tuple[Any, Any], given: tuple[Any, ...], of: int = 0, **told: Any) -> None:
    """Two functions of the same arguments. of: which the gradients are of."""
    x = given[of].clone().requires_grad_()
    outs = [fn(*given[:of], x, *given[of + 1 :], **told) for fn in functions]
    upstream = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, x, upstream)[0] for out in outs]
    for one, other in (outs, grads):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("kind", ["rows", "offsets", "last offset"])
def test_bags(kind: str, padding: int | None) -> None:
    torch.manual_seed(0)
    table = torch.randn(10, 4, dtype=f64)
    input, offsets = torch.randint(10, (17,)), torch.tensor([0, 3, 3, 9, 17][: 4 + (kind == "last offset")])
    if kind == "rows":
        input = torch.randint(10, (6, 5))
        input[2] = 3  # nothing but padding
    for mode, weighted in product(("sum", "mean", "max"), (False, True)):
        weights = torch.randn(input.shape, dtype=f64) if weighted and mode == "sum" else None
        told: dict[str, Any] = {
            "offsets": None if kind == "rows" else offsets,
            "mode": mode,
            "padding_idx": padding,
            "per_sample_weights": weights,
            "include_last_offset": kind == "last offset",
        }
        equal((F.embedding_bag, embedding_bag), (input, table), 1, **told)


@pytest.mark.parametrize("shape", [(5, 7), (5,), (5, 1)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gaussian_losses(shape: tuple[int, ...], reduction: str) -> None:
    x, var = torch.randn(5, 7, dtype=f64), torch.rand(shape, dtype=f64)
    var.view(-1)[0] = 0.0  # below eps
    for full in (False, True):
        told: dict[str, Any] = {"full": full, "eps": 1e-3, "reduction": reduction}
        equal((F.gaussian_nll_loss, gaussian_nll_loss), (x, x + 1, var), 2, **told)
    with pytest.raises(ValueError, match="size"):
        gaussian_nll_loss(x, x, torch.rand(3, dtype=f64))


def test_covariances() -> None:
    x = torch.randn(5, 7, dtype=f64)
    for given in (x, x[0], torch.complex(x, x.flip(1))):
        for correction in (0, 1):
            torch.testing.assert_close(
                cov(given, correction=correction), torch.cov(given, correction=correction)
            )
        torch.testing.assert_close(corrcoef(given), torch.corrcoef(given))
    equal((torch.corrcoef, corrcoef), (x,))
    assert torch.equal(cov(x, aweights=torch.ones(7)), torch.cov(x, aweights=torch.ones(7)))


def test_similarities() -> None:
    x = torch.randn(4, 1, 6, dtype=f64)
    x[1] = 0.0  # below eps
    other = torch.randn(3, 6, dtype=f64)
    for dim in (-1, 1):
        equal((F.cosine_similarity, cosine_similarity), (x, other, dim, 1e-4))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_labels_up_to_the_first_that_is_none(reduction: str) -> None:
    torch.manual_seed(0)
    labels = torch.tensor([[0, 2, -1, 1, 4], [3, -1, -1, -1, -1], [4, 3, 2, 1, 0], [-1, 0, 1, 2, 3]])
    functions = F.multilabel_margin_loss, multilabel_margin_loss
    x = torch.randn(4, 5, dtype=f64)
    equal(functions, (x, labels), reduction=reduction)
    equal(functions, (x[1], labels[1]), reduction=reduction)


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (6,)])
@pytest.mark.parametrize("offset", [0, 2, -1])
def test_diagonals(shape: tuple[int, ...], offset: int) -> None:
    x = torch.randn(shape, dtype=f64)
    equal((torch.diag, diag), (x, offset))
    equal((torch.take, take), (x, torch.tensor([[0, -1], [3, 3]])))
    if len(shape) == 2:
        filled = [fill(x.clone(), 3.0) for fill in (torch.Tensor.fill_diagonal_, fill_diagonal)]
        assert torch.equal(*filled)


@pytest.mark.parametrize("hard", [False, True])
def test_classes_are_drawn_by_their_probabilities(hard: bool) -> None:
    torch.manual_seed(0)
    softmax = Draws(lambda x, p: F.dropout(x, p)).table()[F.gumbel_softmax]
    scores = torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=f64).requires_grad_()
    drawn = softmax(scores.expand(20_000, 4), tau=0.5, hard=hard)
    share = drawn.argmax(-1).bincount(minlength=4) / len(drawn)
    assert (share - scores.softmax(0)).abs().max() < 0.02
    assert not hard or set(drawn.unique().tolist()) <= {0.0, 1.0}
    assert torch.autograd.grad((drawn * torch.arange(4)).sum(), scores)[0].abs().min() > 0
