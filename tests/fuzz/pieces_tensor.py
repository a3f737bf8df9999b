"""Structure, in-place ops, dtypes, buffers, and functions of the user's own."""

from __future__ import annotations

from fuzz.piece import Piece, pieces

_STRAIGHT = """
class Straight$(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()
    @staticmethod
    def backward(ctx, grad):
        return 3 * grad
"""
_PENALTY = """
leaf = h if h.requires_grad else h.detach().requires_grad_()
with torch.enable_grad():
    slope, = torch.autograd.grad(leaf.pow(3).sum(), leaf, create_graph=True)
h = h + slope
"""

STRUCTURE = pieces(
    Piece("tied", "h = self.tied$(h)", "self.tied$ = nn.Linear(D, D)\nself.tied$.weight = self.lin.weight"),
    Piece("shared", "h = self.twin$(torch.tanh(h))", "self.twin$ = self.lin"),
    Piece("called twice", "h = self.lin(torch.tanh(self.lin(h)))"),
    Piece("never called", init="self.idle$ = nn.Linear(D, D)"),
    Piece(
        "no bias in one layer",
        "h = self.part$(h)",
        "self.part$ = nn.Linear(D, D, bias=k != 1)",
    ),
    Piece(
        "ParameterList",
        "h = h * self.many$[0] + self.many$[1]",
        "self.many$ = nn.ParameterList([nn.Parameter(torch.full((D,), 1.5)), torch.zeros(D)])",
    ),
    Piece(
        "ParameterDict",
        'h = h * self.named$["a"]',
        'self.named$ = nn.ParameterDict({"a": torch.full((D,), 1.5), "b": torch.ones(2)})',
    ),
    Piece(
        "ModuleDict",
        "for name in self.parts$:\n    h = self.parts$[name](h)",
        'self.parts$ = nn.ModuleDict({"b": nn.Linear(D, D), "a": nn.Tanh()})',
    ),
    Piece(
        "Sequential slice",
        "h = self.row$[:2](h) + self.row$[-1](h)",
        "self.row$ = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))",
    ),
    Piece(
        "weight_norm",
        "h = self.normed$(h)",
        "self.normed$ = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))",
    ),
    Piece(
        "spectral_norm",
        "h = self.spectral$(h)",
        "self.spectral$ = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))",
    ),
    Piece(
        "parametrization",
        "h = self.own$(h)",
        "self.own$ = nn.Linear(D, D)\n"
        "nn.utils.parametrize.register_parametrization(self.own$, 'weight', Skew$())",
        "class Skew$(nn.Module):\n    def forward(self, x):\n        return x.triu() - x.triu().mT",
    ),
    Piece("old weight_norm", "h = self.hooked$(h)", "self.hooked$ = nn.utils.weight_norm(nn.Linear(D, D))"),
    Piece("custom Function", "h = h + Straight$.apply(h)", top=_STRAIGHT),
    Piece("gradient in forward", _PENALTY),
    Piece("checkpoint", "h = torch.utils.checkpoint.checkpoint(self.lin, h, use_reentrant=False)"),
    Piece("reentrant checkpoint", "h = torch.utils.checkpoint.checkpoint(self.lin, h, use_reentrant=True)"),
    Piece("LayerNorm", "h = self.norm$(h)", "self.norm$ = nn.LayerNorm(D)"),
    Piece(
        "attention",
        "h = h + self.attn$(h, h, h, need_weights=False)[0]",
        "self.attn$ = nn.MultiheadAttention(D, 2, batch_first=True)",
    ),
    Piece(
        "encoder layer",
        "h = self.encoder$(h)",
        "self.encoder$ = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True)",
    ),
    Piece("conv", "h = self.conv$(h.mT).mT", "self.conv$ = nn.Conv1d(D, D, 3, padding=1)"),
    Piece("GRU", "h = self.gru$(h)[0]", "self.gru$ = nn.GRU(D, D, batch_first=True)"),
    Piece(
        "embedding with padding",
        "h = h + self.emb$((h.detach() > 0).long().sum(-1))",
        "self.emb$ = nn.Embedding(D + 1, D, padding_idx=4)",
    ),
    Piece(
        "embedding with max_norm",
        "h = h + self.emb$((h.detach() > 0).long().sum(-1))",
        "self.emb$ = nn.Embedding(D + 1, D, max_norm=0.5)",
    ),
    Piece("functorch", "h = torch.vmap(lambda row: row * row.sum())(h)"),
    Piece("vjp", "h = h + torch.func.grad(lambda x: x.pow(3).sum())(h)"),
)

TENSORS = pieces(
    Piece("add_", "h = h.clone()\nh.add_(1.0).mul_(1.5)"),
    Piece("add_ on input", "h.add_(1.0)"),
    Piece("masked assignment", "h = h.clone()\nh[h > 0.5] = 0.25"),
    Piece(
        "mean of chosen rows", "chosen = h[..., 0] > 0\nh = h + h[chosen].mean(0) + h[~chosen].square().sum()"
    ),
    Piece("loss of chosen rows", "h = h + F.smooth_l1_loss(h[h > 0], torch.tanh(h)[h > 0], beta=0.5)"),
    Piece(
        "chosen rows put back",
        "chosen = h[..., 0] > 0\nh = h.clone()\nh[chosen] = self.repair$(h[chosen]) + h[chosen]",
        "self.repair$ = nn.Linear(D, D)",
    ),
    Piece("chosen rows by places", "h = h + h[torch.where(h[..., 0] > 0)].softmax(-1).sum(0, keepdim=True)"),
    Piece(
        "bags",
        "h = h + self.bag$((h.detach()[..., 0] > 0).long())[:, None]",
        'self.bag$ = nn.EmbeddingBag(3, D, mode="sum")',
    ),
    Piece("row assignment", "h = h * 1.0\nh[:, 0] = h[:, 1] * 2.0"),
    Piece(
        "index_put_",
        "h = h * 1.0\nh.index_put_((torch.tensor([0, 2]),), torch.ones((), dtype=h.dtype), accumulate=True)",
    ),
    Piece("relu_ on a view", "h = h * 1.0\nF.relu_(h[:, :2])"),
    Piece("mul_ on a flat view", "h = (h * 1.0).contiguous()\nh.view(-1)[::2].mul_(2.0)"),
    Piece("masked_fill_", "h = (h * 1.0).masked_fill_(h > 1.0, 0.0)"),
    Piece(
        "scatter_add_",
        "h = torch.zeros_like(h).scatter_add_(1, torch.zeros_like(h, dtype=torch.long), h) + h",
    ),
    Piece("in-place module", "h = self.relu$(self.lin(h))", "self.relu$ = nn.ReLU(inplace=True)"),
    Piece("weight clamped", "with torch.no_grad():\n    self.lin.weight.clamp_(-0.2, 0.2)\nh = self.lin(h)"),
    Piece("weight data changed", "self.lin.weight.data.mul_(0.5)"),
    Piece("no elements", "h = torch.cat([h, h[:, :0]], 1) + h[:, S:].sum()"),
    Piece(
        "buffer with no elements",
        "h = h + self.empty$.sum()",
        'self.register_buffer("empty$", torch.zeros(0, D))',
    ),
    Piece(
        "parameter with no elements",
        "h = h + self.void$.sum()",
        "self.void$ = nn.Parameter(torch.zeros(0, D))",
    ),
    Piece("bfloat16", "h = h + self.lin(h).bfloat16().to(h.dtype)", single=True),
    Piece(
        "float16 layer",
        "h = h + self.small$(h.to(self.small$.weight.dtype)).to(h.dtype)",
        "self.small$ = nn.Linear(D, D)",
        made="m.small$.half()",
        single=True,
    ),
    Piece(
        "bfloat16 in one layer",
        "h = h + self.part$(h.to(self.part$.weight.dtype)).to(h.dtype)",
        "self.part$ = nn.Linear(D, D)",
        made="m.part$.bfloat16()",
        single=True,
    ),
    Piece("float64 sum", "h = h * h.double().pow(2).mean().to(h.dtype)"),
    Piece(
        "int8 buffer",
        "h = h * self.bytes$",
        'self.register_buffer("bytes$", torch.arange(D, dtype=torch.int8))',
        change="m.bytes$.add_(1)",
    ),
    Piece(
        "uint8 buffer",
        "h = h * (self.codes$ >> 1)",
        'self.register_buffer("codes$", torch.arange(D, dtype=torch.uint8) + 2)',
    ),
    Piece(
        "bool buffer",
        "h = torch.where(self.mask$, h, 0.5)",
        'self.register_buffer("mask$", torch.arange(D) % 2 == 0)',
        change="m.mask$.logical_not_()",
    ),
    Piece(
        "complex",
        "c = torch.view_as_complex(h.reshape(-1, S, D // 2, 2))\n"
        "h = torch.view_as_real(c * c).reshape(-1, S, D)",
    ),
    Piece("fft", "h = torch.fft.irfft(torch.fft.rfft(h, dim=-1), n=D, dim=-1) * 1.5"),
    Piece("batch norm", "h = self.bn$(h)", "self.bn$ = nn.BatchNorm1d(S)"),
    Piece("batch norm of momentum None", "h = self.bn$(h)", "self.bn$ = nn.BatchNorm1d(S, momentum=None)"),
    Piece(
        "counter buffer",
        "self.n$ += 1\nh = h * (1 + 0.1 * self.n$)",
        'self.register_buffer("n$", torch.zeros((), dtype=torch.long))',
    ),
    Piece(
        "average",
        "self.avg$ = 0.9 * self.avg$ + 0.1 * h.detach().mean((0, 1))\nh = h - self.avg$",
        'self.register_buffer("avg$", torch.zeros(D))',
    ),
    Piece(
        "average in place",
        "with torch.no_grad():\n    self.avg$.lerp_(h.mean((0, 1)), 0.1)\nh = h - self.avg$",
        'self.register_buffer("avg$", torch.zeros(D))',
    ),
    Piece(
        "copy_ into a buffer",
        "self.held$[:2].copy_(h.detach()[:2])\nh = h + self.held$.sum()",
        'self.register_buffer("held$", torch.zeros(3, S, D))',
    ),
    Piece(
        "non-persistent buffer",
        "self.np$.add_(0.5)\nh = h * self.np$",
        'self.register_buffer("np$", torch.ones(D), persistent=False)',
    ),
    Piece(
        "buffer set anew",
        "h = h * self.gain$",
        'self.register_buffer("gain$", torch.full((D,), 1.5))',
        change="m.gain$ = torch.full((D,), 0.5, dtype=DT)",
    ),
    Piece(
        "buffer changed",
        "h = h * self.gain$",
        'self.register_buffer("gain$", torch.full((D,), 1.5))',
        change="m.gain$.mul_(2.0)",
    ),
    Piece(
        "parameter changed",
        "h = h * self.gain$",
        "self.gain$ = nn.Parameter(torch.full((D,), 1.5))",
        change="with torch.no_grad():\n    m.gain$.mul_(2.0)",
    ),
    Piece("scalar parameter", "h = h * self.alpha$", "self.alpha$ = nn.Parameter(torch.tensor(1.5))"),
    Piece("item", "h = h * float(h.detach().abs().mean())"),
    Piece("branch on values", "if h.detach().sum() > 0:\n    h = h * 2.0"),
    Piece("constant tensor", "h = h * torch.tensor([0.5, 1.5] * (D // 2), dtype=h.dtype)"),
    Piece("numpy", "h = h + torch.from_numpy(h.detach().numpy() * 2.0)"),
)
