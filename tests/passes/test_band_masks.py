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
from autoshard.ops.attention import sdpa_math, sdpa_math_backward
from autoshard.planner.analysis import analyse
from autoshard.verify.lockstep import needs_one_rank, verify
from autoshard.verify.single_rank import single_rank_program
from autoshard.verify.static import verify_static

LENGTH = 12
#: of positions of queries [s, 1] and keys [1, s] and of what is no padding [b, 1, 1, s] -> mask
How = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: how a mask is made -> (window, whether a mask of keys is left)
SAID: dict[str, tuple[How, int, bool]] = {
    "at most": (lambda q, k, pad: k <= q, 0, False),
    "less": (lambda q, k, pad: k < q + 1, 0, False),
    "queries first": (lambda q, k, pad: q >= k, 0, False),
    "tail of a window": (lambda q, k, pad: (k <= q) & (k > q - 4), 4, False),
    "window, queries first": (lambda q, k, pad: (q - 3 <= k) & (q + 1 > k), 4, False),
    "the narrower of two": (lambda q, k, pad: (k <= q) & (k > q - 5) & (k >= q - 2), 3, False),
    "only itself": (lambda q, k, pad: (k <= q) & (k >= q), 1, False),
    "a window of all": (lambda q, k, pad: (k <= q) & (k > q - 100), 0, False),
    "padding": (lambda q, k, pad: (k <= q) & pad, 0, True),
    "padding in a window": (lambda q, k, pad: pad & ((k <= q) & (k > q - 4)), 4, True),
    "expanded": (lambda q, k, pad: ((k <= q) & pad).expand(3, 2, LENGTH, LENGTH), 0, True),
    "logical": (lambda q, k, pad: torch.logical_and(k <= q, k > q - 4)[None, None], 4, False),
}
#: how a mask is made that must stay as it is
LEFT: dict[str, How] = {
    "keys behind": lambda q, k, pad: k >= q,
    "one key behind": lambda q, k, pad: k <= q + 1,
    "not its own": lambda q, k, pad: (k < q) | (k == q) & (k == 0),
    "one of two": lambda q, k, pad: (k <= q) | pad,
    "every other": lambda q, k, pad: (k <= q) & ((q - k) % 2 == 0),
    "other positions": lambda q, k, pad: 2 * k <= q,
    "of queries alone": lambda q, k, pad: (k <= q) & (pad.transpose(2, 3) | (k == 0)),
    "numbers": lambda q, k, pad: torch.zeros(LENGTH, LENGTH).masked_fill(k > q, -1.0),
}


class Attending(nn.Module):
    """Two layers that take turns with two masks, or one."""

    def __init__(self, *masks: How) -> None:
        super().__init__()
        self.masks, self.layers = masks, nn.ModuleList(nn.Linear(16, 48) for _ in range(2 * len(masks)))

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        at = torch.arange(LENGTH)
        masks = [how(at[:, None], at[None, :], real[:, None, None, :]) for how in self.masks]
        for k, layer in enumerate(self.layers):
            q, key, v = layer(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, key, v, masks[k % len(masks)])
            x = x + out.transpose(1, 2).flatten(2)
        return x.square().mean()


def made(*masks: How) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    real = torch.ones(3, LENGTH, dtype=torch.bool)
    real[0, 7:] = False
    real[1, :3] = False  # rows that attend to nothing where there is a mask of keys
    return Attending(*masks), {"x": torch.randn(3, LENGTH, 16), "real": real}


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
    how, window, by_keys = SAID[name]
    model, batch = made(how)
    folded = analyse(capture(model, (), batch)).folded
    for node in attention(folded):
        _, _, _, mask, causal, _, *rest = node.args
        assert (isinstance(mask, Ref), causal, rest) == (by_keys, True, [window] if window else [])
    assert attention(folded) and not squares(folded)
    equal(model, batch, "tp=2")


@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_is(name: str) -> None:
    model, batch = made(LEFT[name])
    folded = analyse(capture(model, (), batch)).folded
    assert {node.args[4] for node in attention(folded)} == {False}
    equal(model, batch, "tp=2")


def test_layers_that_take_turns_have_segments_of_their_own() -> None:
    """They were one segment that was given one mask or the other."""
    narrow, padded = SAID["padding in a window"][0], SAID["padding"][0]
    model, batch = made(narrow, padded)
    folded = analyse(capture(model, (), batch)).folded
    assert {node.args[6:] for node in attention(folded)} == {(4,), ()} and not squares(folded)
    for mesh in ("dp=3", "tp=2"):
        equal(model, batch, mesh)


FAMILIES = ("mistral-window", "gemma3-windows")
MESHES = ("dp=2,tp=2", "cp=4", "fsdp=2,cp=2")


@pytest.mark.parametrize(
    ("name", "padded", "mesh"),
    sampled([(n, p, m) for n in FAMILIES for p in ("", "-padded") for m in MESHES], 6),
    ids=str,
)
def test_models_equal_to_eager(name: str, padded: str, mesh: str) -> None:
    model, batch = family(f"{name}{padded}").make()
    equal(model, batch, mesh)


@pytest.mark.parametrize("name", [f"{n}-padded" for n in FAMILIES])
def test_slices_of_windows(name: str) -> None:
    """A slice attends to those before it as far as its window reaches."""
    model, batch = family(name).make()
    equal(model, batch, "pp=2", microbatches=2, schedule="seq1f1b")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("length", "window"), [(300, 0), (300, 40), (700, 300)])
def test_attention_in_numbers_is_that_with_a_mask(
    device: str, padded: bool, length: int, window: int
) -> None:
    """In bf16, beside a mask of queries by keys in fp64."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, length, 16, device=device).to(torch.bfloat16) for _ in range(4))
    at = torch.arange(length, device=device)
    hidden = at[None, :] > at[:, None]
    if window:
        hidden = hidden | (at[None, :] <= at[:, None] - window)
    keys = torch.ones(2, 1, 1, length, dtype=torch.bool, device=device)
    keys[0, ..., :50] = False
    keys[1, ..., -50:] = False
    allowed = ~hidden & keys if padded else ~hidden[None, None]
    ops = torch.ops.autoshard
    out, lse = ops.sdpa(q, k, v, keys if padded else None, True, 0.25, window)
    found = [out, *ops.sdpa_backward(grad, q, k, v, out, lse, keys if padded else None, True, 0.25, window)]
    exact = [x.double() for x in (q, k, v, grad)]
    expected, sums = sdpa_math(*exact[:3], allowed, False, 0.25)
    wanted = [expected, *sdpa_math_backward(exact[3], *exact[:3], expected, sums, allowed, False, 0.25)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours.double() - theirs).abs().max()) < 0.02 * float(theirs.abs().max())


def test_a_batch_as_long_as_the_sequence_is_captured_for_a_microbatch() -> None:
    """Both have one row of numbers then, and a smaller batch would shorten both."""
    model, _ = family("mistral-window").make()
    ids, labels = (torch.randint(3, 96, (16, 16)) for _ in range(2))
    real = torch.ones(16, 16, dtype=torch.int64)
    real[2, 9:] = 0
    batch = {"input_ids": ids, "labels": labels, "attention_mask": real}
    equal(model.to(torch.bfloat16), batch, "tp=4", tile_rows=3, microbatches=2)
