"""Causal depthwise convolutions over a sequence in chunks, each with what its neighbours have at its ends.

A rank with some of the chunks needs nothing else of other ranks: the halo exchange of stencil codes, for
sequences (Dryden et al., "Improving strong-scaling of CNN training", IPDPS 2019, section 3).

x [b, c, t] in n chunks; weight [c, 1, k]; a halo [b, c, n, (k - 1) * dilation]: ``before`` a chunk the last
positions of the one before it, ``after`` it the first gradients of the next; None if there is one chunk. On
all chunks of a rank the convolution runs as it stands, and then takes notice of halos that differ from what
the rank has there: on one device no bit changes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autoshard.torch_adapters.op_library import define


def causal_conv(
    x: torch.Tensor,
    before: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dilation: int = 1,
) -> torch.Tensor:
    """x [b, c, t] -> [b, c, t]: every position of itself and (k - 1) * dilation before it."""
    halo = (weight.shape[-1] - 1) * dilation
    out = F.conv1d(x, weight, bias, padding=halo, dilation=dilation, groups=weight.shape[0])
    out = out[..., : x.shape[-1]]
    if before is not None and x.numel():
        heads = _chunks(out, before)[..., :halo]
        differing = F.pad(before - _tails_before(x, before), (0, halo))
        heads += _depthwise(differing, weight, dilation)
    return out


def causal_conv_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    weight: torch.Tensor,
    dilation: int,
    mask: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x, weight and bias, those of which ``mask`` is True; grad [b, c, t]."""
    channels, halo = weight.shape[0], (weight.shape[-1] - 1) * dilation
    how = [1], [halo], [dilation], False, [0], channels
    of_x, of_weight, of_bias = torch.ops.aten.convolution_backward(
        F.pad(grad, (0, halo)), x, weight, [channels], *how, mask
    )
    if not x.numel():
        return of_x, of_weight, of_bias
    if after is not None and of_x is not None:
        heads = _heads_after(grad, after)
        differing = F.pad(after - heads, (halo, 0))
        _chunks(of_x, after)[..., -halo:] += _depthwise(differing, weight.flip(-1), dilation)
    if before is not None and of_weight is not None:
        differing, heads = before - _tails_before(x, before), _chunks(grad, before)[..., :halo]
        for tap in range(weight.shape[-1] - 1):
            past = tap * dilation
            both = heads[..., : halo - past] * differing[..., past:]
            of_weight[:, 0, tap] += both.sum((0, 2, 3))
    return of_x, of_weight, of_bias


def _depthwise(halos: torch.Tensor, weight: torch.Tensor, dilation: int) -> torch.Tensor:
    """[b, c, n, 2 * halo] -> [b, c, n, halo]."""
    b, c, n, width = halos.shape
    rows = halos.transpose(1, 2).reshape(b * n, c, width)
    out = F.conv1d(rows, weight, dilation=dilation, groups=c)[..., : width // 2]
    return out.reshape(b, n, c, width // 2).transpose(1, 2)


def _chunks(x: torch.Tensor, halos: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (halos.shape[2], -1))


def _tails_before(x: torch.Tensor, halos: torch.Tensor) -> torch.Tensor:
    """What a rank has before each of its chunks, 0 before the first."""
    width = halos.shape[-1]
    return F.pad(_chunks(x, halos)[:, :, :-1, -width:], (0, 0, 1, 0))


def _heads_after(grad: torch.Tensor, halos: torch.Tensor) -> torch.Tensor:
    """What a rank has after each of its chunks, 0 after the last."""
    return F.pad(_chunks(grad, halos)[:, :, 1:, : halos.shape[-1]], (0, 0, 0, 1))


# both run as they stand to tell types and strides
define(
    "causal_conv(Tensor x, Tensor? before, Tensor weight, Tensor? bias, int dilation=1) -> Tensor",
    causal_conv,
    causal_conv,
)
define(
    "causal_conv_backward(Tensor grad, Tensor x, Tensor? before, Tensor? after, Tensor weight, int dilation, "
    "bool[3] mask) -> (Tensor, Tensor, Tensor)",
    causal_conv_backward,
    causal_conv_backward,
)
