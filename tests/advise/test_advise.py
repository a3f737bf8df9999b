"""Configurations of other tools: their files, their spaces, and what is found best in them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoshard.advise.formats.registry import read_config, written
from autoshard.advise.judge import Judge, Judged
from autoshard.advise.neighbours import neighbours
from autoshard.advise.search import Advice, advise
from autoshard.advise.space import choices
from autoshard.advise.tool_config import ToolConfig
from autoshard.advise.tools import tool_named, tools
from autoshard.advise.work import Work, work_of
from autoshard.cli.main import app
from autoshard.cluster import load_cluster
from autoshard.errors import InfeasibleError, UsageError

#: wide enough that computing takes longer than launching
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
BATCH, SEQ = 64, 2048


@cache
def target(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return work_of(target(tmp_path_factory.mktemp("llama")), load_cluster("h100-dgx"), 16, BATCH, SEQ, None)


def test_work_is_read_off_the_graph(work: Work) -> None:
    assert (work.layers, work.hidden, work.divided) == (8, 2048, (8, 5632))
    assert work.node == 8
    # forward and backward of a token: 6 FLOP per parameter of a product, and attention
    products = work.parameters - 32000 * 2048
    assert 6 * products * SEQ < work.flop < 6.5 * products * SEQ + 8 * 12 * SEQ**2 * 2048


@pytest.mark.parametrize("name", tools())
def test_files_say_what_they_were_written_from(name: str, work: Work, tmp_path: Path) -> None:
    tool, path = tools()[name], tmp_path / "config"
    space = list(choices(tool, work))
    assert len(space) > 5
    for choice in space:
        for off in {(), *((switch,) for switch in tool.switches)}:
            wanted = tool.plain(replace(choice, off=off))
            path.write_text(written(tool, wanted, work.batch, work.seq))
            told, settings = read_config(path, None)
            assert told == name
            assert not settings.ignored
            assert settings.batch in (None, work.batch) and settings.seq in (None, work.seq)
            settings = replace(settings, micro=settings.micro or wanted.micro)
            assert tool.plain(settings.choice(work.gpus, work.batch, work.layers)) == wanted, path.read_text()


@pytest.mark.parametrize(
    ("text", "tool", "wanted"),
    [
        (
            "torchrun train.py --tensor-model-parallel-size=2 --pipeline-model-parallel-size 2 \\\n"
            " --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel --micro-batch-size 1 "
            "--use-distributed-optimizer --overlap-grad-reduce # --micro-batch-size 8",
            "megatron",
            ToolConfig(
                2, 2, 2, "interleaved", 4, 1, 1, 1, "none", ("overlap-param-gather", "tp-comm-overlap")
            ),
        ),
        (
            "#!/bin/bash\nTP=2\nexport GBS='64' # sequences\nMICRO=$TP\n"
            "ARGS=(\n  --tensor-model-parallel-size ${TP}\n  --micro-batch-size $MICRO\n"
            "  --pipeline-model-parallel-size ${PP:-1}\n)\ntorchrun pretrain.py ${ARGS[@]}",
            "megatron",
            ToolConfig(2, replicas=8, micro=2, off=("overlap-grad-reduce", "tp-comm-overlap")),
        ),
        (
            "model.tensor_model_parallel_size=4 train.micro_batch_size=2 model.recompute_granularity=full "
            "ddp.use_distributed_optimizer=true ddp.overlap_grad_reduce=true ddp.overlap_param_gather=true "
            "comm_overlap.tp_comm_overlap=true",
            "megatron",
            ToolConfig(4, shards=4, zero=1, micro=2, recompute="full"),
        ),
        (
            "model:\n  tensor_model_parallel_size: 4\ntrain:\n  micro_batch_size: 2\n",
            "megatron",
            ToolConfig(4, replicas=4, micro=2, off=("overlap-grad-reduce", "tp-comm-overlap")),
        ),
        (
            "[training]\nlocal_batch_size = 1\n[parallelism]\ntensor_parallel_degree = 2\n"
            "data_parallel_shard_degree = -1\n[activation_checkpoint]\nmode = 'full'\n"
            "[compile]\nenable = true\n",
            "torchtitan",
            ToolConfig(2, shards=8, zero=3, recompute="full", off=("async-tp",)),
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n"
            "num_processes: 16\ngradient_accumulation_steps: 2\n",
            "accelerate",
            ToolConfig(shards=16, zero=2, micro=2),
        ),
        (
            '{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1, '
            '"zero_optimization": {"stage": 3}}',
            "deepspeed",
            ToolConfig(shards=16, zero=3, micro=4),
        ),
        (
            '{"tp_size": 2, "fsdp_size": 8, "per_device_train_batch_size": 1}',
            "transformers",
            ToolConfig(2, shards=8, zero=3),
        ),
    ],
)
def test_files_that_people_write(text: str, tool: str, wanted: ToolConfig, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    name, settings = read_config(path, None)
    assert name == tool
    assert tools()[tool].plain(settings.choice(16, BATCH, 8)) == wanted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no tool"),
        ("--tensor-model-parallel-size two", "tensor-model-parallel-size is 'two'"),
        ("--tensor-model-parallel-size $TP", r"tensor-model-parallel-size is '\$TP'"),
        ("--tensor-model-parallel-size 1 'x", "No closing quotation"),
        ("--tensor-model-parallel-size 0", "tensor-model-parallel-size is 0"),
        ("--tensor-model-parallel-size 1 --context-parallel-size 2", "cannot be simulated yet"),
        ("[parallelism]\ntensor_parallel_degree = [", "no TOML"),
        (
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'x'\n"
            "data_parallel_shard_degree = 1",
            "pipeline_parallel_schedule is 'x'",
        ),
        ("fsdp_config: [", "no YAML"),
        ("distributed_type: DEEPSPEED", "distributed_type is DEEPSPEED"),
        ('{"zero_optimization": {"stage": 4}}', "stage is 4"),
        ('{"fsdp_size": 8, "pp_size": 2}', "pp_size is 2"),
        ("--tensor-model-parallel-size 3", "does not divide 16 GPUs"),
        ("--tensor-model-parallel-size 1 --micro-batch-size 3", "no multiple of 16 data ranks"),
        ('{"fsdp_size": 3}', "are not 16 data ranks"),
        ('{"fsdp_size": 16}', "does not say how many sequences a microbatch"),
    ],
)
def test_files_that_cannot_be_read(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_config(path, None)[1].choice(16, BATCH, 8)


def test_nothing_in_the_space_is_faster(work: Work) -> None:
    nothing_is_faster("deepspeed", work)


def test_nothing_in_a_space_with_pipelines_is_faster(work: Work) -> None:
    roomy = nothing_is_faster("megatron", work)
    nothing_is_faster("megatron", replace(work, memory=int(roomy.best.peak * 0.7 + 2.5 * 2**30)))


def nothing_is_faster(name: str, work: Work) -> Advice:
    """Not even of what was not simulated, as it cannot be faster or cannot fit."""
    tool = replace(tool_named(name), schedules={"1f1b": (1,)})
    small = replace(work, batch=32)
    advice, judge = advise(tool, small), Judge(tool, small)
    space = list(choices(tool, small))
    every = [j for c in space if isinstance(j := judge.of(c), Judged)]
    fastest = min((j for j in every if j.fits), key=lambda j: j.seconds)
    assert advice.size == len(space) and advice.simulated < len(space)
    assert advice.best.seconds == fastest.seconds
    assert advice.bound <= fastest.seconds
    assert [j.seconds for j in advice.others] == sorted(j.seconds for j in advice.others)
    return advice


def test_little_memory_is_respected(work: Work) -> None:
    tool = tool_named("deepspeed")
    roomy = advise(tool, work)
    # the context of CUDA and the buffers of a communicator are beside the tensors
    tight = advise(tool, replace(work, memory=int(roomy.best.peak * 0.7 + 2.5 * 2**30)))
    assert tight.best.peak < 0.7 * roomy.best.peak
    assert tight.best.seconds > roomy.best.seconds
    with pytest.raises(InfeasibleError, match="no configuration of DeepSpeed ZeRO fits"):
        advise(tool, replace(work, memory=2**28))


def test_neighbours_differ_in_one_setting(work: Work) -> None:
    tool = tool_named("megatron")
    start = ToolConfig(2, 2, shards=4, zero=1, micro=2, off=("tp-comm-overlap",))
    near = set(neighbours(start, tool, work))
    assert replace(start, off=()) in near
    assert replace(start, micro=1) in near and replace(start, micro=8) not in near
    assert replace(start, recompute="full") in near
    assert ToolConfig(4, 2, shards=2, zero=1, micro=2, off=start.off) in near
    assert ToolConfig(1, 2, shards=8, zero=1, micro=2) in near
    assert ToolConfig(2, 2, 2, "interleaved", 4, 1, 1, 2, "none", start.off) in near
    assert start not in near


def test_commands(work: Work, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        return result.stdout

    out = tmp_path / "ds.json"
    where = ("--cluster", "h100-dgx", "--gpus", "16", "--seq", str(SEQ))
    said = run("plan", work.target, *where, "--global-batch", "64", "--for", "deepspeed", "-o", str(out))
    assert "none of the" in said and "autoshard" in said and "fits" in said
    written = json.loads(out.read_text())
    assert written["train_batch_size"] == 64
    checked = json.loads(run("check-config", str(out), work.target, *where, "--json"))
    assert checked["config"]["fits"] and checked["config"]["zero"] == written["zero_optimization"]["stage"]
    assert all(row["seconds"] < checked["config"]["seconds"] for row in checked["better"])

    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(written | {"gradient_checkpointing": True}))
    assert '"gradient_checkpointing": false' in run("check-config", str(slow), work.target, *where)
    for words, says in (
        (("plan", work.target, *where, "--for", "deepspeed"), "--for needs --global-batch"),
        (
            ("plan", work.target, *where, "--for", "deepsped", "--global-batch", "64"),
            "did you mean 'deepspeed'",
        ),
        (
            ("plan", work.target, *where, "--for", "deepspeed", "--global-batch", "64", "--pin", "x=tp:R"),
            "--for goes",
        ),
        (("check-config", str(out), work.target, *where, "--global-batch", "32"), "global batch of 64"),
        (("check-config", str(tmp_path / "none"), work.target, *where), "cannot read"),
    ):
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 2 and says in result.output, result.output
