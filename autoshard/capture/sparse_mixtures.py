"""Mixtures of experts that are written as dense products, of which most rows are zeros.

::

    top, chosen = torch.topk(router(x), k)
    scores = torch.full_like(logits, -inf).scatter_(1, chosen, top).sigmoid()    # 0 where not chosen
    rows = x.repeat(experts, 1) * scores.t().reshape(-1, 1)                      # [experts * tokens, h]
    out = torch.bmm(act(torch.bmm(rows.view(experts, -1, h), up)), down).sum(0)

Rows that are zeros give zeros, and no gradient to anything but constants, as long as only products without
a bias and functions with f(0) = 0 are applied. Then it is a dispatch, products of experts on the rows that
exist, and a combination (`autoshard.ops.experts`). Until the sum, the model is handed tensors of the dense
shapes that stand for the rows; what is not known to keep zeros ends the attempt, and the model is traced as
it is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import autoshard.ops.experts  # noqa: F401 (defines the ops called here)

_ops = torch.ops.autoshard
#: element by element, and 0 for 0
_KEEP_ZERO = frozenset(
    """
    silu gelu relu relu6 tanh mish hardswish leaky_relu elu celu selu softsign abs neg square sign erf sin
    tan atan asinh expm1 log1p clone contiguous to float half bfloat16 double type_as
    """.split()  # noqa: SIM905 - a table reads better than quoted names
)
_SUMS = frozenset(("add", "__add__", "sub", "__sub__"))
_CASTS = frozenset(("to", "float", "half", "bfloat16", "double", "type_as"))
#: of scores; the others give 0 for an infinite negative one
_POINTWISE = _CASTS | {"sigmoid", "exp"}
_RESHAPES = frozenset(("view", "reshape", "transpose", "t"))
_ABOUT = frozenset(("dim", "size", "numel", "is_floating_point", "__get__"))


class NotSparseError(Exception):
    """Rows that are mostly zeros are used in a way that slots have no form for: the trace starts again."""


@dataclass(frozen=True, eq=False)
class _Scores:
    """A tensor with one value for each token and expert, ``rest`` for those that the token did not choose.

    layout: [tokens, experts], [experts, tokens] or [experts * tokens, 1]. plain: the same in the first.
    chosen: experts of every token [tokens, k].
    """

    tensor: torch.Tensor
    layout: Literal["by token", "by expert", "column"]
    plain: torch.Tensor
    chosen: torch.Tensor
    rest: float


@dataclass(frozen=True, eq=False)
class _Mixture:
    chosen: torch.Tensor
    slots: torch.Tensor
    experts: int
    tokens: int


@dataclass(frozen=True, eq=False)
class _Rows:
    """A tensor [experts * tokens, n] or [experts, tokens, n] that the model is handed for rows [s, n]."""

    tensor: torch.Tensor
    rows: torch.Tensor
    of: _Mixture


class SparseMixtures(TorchFunctionMode):
    """Follows scores that are 0 but for the choices of a ``topk`` to products of zero rows."""

    def __init__(self) -> None:
        super().__init__()
        # by identity, with the tensor itself, lest another one gets it
        self._choices: dict[int, torch.Tensor] = {}
        self._constants: dict[int, tuple[torch.Tensor, float]] = {}
        self._scores: dict[int, _Scores] = {}
        self._tiled: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: dict[int, _Rows] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        if self._rows and any(id(t) in self._rows for t in pytree.tree_leaves((args, kwargs))):
            return self._on_rows(func, name, args, kwargs)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:
            return func(*args, **kwargs)
        if name in ("scatter", "scatter_") and id(first) in self._constants:
            return self._scattered(func, args, kwargs)
        if name in ("mul", "__mul__", "__rmul__") and len(args) == 2 and not kwargs:
            made = self._product(*args)
            if made is not None:
                return made
        out = func(*args, **kwargs)
        if name == "topk" and len(args) > 1 and kwargs.get("dim", -1) in (-1, first.dim() - 1):
            self._choices[id(out[1])] = out[1]
        elif name in ("full_like", "zeros_like"):
            given = args[1] if len(args) > 1 else kwargs.get("fill_value")
            value = 0.0 if name == "zeros_like" else given
            if isinstance(value, (int, float)):
                self._constants[id(out)] = out, float(value)
        elif name == "repeat" and first.dim() == 2 and args[2:] == (1,):
            self._tiled[id(out)] = out, first
        elif id(first) in self._scores and (name in _POINTWISE or name in _RESHAPES):
            self._followed(name, self._scores[id(first)], out)
        return out

    def _scattered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        base, rest = self._constants.pop(id(args[0]))
        out: torch.Tensor = func(*args, **kwargs)
        index = args[2] if len(args) == 4 and not kwargs else None
        if base.dim() == 2 and index is not None and id(index) in self._choices and args[1] in (1, -1):
            self._scores[id(out)] = _Scores(out, "by token", out, index, rest)
        return out

    def _followed(self, name: str, scores: _Scores, out: torch.Tensor) -> None:
        """What a function makes of scores, as long as its value for experts that are not chosen is known."""
        experts = scores.plain.shape[1]
        if name in _POINTWISE and scores.layout == "by token":
            rest = scores.rest if name in _CASTS else 0.0 if scores.rest == float("-inf") else float("nan")
            self._scores[id(out)] = _Scores(out, "by token", out, scores.chosen, rest)
        elif name in ("t", "transpose") and scores.layout == "by token":
            self._scores[id(out)] = replace(scores, tensor=out, layout="by expert")
        elif scores.layout == "by expert" and tuple(out.shape) == (experts * len(scores.plain), 1):
            self._scores[id(out)] = replace(scores, tensor=out, layout="column")

    def _product(self, left: Any, right: Any) -> torch.Tensor | None:
        """Tokens times their scores, expert by expert; None for any other product."""
        for x, by in ((left, right), (right, left)):
            tiled, scores = self._tiled.get(id(x)), self._scores.get(id(by))
            if tiled is None or scores is None or scores.rest != 0.0 or scores.layout != "column":
                continue
            tokens, experts = scores.plain.shape
            if len(tiled[1]) != tokens or len(x) != experts * tokens:
                continue
            chosen = _ops.choices(scores.chosen)
            slots = _ops.route(chosen, experts)
            weights = _ops.dispatch_weights(scores.plain.gather(1, scores.chosen), chosen, slots)
            rows = _ops.scale_rows(_ops.dispatch(tiled[1], chosen, slots), weights)
            return self._standing(rows, _Mixture(chosen, slots, experts, tokens), x.shape)
        return None

    def _standing(self, rows: torch.Tensor, of: _Mixture, shape: Any) -> torch.Tensor:
        """A tensor of a dense shape for some rows."""
        made: torch.Tensor = _ops.stands_for(rows, tuple(shape))
        self._rows[id(made)] = _Rows(made, rows, of)
        return made

    def _on_rows(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = self._rows.get(id(args[0])) if args else None
        given = [self._rows[id(t)] for t in pytree.tree_leaves((args, kwargs)) if id(t) in self._rows]
        of = given[0].of
        if name in _ABOUT and first is not None:
            return func(*args, **kwargs)
        if any(g.of is not of for g in given) or first is None:
            raise NotSparseError
        dense = first.tensor.shape
        if name in ("view", "reshape"):
            shape = func(*args, **kwargs).shape
            flat = (of.experts * of.tokens, dense[-1])
            if tuple(shape) not in (flat, (of.experts, of.tokens, dense[-1])):
                raise NotSparseError
            return self._standing(first.rows, of, shape)
        if name in ("bmm", "matmul", "__matmul__") and len(given) == 1 and len(dense) == 3:
            weight = args[1]
            if weight.dim() != 3 or weight.shape[0] != of.experts or kwargs:
                raise NotSparseError
            rows = _ops.expert_mm(first.rows, of.slots, weight, False)
            return self._standing(rows, of, (*dense[:-1], weight.shape[-1]))
        if name in ("chunk", "split"):
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
            if dim not in (-1, len(dense) - 1):
                raise NotSparseError
            parts = func(first.rows, args[1], dim=-1)
            return tuple(self._standing(p, of, (*dense[:-1], p.shape[-1])) for p in parts)
        if name in _SUMS | {"mul", "__mul__"} and len(args) == 2 and not kwargs:
            other = self._rows.get(id(args[1]))
            if other is not None and other.tensor.shape == dense:
                return self._standing(func(first.rows, other.rows), of, dense)
            if isinstance(args[1], (int, float)) and name not in _SUMS:
                return self._standing(func(first.rows, args[1]), of, dense)
        if name in _KEEP_ZERO and len(given) == 1 and not kwargs.get("inplace"):
            out = func(first.rows, *args[1:], **kwargs)
            return self._standing(out, of, dense)
        if name == "sum" and len(dense) == 3 and (args[1:], kwargs) in (((0,), {}), ((), {"dim": 0})):
            made: torch.Tensor = _ops.combine(first.rows, of.chosen, of.slots)
            return made
        raise NotSparseError


def stands_nowhere(graph: fx.Graph) -> bool:
    """Whether nothing that stands for rows is left in a trace."""
    return all(node.target is not _ops.stands_for.default for node in graph.nodes)
