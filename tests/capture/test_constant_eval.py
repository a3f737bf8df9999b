"""Values that follow from numbers alone, windows made by strides, and numbers that are taken to be finite."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoshard.capture.capture import capture
from autoshard.errors import CaptureError
from autoshard.ops.windows import as_strided

Code = Callable[[torch.Tensor], torch.Tensor]


class Asking(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code, self.last = code, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.code(x)).sum()


def ops_of(code: Code) -> list[str]:
    return [node.op for node in capture(Asking(code), (torch.randn(6, 4),)).graph.nodes]


def own_mask(x: torch.Tensor) -> torch.Tensor:
    mask = F.pad(torch.ones(x.shape[0]), (0, 2))
    if (mask > 1).any().item():
        return x.exp()
    return x[: int(mask.sum())] * 2


def chosen(x: torch.Tensor) -> torch.Tensor:
    even = torch.arange(x.shape[0]) % 2 == 0
    return x[even] * even.nonzero().numel() + torch.zeros_like(x)[even]


def number_as_size(x: torch.Tensor) -> torch.Tensor:
    rows = torch.full((), x.shape[0]) // 2
    return x.reshape(rows, 2, -1).repeat(1, rows, 1)


def indexed_by_data(x: torch.Tensor) -> torch.Tensor:
    return x[:, x.sum(0).argmax()].unsqueeze(1) + x


@pytest.mark.parametrize("code", [own_mask, chosen, number_as_size, indexed_by_data])
def test_what_follows_from_numbers_may_be_asked_for(code: Code) -> None:
    ops = ops_of(code)
    assert not any("exp." in op or "nonzero" in op or "_local_scalar" in op for op in ops)


def filled_with_data(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(6)
    mask[0] = x.max()
    return x * 2 if mask.sum() > 6 else x


def view_filled_with_data(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(6)
    mask[1:3].copy_(x[1:3, 0])
    return x * 2 if mask.any() else x


def added_to(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    total += x.sum()
    return x * 2 if total > 0 else x


def drawn(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.bernoulli(torch.ones(4) / 2).any() else x


def never_set(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.empty(4).sum() > 0 else x


@pytest.mark.parametrize("code", [filled_with_data, view_filled_with_data, added_to, drawn, never_set])
def test_what_holds_data_may_not(code: Code) -> None:
    with pytest.raises(CaptureError, match="value of a tensor"):
        ops_of(code)


def mended(x: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(x).all():
        x = x.clamp(-1, 1)
    if torch.isnan(x).any() or torch.isinf(x).any():
        x = x.nan_to_num()
    return x * 2


def test_numbers_are_taken_to_be_finite() -> None:
    ops = ops_of(mended)
    assert "aten.mul.Tensor" in ops and not any("clamp" in op or "nan" in op for op in ops)


def test_strides_of_windows_and_reshapes() -> None:
    draw = random.Random(0)
    windows = 0
    for _ in range(400):
        dims = draw.randint(1, 4)
        x = torch.randn([draw.randint(1, 6) for _ in range(dims)])
        x = x.permute(draw.sample(range(dims), dims))
        dim = draw.randrange(dims)
        wanted = x.unfold(dim, draw.randint(1, x.shape[dim]), draw.randint(1, 3))
        with _Ops() as ops:
            found = as_strided(x, wanted.shape, wanted.stride())
        assert torch.equal(found, wanted) and found.data_ptr() == wanted.data_ptr()
        windows += "aten::as_strided" not in ops.names
    assert windows > 300


def test_other_strides_stay() -> None:
    x = torch.arange(12.0)
    for size, stride in (((3, 2), (2, 3)), ((2, 2), (0, 1)), ((4, 3), (2, 2))):
        assert torch.equal(as_strided(x, size, stride), x.as_strided(size, stride))
    assert torch.equal(as_strided(x, (2, 2), (2, 1), 3), x.as_strided((2, 2), (2, 1), 3))


class _Ops(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))
