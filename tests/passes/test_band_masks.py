"""Masks that a few numbers describe: which of them are, and that nothing changes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import family
from sampling import sampled
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.capture.capture import capture
from autoshard.ir import Folded, Node, Ref
from autoshard.ops import attention as attention_op
from autoshard.ops import attention_rows
from autoshard.ops.attention import sdpa_math, sdpa_math_backward
from autoshard.planner.analysis import analyse
from autoshard.verify.lockstep import needs_one_rank, verify
from autoshard.verify.single_rank import single_rank_program
from autoshard.verify.static import verify_static

LENGTH = 12
#: of positions of queries [s, 1] and keys [1, s], of what is no padding and of numbers [b, s] -> mask
How = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _apart(n: torch.Tensor) -> torch.Tensor:
    """The documents of numbers that begin anew in each, as transformers tells them apart."""
    return (torch.diff(n, prepend=n[:, :1] - 1) != 1).cumsum(-1)


def _equal(n: torch.Tensor) -> torch.Tensor:
    return (n[:, :, None] == n[:, None, :])[:, None]


def _hidden(mask: torch.Tensor, number: float = float("-inf")) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, number)


LOWEST = torch.finfo(torch.float32).min
#: how a mask is made -> (causal, window, what is left of it: keys, documents or nothing)
SAID: dict[str, tuple[How, bool, int, str]] = {
    "at most": (lambda q, k, pad, n: k <= q, True, 0, ""),
    "less": (lambda q, k, pad, n: k < q + 1, True, 0, ""),
    "queries first": (lambda q, k, pad, n: q >= k, True, 0, ""),
    "tail of a window": (lambda q, k, pad, n: (k <= q) & (k > q - 4), True, 4, ""),
    "window, queries first": (lambda q, k, pad, n: (q - 3 <= k) & (q + 1 > k), True, 4, ""),
    "the narrower of two": (lambda q, k, pad, n: (k <= q) & (k > q - 5) & (k >= q - 2), True, 3, ""),
    "only itself": (lambda q, k, pad, n: (k <= q) & (k >= q), True, 1, ""),
    "a window of all": (lambda q, k, pad, n: (k <= q) & (k > q - 100), True, 0, ""),
    "padding": (lambda q, k, pad, n: (k <= q) & pad, True, 0, "keys"),
    "padding in a window": (lambda q, k, pad, n: pad & ((k <= q) & (k > q - 4)), True, 4, "keys"),
    "expanded": (lambda q, k, pad, n: ((k <= q) & pad).expand(4, 2, LENGTH, LENGTH), True, 0, "keys"),
    "logical": (lambda q, k, pad, n: torch.logical_and(k <= q, k > q - 4)[None, None], True, 4, ""),
    "not behind": (lambda q, k, pad, n: ~(k > q), True, 0, ""),
    "neither behind nor far": (lambda q, k, pad, n: ~((k > q) | (k <= q - 4)), True, 4, ""),
    "both sides": (lambda q, k, pad, n: (q - k).abs() < 4, False, 4, ""),
    "both sides, padded": (lambda q, k, pad, n: ((k - q).abs() <= 3) & pad, False, 4, "keys"),
    "behind by a difference": (lambda q, k, pad, n: q - k >= 0, True, 0, ""),
    "a triangle": (lambda q, k, pad, n: torch.ones(LENGTH, LENGTH).tril().bool(), True, 0, ""),
    "not a triangle": (lambda q, k, pad, n: ~torch.ones(LENGTH, LENGTH).triu(1).bool(), True, 0, ""),
    "padding alone": (lambda q, k, pad, n: pad & (q >= 0), False, 0, "keys"),
    "all": (lambda q, k, pad, n: (q >= 0) & (k >= 0), False, 0, ""),
    "numbers": (lambda q, k, pad, n: _hidden(k <= q), True, 0, ""),
    "the lowest number": (lambda q, k, pad, n: _hidden((k <= q) & (k > q - 4), LOWEST), True, 4, ""),
    "numbers chosen": (lambda q, k, pad, n: torch.where(k > q, LOWEST, 0.0), True, 0, ""),
    "a triangle of numbers": (
        lambda q, k, pad, n: torch.full((LENGTH, LENGTH), float("-inf")).triu(1),
        *(True, 0, ""),
    ),
    "a sum": (lambda q, k, pad, n: _hidden(k <= q) + _hidden(k > q - 4), True, 4, ""),
    "documents": (lambda q, k, pad, n: (k <= q) & _equal(n // 5), True, 0, "documents"),
    "documents, both ways": (lambda q, k, pad, n: _equal(n // 5), False, 0, "documents"),
    "documents in a window": (lambda q, k, pad, n: (k <= q) & (k > q - 3) & _equal(n), True, 3, "documents"),
    "of one sequence": (lambda q, k, pad, n: (k <= q) & _equal(n[:1] // 5), True, 0, "documents"),
    "by positions": (
        lambda q, k, pad, n: (n[:, None, None] <= n[:, None, :, None]) & _equal(_apart(n)),
        *(True, 0, "documents"),
    ),
    "by positions in a window": (
        lambda q, k, pad, n: (n[:, None, :, None] - n[:, None, None]).abs().le(2) & _equal(_apart(n)),
        *(False, 3, "documents"),
    ),
}
#: how a mask is made that must stay as it is
LEFT: dict[str, How] = {
    "keys behind": lambda q, k, pad, n: k >= q,
    "one key behind": lambda q, k, pad, n: k <= q + 1,
    "not its own": lambda q, k, pad, n: (k < q) | (k == q) & (k == 0),
    "one of two": lambda q, k, pad, n: (k <= q) | pad,
    "every other": lambda q, k, pad, n: (k <= q) & ((q - k) % 2 == 0),
    "other positions": lambda q, k, pad, n: 2 * k <= q,
    "of queries alone": lambda q, k, pad, n: (k <= q) & (pad.transpose(2, 3) | (k == 0)),
    "other numbers": lambda q, k, pad, n: torch.zeros(LENGTH, LENGTH).masked_fill(k > q, -1.0),
    "a cast mask": lambda q, k, pad, n: (k <= q).float(),
    "unlike sides": lambda q, k, pad, n: (k - q <= 2) & (q - k <= 3),
    "lowest with padding": lambda q, k, pad, n: _hidden((k <= q) & pad, LOWEST),
    "positions without documents": lambda q, k, pad, n: n[:, None, None] <= n[:, None, :, None],
    "positions of other documents": lambda q, k, pad, n: (
        (n[:, None, None] <= n[:, None, :, None]) & _equal(_apart(2 * n))
    ),
    "documents told apart by less": lambda q, k, pad, n: (
        (n[:, None, None] <= n[:, None, :, None]) & _equal((torch.diff(n, prepend=n[:, :1]) < 0).cumsum(-1))
    ),
    "documents of a difference to a number": lambda q, k, pad, n: (
        (n[:, None, None] <= n[:, None, :, None]) & _equal((n - 3 != 1).cumsum(-1))
    ),
    "a triangle of what a cast loses": lambda q, k, pad, n: (
        torch.full((LENGTH, LENGTH), 0.5).tril().int().bool()
    ),
    "documents laid out by place": lambda q, k, pad, n: _equal(
        n[torch.arange(4), torch.arange(LENGTH)[:, None]].reshape(4, LENGTH)
    ),
    "documents and padding": lambda q, k, pad, n: (k <= q) & _equal(n) & pad,
    "documents by head": lambda q, k, pad, n: _equal(n[:2]).transpose(0, 1),
    "unlike numbers": lambda q, k, pad, n: (n[:, :, None] == n[:, None, :] + 1)[:, None] | (q == k),
}


class Attending(nn.Module):
    """Two layers that take turns with two masks, or one."""

    def __init__(self, *masks: How) -> None:
        super().__init__()
        self.masks, self.layers = masks, nn.ModuleList(nn.Linear(16, 48) for _ in range(2 * len(masks)))

    def forward(self, x: torch.Tensor, real: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        at = torch.arange(LENGTH)
        masks = [how(at[:, None], at[None, :], real[:, None, None, :], numbers) for how in self.masks]
        for k, layer in enumerate(self.layers):
            q, key, v = layer(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, key, v, masks[k % len(masks)])
            x = x + out.transpose(1, 2).flatten(2)
        return x.square().mean()


def made(*masks: How) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    real = torch.ones(4, LENGTH, dtype=torch.bool)
    real[0, 7:] = False
    real[1, :3] = False  # rows that attend to nothing where there is a mask of keys
    lengths = ((3, 9), (1, 1, 10), (12,), (5, 5, 2))
    numbers = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in lengths])
    return Attending(*masks), {"x": torch.randn(4, LENGTH, 16), "real": real, "numbers": numbers}


def attention(folded: Folded) -> list[Node]:
    """All forward attention, in the order of segments."""
    return [n for g in folded.segments.values() for n in g.nodes if n.op == "autoshard.sdpa.default"]


def squares(folded: Folded) -> int:
    """Values with a number for every query and key."""
    types = [t for g in folded.segments.values() for t in g.types().values()]
    return sum(t.shape[-2:] == (LENGTH, LENGTH) for t in types)


def equal(model: nn.Module, batch: dict[str, torch.Tensor], mesh: str, **options: Any) -> None:
    planned = autoshard.plan(model, mesh, example_inputs=batch, cluster="h100-dgx", **options)
    program = autoshard.compile(model, planned).program
    one = single_rank_program(program, model, batch) if needs_one_rank(program) else None
    found = verify(program, model, (), batch, steps=1, one_rank=one)
    assert found.ok, found.worst()
    report = verify_static(program)
    assert report.ok and not report.uncovered


@pytest.mark.parametrize("name", SAID)
def test_said_in_numbers(name: str) -> None:
    how, causal, window, left = SAID[name]
    model, batch = made(how)
    folded = analyse(capture(model, (), batch)).folded
    for graph in folded.segments.values():
        types = graph.types()
        for node in (n for n in graph.nodes if n.op == "autoshard.sdpa.default"):
            _, _, _, mask, told, _, *rest = node.args
            kind = (
                {"bool": "keys", "i64": "documents"}[types[mask.name].dtype] if isinstance(mask, Ref) else ""
            )
            assert (kind, told, rest) == (left, causal, [window] if window else [])
    assert attention(folded) and not squares(folded)


@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_is(name: str) -> None:
    model, batch = made(LEFT[name])
    folded = analyse(capture(model, (), batch)).folded
    for graph in folded.segments.values():
        types = graph.types()
        masks = [n.args[3] for n in graph.nodes if n.op == "autoshard.sdpa.default"]
        assert all(isinstance(m, Ref) and types[m.name].shape[-2:] == (LENGTH, LENGTH) for m in masks)
    assert {(node.args[4], *node.args[6:]) for node in attention(folded)} == {(False,)}


@pytest.mark.parametrize(
    ("name", "mesh"), sampled([(n, m) for n in (*SAID, *LEFT) for m in ("dp=2,tp=2", "cp=2")], 12), ids=str
)
def test_equal_to_eager(name: str, mesh: str) -> None:
    how = SAID[name][0] if name in SAID else LEFT[name]
    equal(*made(how), mesh)


def test_layers_that_take_turns_have_segments_of_their_own() -> None:
    """They were one segment that was given one mask or the other."""
    narrow, padded = SAID["padding in a window"][0], SAID["padding"][0]
    model, batch = made(narrow, padded)
    folded = analyse(capture(model, (), batch)).folded
    assert {node.args[6:] for node in attention(folded)} == {(4,), ()} and not squares(folded)
    for mesh in ("dp=4", "tp=2"):
        equal(model, batch, mesh)


#: what packs, pads or leaves a batch as it is
FAMILIES = (
    *(f"{n}{how}" for n in ("mistral-window", "gemma3-windows") for how in ("", "-padded", "-packed")),
    *("llama-packed", "modernbert-padded"),
)
MESHES = ("dp=2,tp=2", "cp=4", "fsdp=2,cp=2")


@pytest.mark.parametrize(("name", "mesh"), sampled([(n, m) for n in FAMILIES for m in MESHES], 8), ids=str)
def test_models_equal_to_eager(name: str, mesh: str) -> None:
    model, batch = family(name).make()
    equal(model, batch, mesh)


@pytest.mark.parametrize("name", ["mistral-window-padded", "gemma3-windows-packed", "llama-packed"])
def test_slices_of_windows_and_documents(name: str) -> None:
    """A slice attends to those before it as far as its window and its documents reach."""
    model, batch = family(name).make()
    equal(model, batch, "pp=2", microbatches=2, schedule="seq1f1b")


def keys_of(kind: str, length: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What attention is given as mask of keys, and the mask [b, 1, s, t] that it stands for."""
    if not kind:
        return None, torch.ones(1, 1, length, length, dtype=torch.bool)
    if kind == "padded":
        keys = torch.ones(2, 1, 1, length, dtype=torch.bool)
        keys[0, ..., :50] = False
        keys[1, ..., -50:] = False
        return keys, keys.expand(2, 1, length, length)
    drawn = torch.rand(2, 1, 1, length)
    numbers = (drawn < 0.05).cumsum(-1) if kind == "documents" else (drawn * 3).to(torch.uint8)
    return numbers, numbers == numbers.transpose(2, 3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["", "padded", "documents", "numbers that return"])
@pytest.mark.parametrize(
    ("length", "window", "softcap"), [(300, 0, 0.0), (300, 0, 2.0), (300, 40, 0.0), (700, 300, 2.0)]
)
def test_attention_in_numbers_is_that_with_a_mask(
    device: str, causal: bool, kind: str, length: int, window: int, softcap: float
) -> None:
    """In bf16, beside a mask of queries by keys in fp64."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, length, 16, device=device).to(torch.bfloat16) for _ in range(4))
    apart = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    keys, allowed = keys_of(kind, length)
    if causal:
        allowed = allowed & (apart <= 0)
    if window:
        allowed = allowed & (apart.abs() < window)
    keys, allowed = None if keys is None else keys.to(device), allowed.to(device)
    ops = torch.ops.autoshard
    told = keys, causal, 0.25, window, softcap
    out, lse = ops.sdpa(q, k, v, *told)
    found = [out, *ops.sdpa_backward(grad, q, k, v, out, lse, *told)]
    *exact, upstream = (x.double() for x in (q, k, v, grad))
    masked = allowed, False, 0.25, softcap
    expected, sums = sdpa_math(*exact, *masked)
    wanted = [expected, *sdpa_math_backward(upstream, *exact, expected, sums, *masked)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours.double() - theirs).abs().max()) < 0.02 * float(theirs.abs().max())


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("kind", ["", "padded", "documents", "numbers that return"])
@pytest.mark.parametrize(("window", "softcap"), [(30, 0.0), (0, 2.0), (30, 2.0)])
def test_gpus_tell_their_kernel_the_same(
    zigzag: bool, kind: str, window: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU runs, here by the reference of its kernel, beside what a CPU runs."""

    def as_on_gpus(ours: Callable[..., Any], *given: Any) -> Any:
        with monkeypatch.context() as patched:
            for module in (attention_op, attention_rows):
                patched.setattr(module, "by_triton", lambda *given: True)
            return ours(*given)

    torch.manual_seed(0)
    q, grad = (torch.randn(2, 3, 80, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 3, 320, 8, dtype=torch.float64) for _ in range(2))
    keys, _ = keys_of(kind, 320)
    told = 0.25, 40, zigzag, keys, window, True, softcap
    wanted = attention_rows.sdpa_rows(q, k, v, *told)
    found = as_on_gpus(attention_rows.sdpa_rows, q, k, v, *told)
    kept = ~found[1].isneginf()  # a row that attends to nothing may have any log-sum-exp
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1][kept], wanted[1][kept])
    made = as_on_gpus(attention_rows.sdpa_rows_backward, grad, q, k, v, *found, *told)
    for ours, theirs in zip(
        made, attention_rows.sdpa_rows_backward(grad, q, k, v, *wanted, *told), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    if not kind and not softcap:
        return  # torch's kernel
    q = torch.randn(2, 3, 320, 8, dtype=torch.float64)
    rest = keys, True, 0.25, window, softcap
    wanted = attention_op._sdpa_cpu(q, k, v, *rest)
    found = as_on_gpus(attention_op._sdpa_cuda, q, k, v, *rest)
    torch.testing.assert_close(found[0], wanted[0])
    made = as_on_gpus(attention_op._sdpa_backward_cuda, k, q, k, v, *found, *rest)
    for ours, theirs in zip(made, attention_op._sdpa_backward_cpu(k, q, k, v, *wanted, *rest), strict=True):
        torch.testing.assert_close(ours, theirs)


def capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, cap: float
) -> torch.Tensor:
    scores = cap * torch.tanh(q @ k.transpose(2, 3) * 0.25 / cap)
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["", "keys", "rows", "numbers"])
@pytest.mark.parametrize(("rows", "keys"), [(50, 50), (50, 23), (23, 50)])
def test_soft_caps_are_those_written_out(
    causal: bool, kind: str, rows: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64, some rows at a time, with gradients by autograd."""
    torch.manual_seed(0)
    monkeypatch.setattr("autoshard.ops.attention._SCORES", 3 * 2 * keys * 17)
    q = torch.randn(2, 3, rows, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 3, keys, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask: torch.Tensor | None = None
    if kind:
        mask = torch.randn(2, 1, 1 if kind == "keys" else rows, keys, dtype=torch.float64)
        mask = mask if kind == "numbers" else mask > -1
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0] = True  # a row of which everything is hidden is a matter of taste
    out, _ = torch.ops.autoshard.sdpa(q, k, v, mask, causal, 0.25, 0, 0.5)
    wanted, grad = capped(q, k, v, mask, causal, 0.5), torch.randn_like(out)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x, (q, k, v), grad) for x in (out, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["", "padded", "documents", "numbers that return"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (30, 2.0)])
def test_rows_of_a_divided_sequence(
    zigzag: bool, causal: bool, kind: str, window: int, softcap: float
) -> None:
    """Ranks with parts of the queries give together what one with all of them gives, in fp64."""
    torch.manual_seed(0)
    length, ops = 320, torch.ops.autoshard
    q, k, v, grad = (torch.randn(2, 3, length, 8, dtype=torch.float64) for _ in range(4))
    keys, _ = keys_of(kind, length)
    out, lse = ops.sdpa(q, k, v, keys, causal, 0.25, window, softcap)
    wanted = ops.sdpa_backward(grad, q, k, v, out, lse, keys, causal, 0.25, window, softcap)
    sums = [torch.zeros_like(x) for x in (k, v)]
    size = length // 8 if zigzag else length // 4
    for rank in range(4):
        rows = torch.arange(rank * size, (rank + 1) * size)
        if zigzag:
            rows = torch.cat((rows, length - size - rank * size + torch.arange(size)))
        given = q[:, :, rows], k, v
        told = 0.25, rank * size, zigzag, keys, window, causal, softcap
        part, part_lse = ops.sdpa_rows(*given, *told)
        torch.testing.assert_close(part, out[:, :, rows])
        torch.testing.assert_close(part_lse, lse[:, :, rows])
        made = ops.sdpa_rows_backward(grad[:, :, rows], *given, part, part_lse, *told)
        torch.testing.assert_close(made[0], wanted[0][:, :, rows])
        sums = [a + b for a, b in zip(sums, made[1:], strict=True)]
    for ours, theirs in zip(sums, wanted[1:], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_batch_as_long_as_the_sequence_is_captured_for_a_microbatch() -> None:
    """Both have one row of numbers then, and a smaller batch would shorten both."""
    model, _ = family("mistral-window").make()
    ids, labels = (torch.randint(3, 96, (16, 16)) for _ in range(2))
    real = torch.ones(16, 16, dtype=torch.int64)
    real[2, 9:] = 0
    batch = {"input_ids": ids, "labels": labels, "attention_mask": real}
    equal(model.to(torch.bfloat16), batch, "tp=4", tile_rows=3, microbatches=2)
