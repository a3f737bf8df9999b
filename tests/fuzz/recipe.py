"""A model as data: inputs, parameters and statements, from which a module and its source are made."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DTYPE = torch.float64
_NAME = re.compile(r"\b(?:[hvx]\d*|self\.[pb]\d+)\b")


@dataclass(frozen=True)
class Spec:
    """A tensor that is given. kind: ``real``, ``unit`` (0 to 1), ``bool``, or ``ints`` below ``top``.

    batch: whether dim 0 is the batch. tied: the parameter whose tensor this is, "" for its own. grad: whether
    it gets a gradient.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "real"
    top: int = 0
    batch: bool = False
    tied: str = ""
    grad: bool = True

    def drawn(self, seed: int) -> torch.Tensor:
        """The same tensor for the same name and seed."""
        text = f"{self.name}/{seed}".encode()
        source = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:6], "big"))
        if self.kind == "ints":
            return torch.randint(0, self.top, self.shape, generator=source)
        if self.kind == "bool":
            return torch.rand(self.shape, generator=source) < 0.5
        if self.kind == "unit":
            return torch.rand(self.shape, generator=source, dtype=DTYPE)
        return torch.randn(self.shape, generator=source, dtype=DTYPE)

    @property
    def text(self) -> str:
        what = f"{self.kind} below {self.top}" if self.kind == "ints" else self.kind
        notes = [what, "batch" if self.batch else "", f"is {self.tied}" if self.tied else ""]
        notes.append("" if self.grad else "frozen")
        return f"{self.name}: {list(self.shape)} {', '.join(n for n in notes if n)}"


@dataclass(frozen=True)
class Statement:
    """``outs = expression`` over names ``x0`` (inputs), ``self.p0``, ``self.b0`` and ``v0`` (made before)."""

    outs: tuple[str, ...]
    expression: str

    @property
    def uses(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.expression))

    def renamed(self, old: str, new: str) -> Statement:
        return replace(self, expression=re.sub(rf"\b{re.escape(old)}\b", new, self.expression))

    def __str__(self) -> str:
        return f"{', '.join(self.outs)}{',' if len(self.outs) > 1 else ''} = {self.expression}"


@dataclass(frozen=True)
class Body:
    """Statements with the parameters and buffers that they use. result: a name; used for layers only."""

    given: tuple[Spec, ...]
    statements: tuple[Statement, ...]
    result: str = ""

    def without_dead(self, wanted: tuple[str, ...]) -> Body:
        """Only what ``wanted`` needs."""
        needed, kept = set(wanted), []
        for statement in reversed(self.statements):
            if needed.intersection(statement.outs):
                needed.update(statement.uses)
                kept.append(statement)
        owners = {g.tied for g in self.given if f"self.{g.name}" in needed and g.tied}
        given = tuple(g for g in self.given if f"self.{g.name}" in needed or g.name in owners)
        return replace(self, given=given, statements=tuple(reversed(kept)))


@dataclass(frozen=True)
class Recipe:
    """A model. layer: what ``run(self.layers, x)`` runs ``repeats`` times. loss: the name of a scalar.

    outputs: names of further outputs, which get gradients too if they are real and ``scalar`` is false.
    """

    seed: int
    inputs: tuple[Spec, ...]
    body: Body
    layer: Body
    repeats: int
    loss: str
    outputs: tuple[str, ...]

    def without_dead(self) -> Recipe:
        """Without statements, inputs and parameters that nothing needs."""
        body = self.body.without_dead((self.loss, *self.outputs))
        uses = {u for s in body.statements for u in s.uses} | {self.loss, *self.outputs}
        inputs = tuple(x for x in self.inputs if x.name in uses or x == self.inputs[0])
        layered = any("self.layers" in s.expression for s in body.statements)
        layer = self.layer.without_dead((self.layer.result,)) if layered else Body((), ())
        return replace(self, body=body, inputs=inputs, layer=layer, repeats=self.repeats if layered else 0)

    def source(self) -> str:
        """The module as Python, with what it is given as comments."""
        lines: list[str] = []
        if self.repeats:
            lines += ["class Layer(nn.Module):", *(f"    # {g.text}" for g in self.layer.given)]
            lines += ["    def forward(self, h):", *(f"        {s}" for s in self.layer.statements)]
            lines += [f"        return {self.layer.result}", "", ""]
        lines += ["class Net(nn.Module):", *(f"    # {g.text}" for g in self.body.given)]
        lines += [f"    # {x.text}" for x in self.inputs]
        if self.repeats:
            lines.append(f"    # layers: {self.repeats} times Layer")
        lines.append(f"    def forward(self, {', '.join(x.name for x in self.inputs)}):")
        lines += [f"        {s}" for s in self.body.statements]
        outs = "".join(f', "{name}": {name}' for name in self.outputs)
        lines.append(f'        return {{"loss": {self.loss}{outs}}}')
        return "\n".join(lines) + "\n"

    def module(self) -> nn.Module:
        """The module, with its parameters drawn."""
        names = namespace()
        exec(compile(self.source(), f"<fuzz {self.seed}>", "exec"), names)
        made: nn.Module = names["Net"]()
        _give(made, self.body, self.seed)
        if self.repeats:
            layers = nn.ModuleList([names["Layer"]() for _ in range(self.repeats)])
            for number, layer in enumerate(layers):
                _give(layer, self.layer, self.seed + 1 + number)
            made.layers = layers
        return made

    def batch(self, pieces: int = 1) -> dict[str, torch.Tensor]:
        """The inputs of ``pieces`` microbatches."""
        found: dict[str, torch.Tensor] = {}
        for x in self.inputs:
            count = pieces if x.batch else 1
            found[x.name] = torch.cat([x.drawn(self.seed + k) for k in range(count)])
            found[x.name].requires_grad_(x.grad and x.kind in ("real", "unit"))
        return found


def namespace() -> dict[str, Any]:
    """What a source may name."""
    return {"torch": torch, "F": F, "nn": nn, "math": math, "run": _run, "put": _put}


def _run(layers: nn.ModuleList, h: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        h = layer(h)
    return h


def _put(x: torch.Tensor, dim: int, begin: int, value: torch.Tensor | float) -> torch.Tensor:
    """A copy whose elements from ``begin`` on are replaced in place."""
    made = x.clone()
    made.narrow(dim, begin, made.shape[dim] - begin).mul_(0.5).add_(value)
    return made


def _give(module: nn.Module, body: Body, seed: int) -> None:
    for spec in body.given:
        if spec.tied:
            setattr(module, spec.name, getattr(module, spec.tied))
        elif spec.name.startswith("b"):
            module.register_buffer(spec.name, spec.drawn(seed))
        else:
            setattr(module, spec.name, nn.Parameter(spec.drawn(seed), requires_grad=spec.grad))
