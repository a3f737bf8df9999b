"""Started by `ranks`: one rank compiles for all; programs are kept; stored ones answer other calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from leaving import leave
from torch import nn
from user_state_worker import Net, batch, close, same_gradients

import autoshard
from autoshard.planner import planning
from autoshard.runtime.compile_once import VARIABLE

MESH = "dp=2,tp=2"


class Unruled(nn.Module):
    """Has an op without a rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.block_diag(x, x)


@contextmanager
def captures() -> Iterator[list[int]]:
    """How many models this rank has captured for plans."""
    count, capture = [0], planning.capture

    def counted(*args: object, **kwargs: object) -> object:
        count[0] += 1
        return capture(*args, **kwargs)  # type: ignore[arg-type]

    planning.capture = counted  # type: ignore[assignment]
    try:
        yield count
    finally:
        planning.capture = capture


def trained(model: nn.Module, what: str, rows: int = 8) -> None:
    eager = Net()
    eager.scale = model.scale
    for each in (model, eager):
        each.zero_grad()
        each(batch(1, rows))["loss"].backward()
    same_gradients(model, eager, what)


def parallel(change: Callable[[Net], object] = lambda m: None) -> nn.Module:
    model = Net()
    change(model)
    made: nn.Module = autoshard.parallelize(model, MESH, example_inputs=batch())
    return made


def one_rank_compiles(first: bool) -> None:
    with captures() as count:
        model = parallel()
        trained(model, "first call")
        trained(model, "other sizes", 3)
        trained(model, "as planned", 8)
        model.eval()
        close(model(batch(2))["logits"], Net().eval()(batch(2))["logits"], "eval")
    assert (count[0] > 0) == first, count


def programs_are_kept(folder: Path, first: bool) -> None:
    os.environ[VARIABLE] = str(folder)
    try:
        for expected in (first, False):
            with captures() as count:
                model = parallel()
                trained(model, "kept")
                trained(model, "kept, other sizes", 3)
            assert (count[0] > 0) == expected, (count, expected)
        with captures() as count:
            trained(parallel(lambda m: setattr(m, "scale", 0.25)), "another attribute")
        assert (count[0] > 0) == first
        dist.barrier()
        if first:
            for path in folder.glob("*/*/program.py"):
                path.write_text(path.read_text() + " ")
        dist.barrier()
        trained(parallel(), "a folder that is damaged")
    finally:
        del os.environ[VARIABLE]


def stored_programs_answer_other_calls(folder: Path, first: bool) -> None:
    if first:
        plan = autoshard.plan(Net(), MESH, example_inputs=batch())
        autoshard.compile(Net(), plan).save(folder)
    dist.barrier()
    model = autoshard.load(folder, Net())
    trained(model, "loaded")
    trained(model, "loaded, other sizes", 3)
    model.scale = 2.0
    trained(model, "loaded, another attribute")


class Scaled(nn.Module):
    """Divides by one number and multiplies by another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0, count: int = 3) -> torch.Tensor:
        return (torch.tanh(self.up(x)) * scale).square().sum() / count


def numbers_are_arguments() -> None:
    """Programs do not grow with the numbers, which count with the precision that Python's have."""
    for dtype, limit in ((torch.float64, 1e-14), (torch.bfloat16, 2e-2)):
        x = batch().to(dtype)
        eager = Scaled().to(dtype)
        example = {"x": x, "scale": 0.3, "count": 7}
        model = autoshard.parallelize(Scaled().to(dtype), MESH, example_inputs=example)
        for scale, count in ((0.3, 7), (0.1, 7), (1 / 3, 7), (0.7, 9), (0.123456789, 11)):
            wanted, found = eager(x, scale, count), model(x=x, scale=scale, count=count)
            assert found.dtype == dtype, (dtype, found.dtype)
            assert abs(float(found - wanted)) <= limit * float(wanted), (dtype, scale, found, wanted)
        assert len(model._autoshard_family.programs) == 3


def errors_reach_all_ranks() -> None:
    def unruled() -> object:
        return autoshard.parallelize(Unruled(), MESH, example_inputs=torch.randn(8, 8))

    def unlike() -> object:
        return parallel(lambda m: setattr(m, "scale", 0.5 + dist.get_rank()))(batch())

    for make, kind in ((unruled, autoshard.NoRuleError), (unlike, autoshard.VerificationError)):
        try:
            make()
        except kind as error:
            assert error.what and error.hint, error
        else:
            raise AssertionError(f"no {kind.__name__}")


@dataclass
class Rows:
    x: torch.Tensor
    weight: float


class Output(NamedTuple):
    loss: torch.Tensor
    rows: Rows


class OfTypes(Net):
    """Takes a dataclass, and returns one inside a named tuple."""

    def forward(self, rows: Rows) -> Output:  # type: ignore[override]
        out = super().forward(rows.x)
        return Output(out["loss"] * rows.weight, Rows(out["logits"], rows.weight))


def types_of_the_user() -> None:
    model, eager = autoshard.parallelize(OfTypes(), MESH, example_inputs=(Rows(batch(), 1.0),)), OfTypes()
    for rows, weight in ((8, 1.0), (3, 1.0), (8, 0.5), (8, 0.25)):
        found, wanted = (each(Rows(batch(1, rows), weight)) for each in (model, eager))
        assert type(found) is Output and type(found.rows) is Rows and found.rows.weight == weight
        close(found.rows.x, wanted.rows.x, "a field")
        for each, out in ((model, found), (eager, wanted)):
            each.zero_grad()
            out.loss.backward()
        same_gradients(model, eager, f"types of the user, {rows} rows, {weight}")


class Longer(Net):
    """Of sequences."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x.cumsum(1))


def lengths_are_planned_together() -> None:
    """Their programs are there before the first call; others come from the one that was planned for more."""

    def some(length: int) -> torch.Tensor:
        return torch.randn(8, length, 8, generator=torch.Generator().manual_seed(length))

    model = autoshard.parallelize(Longer(), MESH, example_inputs=some(4), lengths="4:1,12:3,40:1")
    family, eager = model._autoshard_family, Longer()
    assert len(family.programs) == 3
    for length in (4, 12, 40, 30):
        close(model(some(length))["loss"], eager(some(length))["loss"], f"length {length}")
    assert len(family.programs) == 4


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    one_rank_compiles(first)
    programs_are_kept(folder / "cache", first)
    stored_programs_answer_other_calls(folder / "program", first)
    numbers_are_arguments()
    lengths_are_planned_together()
    types_of_the_user()
    errors_reach_all_ranks()
    if first:
        print("one compiles, all run")
    leave()


if __name__ == "__main__":
    main()
