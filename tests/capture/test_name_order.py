"""A model that loops over a set of names is the same graph in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from autoshard.capture.name_order import OrderedSet, sets_in_order

NAMES = ["sliding", "full", "chunked", "linear", "global", "local"]

TRACED = """
import json, sys
import torch
from torch import nn
from autoshard.planner.analysis import analyse
from autoshard.capture.capture import capture

NAMES = json.loads(sys.argv[1])

class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.kinds = set(NAMES)

    def forward(self, x):
        made = {name: x * len(name) for name in set(NAMES)}
        more = {name: x + len(name) for name in self.kinds}
        return sum((made[name] - more[name] for name in NAMES), self.weight).sum()

joint = capture(Kinds(), (torch.ones(4),))
print(json.dumps([list(set(NAMES)), [repr(n) for n in joint.graph.nodes], analyse(joint).fingerprint]))
"""


def traced(seed: str) -> tuple[list[str], list[str], str]:
    env = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", TRACED, json.dumps(NAMES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    order, nodes, fingerprint = json.loads(done.stdout)
    return order, nodes, fingerprint


def test_graphs_do_not_depend_on_how_a_process_hashes() -> None:
    one, other = traced("1"), traced("2")
    assert one[0] != other[0]  # what Python makes of the set differs
    assert one[1:] == other[1:]


def test_a_set_in_order_is_a_set() -> None:
    names = OrderedSet(NAMES)
    assert list(names) == sorted(NAMES) and names == set(NAMES) and len(names | {"x"}) == 7
    assert isinstance(names, set) and isinstance({1}, OrderedSet) and issubclass(set, OrderedSet)
    assert not isinstance([1], OrderedSet)
    assert set(OrderedSet([3, "a", None])) == {3, "a", None}


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.names = set(NAMES)
        self.numbers = {3, 1}


def test_code_is_left_as_it_was() -> None:
    model, code = Holds(), sys.modules[__name__]
    with pytest.raises(ZeroDivisionError), sets_in_order(model):
        assert vars(code)["set"] is OrderedSet and type(set(NAMES)) is OrderedSet
        assert type(model.names) is OrderedSet and type(model.numbers) is not OrderedSet
        assert "set" not in vars(torch.nn.modules.module)
        raise ZeroDivisionError
    assert "set" not in vars(code)
