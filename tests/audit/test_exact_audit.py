"""Proofs of an audit: exact arithmetic is that of integers, equal formulas are equal, no fault is proved."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import cases_tensor as nets
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_audit_cases import CASES
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoshard
from autoshard.auditing.field.functions import Functions
from autoshard.auditing.field.mode import FieldMode
from autoshard.auditing.field.residues import P, bilinear, hashed, inverse, product, residue, residues
from autoshard.auditing.findings import Proof
from autoshard.auditing.recording import Recorder


def exact(function: object, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A function's result and the gradients of its inputs, in exact arithmetic."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    with FieldMode(Functions(12345), Recorder()):
        out = function(*leaves)
        return residues(out), *map(residues, torch.autograd.grad(out.sum(), leaves))


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-40, 40, shape, generator=generator).double()


def test_numbers_are_the_fractions_that_they_round() -> None:
    for number in (Fraction(1, 3), Fraction(-7, 10), Fraction(5), Fraction(1, 4096), Fraction(123, 1000)):
        assert residue(float(number)) == number.numerator * pow(number.denominator, -1, P) % P
    x = torch.tensor([0.1, -0.2, 1 / 7, 3e-5], dtype=torch.float64)
    assert torch.equal(product(residues(x), inverse(residues(x))), torch.ones(4, dtype=torch.float64))
    assert torch.equal(residues(residues(x)), residues(x))
    infinite = torch.tensor([float("inf"), -float("inf")], dtype=torch.float64)
    assert torch.equal(residues(infinite), infinite)


def test_places_lead_back_to_their_residues() -> None:
    x = torch.cat(
        [hashed("x", torch.arange(2000).double()), torch.arange(-5, 5).double(), torch.tensor([-torch.inf])]
    )
    functions = Functions(1234567891)
    assert torch.equal(functions.at_place(functions.place(x)), residues(x))


def test_products_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(P, (30, 30), generator=generator) for _ in range(2))
    wanted = [[sum(int(a[i, k]) * int(b[k, j]) for k in range(30)) % P for j in range(30)] for i in range(30)]
    assert torch.equal(bilinear(torch.mm, a.double(), b.double()), torch.tensor(wanted).double())


ROWS = torch.tensor([0, 0])
FUNCTIONS = {
    "linear": (lambda x, w: F.linear(x, w) * 3 - x.sum(-1, keepdim=True), (5, 6), (6, 6)),
    "convolution": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (2, 3, 8, 8), (4, 3, 3, 3)),
    "grouped convolution": (lambda x, w: F.conv1d(x, w, groups=2), (2, 4, 9), (4, 2, 3)),
    "lookup": (lambda w: F.embedding(torch.tensor([[1, 3, 1], [0, 1, 1]]), w) ** 3, (5, 4)),
    "einsum": (lambda x, y: torch.einsum("abc,acd->bd", x, y), (3, 4, 5), (3, 5, 2)),
    "parts": (lambda x: torch.cat([x[1:].flip(0), x.t()[:3].roll(1)]).cumsum(0) * x[:1], (4, 4)),
    "in place": (lambda x: x.clone().mul_(2).add_(x, alpha=-5).addcmul_(x, x, value=7), (4, 4)),
    "scattered": (
        lambda x: torch.zeros_like(x).scatter_add(0, torch.tensor([[0, 1], [1, 1]]), x) * x, (2, 2)
    ),
    "written": (lambda x: x.index_put((ROWS,), x[:2], True) * x, (3, 2)),
    "complex": (
        lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(x.flip(0))), (4, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_has_integer_results_has_theirs(name: str) -> None:
    function, *shapes = FUNCTIONS[name]
    inputs = [integers(*shape, seed=k) for k, shape in enumerate(shapes)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    wanted = (out, *torch.autograd.grad(out.sum(), leaves))
    for have, want in zip(exact(function, *inputs), wanted, strict=True):
        assert torch.equal(have, residues(want))


LATER = torch.ones(4, 4, dtype=torch.bool).triu(1)


def powers(x: torch.Tensor) -> torch.Tensor:
    return (x - x.amax(-1, keepdim=True)).exp()


def online(x: torch.Tensor) -> torch.Tensor:
    """Softmax by parts, each with its largest element."""
    top, powers = x[:, :2].amax(-1, keepdim=True), []
    for part in x.split(2, -1):
        before, top = top, torch.maximum(top, part.amax(-1, keepdim=True))
        powers = [p * (before - top).exp() for p in powers] + [(part - top).exp()]
    return torch.cat(powers, -1) / torch.cat(powers, -1).sum(-1, keepdim=True)


def by_logarithms(x: torch.Tensor) -> torch.Tensor:
    """Attention by parts, merged as in torch's context parallelism."""
    out = logs = None
    for part, values in zip(x.split(2, -1), x.T.split(2, 0), strict=True):
        here, these = part.softmax(-1) @ values, part.logsumexp(-1, keepdim=True)
        if out is None:
            out, logs = here, these
        else:
            out = out - torch.sigmoid(these - logs) * (out - here)
            logs = logs - F.logsigmoid(logs - these)
    return out


def grouped(x: torch.Tensor) -> torch.Tensor:
    """Attention of four heads of queries with two of keys and values, by torch's kernel."""
    q = x.view(1, 4, 3, 2)
    return F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True)


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """That, by small ops."""
    q, k = x.view(1, 4, 3, 2), x.view(1, 4, 3, 2)[:, :2].repeat_interleave(2, 1)
    return (q @ k.mT * 2**-0.5).softmax(-1) @ k


def attention(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """By small ops."""
    qkv = [x.view(1, 1, 4, 6) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        mask = None if mask is None else ~mask
        return F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=mask is None)


def test_exponentials_have_one_value_for_each_residue() -> None:
    functions, x = Functions(12345), hashed("x", torch.arange(24).double())
    functions.exp(functions.log(x[:5]))  # residues that are known already, of which x has one
    x[7] = functions.log(x[3:4])
    first = functions.exp(x)
    assert first[7] == x[3]
    assert torch.equal(functions.exp(x[4:9]), first[4:9])


LAWS = {
    "means": (lambda x: x.mean(-1) * 4, lambda x: x.sum(-1) * (4 / 6)),
    "softmax": (lambda x: x.softmax(-1), lambda x: powers(x) / powers(x).sum(-1, keepdim=True)),
    "norms": (
        lambda x: F.rms_norm(x, (6,), eps=1e-5), lambda x: x * (x.pow(2).mean(-1, True) + 1e-5).rsqrt(),
    ),
    "normalisation": (
        lambda x: F.layer_norm(x, (6,)),
        lambda x: (x - x.mean(-1, True)) * (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt(),
    ),
    "gates": (F.silu, lambda x: x * torch.sigmoid(x)),
    "roots": (lambda x: x.norm() ** 2, lambda x: (x.norm(dim=-1).norm() * 3**0.5) ** 2 / 3),
    "entropy": (
        lambda x: F.cross_entropy(x, torch.tensor([1, 0, 5, 2])),
        lambda x: (x.logsumexp(-1) - x.gather(1, torch.tensor([[1], [0], [5], [2]]))[:, 0]).mean(),
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(*(x.view(1, 1, 4, 6) for _ in range(3)), is_causal=True),
        lambda x: (((x @ x.T) * 6**-0.5).masked_fill(LATER, -torch.inf).softmax(-1) @ x).view(1, 1, 4, 6),
    ),
    "merged sums": (lambda x: x.softmax(-1), lambda x: online(x)),
    "merged by logarithms": (lambda x: x.softmax(-1) @ x.T, lambda x: by_logarithms(x)),
    "inverse powers": (torch.sigmoid, lambda x: 1 / (1 + (-x).exp())),
    "shared heads": (
        lambda x: grouped(x), lambda x: by_heads(x),
    ),
    "attention with a mask": (lambda x: attention(x, LATER), lambda x: attention(x, None)),
    "optimizers": (
        lambda x: torch.lerp(x, x * x, 0.1), lambda x: x * 0.9 + x.square() / 10,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_equal_formulas_have_equal_results(name: str) -> None:
    first, second = LAWS[name]
    x = hashed("x", torch.arange(24).double()).view(4, 6)
    functions = Functions(12345)

    def results(formula: object, x: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        with FieldMode(functions, Recorder()):
            out = formula(leaf)
            (gradient,) = torch.autograd.grad(
                (out * hashed("g", torch.arange(out.numel()).view(out.shape).double())).sum(), [leaf]
            )
            return [residues(out), residues(gradient)]

    have, want, other = results(first, x), results(second, x), results(second, x * (1 + 1e-9))
    assert torch.equal(have[0], want[0])
    assert not torch.equal(have[0], other[0])
    if name not in ("normalisation", "roots"):  # products of several roots, of which no law is known
        assert torch.equal(have[1], want[1])


OF_GRADIENTS = [case for case in CASES if case.kind != "buffer"]  # of which a proof says nothing


@pytest.mark.parametrize("case", OF_GRADIENTS, ids=[case.name for case in OF_GRADIENTS])
def test_no_faulty_program_is_proved(case: object) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        model = case.model()
    finally:
        torch.set_default_dtype(default)
    with autoshard.audit(model, case.mesh, step=case.step) as audit:
        assert audit.proof(lambda copy: case.rank_step(copy, case.name)).why


def proof_of(rank_step: object, step: object = nets.one_device) -> Proof:
    with autoshard.audit(nets.Net(), "dp=2", step=step) as audit:
        report = audit.rank(rank_step)
    assert report.ok, report.text()
    return report.proof


def averaged(model: nn.Module) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)


def test_triangular_systems_are_solved() -> None:
    x = hashed("x", torch.arange(24).double()).view(4, 6)
    with FieldMode(Functions(12345), Recorder()):
        for upper in (True, False):
            a = x[:, :4].triu() if upper else x[:, :4].tril()
            assert torch.equal(a @ torch.linalg.solve_triangular(a, x, upper=upper), x)
            assert torch.equal(torch.linalg.solve_triangular(a, x.T, upper=upper, left=False) @ a, x.T)


def test_what_numbers_cannot_tell_is_told() -> None:
    def other(model: nets.Net) -> None:
        model.layers[0].norm.eps *= 1 + 1e-4
        nets.one_device(model)
        averaged(model)

    def scaled(model: nets.Net) -> None:
        nets.one_device(model)
        averaged(model)
        model.head.weight.grad *= 1 + 1e-9  # this line

    def faster(model: nets.Net) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 1e-12)
        nets.one_device(model)
        averaged(model)
        optimizer.step()  # here

    def stepped(model: nets.Net) -> None:
        nets.one_device(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    lines = Path(__file__).read_text().splitlines()
    begins, here = (
        next(k for k, line in enumerate(lines, 1) if line.endswith(mark))
        for mark in ("# this line", "# here")
    )
    epsilon, factor, rate = proof_of(other), proof_of(scaled), proof_of(faster, stepped)
    assert "is another formula" in epsilon.why and "cases_tensor.py:38-41" in epsilon.lines[0]
    assert factor.names == ("head.weight",) and factor.lines[0].endswith(f"test_exact_audit.py:{begins}")
    assert factor.lines[0] in factor.text()
    assert "after the step" in rate.why and rate.lines[0].endswith(f"test_exact_audit.py:{here}")


def test_what_has_no_exact_form_is_told_with_its_line() -> None:
    def reads(model: nets.Net) -> None:
        nets.one_device(model)
        scale = model.head.weight.grad[0, 0].item()
        for p in model.parameters():
            p.grad *= scale / scale
        averaged(model)

    assert "Python reads a value (tests/audit/test_exact_audit.py:" in proof_of(reads).why

    def special(model: nets.Net) -> None:
        nets.one_device(model)
        torch.linalg.inv(model.layers[0].up.weight[:8, :8])
        averaged(model)

    assert "has no exact form (tests/audit/test_exact_audit.py:" in proof_of(special).why

    def complex_numbers(model: nets.Net) -> None:
        nets.one_device(model)
        torch.complex(model.head.weight, model.head.weight) + 1
        averaged(model)

    assert "complex numbers have an exact form in products alone" in proof_of(complex_numbers).why


class Normed(nn.Module):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(x)))


def test_statistics_and_optimizers_on_lists() -> None:
    x, y = torch.randn(8, 6), torch.arange(8) % 3

    def step(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        F.cross_entropy(model(x.double()), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
        optimizer.step()

    def rank_step(model: nn.Module) -> None:
        step(nn.parallel.DistributedDataParallel(model))

    with autoshard.audit(Normed(), "dp=2", step=step) as audit:
        assert audit.rank(rank_step).proof.why == ""


def test_what_is_infinite_is_not_proved() -> None:
    def step(model: nn.Module) -> None:
        (model.head.weight.sum() * torch.tensor([1.0, float("inf")]).double()[:1] / 1).sum().backward()
        model.head.bias.grad = torch.full_like(model.head.bias, float("inf"))

    with autoshard.audit(Normed(), "dp=2", step=step) as audit:
        assert "infinite in exact arithmetic" in audit.proof(step).why


def test_types_of_fewer_bits_are_followed_without_rounding() -> None:
    def narrow(model: nets.Net) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            nets.one_device(model)
        averaged(model)

    assert not proof_of(narrow).why
