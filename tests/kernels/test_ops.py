"""The ops of kernels on the CPU: as torch ops, against torch and formulas, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import autoshard.ops  # noqa: F401 (defines the ops)
from autoshard.errors import UsageError
from autoshard.kernels import launch, quant
from autoshard.kernels.launch import launched
from autoshard.kernels.norm import add_layer_norm, rms_norm
from autoshard.kernels.optim import adamw_shard, sum_squares
from autoshard.kernels.quant import (
    dequantise,
    dequantise_copy_out,
    dequantise_rows,
    quantise,
    quantise_rows,
    wire_bytes,
)
from autoshard.kernels.quant_reduce import dequantise_reduce
from autoshard.kernels.registry import KernelSpec, operand, specs

CPU = torch.device("cpu")
F64 = torch.float64


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def op_of(spec: KernelSpec) -> Any:
    return getattr(torch.ops.autoshard, spec.name).default


def floats(args: Any) -> list[torch.Tensor]:
    """All floating tensors in arguments or results."""
    if isinstance(args, torch.Tensor):
        return [args] if args.is_floating_point() else []
    return [t for a in args for t in floats(a)] if isinstance(args, list | tuple) else []


@pytest.mark.parametrize("spec", specs().values(), ids=lambda s: s.name)
def test_opcheck(spec: KernelSpec) -> None:
    """Schema, fake and autograd registration, on the first sample without a NaN in its result."""
    for args in spec.samples(generator(), torch.float32, CPU):
        out = op_of(spec)(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
        if not any(bool(t.isnan().any()) for t in floats(out)):
            torch.library.opcheck(op_of(spec), args)
            return
    raise AssertionError("no sample without a NaN")


@pytest.mark.parametrize("spec", specs().values(), ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "f64"])
def test_fake_types(spec: KernelSpec, dtype: torch.dtype) -> None:
    """Without data an op gives the shapes and types that it gives with data."""
    args = next(iter(spec.samples(generator(), dtype, CPU)))
    real = op_of(spec)(*args)
    shapes = op_of(spec)(*[_meta(a) for a in args])
    pairs = [real, shapes] if isinstance(real, tuple | list) else [[real], [shapes]]
    for a, b in zip(*pairs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.shape, a.dtype) == (b.shape, b.dtype)


def _meta(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.to("meta")
    return [_meta(a) for a in arg] if isinstance(arg, list) else arg


@pytest.mark.parametrize("spec", specs().values(), ids=lambda s: s.name)
def test_cost_counts_every_operand(spec: KernelSpec) -> None:
    """The bytes of a kernel's cost: inputs read, outputs (or what it changes) written."""
    args = next(iter(spec.samples(generator(), torch.bfloat16, CPU)))
    ins = [operand(t) for t in _tensors(args)]
    state = ins[: spec.mutated]
    out = op_of(spec)(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
    outs = [operand(t) for t in _tensors([out])]
    cost = spec.cost(ins, outs)
    assert cost.written == sum(x.nbytes for x in (*outs, *state))
    assert cost.read == sum(x.nbytes for x in ins)


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, list | tuple):
            found += _tensors(arg)
    return found


# norms


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_is_torchs(dtype: torch.dtype, narrow: bool) -> None:
    x = torch.randn(3, 5, 48, generator=generator()).to(dtype)
    weight = torch.randn(48, generator=generator(4)).to(dtype)
    y, rstd = torch.ops.autoshard.rms_norm(x, weight, 1e-6, narrow)
    true = torch.nn.functional.rms_norm(x.double(), (48,), weight.double(), 1e-6)
    assert torch.allclose(y.double(), true, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert rstd.dtype == torch.float32
    assert torch.allclose(rstd.double(), torch.rsqrt(x.double().square().mean(-1, True) + 1e-6), rtol=1e-6)


def test_narrow_rounds_as_llama_does() -> None:
    """Bit for bit the chain that the model writes."""
    x = torch.randn(4, 64, generator=generator()).bfloat16()
    weight = torch.randn(64, generator=generator(4)).bfloat16()
    wide = x.float()
    rows = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    y, _ = rms_norm(x, weight, 1e-6, True)
    assert torch.equal(y, weight * rows.to(torch.bfloat16))


def test_gradients() -> None:
    """Autograd of the norms in fp64, by differences; the sum before a norm has a gradient of its own, too."""
    make = generator()
    a, b = (torch.randn(3, 7, generator=make, dtype=F64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(7, generator=make, dtype=F64, requires_grad=True) for _ in range(2))
    ops = torch.ops.autoshard
    assert torch.autograd.gradcheck(lambda x, w: ops.rms_norm(x, w, 1e-3, True)[0], (a, weight))
    assert torch.autograd.gradcheck(lambda x, y, w: ops.add_rms_norm(x, y, w, 1e-3, True)[:2], (a, b, weight))
    assert torch.autograd.gradcheck(lambda x, w, c: ops.layer_norm(x, w, c, 1e-3)[0], (a, weight, bias))
    assert torch.autograd.gradcheck(
        lambda x, y, w, c: ops.add_layer_norm(x, y, w, c, 1e-3)[:2], (a, b, weight, bias)
    )
    assert torch.autograd.gradcheck(lambda x, w: ops.layer_norm(x, w, None, 1e-3)[0], (a, weight))
    assert torch.autograd.gradcheck(
        lambda x, y, w: ops.add_layer_norm(x, y, w, None, 1e-3)[:2], (a, b, weight)
    )
    # only the sum is used
    ops.add_rms_norm(a, b, weight, 1e-3, True)[0].sum().backward()
    assert torch.equal(a.grad, torch.ones_like(a)) and weight.grad is None  # type: ignore[arg-type]


def test_layer_norm_is_torchs() -> None:
    a, b = (torch.randn(4, 40, generator=generator(k)) for k in (1, 2))
    weight, bias = (torch.randn(40, generator=generator(k)) for k in (3, 4))
    x, y, mean, rstd = add_layer_norm(a, b, weight, bias, 1e-5)
    true = torch.native_layer_norm(a + b, (40,), weight, bias, 1e-5)
    assert torch.equal(x, a + b)
    for one, other in zip(torch.ops.autoshard.layer_norm(x, weight, bias, 1e-5), true, strict=True):
        assert torch.equal(one, other)
    for one, other in zip((y, mean, rstd), true, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(
        torch.ops.autoshard.layer_norm(x, weight, None, 1e-5),
        torch.native_layer_norm(x, (40,), weight, None, 1e-5),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shift", [True, False], ids=["bias", "no bias"])
def test_wire_of_a_layer_norm_holds_its_rows(shift: bool) -> None:
    """Both ops give what the norm and the quantisation of its rows give; rows far from zero, too."""
    a, b = (torch.randn(3, 5, 64, generator=generator(k)) + 4 for k in (1, 2))
    weight = torch.randn(64, generator=generator(3))
    bias = torch.randn(64, generator=generator(4)) if shift else None
    ops = torch.ops.autoshard
    x, y, mean, rstd = ops.add_layer_norm(a, b, weight, bias, 1e-5)
    wanted = (x, quantise(y, 8, 32), mean, rstd)
    for one, other in zip(ops.add_layer_norm_quantise(a, b, weight, bias, 1e-5, 32), wanted, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(ops.layer_norm_quantise(x, weight, bias, 1e-5, 32), wanted[1:], strict=True):
        assert torch.equal(one, other)
    back = dequantise(wanted[1], 960, 8, 32, torch.float32).view_as(y)
    true = torch.nn.functional.layer_norm(a + b, (64,), weight, bias)
    assert 1e-4 < float((back - true).norm() / true.norm()) < 1e-2


# quantisation


@pytest.mark.parametrize("bits", [8, 4])
def test_error_is_half_a_scale(bits: int) -> None:
    x = torch.randn(3000, generator=generator())
    back = dequantise(quantise(x, bits, 128), 3000, bits, 128, torch.float32)
    for start in range(0, 3000, 128):
        group, other = x[start : start + 128], back[start : start + 128]
        bound = float(group.abs().max()) / quant.limit_of(bits) / 2
        assert float((group - other).abs().max()) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_wire(bits: int) -> None:
    """Whole numbers come back as they are; payload, scales and zeros lie where they should."""
    limit = quant.limit_of(bits)
    x = (torch.arange(64) % (2 * limit + 1) - limit).float()
    x[0] = limit
    wire = quantise(x, bits, 64)
    assert wire.dtype == torch.uint8 and wire.shape == (wire_bytes(64, bits, 64),)
    assert torch.equal(dequantise(wire, 64, bits, 64, torch.float32), x)
    end = quant.payload_bytes(64, bits, 64)
    assert wire[end : end + 4].view(torch.float32).item() == 1.0
    assert not wire[end + 4 :].any() and wire.numel() % 16 == 0
    assert quantise(torch.zeros(0), bits, 64).shape == (0,)


def test_not_finite_shows_on_the_other_side() -> None:
    x = torch.ones(3, 64)
    x[0, 5], x[1, 6] = float("inf"), float("nan")
    back = dequantise(quantise(x, 8, 64), 192, 8, 64, torch.float32).reshape(3, 64)
    assert back[:2].isnan().all() and torch.equal(back[2], x[2])
    tiny = torch.full((64,), 1e-42)
    assert not dequantise(quantise(tiny, 8, 64), 64, 8, 64, torch.float32).any()


def test_rows_copy_out_and_sum_are_made_of_single_wires() -> None:
    x = torch.randn(3, 300, generator=generator())
    wires = quantise_rows(x, 8, 64)
    single = torch.stack([quantise(row, 8, 64) for row in x])
    assert torch.equal(wires, single)
    rows = dequantise_rows(wires, 300, 8, 64, torch.float32)
    assert torch.equal(rows[1], dequantise(single[1], 300, 8, 64, torch.float32))
    sizes = [100, 0, 190, 10]
    flat = dequantise_copy_out(wires, sizes, 8, 64, torch.float32)
    parts = [p.reshape(-1) for p in rows.split(sizes, 1)]
    assert torch.equal(flat, torch.cat(parts))
    total = dequantise_reduce(wires, 300, 8, 64, torch.float32)
    assert torch.equal(total, (rows[0] + rows[1]) + rows[2])


def test_what_quantisation_refuses() -> None:
    for bits, group in ((2, 64), (8, 48), (8, 16), (4, 8192)):
        with pytest.raises(UsageError, match="no wire of"):
            quantise(torch.ones(8), bits, group)
    with pytest.raises(UsageError, match="is no wire of 65 elements"):
        dequantise(quantise(torch.ones(64), 8, 64), 65, 8, 64, torch.float32)
    with pytest.raises(UsageError, match="cannot be quantised"):
        quantise(torch.ones(8, dtype=torch.int32), 8, 64)
    with pytest.raises(UsageError, match="not whole groups"):
        torch.ops.autoshard.rms_norm_quantise(torch.ones(2, 48), torch.ones(48), 1e-6, True, 32)
    with pytest.raises(UsageError, match="not whole groups"):
        torch.ops.autoshard.layer_norm_quantise(torch.ones(2, 48), torch.ones(48), None, 1e-6, 32)
    with pytest.raises(UsageError, match="has no 3 parts"):
        torch.ops.autoshard.bucket_pack([torch.ones(4)], 3, torch.float32, 1.0)


# the optimizer


def test_adamw_is_torchs() -> None:
    """Three steps with clipping beside torch's; the copy is the parameter rounded."""
    torch.manual_seed(0)
    true = torch.randn(50, dtype=F64).requires_grad_()
    optimizer = torch.optim.AdamW([true], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    param = true.detach().clone()
    avg, square = torch.zeros(50, dtype=F64), torch.zeros(50, dtype=F64)
    copy = param.to(torch.bfloat16)
    for step in (1, 2, 3):
        grad = torch.randn(50, dtype=F64) * 10
        norm = sum_squares([grad[:20], grad[20:]]).sqrt()
        factor = (1.0 / norm).clamp(max=1.0)
        true.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([true], 1.0)
        optimizer.step()
        adamw_shard(param, avg, square, copy, grad, factor, 1e-2, 0.8, 0.9, 1e-6, 0.1, step)
        assert torch.allclose(param, true.detach(), rtol=1e-6, atol=1e-9)
        assert torch.equal(copy, param.to(torch.bfloat16))


def test_optimizer_state_must_lie_in_one_piece() -> None:
    state = [torch.zeros(4, 6).t(), torch.zeros(6, 4), torch.zeros(6, 4)]
    with pytest.raises(UsageError, match="not contiguous"):
        adamw_shard(*state, None, torch.ones(6, 4), torch.ones(()), 1e-3, 0.9, 0.99, 1e-8, 0.0, 1)


# launches


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    launch.has_triton.cache_clear()
    try:
        run = launched("triton_quant", "quantise", quant.quantise_reference)
        x = torch.randn(100, generator=generator())
        with pytest.warns(UserWarning, match="triton is not installed"):
            wire = run(x, 8, 32)
        assert torch.equal(wire, quantise(x, 8, 32))
    finally:
        launch.has_triton.cache_clear()


def test_kernels_do_not_take_fp64() -> None:
    """Element types without a kernel run the reference; triton is not asked for."""
    run = launched("no_such_module", "quantise", quant.quantise_reference)
    x = torch.randn(100, generator=generator(), dtype=F64)
    assert torch.equal(run(x, 8, 32), quantise(x, 8, 32))
    run = launched("no_such_module", "sum_squares", sum_squares)
    assert torch.equal(run([x, x]), sum_squares([x, x]))
