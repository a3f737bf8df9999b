"""What is wide computed for some tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import family
from sampling import sampled
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import MistralConfig, MistralForCausalLM

import autoshard
from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import UsageError, VerificationError
from autoshard.ir import Folded
from autoshard.ir.row_tiles import TILES, tiles_of
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.known_ops import known_ops
from autoshard.program.parse import parse_program
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.search.problem.problem import model_flop
from autoshard.simulate.step import estimate_step
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static
from benchmarks.models import bench_batch, bench_llama

ROWS = 5
#: family -> how many ops its segments have that run in tiles
TILED = {"gpt2": 4, "llama": 4, "mixtral": 2, "bert": 4, "t5": 10, "vit": 2}
MESHES = ("dp=2,tp=2", "tp=4", "cp=4", "fsdp=4", "pp=2,tp=2")


def analysed(name: str, rows: int = ROWS) -> Analysis:
    model, inputs = family(name).make()
    return analyse(capture(model, (), inputs), tile_rows=rows)


def tiles_in(folded: Folded) -> int:
    return sum(node.op == TILES for graph in folded.segments.values() for node in graph.nodes)


@pytest.mark.parametrize(
    ("name", "mesh"), sampled([(name, mesh) for name in TILED for mesh in MESHES], 8), ids=str
)
def test_equal_to_eager(name: str, mesh: str) -> None:
    """Proved, and in numbers; the text of the program is read back."""
    model, inputs = family(name).make()
    analysis = analyse(capture(model, (), inputs), tile_rows=ROWS)
    assert tiles_in(analysis.folded) == TILED[name]
    found = plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("cpu-gloo"), reasons=False)
    program = compile_analysed(found)
    assert verify_static(program).ok
    report = verify(program, model, (), inputs, steps=2)
    assert report.ok, report.worst()


def test_half_precision_adds_tiles_in_single(tmp_path: Path) -> None:
    """Also norms are wide there, in single precision; a stored program is the same."""
    torch.manual_seed(0)
    model, inputs = bench_llama(2, 64, 256).bfloat16(), bench_batch(2, 64, 256)
    analysis = analyse(capture(model, (), inputs), tile_rows=16)
    assert tiles_in(analysis.folded) == 6
    plan = plan_analysed(analysis, [Mesh.parse("tp=2")], load_cluster("cpu-gloo"))
    program = compile_analysed(plan)
    assert verify(program, model, (), inputs, steps=1).ok
    save_program(program, tmp_path / "program")
    text = program_text(program)
    assert program_text(load_program(tmp_path / "program")) == text
    for old, new in (("aten.mm.default", "aten.save.default"), ("'%x0'", "'%x9'"), (", 16, (", ", 0, (")):
        assert old in text
        with pytest.raises(VerificationError, match="body of row_tiles"):
            parse_program(text.replace(old, new), ("tp",), known_ops())


def test_nothing_wide_is_left() -> None:
    """No value of all tokens is as wide as an MLP or the vocabulary, in forward or saved for backward."""
    plain, tiled = analysed("llama", 0).folded, analysed("llama").folded
    config: Any = family("llama").make()[0].config
    wide = {config.intermediate_size, config.vocab_size}

    def widths(folded: Folded) -> set[int]:
        values = [t for g in folded.segments.values() for n in g.nodes for t in n.types if t is not None]
        return {t.shape[-1] for t in values if len(t.shape) == 3}

    assert wide <= widths(plain) and not wide & widths(tiled)
    # backward repeats forward's products, which is no work of the model
    recomputed = [tiles_of(n).recomputed for g in tiled.segments.values() for n in g.nodes if n.op == TILES]
    assert any(recomputed)
    assert model_flop(analysed("llama", 0).model) == model_flop(analysed("llama").model)
    steps = []
    for rows in (0, 4):
        found = plan_analysed(
            analysed("llama", rows), [Mesh.parse("dp=2")], load_cluster("cpu-gloo"), reasons=False
        )
        steps.append(estimate_step(compile_analysed(found), load_cluster("cpu-gloo")))
    assert steps[0].model_flop == pytest.approx(steps[1].model_flop)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_logits_are_not_returned() -> None:
    model, inputs = family("llama").make()
    wanted = model(**inputs).loss
    parallel = autoshard.parallelize(model, "dp=1", example_inputs=inputs, tile_rows=ROWS)
    found = parallel(**inputs)
    torch.testing.assert_close(found.loss, wanted)
    found.loss.backward()
    for ask in (
        lambda: found.logits.shape,
        lambda: found.logits[0],
        lambda: torch.softmax(found.logits, -1),
        lambda: list(found.logits),
    ):
        with pytest.raises(UsageError, match="not made"):
            ask()
    with torch.no_grad():
        logits = parallel.eval()(input_ids=inputs["input_ids"]).logits
    assert logits.shape[:2] == inputs["input_ids"].shape


class Mixing(nn.Module):
    """Rows of what is wide depend on other rows, or gradients of what is wide are asked for."""

    def __init__(self, mix: bool) -> None:
        super().__init__()
        self.up, self.down, self.mix = nn.Linear(8, 64), nn.Linear(64, 8), mix

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = self.up(x)
        if self.mix:
            return (self.down(wide.cumsum(1)).sum(),)
        return wide, self.down(wide)


@pytest.mark.parametrize("mix", (True, False))
def test_what_cannot_run_in_tiles_stays(mix: bool) -> None:
    joint = capture(Mixing(mix), (torch.randn(2, 16, 8),), {}, differentiate="all")
    assert tiles_in(analyse(joint, tile_rows=4).folded) == 0


def test_a_plan_has_tiles_where_nothing_else_fits() -> None:
    """And says so; the plan alone is enough to compile it."""
    model, inputs = bench_llama(1, 32, 8192), bench_batch(2, 8192, 8192)
    free = autoshard.plan(model, "tp=2", example_inputs=inputs, memory=2**33)
    assert not free.plan.tile_rows and free.peak is not None
    tight = autoshard.plan(model, "tp=2", example_inputs=inputs, memory=int(0.6 * free.peak.bytes))
    assert tight.plan.tile_rows == 2048 and tight.peak is not None
    assert tight.peak.bytes < 0.6 * free.peak.bytes
    assert "planned with tiles of 2,048 tokens" in tight.plan.warnings[-1]
    assert "global_batch=2" in tight.plan.warnings[-1]
    program = autoshard.compile(model, tight.plan, example_inputs=inputs).program
    assert any(node.op == TILES for s in program.lowered.segments.values() for node in s.graph.nodes)
    with pytest.raises(autoshard.InfeasibleError):
        autoshard.plan(model, "tp=2", example_inputs=inputs, memory=int(0.05 * free.peak.bytes))


def test_parameters_go_to_host_memory_where_nothing_else_fits() -> None:
    model, inputs = bench_llama(2, 256, 4096), bench_batch(1, 16384, 4096)

    def offloaded(memory: float, optimizer: str = "adamw") -> str:
        planned = autoshard.plan(
            model,
            "dp=1",
            example_inputs=inputs,
            cluster="h100-dgx",
            memory=int(memory),
            optimizer=optimizer,
            baselines=False,
        )
        assert planned.peak is not None and planned.peak.bytes <= memory
        return planned.plan.offload

    assert offloaded(312 * 2**20) == "activations,optimizer"
    assert offloaded(304 * 2**20) == "activations,parameters"
    with pytest.raises(autoshard.InfeasibleError):  # its states cannot live there
        offloaded(304 * 2**20, "muon")


class SoftCapped(nn.Module):
    """Attention by products with capped scores and a window, as eager Gemma-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        q, k, v = self.qkv(x).view(batch, rows, 3, 2, 4).permute(2, 0, 3, 1, 4)
        place = torch.arange(rows)
        apart = place[:, None] - place[None]
        scores = torch.tanh(q @ k.transpose(-1, -2) / 5.0) * 5.0
        scores = scores.masked_fill((apart < 0) | (apart > 9), -1e9)
        mixed = torch.softmax(scores, -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, rows, 8)).square().mean()


@pytest.mark.parametrize("mesh", ("dp=2,tp=2", "cp=2"))
def test_scores_are_made_for_some_queries(mesh: str) -> None:
    """Never for all queries and all keys, in forward or backward; a rank may have some queries, or heads."""
    torch.manual_seed(0)
    model, x = SoftCapped(), torch.randn(2, 24, 8)
    analysis = analyse(capture(model, (x,), {}), tile_rows=ROWS)
    assert tiles_in(analysis.folded) == 2
    values = [t for g in analysis.folded.segments.values() for t in g.types().values()]
    assert not any(t.is_float and t.shape[-2:] == (24, 24) for t in values)
    found = plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("cpu-gloo"), reasons=False)
    program = compile_analysed(found)
    assert verify_static(program).ok
    report = verify(program, model, (x,), {}, steps=2)
    assert report.ok, report.worst()


class Masked(nn.Module):
    """A small model whose attention has a mask of more than one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}
        config = MistralConfig(num_hidden_layers=2, intermediate_size=40, vocab_size=96, **heads)
        self.kind, self.inner = kind, MistralForCausalLM(config)

    def forward(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        place = torch.arange(ids.shape[1])
        query, key, mask = place[:, None], place[None], real[:, None, None]
        if self.kind == "chunks":
            mask = mask & (key <= query) & (key // 48 == query // 48)
        elif self.kind == "prefix":
            mask = mask & ((key <= query) | (key < 20))
        else:
            numbers = (real != 0).cumsum(1) // 70
            mask = mask & (key <= query) & (numbers[:, None, :, None] == numbers[:, None, None])
        return self.inner(ids, attention_mask=mask, labels=ids).loss


@pytest.mark.parametrize("kind", ("chunks", "prefix", "padded documents"))
def test_masks_are_made_for_some_queries(kind: str) -> None:
    """No mask of all queries and all keys is made anywhere."""
    torch.manual_seed(0)
    model = Masked(kind)
    inputs = {"ids": torch.randint(3, 96, (2, 288)), "real": torch.arange(288) < torch.tensor([[288], [200]])}

    def matrices(rows: int) -> int:
        folded = analyse(capture(model, (), inputs), tile_rows=rows).folded
        types = [t for g in folded.segments.values() for t in g.types().values()]
        return sum(t.shape[-2:] == (288, 288) for t in types)

    assert matrices(0) and not matrices(48)
    analysis = analyse(capture(model, (), inputs), tile_rows=48)
    found = plan_analysed(analysis, [Mesh.parse("cp=2,tp=2")], load_cluster("cpu-gloo"), reasons=False)
    program = compile_analysed(found)
    assert verify_static(program).ok
    report = verify(program, model, (), inputs, steps=2)
    assert report.ok, report.worst()


class Encoder(nn.Module):
    """torch's own layers, with a mask of numbers to add and padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, mask=mask < 0, src_key_padding_mask=padded).square().mean()


def test_the_batch_does_not_decide_what_runs_in_tiles() -> None:
    """A plan of microbatches was for another graph than its program, as masks were larger beside a batch."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 32, 16), "padded": torch.arange(32).expand(4, -1) > 20}
    asked: dict[str, Any] = {"cluster": "cpu-gloo", "microbatches": 2, "tile_rows": ROWS}
    found = autoshard.plan(Encoder(), "seq=2,tp=2", example_inputs=inputs, **asked)
    assert found.of_microbatch(lambda _: None).analysis.fingerprint == found.analysis.fingerprint
    report = verify(autoshard.compile(Encoder(), found).program, Encoder(), (), inputs)
    assert report.ok, report.worst()
