"""Inputs that a model's code asks nothing of, as transformers' ``cu_seq_lens_q`` of packed documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture.capture import capture

Layer = Callable[[torch.Tensor, torch.Tensor], Any]
#: what layers do with lengths that differ from call to call
READING: dict[str, Layer] = {
    "shape": lambda x, lengths: 2 if lengths.shape[0] > 2 else 1,
    "size": lambda x, lengths: 2 if lengths.size(0) > 2 else 1,
    "len": lambda x, lengths: len(lengths),
    "numel": lambda x, lengths: lengths.numel(),
    "dims": lambda x, lengths: lengths.ndim,
    "type": lambda x, lengths: 2 if lengths.dtype == torch.int32 else 1,
    "device": lambda x, lengths: 2 if lengths.is_cuda else 1,
    "iterated": lambda x, lengths: sum(1 for _ in lengths),
    "shape of what is made of it": lambda x, lengths: torch.cat([lengths, lengths]).shape[0],
    "length of another": lambda x, lengths: x.new_zeros(lengths.shape[0]).sum(),
    "inside vmap": lambda x, lengths: torch.vmap(lambda row: row + lengths.shape[0])(x),
    "values": lambda x, lengths: lengths.sum(),
}
UNREAD: dict[str, Layer] = {
    "nothing": lambda x, lengths: 1,
    "whether it is there": lambda x, lengths: 1 if lengths is not None else 2,
    "its class": lambda x, lengths: 1 if isinstance(lengths, torch.Tensor) else 2,
}


class Inner(nn.Module):
    def __init__(self, reads: Layer) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(8, 8), reads

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.reads(x, lengths)


class Outer(nn.Module):
    """Layers that repeat are traced once, from four on."""

    def __init__(self, reads: Layer, layers: int, also: str = "") -> None:
        super().__init__()
        self.layers, self.also = nn.ModuleList(Inner(reads) for _ in range(layers)), also
        self.register_buffer("last", torch.zeros(3, dtype=torch.int32))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x, lengths=lengths)
        if self.also == "kept":
            self.last = lengths
        loss = x.square().mean()
        return (loss, lengths) if self.also == "given back" else loss


def inputs_of(model: nn.Module) -> list[str]:
    batch = {"x": torch.randn(4, 8), "lengths": torch.tensor([0, 2, 4], dtype=torch.int32)}
    return [p.target for p in capture(model, (), batch).ports if p.kind == "input"]


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("name", [*READING, *UNREAD])
def test_inputs_are_those_that_something_was_asked_of(name: str, layers: int) -> None:
    reads = READING.get(name) or UNREAD[name]
    assert inputs_of(Outer(reads, layers)) == (["0", "1"] if name in READING else ["0"])


@pytest.mark.parametrize("also", ["kept", "given back"])
def test_what_is_kept_or_given_back_is_an_input(also: str) -> None:
    assert inputs_of(Outer(UNREAD["nothing"], 4, also)) == ["0", "1"]
