"""AdamW on shards: torch's numbers and state, clipping on the way, float32 copies of half precision."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.errors import UsageError

RATES = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of one rank, whose shards are whole tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _parameters(dtype: torch.dtype, spread: bool) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    found = []
    for k, shape in enumerate(((5, 3), (7,), (4, 4))):
        x = torch.randn(shape, generator=generator).to(dtype)
        placed = DTensor.from_local(x, mesh, [Shard(0) if k else Replicate()]) if spread else x
        found.append(nn.Parameter(placed))
    return found


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def _give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        own = _whole(p)
        grad = 3 * torch.randn(own.shape, generator=generator).to(own.dtype)
        p.grad = DTensor.from_local(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_numbers_are_those_of_torch(spread: bool, clip: float | None) -> None:
    ours, theirs = _parameters(torch.float32, spread), _parameters(torch.float32, False)
    one, two = autoshard.AdamW(ours, **RATES, clip_norm=clip), torch.optim.AdamW(theirs, **RATES)
    for step in range(4):
        _give_gradients(ours, step)
        _give_gradients(theirs, step)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        one.step()
        two.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(_whole(p), q.detach(), rtol=1e-5, atol=1e-6)
            for name in ("exp_avg", "exp_avg_sq", "step"):
                torch.testing.assert_close(
                    _whole(one.state[p][name]), two.state[q][name], rtol=1e-4, atol=1e-6
                )


def test_a_shared_gradient_is_clipped_once() -> None:
    ours, theirs = _parameters(torch.float32, False)[:1] * 1, _parameters(torch.float32, False)[:1]
    ours.append(nn.Parameter(ours[0].detach().clone()))
    theirs.append(nn.Parameter(theirs[0].detach().clone()))
    grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    for p in ours:
        p.grad = grad
    for p in theirs:
        p.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(theirs, 0.1)
    autoshard.AdamW(ours, **RATES, clip_norm=0.1).step()
    torch.optim.AdamW(theirs, **RATES).step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_half_precision_parameters_are_copies_of_float32_ones(spread: bool, clip: float | None) -> None:
    ours = _parameters(torch.bfloat16, spread)
    exact = [nn.Parameter(_whole(p).float()) for p in ours]
    one = autoshard.AdamW(ours, **RATES, clip_norm=clip, master=True)
    two = torch.optim.AdamW(exact, **RATES)
    for step in range(4):
        _give_gradients(ours, step)
        for p, q in zip(ours, exact, strict=True):
            q.grad = _whole(p.grad).float()  # type: ignore[arg-type]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(exact, clip)
        one.step()
        two.step()
        for p, q in zip(ours, exact, strict=True):
            master = _whole(one.state[p]["master"])
            assert master.dtype == torch.float32
            torch.testing.assert_close(master, q.detach(), rtol=1e-4, atol=1e-5)
            assert torch.equal(_whole(p), master.bfloat16())


def test_a_changed_parameter_is_taken_over() -> None:
    (p,) = _parameters(torch.bfloat16, True)[:1]
    optimizer = autoshard.AdamW([p], **RATES, master=True)
    _give_gradients([p], 0)
    optimizer.step()
    with torch.no_grad():
        p.copy_(torch.full_like(p, 4.0))
    _give_gradients([p], 1)
    optimizer.step()
    assert (_whole(optimizer.state[p]["master"]) - 4).abs().max() < 0.1


def test_elements_that_others_change_are_taken_over_and_others_keep_their_master() -> None:
    """Whatever versions say: through ``.data``; and bits that come back leave the masters as they are."""
    (p,) = _parameters(torch.bfloat16, True)[:1]
    optimizer = autoshard.AdamW([p], lr=1e-4, weight_decay=0.0, master=True)
    for step in range(3):
        _give_gradients([p], step)
        optimizer.step()
    before = _whole(optimizer.state[p]["master"]).clone()
    own = _whole(p)
    assert not torch.equal(before, own.float())
    with torch.no_grad():
        p.copy_(p.clone())  # raises the version alone
    own.data[0].fill_(4.0)  # raises none
    _give_gradients([p], 3)
    optimizer.step()
    after = _whole(optimizer.state[p]["master"])
    assert (after[0] - 4).abs().max() < 2e-4
    # a step is 1e-4 at most, three of them had been rounded away
    assert (after[1:] - before[1:]).abs().max() < 1.5e-4
    assert (before[1:] - own[1:].float()).abs().max() > 2.5e-4


def test_states_of_another_optimizer_get_masters() -> None:
    ours, theirs = _parameters(torch.bfloat16, True), _parameters(torch.bfloat16, True)
    one, two = autoshard.AdamW(ours, **RATES, master=True), torch.optim.AdamW(theirs, **RATES)
    _give_gradients(theirs, 0)
    two.step()
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    one.load_state_dict(deepcopy(two.state_dict()))
    _give_gradients(ours, 1)
    one.step()
    for p, q in zip(ours, theirs, strict=True):
        state = one.state[p]
        assert {_whole(state[k]).dtype for k in ("master", "exp_avg", "exp_avg_sq")} == {torch.float32}
        assert int(state["step"]) == 2 and not torch.equal(_whole(p), _whole(q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_through_a_state_dict(dtype: torch.dtype) -> None:
    master = dtype != torch.float32
    one, two = _parameters(dtype, True), _parameters(dtype, True)
    first = autoshard.AdamW(one, **RATES, master=master)
    for step in range(2):
        _give_gradients(one, step)
        first.step()
    with torch.no_grad():
        for p, q in zip(one, two, strict=True):
            q.copy_(p)
    second = autoshard.AdamW(two, lr=5.0, master=master)
    second.load_state_dict(deepcopy(first.state_dict()))
    for optimizer, parameters in ((first, one), (second, two)):
        _give_gradients(parameters, 2)
        optimizer.step()
    for p, q in zip(one, two, strict=True):
        assert torch.equal(_whole(p), _whole(q))
        for name, value in first.state[p].items():
            assert torch.equal(_whole(value), _whole(second.state[q][name])), name
            assert value.dtype == second.state[q][name].dtype


def test_checkpoints_are_those_of_torch() -> None:
    one, two = _parameters(torch.float32, True), _parameters(torch.float32, True)
    first, second = autoshard.AdamW(one, **RATES), torch.optim.AdamW(two, **RATES)
    _give_gradients(one, 0)
    _give_gradients(two, 0)
    first.step()
    second.step()
    saved = deepcopy(second.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    first.load_state_dict(saved)
    _give_gradients(one, 1)
    _give_gradients(two, 1)
    first.step()
    second.step()
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(_whole(p), _whole(q))


def test_what_it_does_not_know_is_refused() -> None:
    parameters = _parameters(torch.float32, False)
    with pytest.raises(UsageError, match="clip_norm is 0"):
        autoshard.AdamW(parameters, clip_norm=0)
    optimizer = autoshard.AdamW(parameters)
    optimizer.load_state_dict(torch.optim.AdamW(parameters, amsgrad=True).state_dict())
    _give_gradients(parameters, 0)
    with pytest.raises(UsageError, match="amsgrad"):
        optimizer.step()
