"""The connectionist temporal classification loss (Graves et al. 2006), with its gradient at once.

Torch's own op takes lengths as Python numbers, which a graph does not have.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.torch_adapters.op_library import define


def ctc(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    counted: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_probs [t, b, c], targets [b, s], lengths [b] -> (loss of each row [b], its gradient [t, b, c]).

    counted: [b, s], which targets there are, wherever they stand in their row. Raises ValueError if they
    are not as many as ``target_lengths`` says.
    """
    if log_probs.shape[1] == 0:
        return log_probs.new_empty(0), torch.empty_like(log_probs)
    if not torch.equal(counted.sum(1), target_lengths.to(torch.int64)):
        raise ValueError("the lengths of the targets are not the numbers of targets selected in each row")
    order = torch.argsort((~counted).to(torch.int8), dim=1, stable=True)
    rows = targets.gather(1, order)
    frames, labels = input_lengths.tolist(), target_lengths.tolist()
    with torch.no_grad():
        loss, alpha = torch.ops.aten._ctc_loss(log_probs, rows, frames, labels, blank, zero_infinity)
        ones = torch.ones_like(loss)
        grad = torch.ops.aten._ctc_loss_backward(
            ones, log_probs, rows, frames, labels, loss, alpha, blank, zero_infinity
        )
        if zero_infinity:
            loss = torch.where(loss == torch.inf, torch.zeros_like(loss), loss)
    return loss, grad


def _fake(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    counted: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(log_probs.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_rows: torch.Tensor | None, grad_grad: object) -> tuple[Any, ...]:
    if grad_rows is None:
        return (None,) * 7
    (grad,) = ctx.saved_tensors
    return (grad_rows[None, :, None] * grad, *(None,) * 6)


define(
    "ctc(Tensor log_probs, Tensor targets, Tensor counted, Tensor input_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity) -> (Tensor, Tensor)",
    ctc,
    _fake,
    backward=_backward,
    save=_save,
    waits=True,
)


#: not torch.masked_select, which is replaced while a model is traced
_SELECT = torch.ops.aten.masked_select.default


class Selected:
    """``labels.masked_select(mask)`` of rows, before anything needs it as a tensor.

    Its shape depends on values; the loss above does not need it, anything else gets torch's own result.
    """

    def __init__(self, labels: torch.Tensor, mask: torch.Tensor) -> None:
        self.labels, self.mask = labels, mask

    def __getattr__(self, name: str) -> Any:
        return getattr(_SELECT(self.labels, self.mask), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def plain(value: Any) -> Any:
            return _SELECT(value.labels, value.mask) if isinstance(value, Selected) else value

        return func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})


def masked_select(input: torch.Tensor, mask: torch.Tensor) -> Any:
    """``torch.masked_select``, put off for rows of labels."""
    rows = input.dim() == 2 and input.dtype in (torch.int32, torch.int64) and input.shape == mask.shape
    return Selected(input, mask) if rows else _SELECT(input, mask)


def _rows(targets: Any, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(targets [b, s], which of them count), or None if they are all in one row."""
    if isinstance(targets, Selected):
        return targets.labels, targets.mask
    if targets.dim() != 2:
        return None
    return targets, torch.arange(targets.shape[1])[None, :] < lengths[:, None]


def ctc_loss(
    log_probs: torch.Tensor,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.ctc_loss`` by the op above, where the targets are rows of their own."""
    frames, labels = _lengths(input_lengths), _lengths(target_lengths)
    rows = _rows(targets, labels) if log_probs.dim() == 3 else None
    if rows is None or rows[0].shape[1] == 0 or reduction not in ("mean", "sum", "none"):
        loss: torch.Tensor = torch.nn.functional.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
        return loss
    loss, _ = torch.ops.autoshard.ctc(log_probs, *rows, frames, labels, blank, zero_infinity)
    if reduction == "mean":
        return (loss / labels.clamp_min(1).to(loss.dtype)).mean()
    return loss.sum() if reduction == "sum" else loss


def _lengths(lengths: Any) -> torch.Tensor:
    return lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)
