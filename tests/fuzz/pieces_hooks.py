"""Hooks of every kind, and modes: autocast, no_grad, train and eval."""

from __future__ import annotations

from fuzz.piece import Piece, pieces

HOOKS = pieces(
    Piece("hook changes output", made="m.lin.register_forward_hook(lambda mod, args, out: out * 1.5)"),
    Piece(
        "hook of the whole changes output",
        made="m.register_forward_hook(lambda mod, args, out: scaled(out, 1.5))",
    ),
    Piece(
        "hook collects",
        top="FOUND$ = []",
        made="m.lin.register_forward_hook(lambda mod, args, out: FOUND$.append(out.detach()))",
    ),
    Piece(
        "hook of the whole counts",
        top="COUNT$ = []",
        made="m.register_forward_hook(lambda mod, args, out: COUNT$.append(1))",
    ),
    Piece(
        "pre-hook changes input", made="m.lin.register_forward_pre_hook(lambda mod, args: (args[0] * 1.5,))"
    ),
    Piece(
        "pre-hook of the whole",
        made="m.register_forward_pre_hook(\n"
        "    lambda mod, args, kwargs: (scaled(args, 1.5), scaled(kwargs, 1.5)), with_kwargs=True)",
    ),
    Piece(
        "pre-hook counts and scales",
        top="CALLS$ = [0]\ndef count$(mod, args):\n    CALLS$[0] += 1\n    return (args[0] * CALLS$[0],)",
        made="m.lin.register_forward_pre_hook(count$)",
    ),
    Piece(
        "hook that is removed",
        made="m.handle$ = m.lin.register_forward_hook(lambda mod, args, out: out * 1.5)",
        change="m.handle$.remove()",
    ),
    Piece("hook that is added", change="m.lin.register_forward_hook(lambda mod, args, out: out * 1.5)"),
    Piece(
        "hook of the whole that is added",
        change="m.register_forward_hook(lambda mod, args, out: scaled(out, 1.5))",
    ),
    Piece(
        "backward hook",
        made="m.lin.register_full_backward_hook(lambda mod, gi, go: scaled(gi, 2.0))",
    ),
    Piece(
        "backward hook collects",
        top="GRADS$ = []",
        made="m.lin.register_full_backward_hook(lambda mod, gi, go: GRADS$.append(go[0]))",
    ),
    Piece(
        "backward pre-hook",
        made="m.lin.register_full_backward_pre_hook(lambda mod, go: tuple(2 * g for g in go))",
    ),
    Piece("tensor hook", "h = h * 1.0\nif h.requires_grad:\n    h.register_hook(lambda g: 2 * g)"),
    Piece("parameter hook", made="m.lin.weight.register_hook(lambda g: 2 * g)"),
    Piece("parameter hook that is added", change="m.lin.weight.register_hook(lambda g: 2 * g)"),
    Piece(
        "post-accumulate hook",
        top="def halve$(p):\n    p.grad.mul_(0.5)",
        made="m.lin.weight.register_post_accumulate_grad_hook(halve$)",
    ),
    Piece(
        "post-accumulate hook counts",
        top="STEPS$ = []",
        made="m.lin.weight.register_post_accumulate_grad_hook(lambda p: STEPS$.append(1))",
    ),
)

MODES = pieces(
    Piece(
        "autocast",
        'with torch.autocast("cpu", dtype=torch.bfloat16):\n'
        "    one = F.linear(torch.full_like(h, 1.001), torch.eye(D))\n"
        "h = h + 1000 * (one.to(h.dtype) - 1.0)",
        single=True,
    ),
    Piece(
        "autocast of a layer",
        'with torch.autocast("cpu", dtype=torch.bfloat16, enabled=k$(self)):\n    h = self.lin(h)\n'
        "h = h.float() * (2.0 if h.dtype is torch.bfloat16 else 1.0)",
        "self.cast$ = k == 1",
        "def k$(m):\n    return m.cast$",
        change="m.cast$ = not m.cast$",
        single=True,
    ),
    Piece("no_grad", "with torch.no_grad():\n    mean = h.mean(-1, keepdim=True)\nh = h - mean"),
    Piece("no_grad around a layer", "with torch.no_grad():\n    other = self.lin(h)\nh = h + other"),
    Piece(
        "enable_grad in no_grad",
        "with torch.no_grad():\n    with torch.enable_grad():\n        h = self.lin(h)",
    ),
    Piece(
        "set_grad_enabled",
        "with torch.set_grad_enabled(self.grad$ and torch.is_grad_enabled()):\n    part = self.lin(h)\n"
        "h = h + part",
        "self.grad$ = k != 1",
        change="m.grad$ = not m.grad$",
    ),
    Piece(
        "no_grad method",
        "h = h + self.still$(h)",
        body="@torch.no_grad()\ndef still$(self, x):\n    return self.lin(x)",
        change="type(m).still$ = lambda self, x: x",
    ),
    Piece(
        "inference_mode",
        "with torch.inference_mode():\n    mean = h.mean(-1, keepdim=True)\nh = h + mean.clone()",
    ),
    Piece("detach", "h = h + h.detach() * self.lin(h).detach()"),
    Piece("data", "h = h + self.lin.weight.data.sum()"),
    Piece("frozen", made="m.lin.weight.requires_grad_(False)", change="m.lin.weight.requires_grad_(True)"),
    Piece("frozen later", change="m.lin.weight.requires_grad_(False)"),
    Piece("frozen bias", made="m.lin.bias.requires_grad_(False)"),
    Piece(
        "batch norm in eval", "h = self.still$(h)", "self.still$ = nn.BatchNorm1d(S)", made="m.still$.eval()"
    ),
    Piece(
        "dropout in eval",
        "h = self.off$(h)",
        "self.off$ = nn.Dropout(1.0 if k == 1 else 0.0)",
        made="m.off$.eval()",
        change="m.off$.train()",
    ),
    Piece(
        "dropout of 0",
        "h = self.none$(h)",
        "self.none$ = nn.Dropout(0.0)",
        change="m.none$.p = 1.0",
    ),
    Piece(
        "dropout", "h = self.drop$(h)", "self.drop$ = nn.Dropout(0.3)", change="m.drop$.p = 0.0", random=True
    ),
    Piece(
        "dropout of one layer",
        "h = self.odd$(h)",
        "self.odd$ = nn.Dropout(0.5 if k == 1 else 0.1)",
        random=True,
    ),
    Piece(
        "functional dropout",
        "h = F.dropout(h, self.p$, self.training)",
        "self.p$ = 0.2",
        random=True,
        change="m.p$ = 0.9",
    ),
    Piece("rand_like", "h = h + 0.1 * torch.rand_like(h)", random=True),
    Piece("bernoulli", "h = h * torch.bernoulli(torch.full_like(h, 0.5))", random=True),
    Piece("randn", "h = h + 0.1 * torch.randn(h.shape, dtype=h.dtype)", random=True),
    Piece("randperm", "h = h[:, torch.randperm(S)]", random=True),
)
