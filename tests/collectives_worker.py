"""Started by torchrun: collectives of even, uneven and empty tensors, and a model with empty tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from collective_cases import CASES, call_of
from empties import PartialRotary
from leaving import leave
from lockstep_check import relative_error
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.runtime.collectives import GroupCollectives
from autoshard.runtime.pending import arrived
from autoshard.runtime.transport.network import Network
from autoshard.runtime.transport.transport import Transport
from autoshard.runtime.transport.transport_choice import transport_of


def collectives(over: Transport) -> None:
    ranks = GroupCollectives({"tp": over})
    for case in CASES:
        found = arrived(call_of(case, ranks, dist.get_rank())())
        wanted = case.wanted(dist.get_rank())
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), f"{type(over).__name__}: {case}"


def model(mesh: str) -> None:
    x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0))
    plain = PartialRotary()
    plain(x).backward()
    parallel = autoshard.parallelize(PartialRotary(), mesh, example_inputs=(x,))
    loss = parallel(x)
    loss.backward()
    for name, parameter in parallel.named_parameters():
        grad = parameter.grad
        assert isinstance(grad, DTensor)
        wanted = plain.get_parameter(name).grad
        assert wanted is not None and relative_error(grad.full_tensor(), wanted) < 1e-5, name


def main() -> None:
    torch.set_num_threads(1)
    name = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)).get_group("tp").group_name
    collectives(Network(name))
    collectives(transport_of(name, torch.device("cpu")))
    for mesh in ("tp=4", "dp=2,tp=2"):
        model(mesh)
    leave()


if __name__ == "__main__":
    main()
