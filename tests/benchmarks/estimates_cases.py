"""The programs whose steps are predicted and measured: small models on four ranks of the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import UsageError
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.search.plan.plan import Cut, Pipeline, Recompute
from benchmarks.models import bench_batch, bench_llama

RANKS = 4
VOCAB = 1024
Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class EstimateCase:
    """A program. model: with random weights, the same in every process. batch: so many sequences or images of
    a microbatch, the same in every process. mesh: of one stage. stages: of the pipeline, each on a rank of
    its own; its calls after the first, which embeds, are dealt out evenly. again: whether backward runs all
    layers again. tile_rows: see `passes.memory.tile_rows`.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Inputs]
    size: int
    mesh: str
    stages: int = 1
    microbatches: int = 1
    again: bool = False
    tile_rows: int = 0

    @property
    def text(self) -> str:
        """The model, the mesh, and what else there is to its step."""
        mesh = self.mesh if self.stages == 1 else f"pp={self.stages},{self.mesh}"
        more = [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        more += ["layers run again"] if self.again else []
        more += [f"tiles of {self.tile_rows} tokens"] if self.tile_rows else []
        return ", ".join([f"{self.name} {mesh}", *more])

    def step_batch(self) -> Inputs:
        """The batch of all microbatches."""
        return self.batch(self.size * self.microbatches)


def cases() -> tuple[EstimateCase, ...]:
    """All of them; a step takes 50 to 500 ms on a laptop's two cores."""
    return (
        EstimateCase("llama", bench_llama, _tokens(64), 8, "dp=4"),
        EstimateCase("llama", bench_llama, _tokens(64), 8, "tp=4"),
        EstimateCase("llama", bench_llama, _tokens(64), 8, "fsdp=4", again=True),
        EstimateCase("llama", bench_llama, _tokens(64), 4, "dp=2,tp=2", microbatches=4),
        EstimateCase("llama", bench_llama, _tokens(64), 4, "dp=2", stages=2, microbatches=8),
        EstimateCase("gpt2", _gpt2, _tokens(128), 2, "dp=1", stages=4, microbatches=8),
        EstimateCase("gpt2", _gpt2, _tokens(128), 4, "dp=2,tp=2"),
        EstimateCase("t5", _t5, _pairs, 8, "fsdp=4"),
        EstimateCase("vit", _vit, _images(64), 16, "tp=4"),
        EstimateCase("convolutions", _convolutions, _images(32), 32, "dp=4"),
    )


def program_of(case: EstimateCase) -> Program:
    """Planned for its mesh and compiled. Raises UsageError if its layers cannot be dealt out."""
    found = plan_analysed(
        analyse(capture(case.model(), (), case.batch(case.size)), tile_rows=case.tile_rows),
        [Mesh.parse(case.mesh)],
        load_cluster("cpu-gloo"),
    )
    plan = replace(found.plan, microbatches=case.microbatches)
    if case.again:
        segment, calls = _layers(found.analysis)
        plan = replace(plan, recompute={segment: Recompute("full", calls)})
    if case.stages > 1:
        _, calls = _layers(found.analysis)
        cuts = tuple(Cut(calls * k // case.stages) for k in range(1, case.stages))
        plan = replace(plan, pipeline=Pipeline(case.stages, 0, "1f1b", 1, cuts))
    return compile_analysed(replace(found, plan=plan))


def _layers(analysis: Analysis) -> tuple[str, int]:
    """The segment that forward calls most often, and how often."""
    often = Counter(call.segment for call in analysis.folded.calls if not call.backward)
    segment, calls = often.most_common(1)[0]
    if calls < 2:
        raise UsageError("the model has no layers that are alike", hint="choose another model")
    return segment, calls


# -- models and batches ----------------------------------------------------------------------------


def _tokens(length: int) -> Callable[[int], Inputs]:
    return lambda size: bench_batch(size, length, VOCAB)


def _pairs(size: int) -> Inputs:
    return {"input_ids": bench_batch(size, 64, VOCAB)["input_ids"], **_labels(size)}


def _labels(size: int) -> Inputs:
    return {"labels": bench_batch(size, 32, VOCAB)["labels"]}


def _images(side: int) -> Callable[[int], Inputs]:
    def make(size: int) -> Inputs:
        generator = torch.Generator().manual_seed(2)
        return {
            "pixel_values": torch.randn(size, 3, side, side, generator=generator),
            "labels": torch.randint(0, 10, (size,), generator=generator),
        }

    return make


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_layer": 8, "n_head": 8, "n_embd": 256, "vocab_size": VOCAB, "n_positions": 128}
    return GPT2LMHeadModel(
        GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **size)
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    size = {
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_heads": 8,
        "d_model": 256,
        "d_kv": 32,
        "d_ff": 1024,
    }
    config = T5Config(vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False, **size)
    return T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    size = {"num_hidden_layers": 6, "num_attention_heads": 8, "hidden_size": 256, "intermediate_size": 1024}
    config = ViTConfig(image_size=64, patch_size=8, num_labels=10, **size)
    return ViTForImageClassification(config)


class Convolutions(nn.Module):
    """Six 3 x 3 convolutions with group norm, twice pooled, and the loss of ten classes.

    pixel_values: [batch, 3, side, side]; labels: [batch].
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 32, 64, 64, 128, 128)
        layers: list[nn.Module] = []
        for k, (before, after) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if k in (1, 3) else []
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Inputs:
        return {"loss": nn.functional.cross_entropy(self.layers(pixel_values), labels)}


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    return Convolutions()
