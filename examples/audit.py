"""A layer that is parallel by hand, with a mistake in it. `python examples/audit.py` audits it, and so does

autoshard audit examples/audit.py:build --ranks dp=2,tp=2
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

X, Y = torch.randn(8, 16).double(), torch.randn(8, 16).double()  # an audit runs in float64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x, scatter=lambda x: x, reduce=lambda x: x):
        return x + reduce(self.down(F.gelu(self.up(scatter(self.norm(x))))))


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)  # the mistake: every rank has this gradient already
        return gradient, None


def rank_step(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        module, key = name.split(".")
        part = model.get_parameter(name).detach().chunk(2, dim)[tp].clone()
        setattr(model.get_submodule(module), key, nn.Parameter(part))
    group = mesh["tp"].get_group()
    x, y = X.chunk(2)[dp], Y.chunk(2)[dp]
    out = model(x, lambda x: Scatter.apply(x, group), lambda x: Reduce.apply(x, group))
    F.mse_loss(out, y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=mesh["dp"].get_group())


def one_device_step(model):
    F.mse_loss(model(X), Y).backward()


def build():
    return Layer(), one_device_step, rank_step


if __name__ == "__main__":
    import autoshard

    model, step, _ = build()
    with autoshard.audit(model, "dp=2,tp=2", step=step) as audit:
        audit.rank(rank_step)
    print(audit.report())
