"""Keys of models: alike in every process where captures are, other where anything that code reads is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture.python_state.model_key import NoKeyError, model_key

GAIN = 2.0


class Settings:
    """What a module holds beside tensors."""

    def __init__(self) -> None:
        self.depth, self.names, self.size = 2, {"a", "b"}, torch.Size([2])


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * GAIN


def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Net(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)
        self.settings, self.act = Settings(), doubled
        self.register_buffer("table", torch.arange(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.inner(x)) * self.gain


def key(model: nn.Module, x: torch.Tensor | None = None, *more: Any) -> str:
    return model_key(model, ((torch.zeros(3, 4) if x is None else x,), {}), *more)


def test_values_of_parameters_and_of_arguments_do_not_count() -> None:
    assert key(Net()) == key(Net(), torch.ones(3, 4))


def _frozen(model: Net) -> None:
    model.inner.weight.requires_grad_(False)


def _hooked(model: Net) -> None:
    model.inner.register_forward_hook(lambda m, a, y: y + 1)


def _tied(model: Net) -> None:
    model.other = nn.Linear(4, 4)
    model.other.weight = model.inner.weight


CHANGES: dict[str, Callable[[Net], object]] = {
    "mode": lambda m: m.eval(),
    "mode of a module": lambda m: m.drop.eval(),
    "attribute": lambda m: setattr(m, "gain", 3.0),
    "attribute of a module": lambda m: setattr(m.drop, "p", 0.5),
    "attribute of an object": lambda m: setattr(m.settings, "depth", 3),
    "a set": lambda m: m.settings.names.add("c"),
    "a function": lambda m: setattr(m, "act", tripled),
    "a partial": lambda m: setattr(m, "act", partial(torch.mul, 2.0)),
    "a closure": lambda m: setattr(m, "act", lambda x, by=m.gain: x * by),
    "a method of an instance": lambda m: setattr(m, "forward", m.inner.forward),
    "another class": lambda m: setattr(m, "drop", nn.AlphaDropout(0.1)),
    "a dtype": lambda m: m.double(),
    "a parameter that is frozen": _frozen,
    "a hook": _hooked,
    "numbers of a buffer": lambda m: m.table.add_(1),
    "a tied parameter": _tied,
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_code_may_read_counts(what: str) -> None:
    model = Net()
    before = key(model)
    CHANGES[what](model)
    assert key(model) != before


def test_arguments_modes_variables_and_options_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.zeros(3, 4, dtype=torch.int64)
    keys = [
        key(Net()),
        key(Net(), torch.zeros(4, 4)),
        key(Net(), torch.zeros(3, 4, requires_grad=True)),
        key(Net(), ids),
        key(Net(), ids + 1),
        key(Net(), None, "an option"),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(key(Net()))
    with torch.no_grad():
        keys.append(key(Net()))
    monkeypatch.setattr(sys.modules[__name__], "GAIN", 5.0)
    keys.append(key(Net()))
    monkeypatch.setattr(Net, "forward", lambda self, x: self.inner(x))
    keys.append(key(Net()))
    assert len(set(keys)) == len(keys)


def test_code_that_a_user_put_into_a_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    model = LlamaForCausalLM(config)
    before = key(model)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert key(model) != before


@pytest.mark.parametrize("value", [iter([1]), object(), torch.zeros(1 << 21)], ids=["iterator", "C", "large"])
def test_what_no_other_process_can_compare_has_no_key(value: Any) -> None:
    model = Net()
    model.more = value
    with pytest.raises(NoKeyError):
        key(model)


def test_another_process_finds_the_same_key() -> None:
    code = "import test_model_key as t, torch; print(t.key(t.Net()), t.key(torch.nn.Linear(2, 3)))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in "12"
    }
    assert len(found) == 1
