"""Models captured once per size, and scaled to the batch of a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isclose

import torch
from torch import nn

from autoshard.capture.capture import capture
from autoshard.ir import Arg, Folded, Graph, Node, TensorType, refs_of
from autoshard.planner.analysis import Analysis, analyse
from autoshard.rules.core import Factored
from autoshard.search.problem.problem import Model
from autoshard.search.problem.rescale_batch import NotRescalable, with_batch

#: sequences of the capture that stands for every batch but 1
_CAPTURED = 16


@dataclass(frozen=True)
class Scaled:
    """A model at one batch, ready for the passes. analysis: of the capture it comes from."""

    model: Model
    analysis: Analysis


class Captures:
    """Captures of one model, made when they are first needed. build: the model and its inputs for a batch."""

    def __init__(self, build: Callable[[int], tuple[nn.Module, dict[str, torch.Tensor]]]) -> None:
        self._build = build
        self._analyses: dict[int, Analysis] = {}
        self._scaled: dict[int, Scaled] = {}

    def at(self, batch: int) -> Scaled:
        """The model with ``batch`` sequences; captured anew where it cannot be scaled."""
        if batch not in self._scaled:
            self._scaled[batch] = self._made(batch)
        return self._scaled[batch]

    def _made(self, batch: int) -> Scaled:
        if batch > 1:
            base = self._analysis(_CAPTURED)
            try:
                return Scaled(_with_arguments(base, with_batch(base.model, batch)), base)
            except NotRescalable:
                pass  # captured at its own batch, which costs time and nothing else
        own = self._analysis(batch)
        return Scaled(own.model, own)

    def _analysis(self, batch: int) -> Analysis:
        if batch not in self._analyses:
            model, inputs = self._build(batch)
            self._analyses[batch] = analyse(capture(model, (), inputs))
        return self._analyses[batch]


def _with_arguments(base: Analysis, scaled: Model) -> Model:
    """A scaled model whose calls hold the new sizes, too. Raises NotRebatchable where one is not understood.

    A tuple of numbers that is the shape of what the call made becomes the new shape; then every op's rule is
    found again from its arguments and must be the scaled one.
    """
    old = base.folded.segments
    segments = {name: _graph(old[name], graph) for name, graph in scaled.folded.segments.items()}
    folded = Folded(segments, scaled.folded.calls, scaled.folded.joint)
    rules: dict[tuple[str, int], Factored] = {}
    for name, graph in segments.items():
        types = graph.types()
        for number, node in enumerate(graph.nodes):
            rule = base.table[node.op](node, [types[r] for r in refs_of(node)])
            if not _alike(rule, scaled.rules[name, number]):
                raise NotRescalable(f"{node.op} has sizes that do not scale")
            rules[name, number] = rule
    return replace(scaled, folded=folded, rules=rules)


def _alike(one: Factored, scaled: Factored) -> bool:
    same = replace(one, local=None, flops=0.0) == replace(scaled, local=None, flops=0.0)
    return same and isclose(one.flops, scaled.flops, rel_tol=1e-9)


def _graph(old: Graph, new: Graph) -> Graph:
    nodes = tuple(_node(a, b) for a, b in zip(old.nodes, new.nodes, strict=True))
    return Graph(new.name, new.inputs, nodes, new.outputs)


def _node(old: Node, new: Node) -> Node:
    shapes = {a.shape: b.shape for a, b in _changed(old, new)}
    if not shapes:
        return new
    args = tuple(_argument(arg, shapes) for arg in new.args)
    kwargs = tuple((key, _argument(value, shapes)) for key, value in new.kwargs)
    return Node(new.op, args, kwargs, new.outs, new.types, new.origin, new.backward)


def _changed(old: Node, new: Node) -> Iterator[tuple[TensorType, TensorType]]:
    for a, b in zip(old.types, new.types, strict=True):
        if a is not None and b is not None and a.shape != b.shape:
            yield a, b


def _argument(arg: Arg, shapes: dict[tuple[int, ...], tuple[int, ...]]) -> Arg:
    return shapes.get(arg, arg) if isinstance(arg, tuple) else arg
