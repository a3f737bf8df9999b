"""Tables that forward builds for later calls: programs of several sizes need them to agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.capture.python_state.kept_tables import table_text, tables_agree
from autoshard.errors import CaptureError, UsageError


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Table(nn.Module):
    """Adds a row of a table per position. scaled: whether its values depend on its length, as those of
    dynamic NTK do. buffer: whether it is one, else an attribute."""

    def __init__(self, scaled: bool, buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scaled = nn.Linear(4, 4), scaled
        if buffer:
            self.register_buffer("table", None, persistent=False)
        else:
            self.table = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.table is None or self.table.shape[0] < length:
            self.table = self.rows(length)
        return self.loss(x)

    def rows(self, length: int) -> torch.Tensor:
        base = 100.0 * (length if self.scaled else 1)
        return torch.outer(torch.arange(float(length)), base ** -torch.linspace(0, 1, 4)).cos()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (self.linear(x) + self.table[: x.shape[1]]).pow(2).mean()
        return result


class Renewed(Table):
    """The same table in every call, which no later one reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.rows(x.shape[1])
        return self.loss(x)


def losses(model: nn.Module, lengths: tuple[int, ...]) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    return [float(model(torch.randn(4, n, 4, generator=generator)).detach()) for n in lengths]


def parallel(model: nn.Module) -> nn.Module:
    return autoshard.parallelize(model, "dp=1", example_inputs=(torch.randn(4, 8, 4),))


@pytest.mark.parametrize("buffer", [True, False])
def test_lengths_share_a_table_whose_values_do_not_depend_on_them(buffer: bool) -> None:
    lengths = (8, 12, 20, 6, 12, 8)
    expected = losses(Table(scaled=False, buffer=buffer), lengths)
    assert losses(parallel(Table(scaled=False, buffer=buffer)), lengths) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("second", [12, 6])
def test_a_table_that_depends_on_the_length_is_refused_for_another(buffer: bool, second: int) -> None:
    model = parallel(Table(scaled=True, buffer=buffer))
    losses(model, (8, 8))
    with pytest.raises(UsageError, match="forward keeps table for its next calls"):
        losses(model, (second,))


def test_a_table_of_each_call_may_depend_on_its_length() -> None:
    lengths = (8, 12, 6, 8)
    expected = losses(Renewed(scaled=True, buffer=False), lengths)
    assert losses(parallel(Renewed(scaled=True, buffer=False)), lengths) == pytest.approx(expected, rel=1e-5)


class Grown(Table):
    """A table of 8 rows and its length, both attributes."""

    def __init__(self) -> None:
        super().__init__(scaled=False, buffer=False)
        self._build(8)

    def _build(self, length: int) -> None:
        self.length, self.table = length, torch.arange(float(length))[:, None].repeat(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.length:
            self._build(x.shape[1])
        return super().forward(x)


def test_a_table_that_a_capture_outgrows_is_named() -> None:
    with pytest.raises(CaptureError, match="forward changes length, which it reads: from 8 to 12"):
        autoshard.plan(Grown(), "dp=2", example_inputs=(torch.randn(4, 12, 4),))


def test_tables_are_compared_where_both_have_values() -> None:
    def text(*shape: int, step: float = 1.0) -> str:
        parts = torch.meshgrid(*(torch.arange(float(n)) for n in shape), indexing="ij")
        return table_text(sum(step ** (k + 1) * p for k, p in enumerate(parts)))

    assert tables_agree(text(7, 33), text(100, 5))
    assert not tables_agree(text(7, 33), text(100, 5, step=1.01))
    assert not tables_agree(text(7, 33), text(7))
    late = torch.zeros(100)
    late[96] = 1.0
    assert tables_agree(table_text(torch.zeros(96)), table_text(late))
    assert not tables_agree(table_text(torch.zeros(100)), table_text(late))
    assert tables_agree(table_text(torch.ones(3) * 1j), table_text(torch.ones(9) * 1j))
    assert not tables_agree("", "")
