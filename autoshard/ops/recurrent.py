"""Recurrent layers (LSTM, GRU, RNN) as one op for all steps in time.

Written out step by step, a layer would make as many decisions as there are steps, all about one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.torch_adapters.autograd_inside import autograd_inside
from autoshard.torch_adapters.op_library import define

LSTM, GRU, TANH, RELU = range(4)
#: rows of the weights for each hidden element
GATES = (4, 3, 1, 1)
_RUN: tuple[Callable[..., Any], ...] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def recurrent(
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    flat: torch.Tensor,
    kind: int,
    bias: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [t, b, i], states h, c [d, b, n] (d directions), all weights in one [m] -> (out [t, b, d * n], h, c).

    kind: LSTM, GRU, TANH or RELU; only an LSTM uses c, of the others the new one is zero.
    """
    if x.shape[1] == 0:
        return x.new_zeros(*x.shape[:2], h.shape[0] * h.shape[2]), torch.zeros_like(h), torch.zeros_like(h)
    weights = _weights(flat, x.shape[2], h.shape[2], kind, bias, h.shape[0])
    states = (h, c) if kind == LSTM else h
    out, *after = _RUN[kind](x, states, weights, bias, 1, 0.0, False, bidirectional, False)
    return out.contiguous(), after[0].clone(), after[1].clone() if kind == LSTM else torch.zeros_like(h)


def _weights(
    flat: torch.Tensor, inputs: int, hidden: int, kind: int, bias: bool, directions: int
) -> list[torch.Tensor]:
    """The weights of each direction: of the input, of the state, and their biases."""
    rows = GATES[kind] * hidden
    shapes: list[tuple[int, ...]] = [(rows, inputs), (rows, hidden), *([(rows,)] * 2 if bias else [])]
    sizes = [torch.Size(s).numel() for s in shapes] * directions
    return [w.view(s) for w, s in zip(flat.split(sizes), shapes * directions, strict=True)]


def recurrent_backward(
    grad_out: torch.Tensor,
    grad_h: torch.Tensor,
    grad_c: torch.Tensor,
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    flat: torch.Tensor,
    kind: int,
    bias: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, h, c and of the weights; the forward is run once more."""
    ends = tuple(t.detach().clone() for t in (x, h, c, flat))
    if x.shape[1] == 0:
        gx, gh, gc, gw = (torch.zeros_like(t) for t in ends)
        return gx, gh, gc, gw
    with autograd_inside():
        for t in ends:
            t.requires_grad_()
        new = recurrent(ends[0], ends[1], ends[2], ends[3], kind, bias, bidirectional)
        used = [(o, g) for o, g in zip(new, (grad_out, grad_h, grad_c), strict=True) if o.requires_grad]
        result = torch.autograd.grad(
            [o for o, _ in used], ends, [g for _, g in used], allow_unused=True, materialize_grads=True
        )
    gx, gh, gc, gw = (t.detach().contiguous() for t in result)
    return gx, gh, gc, gw


def _fake(
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    flat: torch.Tensor,
    kind: int,
    bias: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = x.new_empty(*x.shape[:2], h.shape[0] * h.shape[2])
    return out, h.new_empty(h.shape), h.new_empty(h.shape)


def _fake_backward(
    grad_out: torch.Tensor,
    grad_h: torch.Tensor,
    grad_c: torch.Tensor,
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    flat: torch.Tensor,
    kind: int,
    bias: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), h.new_empty(h.shape), c.new_empty(c.shape), flat.new_empty(flat.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, h, c, flat, *ctx.options = inputs
    ctx.save_for_backward(x, h, c, flat)


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    result = torch.ops.autoshard.recurrent_backward(*grads, *ctx.saved_tensors, *ctx.options)
    return (*result, None, None, None)


_OPTIONS = "int kind, bool bias, bool bidirectional"
define(
    f"recurrent(Tensor x, Tensor h, Tensor c, Tensor flat, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    recurrent,
    _fake,
    backward=_backward,
    save=_save,
)
define(
    "recurrent_backward(Tensor grad_out, Tensor grad_h, Tensor grad_c, Tensor x, Tensor h, Tensor c, "
    f"Tensor flat, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    recurrent_backward,
    _fake_backward,
)


def layers(kind: int, drop: Callable[[torch.Tensor, float, bool], torch.Tensor]) -> Callable[..., Any]:
    """A function with the signature of ``torch.lstm`` (or its like) that runs the op above for each layer.

    drop: called with (x, p, training) between layers. Packed sequences, whose shapes depend on lengths, and
    projections are left to torch.
    """
    plain = _RUN[kind]

    def run(x: torch.Tensor, state: Any, weights: Any, *options: Any, **named: Any) -> Any:
        if not isinstance(weights, Sequence) or len(options) != 6:
            return plain(x, state, weights, *options, **named)
        bias, count, p, training, bidirectional, batch_first = options
        directions = 2 if bidirectional else 1
        each = directions * (4 if bias else 2)
        if x.dim() != 3 or len(weights) != each * count:
            return plain(x, state, weights, *options)
        h, c = state if kind == LSTM else (state, torch.zeros_like(state))
        x = x.transpose(0, 1) if batch_first else x
        ends = []
        for layer in range(count):
            flat = torch.cat([w.reshape(-1) for w in weights[layer * each : (layer + 1) * each]])
            rows = slice(layer * directions, (layer + 1) * directions)
            x, *after = torch.ops.autoshard.recurrent(x, h[rows], c[rows], flat, kind, bias, bidirectional)
            ends.append(after)
            if layer + 1 < count:
                x = drop(x, p, training)
        out = x.transpose(0, 1) if batch_first else x
        states = tuple(torch.cat(parts) for parts in zip(*ends, strict=True))
        return (out, *states) if kind == LSTM else (out, states[0])

    return run
