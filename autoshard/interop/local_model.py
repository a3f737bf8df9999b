"""What the model's own code does on one rank, seen by running it with the sizes that a rank has.

A graph cannot tell ``x.view(batch, seq, -1, head_dim)`` from ``x.view(batch, -1, heads, head_dim)``: on
full tensors they are the same. On a rank's part of the features the first gives fewer heads, and the second
silently cuts the sequence. So the model is captured once more with the divided layers as small as on a rank,
and every tensor must have the shape that the rank's part of it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.capture import capture
from autoshard.errors import CaptureError
from autoshard.interop.module_styles import Style
from autoshard.ir import Folded
from autoshard.passes.pipeline import simplify


@dataclass(frozen=True)
class LocalModel:
    """A model and example inputs of global shape, to be captured as one rank of ``size`` would run it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    size: int

    def fitting(self, style: Style, module: str) -> bool:
        """Whether a module is of the class that torch divides so, and does no more than that class."""
        kind = nn.Embedding if style.kind.startswith("table") else nn.Linear
        result = self.model.get_submodule(module)
        return isinstance(result, kind) and type(result).forward is kind.forward

    def graph(self, styles: Mapping[str, Style]) -> Folded | str:
        """The folded graph with the layers as small as on a rank; the reason if the code fails on them."""
        with ExitStack() as stack:
            for name, style in styles.items():
                stack.enter_context(_small(self.model.get_submodule(name), style, self.size))
            try:
                return simplify(capture(self.model, self.args, dict(self.kwargs)))
            except CaptureError as error:
                return error.why or error.what


@contextmanager
def _small(module: nn.Module, style: Style, size: int) -> Iterator[None]:
    """Give a layer parameters of the sizes that its part has where code outside of it can tell."""
    dims: dict[str, int] = {}
    splits = not style.gather_output
    if style.kind == "columns" and splits:
        dims = {"weight": 0, "bias": 0}
    if (style.kind == "table_columns" and splits) or (style.kind == "rows" and not style.full_input):
        dims = {"weight": 1}
    table = module._parameters
    before = dict(table)
    try:
        for name, dim in dims.items():
            full = table.get(name)
            if full is not None:
                shape = [n // size if d == dim else n for d, n in enumerate(full.shape)]
                part = torch.empty(shape, dtype=full.dtype, device="meta")
                table[name] = nn.Parameter(part, requires_grad=full.requires_grad)
        yield
    finally:
        table.update(before)
