"""Started by torchrun: models that `parallelize` takes or refuses, on four processes alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from compiled_nets import Net, in_place, inside
from gloo_api_worker import check, raises
from leaving import leave
from lockstep_check import relative_error
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import NoRuleError


class Scale(nn.Module):
    """A module whose text tells the shapes of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.weight + self.bias)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {tuple(self.bias.shape)}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale(self.down(torch.tanh(self.up(x))))


class Tower(nn.Module):
    """Layers, of which the first ``plain`` have parameters."""

    def __init__(self, plain: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() if k < plain else nn.Tanh() for k in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: grad * 2)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tests.doubled(self.layer(x)).square().mean()


def equal(parallel: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    """A step of both gives the same gradients, under the same names."""
    plain(x).backward()
    parallel(x).backward()
    wanted = dict(plain.named_parameters())
    check(list(dict(parallel.named_parameters())) == list(wanted), "the names are kept")
    for name, parameter in parallel.named_parameters():
        grad, other = parameter.grad, wanted[name].grad
        assert isinstance(grad, DTensor) and other is not None
        check(relative_error(grad.full_tensor(), other) < 1e-5, name)


def compiled_before() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for way in (inside, in_place):
        equal(autoshard.parallelize(way(Net()), "dp=2,tp=2", example_inputs=(x,)), Net(), x)
    equal(autoshard.parallelize(inside(Net()), "tp=4"), Net(), x)


def replicated_ops() -> None:
    """What the hint of an error says is an argument, also of the decorator."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    raises(
        NoRuleError,
        lambda: autoshard.parallelize(Custom(), "dp=4", example_inputs=(x,)),
        "replicate_unknown=True",
    )
    equal(autoshard.parallelize(Custom(), "dp=4", example_inputs=(x,), replicate_unknown=True), Custom(), x)
    made = autoshard.parallelize(mesh="tp=4", replicate_unknown=True)(lambda: Custom())
    equal(made(), Custom(), x)


def stages() -> None:
    """Every rank of a pipeline can be printed, and has parameters to train."""
    x = torch.randn(8, 8)
    model = autoshard.parallelize(Tower(8), "pp=4", example_inputs=(x,), microbatches=4)
    text = repr(model)
    check(text == repr(Tower(8)).replace("Tower(", f"{type(model).__name__}("), text)
    held = [name for name, _ in model.named_parameters()]
    check(0 < len(held) < 48 and set(model.state_dict()) == set(held), f"holds {held}")
    small = autoshard.parallelize(Tower(2), "pp=4", example_inputs=(x,), microbatches=4)
    torch.optim.AdamW(small.parameters())  # refuses an empty list
    check(len(list(small.parameters())) > 0, "no parameters")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for way in (compiled_before, replicated_ops, stages):
        way()
    leave()


if __name__ == "__main__":
    main()
