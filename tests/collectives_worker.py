"""Started by torchrun: collectives of even, uneven and empty tensors, and a model with empty tensors."""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from collective_cases import CASES, call_of
from empties import PartialRotary
from families import family
from leaving import leave
from lockstep_check import relative_error
from slow_links import ring_cluster, slow_cluster
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.cluster import Cluster, load_cluster
from autoshard.ir.window_hops import WindowHops
from autoshard.program.text import program_text
from autoshard.runtime.collectives import GroupCollectives
from autoshard.runtime.pending import Pending, arrived
from autoshard.runtime.resolve import RankView
from autoshard.runtime.shard_utils import take_part
from autoshard.runtime.transport.network import Network
from autoshard.runtime.transport.transport import Transport
from autoshard.runtime.transport.transport_choice import transport_of


def collectives(over: Transport) -> None:
    ranks = GroupCollectives({"tp": over})
    for case in CASES:
        found = arrived(call_of(case, ranks, dist.get_rank())())
        wanted = case.wanted(dist.get_rank())
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), f"{type(over).__name__}: {case}"


def keys_go_round(over: Transport) -> None:
    """Ring attention on one level and on two, forward and backward, beside all keys."""
    rank, ways, told = dist.get_rank(), over.ways, (True, 0.5)
    torch.manual_seed(0)
    q = torch.randn(2, 4, 32, 8)
    k, v = (torch.randn(2, 2, 1, 32, 8) for _ in range(2))
    mask = (torch.arange(32) < torch.tensor([[32], [21]]))[:, None, None]
    out, lse = torch.ops.autoshard.sdpa(q, k, v, mask, *told)
    grads = torch.ops.autoshard.sdpa_backward(out, q, k, v, out, lse, mask, *told)
    mine = [take_part(x, x.dim() - 2, ways, rank, -2, 1) for x in (q, k, v, out, *grads)]
    sums = take_part(lse, 2, ways, rank, -2, 1)
    view, ranks = RankView(("cp",), (ways,), (rank,)), GroupCollectives({"cp": over})
    for inside in (None, 2, 1):
        new, _ = ranks.ring_attention(view, [*mine[:3], mask], "cp", *told, inside=inside)
        assert relative_error(new, mine[3]) < 1e-5, f"{type(over).__name__}, {inside}"
        given = [mine[3], *mine[:3], mine[3], sums, mask]
        for got, wanted in zip(
            ranks.ring_attention_backward(view, given, "cp", *told, inside=inside), mine[4:], strict=True
        ):
            assert relative_error(got, wanted) < 1e-5, f"{type(over).__name__}, {inside}, backward"


def keys_go_as_far_as_a_window(over: Transport) -> None:
    """In the order of positions and in a zigzag, to one side and to both; one hop, and several."""
    rank, ways = dist.get_rank(), over.ways
    torch.manual_seed(0)
    q = torch.randn(2, 4, 32, 8)
    k, v = (torch.randn(2, 2, 1, 32, 8) for _ in range(2))
    mask = (torch.arange(32) < torch.tensor([[32], [21]]))[:, None, None]
    view, ranks = RankView(("cp",), (ways,), (rank,)), GroupCollectives({"cp": over})
    for window, causal, zigzag in product((4, 19), (True, False), (True, False)):
        if zigzag and not causal:
            continue
        out, lse = torch.ops.autoshard.sdpa(q, k, v, mask, causal, 0.5, window)
        grads = torch.ops.autoshard.sdpa_backward(out, q, k, v, out, lse, mask, causal, 0.5, window)
        outer = -2 if zigzag else 1
        mine = [take_part(x, x.dim() - 2, ways, rank, outer, 1) for x in (q, k, v, out, *grads)]
        sums = take_part(lse, 2, ways, rank, outer, 1)
        hops = WindowHops.over(32, ways, window, causal=causal, zigzag=zigzag).count
        told = "cp", causal, 0.5, 0.0, window, zigzag, hops
        new, _ = ranks.ring_attention(view, [*mine[:3], mask], *told)
        seen = (take_part(mask, 3, ways, rank, outer, 1) | (window > 12)).transpose(-1, -2)
        assert relative_error(new * seen, mine[3] * seen) < 1e-5, f"{type(over).__name__}, {told}"
        given = [mine[3], *mine[:3], mine[3], sums, mask]
        for got, wanted in zip(ranks.ring_attention_backward(view, given, *told), mine[4:], strict=True):
            assert relative_error(got, wanted) < 1e-5, f"{type(over).__name__}, {told}, backward"


def tokens_go_by_node(over: Transport) -> None:
    """The same sums as if each token went to every rank by itself; with the second hop on its own, too."""
    rank, ways, experts = dist.get_rank(), over.ways, 8
    torch.manual_seed(rank)
    x, chosen = torch.randn(12, 16), torch.rand(12, experts).topk(2)[1]
    if rank == 1:
        chosen = torch.full_like(chosen, 5)  # all to one expert
    view, ranks = RankView(("ep",), (ways,), (rank,)), GroupCollectives({"ep": over})
    sums = []
    for told in ({}, {"inside": 2}, {"inside": 2, "relayed": True}, {"inside": 1}):
        slots = ranks.expert_route(view, (chosen,), "ep", experts, **told)
        there = Pending(ranks.expert_dispatch(view, (x, chosen, slots), "ep", experts, **told))
        if "relayed" in told:
            there = Pending(ranks.expert_relay(view, (there, chosen, slots), "ep", experts, 2))
        rows = there.get()
        back = Pending(ranks.expert_combine(view, (rows * 2.0, chosen, slots), "ep", experts, **told))
        if "relayed" in told:
            back = Pending(ranks.expert_relay(view, (back, chosen, slots), "ep", experts, 2))
        sums.append(back.get())
    for other in sums[1:]:
        assert relative_error(other, sums[0]) < 1e-6, type(over).__name__


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


def step(name: str, mesh: str, cluster: Cluster, *said: str) -> None:
    """A step of a model whose program says such things, on four ranks."""
    plain, inputs = family(name).make()
    plain(**inputs).loss.backward()
    parallel = autoshard.parallelize(family(name).make()[0], mesh, example_inputs=inputs, cluster=cluster)
    text = program_text(parallel._autoshard.program)
    assert all(each in text for each in said)
    parallel(**inputs).loss.backward()
    for key, parameter in parallel.named_parameters():
        wanted, grad = plain.get_parameter(key).grad, parameter.grad
        assert isinstance(grad, DTensor) and wanted is not None
        assert relative_error(grad.full_tensor(), wanted) < 1e-4, (name, key)


def main() -> None:
    torch.set_num_threads(1)
    name = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)).get_group("tp").group_name
    for over in (Network(name), transport_of(name, torch.device("cpu"))):
        collectives(over)
        keys_go_round(over)
        keys_go_as_far_as_a_window(over)
        tokens_go_by_node(over)
    for mesh in ("tp=4", "dp=2,tp=2"):
        model(mesh)
    step("mixtral", "ep=4", slow_cluster(1e5, 2), "expert_relay", "inside=2")
    step("llama-long", "cp=4", ring_cluster(2), "ring_attention", "inside=2")
    step("bart-long", "cp=4", load_cluster("h100-dgx"), "op='attention'")
    step("mistral-window", "cp=4", ring_cluster(), "ring_attention", "100, False, 1)")
    step("gemma3-windows", "cp=4", ring_cluster(), "ring_attention", "100, True, 2)")
    step("gemma2-packed", "cp=4", ring_cluster(), "ring_attention", "100, True, 2)")
    leave()


if __name__ == "__main__":
    main()
