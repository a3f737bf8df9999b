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
from typing import Any, Generic, Literal, TypeVar

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
    """Of a tensor with one value for each token and expert, ``rest`` for those that the token did not choose.

    layout: [tokens, experts], [experts, tokens] or [experts * tokens, 1]. plain: the same in the first.
    chosen: experts of every token [tokens, k].
    """

    layout: Literal["by token", "by expert", "column"]
    plain: torch.Tensor
    chosen: torch.Tensor
    rest: float


T = TypeVar("T")


class _Notes(Generic[T]):
    """What is known of tensors, as long as nothing changes them in place, or a view of them."""

    def __init__(self) -> None:
        # with the tensor itself, lest another one gets its identity
        self._of: dict[int, tuple[torch.Tensor, int, T]] = {}

    def __setitem__(self, tensor: torch.Tensor, note: T) -> None:
        self._of[id(tensor)] = tensor, tensor._version, note

    def get(self, tensor: object) -> T | None:
        known = self._of.get(id(tensor))
        return known[2] if known is not None and known[0]._version == known[1] else None


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
        self._choices: _Notes[int] = _Notes()
        self._constants: _Notes[float] = _Notes()
        self._scores: _Notes[_Scores] = _Notes()
        self._tiled: _Notes[torch.Tensor] = _Notes()
        self._tokens: _Notes[bool] = _Notes()
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
        if name in ("scatter", "scatter_") and self._constants.get(first) is not None:
            return self._scattered(func, args, kwargs)
        if name in ("mul", "__mul__", "__rmul__") and len(args) == 2 and not kwargs:
            new = self._product(*args)
            if new is not None:
                return new
        out = func(*args, **kwargs)
        if name == "topk" and (args[2] if len(args) > 2 else kwargs.get("dim", -1)) in (-1, first.dim() - 1):
            self._choices[out[1]] = first.shape[-1]
        elif name in ("full_like", "zeros_like"):
            given = args[1] if len(args) > 1 else kwargs.get("fill_value")
            value = 0.0 if name == "zeros_like" else given
            if isinstance(value, (int, float)):
                self._constants[out] = float(value)
        elif name == "repeat" and first.dim() == 2 and args[2:] == (1,):
            self._tiled[out], self._tokens[first] = first, True
        elif name in _POINTWISE or name in _RESHAPES:
            scores = self._scores.get(first)
            if scores is not None:
                self._followed(name, scores, out)
        return out

    def _scattered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        rest = self._constants.get(args[0])
        index = args[2] if len(args) == 4 and not kwargs else None
        chosen = args[0].dim() == 2 and args[1] in (1, -1) and self._choices.get(index) == args[0].shape[1]
        out: torch.Tensor = func(*args, **kwargs)
        if chosen and index is not None and rest is not None:
            self._scores[out] = _Scores("by token", out, index, rest)
        return out

    def _followed(self, name: str, scores: _Scores, out: torch.Tensor) -> None:
        """What a function makes of scores, as long as its value for experts that are not chosen is known."""
        experts = scores.plain.shape[1]
        if name in _POINTWISE and scores.layout == "by token":
            rest = scores.rest if name in _CASTS else 0.0 if scores.rest == float("-inf") else float("nan")
            self._scores[out] = _Scores("by token", out, scores.chosen, rest)
        elif name in ("t", "transpose") and scores.layout == "by token":
            self._scores[out] = replace(scores, layout="by expert")
        elif scores.layout == "by expert" and tuple(out.shape) == (experts * len(scores.plain), 1):
            self._scores[out] = replace(scores, layout="column")

    def _product(self, left: Any, right: Any) -> torch.Tensor | None:
        """Tokens times their scores, expert by expert; None for any other product."""
        for x, by in ((left, right), (right, left)):
            x_of, scores = self._tiled.get(x), self._scores.get(by)
            if x_of is None or scores is None or scores.rest != 0.0 or scores.layout != "column":
                continue
            tokens, experts = scores.plain.shape
            if len(x_of) != tokens or len(x) != experts * tokens or not self._unchanged(x_of, scores):
                continue
            chosen = _ops.choices(scores.chosen)
            slots = _ops.route(chosen, experts)
            weights = _ops.dispatch_weights(scores.plain.gather(1, scores.chosen), chosen, slots)
            rows = _ops.scale_rows(_ops.dispatch(x_of, chosen, slots), weights)
            return self._standing(rows, _Mixture(chosen, slots, experts, tokens), x.shape)
        return None

    def _unchanged(self, tokens: torch.Tensor, scores: _Scores) -> bool:
        """Whether what the dense rows were made of still is as it was."""
        known = self._tokens.get(tokens), self._choices.get(scores.chosen), self._scores.get(scores.plain)
        return None not in known

    def _standing(self, rows: torch.Tensor, of: _Mixture, shape: Any) -> torch.Tensor:
        """A tensor of a dense shape for some rows."""
        new: torch.Tensor = _ops.stands_for(rows, tuple(shape))
        self._rows[id(new)] = _Rows(new, rows, of)
        return new

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
            new: torch.Tensor = _ops.combine(first.rows, of.chosen, of.slots)
            return new
        raise NotSparseError


def stands_nowhere(graph: fx.Graph) -> bool:
    """Whether nothing that stands for rows is left in a trace."""
    return all(node.target is not _ops.stands_for.default for node in graph.nodes)
