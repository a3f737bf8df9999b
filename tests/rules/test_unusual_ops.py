"""Small models with ops that are rare in networks: their programs equal eager, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import NoRuleError
from autoshard.verify.lockstep import verify

Fn = Callable[["Net", torch.Tensor], Any]


class Net(nn.Module):
    """A layer, then a function of its results [4, 8, 16]."""

    def __init__(self, fn: Fn) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fn, self.layer = fn, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.fn(self, self.layer(x))
        return out.pow(2).mean() if isinstance(out, torch.Tensor) and out.is_floating_point() else out


def square(y: torch.Tensor) -> torch.Tensor:
    """Matrices that can be inverted, [4, 8, 4, 4]."""
    return y.unflatten(-1, (4, 4)) + 4 * torch.eye(4)


def positive(y: torch.Tensor) -> torch.Tensor:
    return square(y) @ square(y).mT


def put(place: Callable[[torch.Tensor], Any], value: Any, added: bool = False) -> Fn:
    def run(net: Net, y: torch.Tensor) -> torch.Tensor:
        where = place(y)
        filled = torch.as_tensor(value(y) if callable(value) else value)
        return y.index_put(where if isinstance(where, tuple) else (where,), filled, accumulate=added)

    return run


def assigned(place: Callable[[torch.Tensor], Any], value: float) -> Fn:
    def run(net: Net, y: torch.Tensor) -> torch.Tensor:
        changed = y.clone()
        changed[place(y)] = value
        return changed

    return run


def volume(y: torch.Tensor) -> torch.Tensor:
    return y.unflatten(-1, (4, 2, 2))


def head_and_loss(net: Net, y: torch.Tensor) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=8)
    return F.linear_cross_entropy(y.flatten(0, 1), net.layer.weight, LABELS, options=options)


LA = torch.linalg
BAGS, BEGINS = torch.tensor([[0, 3, 3], [15, 1, 2], [4, 4, 4], [9, 8, 7]]), torch.tensor([0, 2, 2, 7])
CONSTANT, LABELS = torch.linspace(-1, 1, 16), torch.arange(32) % 16
ROWS, MASK = torch.tensor([0, 2]), torch.rand(4, 8, 16, generator=torch.Generator().manual_seed(0)) > 0.5
MODELS: Mapping[str, Fn] = MappingProxyType(
    {
        "solve": lambda net, y: LA.solve(square(y), y[..., :4, None]),
        "solve vectors": lambda net, y: LA.solve(square(y), y[..., :4]),
        "solve right": lambda net, y: LA.solve(square(y), square(y).mT, left=False),
        "solve one matrix": lambda net, y: LA.solve(net.layer.weight + 9 * torch.eye(16), y.mT),
        "cholesky": lambda net, y: LA.cholesky(positive(y)),
        "cholesky solve": lambda net, y: torch.cholesky_solve(y[..., :4, None], LA.cholesky(positive(y))),
        "inv": lambda net, y: LA.inv(square(y)),
        "inv of a weight": lambda net, y: y @ LA.inv(net.layer.weight + 9 * torch.eye(16)),
        "pinv": lambda net, y: LA.pinv(square(y)),
        "eigh": lambda net, y: LA.eigh(positive(y))[0],
        "qr": lambda net, y: LA.qr(square(y))[1],
        "svd": lambda net, y: LA.svd(square(y))[1],
        "det": lambda net, y: LA.det(square(y)).log1p(),
        "slogdet": lambda net, y: LA.slogdet(positive(y))[1],
        "lu": lambda net, y: LA.lu(square(y))[2],
        "lu solve": lambda net, y: LA.lu_solve(*LA.lu_factor(square(y)), y[..., :4, None]),
        "triangular": lambda net, y: LA.solve_triangular(square(y).triu(), y[..., :4, None], upper=True),
        "old triangular": lambda net, y: torch.triangular_solve(y[..., :4, None], square(y))[0],
        "matrix exp": lambda net, y: LA.matrix_exp(square(y) / 9),
        "cross": lambda net, y: LA.cross(y[..., :3], y[..., 3:6]),
        "diagonals": lambda net, y: torch.diag_embed(y).diagonal_scatter(y * 2, dim1=-2, dim2=-1),
        "complex": lambda net, y: torch.fft.fft(y),
        "mask": put(lambda y: MASK, 0.5),
        "mask of values": put(lambda y: y > 0, 0.5),
        "mask added": put(lambda y: MASK, 0.5, added=True),
        "mask of rows": put(lambda y: MASK[..., 0], 0.5),
        "mask of rows, vector": put(lambda y: MASK[..., 0], lambda y: y[0, 0].detach() * 2),
        "mask after a dim": assigned(lambda y: (slice(None), MASK[0]), 0.5),
        "mask of a batch": put(lambda y: MASK[:, 0, 0], lambda y: y[0].detach() * 2),
        "mask and a row": assigned(lambda y: (MASK[:, 0, 0], slice(None), torch.tensor(3)), 0.5),
        "mask of a weight": lambda net, y: y @ put(lambda w: w > 0, 0.0)(net, net.layer.weight),
        "masked scatter": lambda net, y: y.masked_scatter(MASK, y.flip(0)),
        "assigned mask": assigned(lambda y: MASK, 0.5),
        "assigned rows": assigned(lambda y: ROWS, 0.5),
        "assigned columns": assigned(lambda y: (slice(None), ROWS), 0.5),
        "assigned last": assigned(lambda y: (..., ROWS), 0.5),
        "added rows": put(lambda y: ROWS, lambda y: y[:2] * 2, added=True),
        "mean of a number": lambda net, y: y.square().mean().mean(0),
        "no rows": lambda net, y: torch.cat((y, y.repeat(1, 0, 1)), 1),
        "bilinear": lambda net, y: F.bilinear(y[..., :4], y[..., 4:8], net.layer.weight.view(16, 4, 4)),
        "bags of rows": lambda net, y: F.embedding_bag(BAGS, net.layer.weight) + y[:, 0],
        "weighted bags": lambda net, y: F.embedding_bag(
            BAGS.flatten(), net.layer.weight, BEGINS, mode="sum", per_sample_weights=y.flatten()[:12]
        ),
        "affine grid": lambda net, y: F.grid_sample(
            y[:, None], F.affine_grid(y[:, :2, :3], [4, 1, 8, 16], align_corners=False), align_corners=False
        ),
        "linear": lambda net, y: F.interpolate(y, scale_factor=2, mode="linear"),
        "trilinear": lambda net, y: F.interpolate(volume(y), scale_factor=2, mode="trilinear"),
        "nearest of volumes": lambda net, y: F.interpolate(volume(y), scale_factor=2),
        "pool of volumes": lambda net, y: F.adaptive_avg_pool3d(volume(y), 2),
        "unpooling": lambda net, y: F.max_unpool1d(*F.max_pool1d(y, 2, return_indices=True), 2),
        "gaussian loss": lambda net, y: F.gaussian_nll_loss(y, y.detach() + 1, y.exp(), full=True),
        "margins": lambda net, y: F.multi_margin_loss(y.flatten(0, 1), BAGS.repeat(3, 1).flatten()[:32]),
        "soft margin": lambda net, y: F.soft_margin_loss(y, y.detach().sign()),
        "correlations": lambda net, y: torch.corrcoef(y.flatten(0, 1)),
        "similarity": lambda net, y: F.cosine_similarity(y, CONSTANT, dim=-1),
        "fake quantised": lambda net, y: torch.fake_quantize_per_channel_affine(
            y, CONSTANT.abs() + 0.1, torch.zeros(16, dtype=torch.int32), 2, -8, 7
        ),
        "conjugates": lambda net, y: torch.view_as_real(
            torch.view_as_complex(y.unflatten(-1, (8, 2))).conj().resolve_conj()
        )[..., 1],
        **({"head and loss": head_and_loss} if hasattr(F, "linear_cross_entropy") else {}),
    }
)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=4", "fsdp=4"])
@pytest.mark.parametrize("name", MODELS)
def test_an_unusual_op_equals_eager(name: str, mesh: str) -> None:
    model, x = Net(MODELS[name]), torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))
    program = autoshard.compile(model, autoshard.plan(model, mesh, example_inputs=(x,))).program
    report = verify(program, model, (x,), {}, steps=1)
    assert report.ok, report.worst()


@pytest.mark.parametrize("name", ["solve", "cholesky", "inv", "svd", "mask"])
def test_the_dims_before_matrices_are_split(name: str) -> None:
    """On a mesh with nothing but a batch axis, nothing is gathered."""
    model, x = Net(MODELS[name]), torch.randn(4, 8, 16)
    program = autoshard.compile(model, autoshard.plan(model, "dp=4", example_inputs=(x,))).program
    gathers = [n.op for s in program.lowered.segments.values() for n in s.graph.nodes if "gather" in n.op]
    assert not gathers


def test_a_refusal_names_the_line() -> None:
    model, x = Net(lambda net, y: y.put(ROWS, torch.zeros(2))), torch.randn(4, 8, 16)
    with pytest.raises(NoRuleError, match=r"test_unusual_ops\.py:\d+"):
        autoshard.plan(model, "tp=4", example_inputs=(x,))
