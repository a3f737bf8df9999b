"""Deep models looked at without most of their equal layers: what is then said of all of them is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from families import _gpt2, _llama, _tokens
from torch import nn

from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.ir import Folded
from autoshard.options import PlanOptions
from autoshard.passes.pipeline import LoweringOptions
from autoshard.passes.stages.truncate_layers import Shorter
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.candidates import given_mesh
from autoshard.planner.memory_fit import MemoryFitter
from autoshard.planner.planning import plan_analysed
from autoshard.planner.slot_costs import _filled, _Pricing
from autoshard.planner.stage_slots import Slots
from autoshard.search.plan.plan import Recompute
from autoshard.search.problem.problem import batch_of
from autoshard.search.select.request import SearchRequest
from autoshard.search.solve.formulate import layer_calls


def _gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        num_hidden_layers=17,  # full and sliding attention in turns
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=96,
        sliding_window=8,
        use_cache=False,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


def _bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        encoder_layers=9,
        decoder_layers=10,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        d_model=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=96,
        max_position_embeddings=32,
        dropout=0.0,
        use_cache=False,
        pad_token_id=1,
        decoder_start_token_id=2,
    )
    return BartForConditionalGeneration(config)


def _opt() -> nn.Module:
    """Whose backward of one layer takes a view that the layer before it makes."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        num_hidden_layers=12,
        num_attention_heads=4,
        hidden_size=32,
        ffn_dim=48,
        word_embed_proj_dim=32,
        vocab_size=96,
        max_position_embeddings=32,
        dropout=0.0,
        use_cache=False,
    )
    return OPTForCausalLM(config)


class _Listed(nn.Module):
    """Layers of which the loss takes all that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.layers:
            x = layer(x).relu()
            found.append(x)
        return torch.cat(found).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _llama(layers=11),
    "gpt2": lambda: _gpt2(layers=11),
    "bart": _bart,
    "gemma2": _gemma2,
    "opt": _opt,
}


def _analysed(name: str) -> Analysis:
    torch.manual_seed(0)
    return analyse(capture(MODELS[name](), (), _tokens(96)()))


def _placed(analysis: Analysis, mesh: str) -> tuple[Folded, LoweringOptions, MemoryFitter]:
    cluster = load_cluster("h100-dgx")
    layers, batch = sum(layer_calls(analysis.folded).values()), batch_of(analysis.folded)
    staged = given_mesh(Mesh.parse(mesh), cluster, layers, batch, PlanOptions())
    planned = plan_analysed(analysis, [staged], cluster, request=SearchRequest(batch=None), reasons=False)
    assert planned.solution is not None
    fitter = MemoryFitter(analysis, cluster, SearchRequest(), fixed=False, progress=lambda _: None)
    return planned.solution.formulated.model.folded, fitter.lowering(planned.solution)[1], fitter


def _again(folded: Folded, how: LoweringOptions, share: float) -> LoweringOptions:
    """The first calls of every layer run again."""
    calls = layer_calls(folded)
    chosen = {s: Recompute("selective", int(share * c)) for s, c in calls.items()}
    return replace(how, plan=replace(how.plan, recompute=chosen))


def _whole(folded: Folded, how: LoweringOptions, fitter: MemoryFitter) -> Slots:
    return _Pricing(folded, how, fitter.cluster, fitter.request.recipe, 2).slots()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "pp=2,fsdp=2"])
def test_slots_of_equal_layers_are_those_of_one(name: str, mesh: str) -> None:
    folded, plain, fitter = _placed(_analysed(name), mesh)
    for how in (plain, _again(folded, plain, 1.0), _again(folded, plain, 0.2)):
        found = _filled(folded, how, fitter.cluster, fitter.request.recipe, 2)
        whole = _whole(folded, how, fitter)
        assert found is not None and found.all == whole.all
        for each in fields(whole.costs_of):
            assert np.array_equal(getattr(found.costs_of, each.name), getattr(whole.costs_of, each.name))


def test_layers_that_would_look_otherwise_are_not_filled_in() -> None:
    folded, how, fitter = _placed(_analysed("llama"), "pp=2,fsdp=2")
    short = Shorter(folded, how.flow, how.plan).model()
    assert short is not None
    (gap,) = short.gaps
    assert gap.left_out == tuple(f"model.layers.{k}" for k in range(2, 9)) and gap.blocks == 7
    slots = _Pricing(short.folded, how.of(short), fitter.cluster, fitter.request.recipe, 2).slots()
    first = next(k for k, slot in enumerate(slots.all) if slot.label == gap.behind[0])
    slots.costs_of.forward[first] *= 1.5
    assert slots.filled(gap) is None


def test_layers_whose_values_all_go_elsewhere_stay() -> None:
    torch.manual_seed(0)
    analysis = analyse(capture(_Listed(), (torch.randn(4, 8),), {}))
    folded, how, _ = _placed(analysis, "pp=2,fsdp=2")
    assert layer_calls(folded)
    assert Shorter(folded, how.flow, how.plan).model() is None
