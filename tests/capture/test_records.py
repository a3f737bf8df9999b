"""Dataclasses and named tuples that models take and return."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import autoshard
from autoshard.errors import CaptureError, UsageError, VerificationError
from autoshard.program.signature_check import check_signature
from autoshard.program.store import load_program, save_program
from autoshard.torch_adapters.records import NAME, Record, from_records, has_records, to_records
from autoshard.verify.lockstep import verify


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    kind: str = "mean"


class Pair(NamedTuple):
    loss: torch.Tensor
    more: Any


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8)

    def forward(self, batch: Batch) -> Pair:
        y = torch.tanh(self.up(batch.x))
        loss = y.square().mean() if batch.kind == "mean" else y.square().sum()
        return Pair(loss, {"parts": [Batch(y, "out"), Pair(y.sum(), 3)]})


def test_programs_take_and_return_them(tmp_path: Path) -> None:
    batch = Batch(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    planned = autoshard.plan(Net(), "dp=2,tp=2", example_inputs=(batch,))
    program = autoshard.compile(Net(), planned).program
    save_program(program, tmp_path / "program")
    found = verify(load_program(tmp_path / "program"), Net(), (batch,), {}, steps=2)
    assert found.ok, found.worst()


def test_there_and_back() -> None:
    x = torch.zeros(2)
    tree = ([Pair(x, Batch(x))], {"a": (1, Batch(x, "b"))})
    found = from_records(to_records(tree))
    assert repr(found) == repr(tree) and found[0][0].more.x is x
    assert not has_records(([1, x], {"b": None})) and has_records({"a": [(Batch(x),)]})
    spec = pytree.tree_structure(to_records(tree))
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_what_fields_alone_do_not_make_is_refused() -> None:
    @dataclass
    class Local:
        x: int

    with pytest.raises(CaptureError, match="inside a function"):
        to_records(Local(1))
    batch = Batch(torch.zeros(2))
    object.__setattr__(batch, "hidden", 3)
    with pytest.raises(CaptureError, match="hidden"):
        to_records([batch])


@pytest.mark.parametrize("kind", ["os:system", "builtins:dict", "no_such:Thing", f"{__name__}:Net"])
def test_a_record_names_nothing_but_a_class_that_is_there(kind: str) -> None:
    with pytest.raises(UsageError, match="no class with the fields"):
        from_records(Record(kind, ("x",), (1,)))


@pytest.mark.parametrize("context", [["a:B", ["x", "x"]], ["a:B", []], ["a.b", ["x"]], ["a:B()", ["x"]], 3])
def test_stored_records_are_checked(context: object) -> None:
    batch = Batch(torch.randn(8, 8))
    program = autoshard.compile(Net(), autoshard.plan(Net(), "dp=2", example_inputs=(batch,))).program
    raw = json.loads(program.signature.out_tree)
    inner = raw[1]["children_spec"]
    leaf = {"type": None, "context": None, "children_spec": []}
    inner[0] = {"type": NAME, "context": json.dumps(context), "children_spec": [leaf]}
    signature = replace(program.signature, out_tree=json.dumps(raw))
    with pytest.raises(VerificationError, match="outputs"):
        check_signature(signature, {})
