"""Calls of torch that become our ops while a model is traced.

A ``TorchFunctionMode`` sees every torch function the model calls, however it was imported. Functions
of ``torch.nn.functional`` that call others inside (multi-head attention) hide those calls from a mode,
so the names in that module are replaced as well for the time of the trace.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import autoshard.ops.dropout
import autoshard.ops.loss  # noqa: F401 (these two define ops called here)
from autoshard.errors import CaptureError
from autoshard.ops import recurrent
from autoshard.ops.attention import repeat_heads
from autoshard.ops.bags import embedding_bag
from autoshard.ops.ctc import ctc_loss, masked_select
from autoshard.ops.draws import Draws
from autoshard.ops.flex_attention import flex_attention
from autoshard.ops.masked import setitem
from autoshard.ops.unchecked import corrcoef, cosine_similarity, cov, gaussian_nll_loss
from autoshard.ops.windows import as_strided
from autoshard.ops.written_out import diag, fill_diagonal, multilabel_margin_loss, take
from autoshard.torch_adapters.flex import attention_ops, refuses_gradients
from autoshard.torch_adapters.modes import is_users

Function = Callable[..., Any]

_SDPA: Function = F.scaled_dot_product_attention
_DROPOUT: Function = F.dropout
_CROSS_ENTROPY: Function = F.cross_entropy
#: one element of each channel, to index with
_CHANNELS: tuple[slice, ...] = (slice(None), slice(None), *[slice(0, 1)] * 8)
#: scale times alpha of SELU
_SATURATION = 1.7580993408473766


class Lifter:
    """Our versions of torch functions, for one run of a model.

    seed: int64 scalar tensor that all dropout masks depend on. sites: dropout calls so far. like_queries:
    whether attention of dense queries is dense, as torch's is on the CPU; on a GPU it lies by positions. A
    model written for either may take views that the other does not allow.
    """

    def __init__(self, seed: torch.Tensor, *, like_queries: bool = False) -> None:
        self.seed, self.like_queries = seed, like_queries
        self.sites = 0
        #: by identity: tensors of the call that nothing was asked of yet, and what they are
        self.unread: dict[int, str] = {}

    def reads(self, given: object) -> None:
        """Arguments of a function."""
        for value in given if isinstance(given, tuple | list) else (given,):
            if isinstance(value, tuple | list):
                self.reads(value)
            elif isinstance(value, torch.Tensor):
                self.unread.pop(id(value), None)

    def table(self) -> dict[Function, Function]:
        """What to call in place of what; signatures are those of torch."""
        return {
            _SDPA: self.sdpa,
            _DROPOUT: self.dropout,
            torch.dropout: self.dropout_c,
            torch.dropout_: self.dropout_c_,
            torch.native_dropout: self.native_dropout,
            F.dropout1d: _of_channels(self.feature_dropout, 2),
            F.dropout2d: _of_channels(self.feature_dropout, 0),
            F.dropout3d: _of_channels(self.feature_dropout, 4),
            torch.feature_dropout: self.feature_dropout,
            F.alpha_dropout: self.alpha_dropout,
            torch.alpha_dropout: self.alpha_dropout,
            F.feature_alpha_dropout: self.feature_alpha_dropout,
            torch.feature_alpha_dropout: self.feature_alpha_dropout,
            _CROSS_ENTROPY: self.cross_entropy,
            F.ctc_loss: ctc_loss,
            F.cosine_similarity: cosine_similarity,
            F.embedding_bag: embedding_bag,
            F.gaussian_nll_loss: gaussian_nll_loss,
            F.multilabel_margin_loss: multilabel_margin_loss,
            torch.diag: diag,
            torch.Tensor.diag: diag,
            torch.Tensor.fill_diagonal_: fill_diagonal,
            torch.take: take,
            torch.Tensor.take: take,
            torch.cov: cov,
            torch.Tensor.cov: cov,
            torch.corrcoef: corrcoef,
            torch.Tensor.corrcoef: corrcoef,
            torch.lstm: recurrent.layers(recurrent.LSTM, self.dropout),
            torch.gru: recurrent.layers(recurrent.GRU, self.dropout),
            torch.rnn_tanh: recurrent.layers(recurrent.TANH, self.dropout),
            torch.rnn_relu: recurrent.layers(recurrent.RELU, self.dropout),
            torch.masked_select: masked_select,
            torch.Tensor.masked_select: masked_select,
            **Draws(self._drop).table(),
            torch.Tensor.__setitem__: setitem,
            **dict.fromkeys(attention_ops(), flex_attention),
            torch.as_strided: as_strided,
            torch.Tensor.as_strided: as_strided,
            # torch 2.13 has it; chunks of it are for memory, which tiles save as well
            **({F.linear_cross_entropy: _in_one} if hasattr(F, "linear_cross_entropy") else {}),
        }

    def _drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        site, self.sites = self.sites, self.sites + 1
        with torch._C.DisableTorchFunction():  # of rows that a mask chose: all of them
            shape = list(x.shape)
        dropped = torch.ops.autoshard.dropout(x, p, self.seed, site, [0] * len(shape), shape)
        return cast(torch.Tensor, dropped)

    def dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not 0.0 < p <= 1.0 or not training or not input.is_floating_point():
            return cast(torch.Tensor, _DROPOUT(input, p, training, inplace))
        out = self._drop(input, float(p)) if p < 1.0 else torch.zeros_like(input)
        return input.copy_(out) if inplace else out

    def dropout_c(self, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return self.dropout(input, p, train)

    def dropout_c_(self, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return self.dropout(input, p, train, True)

    def native_dropout(
        self, input: torch.Tensor, p: float, train: bool | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0.0 < p < 1.0 or train is False:
            return torch.native_dropout(input, p, train)
        out = self._drop(input, float(p))
        self.sites -= 1  # the mask is that of the same call
        return out, self._drop(torch.ones_like(input.detach()), float(p)) != 0

    def feature_dropout(self, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        """Full channels of [n, c, ...] are dropped."""
        if not train or p == 0.0:
            return input
        return input * self.dropout(torch.ones_like(input[_CHANNELS[: input.dim()]]), p)

    def alpha_dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> torch.Tensor:
        """What is dropped is set to the value that SELU saturates at; mean and variance are kept (Klambauer
        et al., "Self-normalizing neural networks", 2017, section 3)."""
        return self._alpha(input, torch.ones_like(input), p, training, inplace)

    def feature_alpha_dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> torch.Tensor:
        """The same of full channels."""
        return self._alpha(input, torch.ones_like(input[_CHANNELS[: input.dim()]]), p, training, inplace)

    def _alpha(
        self, input: torch.Tensor, ones: torch.Tensor, p: float, training: bool, inplace: bool
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        if p == 1.0:
            out = torch.zeros_like(input)
        else:
            kept = (self.dropout(ones, p) != 0).to(input.dtype)
            scale = 1.0 / math.sqrt((_SATURATION**2 * p + 1) * (1 - p))
            out = input * (kept * scale) + ((kept - 1) * (_SATURATION * scale) + _SATURATION * scale * p)
        return input.copy_(out) if inplace else out

    def sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        query, key, value = _autocast(query, key, value)
        ours = (
            query.dim() == key.dim() == value.dim() == 4
            and query.dtype == key.dtype == value.dtype
            and query.is_floating_point()
            and not (is_causal and attn_mask is not None)
            and (attn_mask is None or attn_mask.dtype == torch.bool or attn_mask.is_floating_point())
        )
        if ours and enable_gqa:
            key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
            enable_gqa = False
        if ours and (query.shape[:2] != key.shape[:2] or query.shape[:2] != value.shape[:2]):
            query, key, value = _same_batch(query, key, value)
        factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        if ours and dropout_p > 0.0:
            return self._sdpa_with_dropout(query, key, value, attn_mask, dropout_p, is_causal, factor)
        if not ours or (attn_mask is not None and attn_mask.requires_grad):
            return cast(
                torch.Tensor,
                _SDPA(
                    query,
                    key,
                    value,
                    attn_mask=attn_mask,
                    dropout_p=dropout_p,
                    is_causal=is_causal,
                    scale=scale,
                    enable_gqa=enable_gqa,
                ),
            )
        out, _ = torch.ops.autoshard.sdpa(query, key, value, attn_mask, bool(is_causal), factor)
        dense = self.like_queries and query.is_contiguous()
        return cast(torch.Tensor, out.contiguous() if dense else out)

    def _sdpa_with_dropout(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        p: float,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        """Attention written out; rows where everything is masked give zeros, as torch's do."""
        scores = (query * scale) @ key.transpose(-2, -1)
        if causal:
            s, t = scores.shape[-2:]
            mask = torch.ones((s, t), dtype=torch.bool, device=scores.device).tril()
        if mask is None:
            weights = torch.softmax(scores, -1)
        elif mask.dtype == torch.bool:
            weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
            if not causal:
                weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        else:
            weights = torch._safe_softmax(scores + mask, -1)
        return self.dropout(weights, p) @ value

    def cross_entropy(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        ours = (
            input.dim() == 2
            and target.dim() == 1
            and input.is_floating_point()
            and target.dtype == torch.int64
            and input.shape[0] == target.shape[0]
            and weight is None
            and size_average is None
            and reduce is None
            and reduction in ("mean", "sum", "none")
            and 0.0 <= label_smoothing <= 1.0
        )
        if not ours:
            result = _CROSS_ENTROPY(
                input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
            return cast(torch.Tensor, result)
        if torch.is_autocast_enabled("cpu") and input.dtype != torch.float64:  # which autocast leaves alone
            input = input.float()
        rows, _ = torch.ops.autoshard.xent(input, target, ignore_index, float(label_smoothing))
        if reduction == "none":
            return cast(torch.Tensor, rows)
        if reduction == "sum":
            return cast(torch.Tensor, rows.sum())
        return cast(torch.Tensor, rows.sum() / (target != ignore_index).sum())


def _of_channels(drop: Callable[..., torch.Tensor], unbatched: int) -> Function:
    """A function of ``torch.nn.functional``. unbatched: dims of a sample that is alone, 0 for none."""

    def run(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        alone = input.dim() == unbatched
        out = drop(input.unsqueeze(0) if alone else input, p, training)
        out = out.squeeze(0) if alone else out
        return input.copy_(out) if inplace else out

    return run


def _in_one(*args: Any, options: Any = None, **rest: Any) -> torch.Tensor:
    return F.linear_cross_entropy(*args, **rest)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors in the type that autocast would give attention."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _same_batch(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Batch and heads broadcast against each other."""
    lead = torch.broadcast_shapes(*(t.shape[:2] for t in tensors))
    return tuple(t.expand(*lead, *t.shape[2:]) for t in tensors)


#: attributes of tensors that depend on whether gradients are recorded
_GRAD_GETTERS = (torch.Tensor.requires_grad, torch.Tensor.is_leaf, torch.Tensor.grad_fn)


class LiftMode(TorchFunctionMode):
    """Replaces functions and tells ``at`` the frame that calls each of them.

    asked_grad: called where the model's code reads an attribute that depends on whether gradients are
    recorded.
    """

    def __init__(
        self,
        lifter: Lifter,
        at: Callable[[FrameType | None], None],
        asked_grad: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._asked_grad = asked_grad
        self._lifter, self._table = lifter, lifter.table()
        self._at = at
        self._around = torch.is_autocast_enabled("cuda")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame = _frame()
        self._at(frame)
        if self._asked_grad is not None and _asks_for_gradients(func, frame):
            self._asked_grad()
        if torch.is_autocast_enabled("cuda") and not self._around:
            raise CaptureError(
                "the model's code enters torch.autocast for cuda",
                why="models are captured on the CPU, where it would be without effect",
                hint="torch.autocast(x.device.type, ...) with a tensor's device, or cast explicitly",
            )
        if refuses_gradients(func, frame):
            return False
        kwargs = kwargs or {}
        if self._lifter.unread:
            self._lifter.reads((args, tuple(kwargs.values())))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return self._table.get(func, func)(*args, **kwargs)


def _asks_for_gradients(func: Any, frame: FrameType) -> bool:
    """Whether code that is not torch's reads an attribute that depends on gradients being recorded."""
    return getattr(func, "__self__", None) in _GRAD_GETTERS and is_users(frame)


def _frame() -> FrameType:
    """The frame that called the function that asks."""
    return sys._getframe(2)


@contextmanager
def lifting(
    lifter: Lifter, at: Callable[[FrameType | None], None], asked_grad: Callable[[], None] | None = None
) -> Iterator[None]:
    """Replace the functions of ``lifter.table()`` for code that runs inside. asked_grad: see `LiftMode`."""
    names: dict[str, Function] = {name: getattr(F, name) for name in _NAMES}
    table = lifter.table()

    def entry(fn: Function) -> Function:
        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            at(_frame())
            return fn(*args, **kwargs)

        return call

    for name, fn in names.items():
        setattr(F, name, entry(table[fn]))
    try:
        with LiftMode(lifter, at, asked_grad):
            yield
    finally:
        for name, fn in names.items():
            setattr(F, name, fn)


_NAMES = ("scaled_dot_product_attention", "dropout", "cross_entropy")
