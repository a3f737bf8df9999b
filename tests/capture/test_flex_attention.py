"""FlexAttention: block masks become what the attention is told, changes of scores are written out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from sampling import sampled
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, flex_attention

import autoshard
from autoshard.capture.capture import capture
from autoshard.errors import CaptureError, UsageError
from autoshard.ir import Folded, Ref
from autoshard.planner.analysis import analyse
from autoshard.torch_adapters.flex import softcap_of
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static

LENGTH, HEADS = 128, 4
#: of a query's and a key's (batch, head, position): whether it attends to it
Mask = Callable[..., torch.Tensor]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < 30


def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) | (k < 20)


def capped(score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return 5 * torch.tanh(score / 5)


def narrowed(score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return 5 * torch.tanh(score / 4)


class Capping:
    """Soft caps as methods, of which one asks a table for the head's."""

    caps: ClassVar = {0: 5.0}

    def __call__(self, score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return 5.0 * torch.tanh(score / 5.0)

    def told(self, score: torch.Tensor, b: Any, h: Any, q: Any, k: Any, cap: float = 5.0) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    def looked_up(self, score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return self.told(score, b, h, q, k, self.caps[h])


def alibi(score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return score + (k - q) * torch.exp2(-(h + 1) * 2.0)


def hiding(score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return torch.where((q > 5) & (q >= k), score, float("-inf"))


class Attending(nn.Module):
    """Two layers with FlexAttention; as torch users write it, or with what it stands for."""

    def __init__(
        self,
        masks: tuple[Mask, ...] = (),
        change: Callable[..., torch.Tensor] | None = None,
        documents: bool = False,
        call: Callable[..., Any] = flex_attention,
        **options: Any,
    ) -> None:
        super().__init__()
        self.masks, self.change, self.documents = masks, change, documents
        self.call, self.options = call, options
        self.layers = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        masks = self.masks
        if self.documents:
            masks = (*masks, lambda b, h, q, k: numbers[b, q] == numbers[b, k])
        block_mask = None
        if masks:
            batch = len(x) if self.documents else None
            block_mask = create_block_mask(and_masks(*masks), batch, None, LENGTH, LENGTH, x.device)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(2, (8, 8)).transpose(1, 2).split((HEADS, 2, 2), 1)
            out = self.call(q, k, v, self.change, block_mask, enable_gqa=True, **self.options)
            x = x + out.transpose(1, 2).flatten(2)
        return x.square().mean()


def plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, change: Any, block_mask: Any, enable_gqa: bool
) -> torch.Tensor:
    """What FlexAttention stands for, which has no gradients on CPUs."""
    k, v = (x.repeat_interleave(HEADS // 2, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / 8**0.5
    places = torch.arange(LENGTH)
    if change is not None:
        at = torch.arange(HEADS)[:, None, None], places[:, None], places
        scores = change(scores, None, *at)
    if block_mask is not None:
        sizes = block_mask.kv_num_blocks.shape[:2]
        mask = create_mask(block_mask.mask_mod, *sizes, LENGTH, LENGTH, "cpu")
        scores = scores.masked_fill(~mask, float("-inf"))
    shares = torch.softmax(scores, -1)
    return torch.where(torch.isnan(shares), 0.0, shares) @ v


Told = tuple[bool, int, str] | tuple[bool, int, str, float]
#: arguments of `Attending` -> (causal, window, dtype of the mask of keys, and a soft cap), None: scores
#: are written out
CASES: dict[str, tuple[dict[str, Any], Told | None]] = {
    "all": ({}, (False, 0, "")),
    "causal": ({"masks": (causal,)}, (True, 0, "")),
    "window": ({"masks": (causal, window)}, (True, 30, "")),
    "documents": ({"masks": (causal,), "documents": True}, (True, 0, "i64")),
    "documents both ways": ({"documents": True}, (False, 0, "i64")),
    "prefix": ({"masks": (prefix,)}, (False, 0, "bool")),
    "capped": ({"masks": (causal, window), "change": capped}, (True, 30, "", 5.0)),
    "capped by a method": ({"masks": (causal,), "change": Capping().told}, (True, 0, "", 5.0)),
    "narrowed": ({"masks": (causal,), "change": narrowed}, None),
    "biased": ({"masks": (causal,), "change": alibi}, None),
    "hidden by scores": ({"change": hiding}, None),
}


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    numbers = (torch.rand(4, LENGTH) < 0.05).cumsum(1)
    return {"x": torch.randn(4, LENGTH, 32, dtype=torch.float64), "numbers": numbers}


def built(options: dict[str, Any], call: Callable[..., Any] = flex_attention) -> nn.Module:
    torch.manual_seed(1)
    return Attending(**options, call=call).double()


def test_modifications_that_are_no_functions() -> None:
    mods = Capping(), Capping().told, partial(Capping().told, cap=2.5), Capping().looked_up
    assert [softcap_of(mod) for mod in mods] == [5.0, 5.0, 2.5, 0.0]


def told(folded: Folded) -> set[Told]:
    found: set[Told] = set()
    for graph in folded.segments.values():
        types = graph.types()
        for node in (n for n in graph.nodes if n.op == "autoshard.sdpa.default"):
            _, _, _, mask, told_causal, _, *width = node.args
            kind = types[mask.name].dtype if isinstance(mask, Ref) else ""
            found.add((told_causal, width[0] if width else 0, kind, *(c for c in width[1:] if c)))
    return found


@pytest.mark.parametrize("name", CASES)
def test_masks_become_what_the_attention_is_told(name: str) -> None:
    options, wanted = CASES[name]
    folded = analyse(capture(built(options), (), batch())).folded
    assert told(folded) == ({wanted} if wanted else set())


@pytest.mark.parametrize(
    ("name", "mesh"), sampled([(n, m) for n in CASES for m in ("dp=2,tp=2", "cp=2,tp=2", "dp=4")], 6), ids=str
)
def test_equal_to_what_it_stands_for(name: str, mesh: str) -> None:
    options, _ = CASES[name]
    inputs, model = batch(), built(options)
    planned = autoshard.plan(model, mesh, example_inputs=inputs, cluster="h100-dgx")
    program = autoshard.compile(model, planned).program
    report = verify(program, built(options, plainly), (), inputs, steps=2)
    assert report.ok, report.worst()
    assert verify_static(program).ok


def test_compiled_attention_is_the_same() -> None:
    folded = analyse(capture(built({"masks": (causal,)}, torch.compile(flex_attention)), (), batch())).folded
    assert told(folded) == {(True, 0, "")}


def test_statistics_are_refused() -> None:
    with pytest.raises(CaptureError, match="more than its output") as raised:
        capture(built({"return_lse": True}), (), batch())
    assert "return_lse" in str(raised.value)


class TakesBlockMask(nn.Module):
    def forward(self, x: torch.Tensor, block_mask: Any) -> torch.Tensor:
        return flex_attention(x, x, x, block_mask=block_mask).square().mean()


def test_a_block_mask_as_argument_is_refused() -> None:
    """What its function reads would be that of the capture in every call."""
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu")
    with pytest.raises(CaptureError, match="block_mask is a BlockMask"):
        capture(TakesBlockMask(), (), {"x": torch.randn(2, 2, LENGTH, 8), "block_mask": mask})


def test_eager_that_does_not_run_here_is_said() -> None:
    """FlexAttention has no gradients on CPUs."""
    inputs, model = batch(), built({"masks": (causal,)})
    planned = autoshard.plan(model, "tp=2", example_inputs=inputs, cluster="cpu-gloo")
    with pytest.raises(UsageError, match="does not run on this machine"):
        verify(autoshard.compile(model, planned).program, model, (), inputs)
