"""Small networks written by hand in ``torch.nn``, each with its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LABELS = 6


class Loss(nn.Module):
    """A network with a classification loss of its last dim."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.layers(pixel_values), labels)}


class Pointwise(nn.Module):
    """A network with one number per pixel, and a loss that says how far it is off."""

    def __init__(self, loss: nn.Module, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.loss = nn.Sequential(*layers), loss

    def forward(self, pixel_values: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(self.layers(pixel_values), wanted)}


class Joined(nn.Module):
    """What goes in beside what comes out (as in DenseNet and U-Net), at the size of what went in."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if y.shape[-2:] != x.shape[-2:]:
            y = F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return torch.cat((x, y), 1)


def _conv(
    before: int, after: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, **more: Any
) -> nn.Module:
    conv = nn.Conv2d(before, after, 3, padding=1, bias=False, **more)
    return nn.Sequential(conv, norm(after), nn.ReLU())


def _head(channels: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, LABELS)


def vgg() -> nn.Module:
    return Loss(_conv(3, 8), nn.MaxPool2d(2), _conv(8, 16), nn.MaxPool2d(2), _conv(16, 16), *_head(16))


def densenet() -> nn.Module:
    return Loss(_conv(3, 8), Joined(_conv(8, 8)), Joined(_conv(16, 8)), nn.AvgPool2d(2), *_head(24))


def mobilenet() -> nn.Module:
    return Loss(_conv(3, 8), _conv(8, 8, groups=8), nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), *_head(16))


def unet() -> nn.Module:
    down = (nn.MaxPool2d(2), _conv(8, 16), Joined(nn.MaxPool2d(2), _conv(16, 16)), _conv(32, 8))
    return Pointwise(nn.BCEWithLogitsLoss(), _conv(3, 8), Joined(*down), nn.Conv2d(16, 1, 1))


def autoencoder() -> nn.Module:
    def norm(channels: int) -> nn.Module:
        return nn.GroupNorm(2, channels)

    up = nn.ConvTranspose2d(16, 8, 2, stride=2)
    return Pointwise(nn.MSELoss(), _conv(3, 8, norm), _conv(8, 16, norm, stride=2), up, nn.Conv2d(8, 1, 1))


def mixer() -> nn.Module:
    """Patches that are mixed by convolutions over all of them (ConvMixer)."""
    wide = nn.Conv2d(16, 16, 5, padding=2, groups=16)
    return Loss(nn.Conv2d(3, 16, 4, stride=4), nn.GELU(), nn.BatchNorm2d(16), wide, nn.GELU(), *_head(16))


def _act(
    before: int, after: int, size: int = 3, act: type[nn.Module] = nn.ReLU, **more: Any
) -> nn.Sequential:
    conv = nn.Conv2d(before, after, size, padding=size // 2, bias=False, **more)
    return nn.Sequential(conv, nn.BatchNorm2d(after), act())


class Residual(nn.Module):
    """What goes in plus what comes out, through a 1 x 1 convolution if the shapes differ."""

    def __init__(self, before: int, after: int, stride: int, inner: nn.Module, last: nn.Module) -> None:
        super().__init__()
        same = before == after and stride == 1
        short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.inner, self.last, self.short = inner, last, nn.Identity() if same else short

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x) + self.short(x))


class Excite(nn.Module):
    """Channels weighed by a function of their means (squeeze and excitation)."""

    def __init__(self, channels: int, gate: type[nn.Module]) -> None:
        super().__init__()
        inner = (nn.Conv2d(channels, 4, 1), nn.ReLU(), nn.Conv2d(4, channels, 1), gate())
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), *inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale(x)


class Branches(nn.Module):
    """Several networks on one input, side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Function(nn.Module):
    """A function of one tensor as a layer."""

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x)


def _basic(before: int, after: int, stride: int = 1) -> nn.Module:
    second = (nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after))
    inner = nn.Sequential(_act(before, after, stride=stride), *second)
    return Residual(before, after, stride, inner, nn.ReLU())


def resnet() -> nn.Module:
    blocks = (_basic(8, 8), _basic(8, 16, 2), _basic(16, 16))
    return Loss(_act(3, 8, 7, stride=2), nn.MaxPool2d(3, 2, 1), *blocks, *_head(16))


def resnext() -> nn.Module:
    """Bottlenecks with grouped convolutions."""

    def block(before: int, after: int) -> nn.Module:
        last = (nn.Conv2d(8, after, 1, bias=False), nn.BatchNorm2d(after))
        return Residual(
            before, after, 1, nn.Sequential(_act(before, 8, 1), _act(8, 8, groups=4), *last), nn.ReLU()
        )

    return Loss(_act(3, 8), block(8, 16), block(16, 16), *_head(16))


def mobilenet_v3() -> nn.Module:
    """Inverted bottlenecks with depthwise convolutions, squeeze and excitation, hard functions."""

    def block(channels: int) -> nn.Module:
        wide = 2 * channels
        depthwise = _act(wide, wide, 5, nn.Hardswish, groups=wide)
        last = (nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))
        inner = (_act(channels, wide, 1, nn.Hardswish), depthwise, Excite(wide, nn.Hardsigmoid), *last)
        return Residual(channels, channels, 1, nn.Sequential(*inner), nn.Identity())

    return Loss(_act(3, 8, act=nn.Hardswish), block(8), block(8), *_head(8))


def efficientnet() -> nn.Module:
    def block(before: int, after: int, stride: int) -> nn.Module:
        wide = 2 * before
        depthwise = _act(wide, wide, 3, nn.SiLU, groups=wide, stride=stride)
        last = (nn.Conv2d(wide, after, 1, bias=False), nn.BatchNorm2d(after))
        inner = (_act(before, wide, 1, nn.SiLU), depthwise, Excite(wide, nn.Sigmoid), *last)
        return Residual(before, after, stride, nn.Sequential(*inner), nn.Identity())

    return Loss(_act(3, 8, act=nn.SiLU), block(8, 8, 1), block(8, 16, 2), *_head(16))


def shufflenet() -> nn.Module:
    def shuffled(x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            depthwise = (nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8))
            self.branch = nn.Sequential(_act(8, 8, 1), *depthwise, _act(8, 8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, 1)
            return shuffled(torch.cat((left, self.branch(right)), 1))

    return Loss(_act(3, 16), Unit(), Unit(), *_head(16))


def inception() -> nn.Module:
    pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), _act(8, 4, 1))
    block = Branches(_act(8, 4, 1), nn.Sequential(_act(8, 4, 1), _act(4, 8)), _act(8, 4, 5), pooled)
    return Loss(_act(3, 8), block, nn.LocalResponseNorm(3), *_head(20))


def squeezenet() -> nn.Module:
    def fire(before: int) -> nn.Module:
        squeeze = nn.Sequential(nn.Conv2d(before, 4, 1), nn.ReLU())
        expand = Branches(nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1))
        return nn.Sequential(squeeze, expand, nn.ReLU())

    pool = nn.MaxPool2d(3, 2, ceil_mode=True)
    last = (nn.Conv2d(16, LABELS, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Loss(nn.Conv2d(3, 8, 3, padding=1), fire(8), pool, fire(16), *last)


def alexnet() -> nn.Module:
    pool = nn.AdaptiveMaxPool2d(2)
    return Loss(
        nn.Conv2d(3, 8, 5, 2, 2),
        nn.ReLU(),
        pool,
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(),
        nn.Linear(16, LABELS),
    )


def deeplab() -> nn.Module:
    """Dilated convolutions side by side, the mean of the image among them, and upsampling."""

    def pooled(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.mean((2, 3), keepdim=True), size=x.shape[-2:], mode="bilinear")

    parts = (
        _act(8, 8, 1),
        _dilated(8, 8, 2),
        _dilated(8, 8, 3),
        nn.Sequential(Function(pooled), _act(8, 8, 1)),
    )
    up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
    return Pointwise(nn.BCEWithLogitsLoss(), _act(3, 8, stride=2), Branches(*parts), nn.Conv2d(32, 1, 1), up)


def _dilated(before: int, after: int, rate: int) -> nn.Module:
    conv = nn.Conv2d(before, after, 3, padding=rate, dilation=rate, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU())


def pixel_shuffle() -> nn.Module:
    """Super-resolution of a downsampled image (ESPCN)."""
    layers = (nn.AvgPool2d(2), nn.Conv2d(3, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 4, 3, padding=1))
    return Pointwise(nn.SmoothL1Loss(), *layers, nn.PixelShuffle(2))


def style_transfer() -> nn.Module:
    def conv(before: int, after: int, stride: int = 1) -> nn.Module:
        inner = nn.Conv2d(before, after, 3, stride)
        return nn.Sequential(nn.ReflectionPad2d(1), inner, nn.InstanceNorm2d(after, affine=True), nn.ReLU())

    up = nn.Upsample(scale_factor=2, mode="nearest")
    return Pointwise(nn.L1Loss(), conv(3, 8), conv(8, 16, 2), up, conv(16, 8), nn.Conv2d(8, 1, 1))


def generator() -> nn.Module:
    """From one vector to an image by transposed convolutions (DCGAN)."""

    def up(before: int, after: int, *last: nn.Module) -> nn.Module:
        return nn.Sequential(nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False), *last)

    seed = (nn.Flatten(), nn.Linear(192, 64), nn.Unflatten(1, (16, 2, 2)), nn.BatchNorm2d(16), nn.ReLU())
    return Pointwise(
        nn.MSELoss(), *seed, up(16, 8, nn.BatchNorm2d(8), nn.LeakyReLU(0.2)), up(8, 1, nn.Sigmoid())
    )


def fractional_unet() -> nn.Module:
    """Group norms, nearest and bicubic upsampling, PReLU."""
    norm = nn.GroupNorm(4, 8)
    inner = nn.Sequential(
        nn.Conv2d(8, 8, 3, 2, 1), norm, nn.PReLU(8), nn.Upsample(scale_factor=2, mode="bicubic")
    )
    return Pointwise(nn.HuberLoss(), nn.Conv2d(3, 8, 3, padding=1), Joined(inner), nn.Conv2d(16, 1, 1))


class Sequences(nn.Module):
    """A network on sequences [batch, time, 8], and a loss of its mean over time."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(width, LABELS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.inner(x)
        out = out[0] if isinstance(out, tuple) else out
        return {"loss": F.cross_entropy(self.head(out.mean(1)), labels)}


def temporal_convolutions() -> nn.Module:
    """Causal dilated convolutions over time with weight norm (TCN), gated (WaveNet)."""

    def conv(before: int, after: int, rate: int) -> nn.Module:
        inner = nn.utils.parametrizations.weight_norm(nn.Conv1d(before, after, 3, dilation=rate))
        return nn.Sequential(nn.ConstantPad1d((2 * rate, 0), 0.0), inner)

    turned = Function(lambda x: x.transpose(1, 2))
    return Sequences(nn.Sequential(turned, conv(8, 32, 1), nn.GLU(1), conv(16, 16, 2), nn.ReLU(), turned), 16)


def lstm() -> nn.Module:
    return Sequences(nn.LSTM(8, 16, num_layers=2, batch_first=True, bidirectional=True), 32)


def gru() -> nn.Module:
    return Sequences(nn.GRU(8, 16, batch_first=True), 16)


def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return Sequences(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 8)


class Translator(nn.Module):
    """``nn.Transformer`` with token embeddings and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.core = nn.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.head(self.core(self.embed(source), self.embed(target), tgt_mask=mask))
        return {"loss": F.cross_entropy(out.flatten(0, 1), target.flatten())}


class Recogniser(nn.Module):
    """Convolutions, a recurrent layer and CTC (CRNN)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(_act(3, 8), nn.MaxPool2d((2, 1)))
        self.lstm, self.head = nn.LSTM(32, 8, batch_first=True), nn.Linear(8, LABELS)

    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = self.conv(pixel_values).permute(0, 3, 1, 2).flatten(2)
        scores = self.head(self.lstm(x)[0]).log_softmax(-1).transpose(0, 1)
        frames = torch.full_like(lengths, scores.shape[0])
        return {"loss": F.ctc_loss(scores, labels, frames, lengths)}


def video() -> nn.Module:
    """Convolutions over time and space."""
    conv = nn.Conv3d(3, 8, 3, padding=1, bias=False)
    last = (nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, LABELS))
    return Loss(
        conv,
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 8, (1, 3, 3), padding=(0, 1, 1)),
        *last,
    )


class Pyramid(nn.Module):
    """Features of three sizes, added from the top down (FPN), with a head shared by all."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList((_act(3, 8), _act(8, 16, stride=2), _act(16, 24, stride=2)))
        self.sides = nn.ModuleList(nn.Conv2d(c, 8, 1) for c in (8, 16, 24))
        self.head = nn.Conv2d(8, LABELS, 3, padding=1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        features, x = [], pixel_values
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        top, scores = None, pixel_values.new_zeros(len(labels), LABELS)
        for side, feature in zip(reversed(self.sides), reversed(features), strict=True):
            own = side(feature)
            top = own if top is None else own + F.interpolate(top, size=own.shape[-2:], mode="nearest")
            scores = scores + self.head(top).amax((2, 3))
        return {"loss": F.cross_entropy(scores, labels)}


class Points(nn.Module):
    """Every point alone, then the largest of all (PointNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 1))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, LABELS))

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.head(self.each(points).max(2).values), labels)}


class Graphs(nn.Module):
    """Sums over the neighbours in a graph (GCN)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, LABELS)

    def forward(
        self, nodes: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        def summed(x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])

        return {"loss": F.cross_entropy(self.second(summed(self.first(nodes)).relu()), labels)}


class Clicks(nn.Module):
    """Dense and looked-up features with their products (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 8) for n in (32, 24, 17))
        self.dense, self.head = nn.Linear(6, 8), nn.Linear(14, 1)

    def forward(
        self, dense: torch.Tensor, sparse: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        found = [table(sparse[:, k]) for k, table in enumerate(self.tables)]
        all_ = torch.stack((self.dense(dense), *found), 1)
        products = all_ @ all_.transpose(1, 2)
        above = torch.triu_indices(4, 4, 1)
        wide = torch.cat((all_[:, 0], products[:, above[0], above[1]]), 1)
        return {"loss": F.binary_cross_entropy_with_logits(self.head(wide)[:, 0], labels)}


class Diffusion(nn.Module):
    """A U-Net with time embeddings, group norms and attention over pixels that says what noise was added."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.into, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2, 1)
        self.norm, self.attention = nn.GroupNorm(4, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.out = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(32, 3, 3, padding=1)

    def forward(
        self, noisy: torch.Tensor, noise: torch.Tensor, step: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        angles = step[:, None] * torch.exp(-torch.arange(4, device=step.device) * 0.5)
        time = self.time(torch.cat((angles.sin(), angles.cos()), -1))
        wide = self.into(noisy) + time[:, :, None, None]
        x = self.norm(self.down(wide)).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.up(x.transpose(1, 2).unflatten(2, (4, 4)))
        return {"loss": F.mse_loss(self.out(torch.cat((x, wide), 1)), noise)}


class Twins(nn.Module):
    """Two inputs through one network, compared by the cosine of their angle."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, left: torch.Tensor, right: torch.Tensor, same: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cosine_embedding_loss(self.net(left), self.net(right), same, margin=0.1)}
