"""Plans exported for torch's own parallel APIs and for transformers: what they say, and that it is right."""

from __future__ import annotations

import ast
import functools
import json
import os
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import export_worker
import pytest
import torch
from planned import planned as planned_family
from ranks import HERE, run_ranks
from sampling import sampled
from torch import nn
from typer.testing import CliRunner

import autoshard
from autoshard.capture.capture import capture
from autoshard.cli.export import write_atomically
from autoshard.cli.main import app
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import UsageError, VerificationError
from autoshard.interop.by_module import globs, grouped
from autoshard.interop.export import Exported
from autoshard.interop.module_styles import parameter_uses
from autoshard.interop.units import layer_lists
from autoshard.ir.placement import Layout, Placement, R, Shard
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.search.plan.plan import Recompute

FAMILIES = ("llama", "gpt2", "bert", "t5", "mixtral")
MESHES = ("tp=2", "fsdp=2", "dp=2,tp=2", "fsdp=2,tp=2")
#: ends of the names of modules that Megatron-LM divides by columns, and by rows
COLUMNS = tuple(
    f".{end}"
    for end in (
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "query", "key", "value"),
        *("q", "k", "v", "wi", "intermediate.dense"),
    )
)
ROWS = tuple(f".{end}" for end in ("o_proj", "out_proj", "down_proj", "fc2", "o", "wo", "output.dense"))


@functools.cache
def model_of(name: str) -> tuple[nn.Module, dict[str, Any]]:
    return export_worker.make(name)


@functools.cache
def analysis_of(name: str) -> Analysis:
    model, inputs = model_of(name)
    return analyse(capture(model, (), inputs))


@functools.cache
def planned(name: str, mesh: str) -> Planned:
    return plan_analysed(analysis_of(name), [Mesh.parse(mesh)], load_cluster("cpu-gloo"), reasons=False)


@functools.cache
def divided(name: str, mesh: str, tables: bool = False) -> Planned:
    """A plan in which the layers are divided as in Megatron-LM, whatever the search thinks of it.

    tables: the embeddings and the head as well, by the vocabulary.
    """
    return forced(planned(name, mesh), mesh, tables)


def forced(found: Planned, mesh: str, tables: bool = False) -> Planned:
    plan, analysis, axis = found.plan, found.analysis, Mesh.parse(mesh).index("tp")
    nodes = dict(plan.nodes)
    for (number, site), product in parameter_uses(analysis).products.items():
        module, key = product.module, (analysis.folded.calls[number].segment, site)
        inputs: tuple[Placement, Placement]
        if product.lookup:
            inputs = (Shard(0), R) if tables else (R, R)
        elif f".{module}".endswith(COLUMNS) or (tables and module == "lm_head"):
            inputs = (R, Shard(1))
        else:
            inputs = (Shard(1), Shard(0)) if f".{module}".endswith(ROWS) else (R, R)
        old = nodes[key]
        nodes[key] = replace(
            old, inputs=tuple(_with(lay, axis, p) for lay, p in zip(old.inputs, inputs, strict=True))
        )
    return Planned(replace(plan, nodes=nodes), analysis, found.cluster)


def _with(layout: Layout, axis: int, placement: Placement) -> Layout:
    return (*layout[:axis], placement, *layout[axis + 1 :])


def exported(found: Planned, name: str, format: str = "torch") -> Exported:
    model, inputs = model_of(name)
    return autoshard.export(found, format, model=model, example_inputs=inputs)


@functools.cache
def exported_divided(name: str, mesh: str, tables: bool = False, format: str = "torch") -> Exported:
    return exported(divided(name, mesh, tables), name, format)


def styles_in(text: str) -> dict[str, str]:
    """Pattern -> style of a text's tensor_parallel_plan."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == "tensor_parallel_plan":
            (table,) = (n for n in ast.walk(node) if isinstance(n, ast.Dict))
            return {
                ast.literal_eval(k): ast.unparse(v)
                for k, v in zip(table.keys, table.values, strict=True)
                if k
            }
    return {}


def matches(pattern: str, name: str) -> bool:
    words, others = pattern.split("."), name.split(".")
    return len(words) == len(others) and all(fnmatchcase(o, w) for w, o in zip(words, others, strict=True))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_text_says_all_of_the_plan(name: str, mesh: str) -> None:
    """Public imports only, patterns that match, and every parameter split over tp divided or named."""
    found = planned_family(name, mesh)
    text = autoshard.export(found).text
    tree = ast.parse(text)
    compile(tree, "exported.py", "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            modules = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            assert not any(part.startswith("_") for m in modules for part in m.split("."))
    assert all(len(line) <= 120 for line in text.splitlines())
    sizes = dict(zip(Mesh.parse(mesh).names, Mesh.parse(mesh).sizes, strict=True))
    assert ("fully_shard(model" in text) == (sizes.get("fsdp", 1) > 1)
    assert ("average_gradients(model" in text or "DistributedDataParallel(" in text) == (
        sizes.get("dp", 1) > 1
    )
    styles = styles_in(text)
    modules = dict(model_of(name)[0].named_modules())
    for pattern in styles:
        assert any(matches(pattern, module) for module in modules), pattern
    comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    named = {word.strip(",:;.") for word in comment.split()}
    if "tp" not in sizes:
        assert not styles
        return
    axis = Mesh.parse(mesh).index("tp")
    for key, group in found.analysis.flow.classes.items():
        if group.first.kind == "param" and found.plan.params[key].use[axis] != R:
            for port in group.ports:
                module = port.target.rpartition(".")[0]
                said = any(matches(p, n) for p in (*styles, *named) for n in (module, port.target))
                assert said, port.target


GOLDEN = '''from functools import partial

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

MESH = {"dp": 2, "fsdp": 2, "tp": 2}
MICROBATCHES = 4


def tensor_parallel_plan():
    """How modules are divided over the axis tp; each ``*`` stands for a number."""
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


def apply(model, mesh):
    """Make the model parallel on a DeviceMesh with the axes of MESH; gives back what to call."""
    shape = dict(zip(mesh.mesh_dim_names or (), mesh.shape))
    if shape != MESH:
        raise ValueError(f"the mesh is {shape}, and this was planned for {MESH}")
    parallelize_module(model, mesh["tp"], tensor_parallel_plan())
    for layer in list(model.model.layers.children())[:1]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    data_mesh = mesh["dp", "fsdp"]
    for layer in model.model.layers.children():
        fully_shard(layer, mesh=data_mesh, reshard_after_forward=True)
    fully_shard(model, mesh=data_mesh, reshard_after_forward=False)
    return model
'''


def test_text_of_a_whole_plan() -> None:
    """Every part at once, word for word."""
    found = divided("llama-wide", "dp=2,fsdp=2,tp=2", tables=True)
    plan = replace(found.plan, microbatches=4, recompute={"layers_fwd": Recompute("full", 1)})
    layers = {k for k, c in found.analysis.flow.classes.items() if ".layers." in c.first.target}
    plan = replace(plan, params={k: replace(p, keep=k not in layers) for k, p in plan.params.items()})
    text = exported(Planned(plan, found.analysis, found.cluster), "llama-wide").text
    assert text.endswith(GOLDEN), text
    head = text.removesuffix(GOLDEN)
    assert "4 microbatches" in head and "use_cache=False" in head
    assert "lm_head: its output is gathered: xent_stats" in head


def test_code_that_names_its_heads_gets_whole_tensors() -> None:
    """OPT cuts heads by their number: on half of the features that would take half of the tokens instead."""
    text = exported_divided("opt", "tp=2").text
    styles = styles_in(text)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert (
            styles[f"model.decoder.layers.*.self_attn.{name}"]
            == "ColwiseParallel(output_layouts=Replicate())"
        )
    assert styles["model.decoder.layers.*.self_attn.out_proj"] == "RowwiseParallel(input_layouts=Replicate())"
    assert styles["model.decoder.layers.*.fc1"] == "ColwiseParallel()"
    assert styles["model.decoder.layers.*.fc2"] == "RowwiseParallel()"
    assert "takes a rank's part for something else" in " ".join(text.replace("#", "").split())


def test_without_the_model_nothing_stays_split() -> None:
    made = autoshard.export(divided("llama-wide", "tp=2"))
    assert set(styles_in(made.text).values()) == {
        "ColwiseParallel(output_layouts=Replicate())",
        "RowwiseParallel(input_layouts=Replicate())",
    }
    assert any("give the model" in remark for remark in made.remarks)


@pytest.mark.parametrize(
    ("name", "module", "reason"),
    [
        ("bert", "bert.embeddings.word_embeddings", "shares its weight"),
        ("bert", "bert.embeddings.token_type_embeddings", None),
        ("opt", "model.decoder.embed_tokens", "padding_idx"),
        ("llama-odd", "model.embed_tokens", "shares its weight"),
        ("llama-odd", "model.layers.*.self_attn.o_proj", None),
        ("mixtral", "model.layers.*.mlp.gate", None),
    ],
)
def test_what_module_styles_cannot_say_is_said(name: str, module: str, reason: str | None) -> None:
    made = exported_divided(name, "tp=2", True)
    noted = [remark for remark in made.remarks if module in remark.split(": ")[0].split(", ")]
    if reason is None:
        assert not any("shares" in remark or "padding" in remark for remark in noted)
    else:
        assert any(reason in remark for remark in noted), made.remarks
        assert module not in styles_in(made.text)


class Dropping(nn.Module):
    """Two layers with dropout between them, both divided."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.drop(self.fc1(x))).square().mean()


class Shared(nn.Module):
    """A scale that all of a rank's part is multiplied by: its gradient would be a part of the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x) * self.scale).square().mean()


def small(model: nn.Module) -> Exported:
    """The export of a small model whose layers fc1 and fc2 are divided."""
    inputs = (torch.randn(4, 16),)
    found = plan_analysed(analyse(capture(model, inputs)), [Mesh.parse("tp=2")], load_cluster("cpu-gloo"))
    return autoshard.export(forced(found, "tp=2"), model=model, example_inputs=inputs)


def test_dropout_on_parts_is_said() -> None:
    made = small(Dropping())
    assert styles_in(made.text) == {"fc1": "ColwiseParallel()", "fc2": "RowwiseParallel()"}
    assert any(remark.startswith("drop: its dropout acts on parts") for remark in made.remarks)


def test_no_whole_weight_takes_part_of_a_gradient() -> None:
    made = small(Shared())
    assert styles_in(made.text)["fc1"] == "ColwiseParallel(output_layouts=Replicate())"
    assert any("part of its gradient" in remark for remark in made.remarks)


def test_shards_outside_of_replicas_are_refused() -> None:
    with pytest.raises(UsageError, match="dp before fsdp"):
        autoshard.export(planned("gpt2", "fsdp=2,dp=2"))


def test_arguments_are_checked() -> None:
    found = planned("gpt2", "fsdp=2")
    with pytest.raises(UsageError, match="no format"):
        autoshard.export(found, "yaml")
    with pytest.raises(UsageError, match="go together"):
        autoshard.export(found, model=model_of("gpt2")[0])
    with pytest.raises(VerificationError, match="another model"):
        autoshard.export(Planned(found.plan, analysis_of("opt"), found.cluster))


@pytest.mark.parametrize("name", ["llama", "llama-wide", "opt", "bert", "t5", "mixtral"])
def test_tp_plan_is_one_that_transformers_knows(name: str) -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    found = json.loads(exported_divided(name, "tp=2", format="tp-plan").text)
    model, _ = model_of(name)
    names = [n for n, _ in [*model.named_modules(), *model.named_parameters()]]
    for pattern, style in found.items():
        assert style in ALL_PARALLEL_STYLES
        assert any(matches(pattern, n) for n in names), pattern
    held = {n.rpartition(".")[0] for n, _ in model.named_parameters(remove_duplicate=False)}
    assert all(any(matches(p, module) for p in found) for module in held)
    assert {"rowwise", "rowwise_split_input"} & set(found.values())


def test_tp_plan_needs_tp() -> None:
    with pytest.raises(UsageError, match="nothing that a tp_plan could say"):
        autoshard.export(planned("gpt2", "fsdp=2"), "tp-plan")


def test_names_are_grouped() -> None:
    every = [f"a.{n}.{leaf}" for n in range(3) for leaf in ("q", "k")]
    assert grouped(["a.0.q", "a.1.q", "a.2.q"], every) == ["a.*.q"]
    assert grouped(["a.0.q", "a.1.q"], every) == ["a.0.q", "a.1.q"]
    assert globs(["a.0.q", "a.1.q", "a.2.q", "a.1.k"], every) == ["a.*.q", "a.1.k"]
    deep = [f"b.{n}.layer.{k}.x" for n in range(2) for k in range(3)]
    assert globs(["b.0.layer.1.x", "b.1.layer.1.x"], deep) == ["b.*.layer.1.x"]
    assert globs(deep, deep) == ["b.*.layer.*.x"]
    assert globs(["b.0.layer.0.x", "b.1.layer.1.x"], deep) == ["b.0.layer.0.x", "b.1.layer.1.x"]


def test_layers_are_the_outermost_lists() -> None:
    names = ["e.w", "enc.0.mlp.1.w", "enc.0.mlp.2.w", "enc.2.mlp.1.w", "dec.0.w", "dec.1.w", "one.0.w"]
    found = {group.container: (group.numbers, group.contiguous) for group in layer_lists(names)}
    assert found == {"enc": ((0, 2), False), "dec": ((0, 1), True)}


def test_command(tmp_path: Path) -> None:
    """A plan folder to both formats, and no file where something goes wrong."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
    (tmp_path / "llama.json").write_text(json.dumps({**config, **sizes, "num_key_value_heads": 4}))
    runner, folder = CliRunner(), str(tmp_path / "plan")
    target = ["plan", f"hf:{tmp_path / 'llama.json'}", "--mesh", "fsdp=2,tp=2", "--batch", "2", "--seq", "16"]
    made = runner.invoke(app, [*target, "-o", folder])
    assert made.exit_code == 0, made.output
    out = tmp_path / "parallel.py"
    made = runner.invoke(app, ["export", folder, "-o", str(out)])
    assert made.exit_code == 0, made.output
    assert "def apply(model, mesh):" in out.read_text()
    again = runner.invoke(app, ["export", folder, "-o", str(out)])
    assert again.exit_code == 2 and "exists already" in again.output
    shown = runner.invoke(app, ["export", folder, "--format", "torch", "--json"])
    assert json.loads(shown.stdout)["text"] == out.read_text()
    wrong = runner.invoke(app, ["export", folder, "--format", "yaml"])
    assert wrong.exit_code == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama.json", "parallel.py", "plan"]


def test_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "parallel.py"
    write_atomically(out, "old")

    def fails(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="disk full"):
            write_atomically(out, "new")
    assert out.read_text() == "old"
    assert [p.name for p in out.parent.iterdir()] == ["parallel.py"]


#: (model, mesh, whether Megatron's division is forced, format)
CASES = sampled(
    [
        ("llama-wide", "tp=2", True, "torch"),
        ("llama-wide", "dp=2,tp=2", True, "torch"),
        ("llama-wide", "fsdp=2,tp=2", True, "torch"),
        ("llama-wide", "tp=2", False, "torch"),
        ("llama-wide", "tp=2", True, "tp-plan"),
        ("opt", "tp=4", True, "torch"),
        ("opt", "dp=2,fsdp=2", False, "torch"),
        ("opt", "tp=2", True, "tp-plan"),
        ("gpt2", "fsdp=2", False, "torch"),
        ("gpt2", "dp=2", False, "torch"),
        ("gpt2", "dp=2,tp=2", False, "torch"),
        ("bert", "dp=2,tp=2", True, "torch"),
        ("t5", "fsdp=2,tp=2", True, "torch"),
        ("t5", "tp=2", True, "tp-plan"),
        ("mixtral", "fsdp=2,tp=2", True, "torch"),
        ("mixtral", "tp=2", True, "tp-plan"),
    ],
    3,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One start of four processes runs all cases; with sharded parameters, layers run again in backward."""
    folder = tmp_path_factory.mktemp("export")
    cases = []
    for number, (name, mesh, force, format) in enumerate(CASES):
        found = divided(name, mesh, tables=True) if force else planned(name, mesh)
        if "fsdp" in mesh:
            found = Planned(_recomputing(found), found.analysis, found.cluster)
        file = folder / f"case_{number}{'.py' if format == 'torch' else '.json'}"
        write_atomically(file, exported(found, name, format).text)
        cases.append({"model": name, "mesh": mesh, "file": str(file)})
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks(
        [str(HERE / "export_worker.py"), str(folder / "cases.json"), str(folder / "results.json")],
        timeout=300,
    )
    rows: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return rows


def _recomputing(found: Planned) -> Any:
    """The plan, with the layers of every kind run again: all of the first kind, what is cheap of others."""
    calls = [c for c in found.analysis.folded.calls if c.label and not c.backward]
    segments = list(dict.fromkeys(c.segment for c in calls))
    how = {s: Recompute("selective" if k else "full", 2) for k, s in enumerate(segments)}
    return replace(found.plan, recompute=how)


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_equals_eager(results: list[dict[str, Any]], number: int) -> None:
    """Loss and every gradient, and that there is less on a rank than the whole."""
    name, mesh, force, _ = CASES[number]
    row = results[number]
    assert row["error"] < 1e-5, f"{row['at']} is off by {row['error']:.1e}"
    if force or "fsdp" in mesh:
        assert row["share"] < 0.95, f"{name} holds {row['share']:.0%} of its parameters on a rank"
