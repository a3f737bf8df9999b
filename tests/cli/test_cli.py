"""The command line, in process: what it prints, writes and refuses; and one run on four processes."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from typer.testing import CliRunner

import autoshard
from autoshard.cli.main import app
from autoshard.ir.units import bytes_text, parse_bytes, seconds_text
from autoshard.passes.pipeline import NUMBERED
from autoshard.program.store import load_program

TARGETS = """
import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x)))).square().mean()


class Dropping(Mlp):
    def forward(self, x):
        return nn.functional.dropout(self.up(x), 0.5, self.training).square().mean()


class Branching(Mlp):
    def forward(self, x):
        y = self.up(x)
        if y.sum() > 0:
            return y.mean()
        return y.square().mean()


class Exotic(Mlp):
    def forward(self, x):
        return self.up.weight.put(torch.arange(4), torch.zeros(4)).mean() + self.up(x).mean()


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = type("Config", (), {"vocab_size": 256})()
        self.embed = nn.Embedding(256, 16)
        self.head = nn.Linear(16, 256)

    def forward(self, input_ids, labels):
        logits = self.head(torch.relu(self.embed(input_ids)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def mlp():
    return Mlp(), torch.randn(8, 16)


def dropping():
    return Dropping(), torch.randn(8, 16)


def branching():
    return Branching(), torch.randn(8, 16)


def exotic():
    return Exotic(), torch.randn(8, 16)


def text():
    tokens = torch.randint(0, 256, (4, 12))
    return Text(), {"input_ids": tokens, "labels": tokens.clone()}


def only_cpu():
    model = Mlp()
    if model.up.weight.device.type == "meta":
        raise NotImplementedError("reads its weights")
    return model, torch.randn(8, 16)


def broken():
    raise RuntimeError("no such file")


def alone():
    return Mlp()
"""

EXOTIC_LINE = 1 + TARGETS[: TARGETS.index(".put(")].count("\n")
Invoke = Callable[..., Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "targets_of_cli.py").write_text(TARGETS)
    return folder


@pytest.fixture
def invoke(place: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command in the folder of the targets; ``t:mlp`` stands for one of them."""
    monkeypatch.chdir(place)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(*args: str) -> Any:
        words = [a.replace("t:", "targets_of_cli.py:", 1) if a.startswith("t:") else a for a in args]
        return CliRunner().invoke(app, words, catch_exceptions=False)

    return run


@pytest.fixture(scope="module")
def program(place: Path) -> str:
    """A program folder for dp=2,tp=2, compiled once."""
    done = CliRunner().invoke(
        app,
        ["compile", f"{place}/targets_of_cli.py:mlp", "--mesh", "dp=2,tp=2", "-o", f"{place}/mlp"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    return f"{place}/mlp"


def document(result: Any) -> dict[str, Any]:
    """The one JSON document on stdout."""
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema"] == 2
    return found


# -- what works ----------------------------------------------------------------------------------------


def test_plan_prints_what_was_decided_and_why(invoke: Invoke, place: Path) -> None:
    result = invoke("plan", "t:mlp", "--mesh", "dp=2,tp=2", "-o", "planned")
    assert result.exit_code == 0, result.output
    for words in ("dp=2,tp=2  4 ranks", "dual bound", "optimizer", "up.weight", "next best"):
        assert words in result.stdout
    assert "capturing" in result.stderr and "capturing" not in result.stdout
    assert sorted(p.name for p in (place / "planned").iterdir()) == ["plan.json", "request.json"]
    again = invoke("compile", "--plan", "planned", "-o", "from_plan", "--json")
    assert document(again)["mesh"] == "dp=2,tp=2"


def test_plan_json(invoke: Invoke) -> None:
    found = document(invoke("plan", "t:mlp", "--mesh", "dp=2,tp=2", "--gpus", "4", "--json"))
    assert found["ranks"] == 4 and found["gap"] >= 0 and found["dual_bound"] <= found["seconds"] * (1 + 1e-9)
    assert found["parameter_count"] == 16 * 64 * 2 + 64 + 16 + 32
    assert found["optimizer_bytes"] == 2 * found["parameter_bytes"]


def test_plan_searches_the_mesh_of_a_cluster(invoke: Invoke) -> None:
    found = document(invoke("plan", "t:mlp", "--cluster", "cpu-gloo", "--gpus", "2", "--json"))
    assert found["ranks"] == 2


def test_compile_takes_a_global_batch_as_plan_does(invoke: Invoke) -> None:
    words = ("t:text", "--mesh", "dp=2", "--global-batch", "4", "--microbatches", "2")
    planned = document(invoke("plan", *words, "--json"))
    assert invoke("compile", *words, "-o", "pieces").exit_code == 0
    assert planned["microbatches"] == load_program("pieces").microbatches == 2
    assert invoke("verify", "pieces", "--steps", "1").exit_code == 0
    for wrong in (("t:text", "--batch", "4"), ("--plan", "pieces")):
        result = invoke("compile", *wrong, "--global-batch", "4", "-o", "never")
        assert result.exit_code == 2, result.output


def test_unknown_ops_run_replicated_if_allowed(invoke: Invoke) -> None:
    found = document(invoke("plan", "t:exotic", "--mesh", "tp=2", "--replicate-unknown", "--json"))
    assert any("aten.put" in w for w in found["warnings"])


def test_a_target_that_needs_weights_gets_them(invoke: Invoke) -> None:
    result = invoke("plan", "t:only_cpu", "--mesh", "tp=2")
    assert result.exit_code == 0 and "does not work on the meta device" in result.stderr


def test_verify(invoke: Invoke, program: str) -> None:
    result = invoke("verify", program, "--steps", "2")
    assert result.exit_code == 0, result.output
    assert "verified" in result.stdout and "state after 2 steps" in result.stdout
    found = document(invoke("verify", program, "--json"))
    assert found["ok"] and found["reference"].startswith("eager") and len(found["losses"]) == 3
    assert found["static"]["ok"] and found["static"]["ranks"] == 4
    kinds = {c["kind"] for c in found["checks"]}
    assert kinds == {"output", "gradient", "state after 3 steps"}


def test_verify_with_dropout_compares_with_one_rank(invoke: Invoke) -> None:
    assert invoke("compile", "t:dropping", "--mesh", "dp=2,tp=2", "-o", "dropping").exit_code == 0
    found = document(invoke("verify", "dropping", "--json"))
    assert found["ok"] and found["reference"] == "the program for one rank"


def test_verify_names_the_tensor_that_is_wrong(invoke: Invoke, program: str, place: Path) -> None:
    changed = place / "changed"
    subprocess.run(["cp", "-r", program, str(changed)], check=True)
    text = (changed / "program.py").read_text()
    assert "1e-05" in text
    tamper(changed, text.replace("1e-05", "0.5"))
    result = invoke("verify", str(changed), "--lockstep")
    assert result.exit_code == 5
    assert "gradient" in result.stdout and "wrong" in result.stdout
    static = invoke("verify", str(changed), "--static")
    assert static.exit_code == 5 and "arguments" in static.stderr and "program.py:" in static.stderr
    found = json.loads(invoke("verify", str(changed), "--static", "--json").stdout)
    assert not found["ok"] and found["static"]["findings"][0]["line"] > 0


def test_verify_without_running(invoke: Invoke, program: str) -> None:
    result = invoke("verify", program, "--static")
    assert result.exit_code == 0, result.output
    assert "verified" in result.stdout and "state after" not in result.stdout
    assert invoke("verify", program, "--static", "--recapture").exit_code == 0
    result = invoke("verify", program, "--static", "--recapture", "--target", "t:dropping")
    assert result.exit_code == 5 and "original.py" in result.stderr
    assert invoke("verify", program, "--limit", "1KiB").exit_code == 0


def tamper(folder: Path, text: str) -> None:
    """Change the program and its checksums."""
    (folder / "program.py").write_text(text)
    manifest, notes = (json.loads((folder / f"{n}.json").read_text()) for n in ("manifest", "notes"))
    digest = notes["parts"]["program.py"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "notes.json").write_text(json.dumps(notes))
    of_notes = hashlib.sha256((folder / "notes.json").read_bytes()).hexdigest()
    manifest["files"] |= {"program.py": digest, "notes.json": of_notes}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_inspect_the_program(invoke: Invoke, program: str) -> None:
    text = invoke("inspect", program).stdout
    assert "GLOBAL shapes" in text and "[64, 16]" in text
    for line in ("# segment ", "# memory  parameters", "# checks  uneven shards 0"):
        assert line in text
    compile(text, "program", "exec")  # the dump is valid Python


def test_inspect_one_rank(invoke: Invoke, program: str) -> None:
    text = invoke("inspect", program, "--rank", "3").stdout
    assert "LOCAL shapes" in text and "rank 3 of 4 at dp=1 tp=1 | parameters" in text
    assert "f32[4, 16] dp:S(0)" in text and "[8, 16] dp:S(0)" not in text
    found = document(invoke("inspect", program, "--rank", "3", "--json"))
    assert found["shapes"] == "local" and found["resident_bytes"]["parameters"] > 0
    assert found["checks"] == {"uneven_shards": 0, "full_gathers": 0, "ops_without_a_rule": 0}


def test_inspect_after_a_pass(invoke: Invoke, program: str) -> None:
    assert invoke("inspect", program, "--after", "normalize").stdout.startswith("# autoshard | after 05_")
    found = document(invoke("inspect", program, "--after", NUMBERED["bucket"], "--json"))
    assert found["after"] == NUMBERED["bucket"] and "dp:S(0)" in found["text"]
    name = document(invoke("inspect", program, "--json"))["segments"][0]["name"]
    assert f"def {name}(" in invoke("inspect", program, "--segment", name).stdout


def test_run_on_one_process(invoke: Invoke) -> None:
    assert invoke("compile", "t:text", "--mesh", "dp=1", "-o", "single").exit_code == 0
    result = invoke("run", "single", "--steps", "3")
    assert result.exit_code == 0, result.output
    assert "step 3/3  loss" in result.stdout and "standard library" in result.stderr


def test_a_log_of_steps(invoke: Invoke, place: Path) -> None:
    assert invoke("compile", "t:mlp", "--mesh", "dp=1", "-o", "logged").exit_code == 0
    again = ("run", "logged", "--steps", "2", "--clip", "0", "--metrics", "one.jsonl")
    assert invoke(*again).exit_code == 0
    text = (place / "one.jsonl").read_text()
    for row in map(json.loads, text.splitlines()):
        # of the catalog's CPU, which is not this one, no share is said
        assert row["samples"] == 8 and row["grad_norm"] is None and row["mfu"] is None
    refused = invoke(*again)
    assert refused.exit_code == 2 and "one.jsonl exists already" in refused.stderr
    assert (place / "one.jsonl").read_text() == text
    assert invoke("run", "logged", "--metrics", "none/such.jsonl").exit_code == 2


@pytest.mark.parametrize("name", ["run", "profile"])
def test_torchrun_takes_no_option_for_one_of_its_own(name: str) -> None:
    """Its parser also reads what follows ``-m autoshard``, and refuses the beginning of several options."""
    from torch.distributed.run import get_args_parser
    from typer.main import get_group

    options = [o for p in get_group(app).commands[name].params for o in p.opts if o.startswith("--")]
    assert len(options) > 5
    theirs = re.findall(r"--[\w-]+", get_args_parser().format_help())
    assert [(o, t) for o in options for t in theirs if t.startswith(o)] == []
    for option in options:
        given = ["-m", "autoshard", name, option]
        assert get_args_parser().parse_args(given).training_script_args == given[2:]


# -- what is refused ---------------------------------------------------------------------------------------

BAD = {
    "axis without size": (2, "t:mlp --mesh dp", "is not an axis"),
    "no mesh": (2, "t:mlp", "--mesh dp=2,tp=2"),
    "mesh and gpus": (2, "t:mlp --mesh dp=2 --gpus 4", "has 2 ranks"),
    "unknown cluster": (2, "t:mlp --cluster h100", "h100-dgx"),
    "batch too small": (2, "t:mlp --mesh dp=16", "too small for 16"),
    "batch of a callable": (2, "t:mlp --mesh dp=2 --batch 4", "hf:"),
    "not a size": (2, "t:mlp --mesh dp=2 --memory lots", "16GiB"),
    "no such function": (2, "t:nothing --mesh dp=2", "has no 'nothing'"),
    "no such file": (2, "missing.py:mlp --mesh dp=2", "missing.py"),
    "no such module": (2, "missing.module:mlp --mesh dp=2", "no module"),
    "no such config": (2, "hf:missing.json --mesh dp=2", "missing.json"),
    "not a target": (2, "mlp --mesh dp=2", "is not a target"),
    "target raises": (2, "t:broken --mesh dp=2", "no such file"),
    "target returns a model": (2, "t:alone --mesh dp=2", "(model, example_inputs)"),
    "control flow": (3, "t:branching --mesh dp=2", "if y.sum() > 0"),
    "no rule": (
        3,
        "t:exotic --mesh dp=2",
        f"aten.put.default at targets_of_cli.py:{EXOTIC_LINE}",
    ),
    "memory": (4, "t:mlp --mesh tp=2 --memory 4KiB", "smallest feasible"),
}


@pytest.mark.parametrize("code, command, words", BAD.values(), ids=BAD)
def test_bad_input(invoke: Invoke, place: Path, code: int, command: str, words: str) -> None:
    before = sorted(p.name for p in place.iterdir())
    result = invoke("compile", *command.split(), "-o", "never")
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert sorted(p.name for p in place.iterdir()) == before  # nothing half-written


@pytest.mark.parametrize(
    "command, words",
    [
        ("compile t:mlp --mesh dp=2 --batch 0 -o never", "error: invalid value for '--batch'"),
        ("compile t:mlp --bogus -o never", "error: no such option: --bogus"),
        ("compile t:mlp", "error: missing option"),
        ("compil", "error: no such command 'compil'"),
        ("--bogus", "error: no such option: --bogus"),
        ("verify nowhere", "why:   there is no such folder"),
        ("check-config nowhere.sh t:mlp", "why:   No such file or directory"),
        ("compile t:mlp --cluster h100-dgx -o never", "try:   --gpus N"),
    ],
)
def test_wrong_words_are_errors_like_others(invoke: Invoke, command: str, words: str) -> None:
    result = invoke(*command.split())
    assert result.exit_code == 2 and words in result.stderr
    assert result.stderr.splitlines()[-1].startswith("  try:   ")
    assert result.stdout == "" and "\u2500" not in result.stderr and "Errno" not in result.stderr


@pytest.mark.parametrize("command", ["verify", "inspect", "run"])
def test_a_plan_is_no_program(invoke: Invoke, program: str, command: str) -> None:
    assert invoke("plan", "t:mlp", "--mesh", "dp=2", "-o", "planned", "--overwrite").exit_code == 0
    for path in ("planned", "planned/plan.json"):
        result = invoke(command, path)
        assert result.exit_code == 2 and f"{path} is a plan, not a program" in result.stderr
        assert "try:   autoshard compile --plan planned -o DIR" in result.stderr
    assert f"give the folder, {program}" in invoke(command, f"{program}/plan.json").stderr


def test_infeasible_memory_names_the_binding_term(invoke: Invoke) -> None:
    result = invoke("plan", "t:mlp", "--mesh", "tp=2", "--memory", "4KiB")
    assert result.exit_code == 4 and "the binding term is parameters" in result.stderr


def test_existing_folders_stay_untouched(invoke: Invoke, place: Path, program: str) -> None:
    mine = place / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("do not lose this")
    for command in ("plan", "compile"):
        for more in ((), ("--overwrite",)):
            assert invoke(command, "t:mlp", "--mesh", "dp=2", "-o", "mine", *more).exit_code == 2
    assert [p.name for p in mine.iterdir()] == ["notes.txt"]
    manifest = Path(program, "manifest.json").read_bytes()
    assert invoke("compile", "t:mlp", "--mesh", "dp=2", "-o", program).exit_code == 2
    assert Path(program, "manifest.json").read_bytes() == manifest


def test_a_damaged_program_is_refused(invoke: Invoke, program: str, place: Path) -> None:
    damaged = place / "damaged"
    subprocess.run(["cp", "-r", program, str(damaged)], check=True)
    (damaged / "program.py").write_text("import os\n")
    for command in ("verify", "inspect", "run"):
        assert invoke(command, str(damaged)).exit_code == 5
    tamper(damaged, "import os\n")
    assert invoke("inspect", str(damaged)).exit_code == 5
    assert invoke("inspect", str(place)).exit_code == 2


def test_wrong_questions(invoke: Invoke, program: str) -> None:
    for words in (
        ("inspect", program, "--rank", "4"),
        ("inspect", program, "--after", "nothing"),
        ("inspect", program, "--segment", "nothing"),
        ("inspect", program, "--after", "010", "--rank", "0"),
        ("verify", program, "--lockstep", "--limit", "1KiB"),
        ("verify", program, "--lockstep", "--static"),
        ("compile", "--plan", program, "-o", "never"),
        ("run", program),
    ):
        result = invoke(*words)
        assert result.exit_code == 2, words
        assert "error:" in result.stderr and "Traceback" not in result.stderr
    assert "torchrun --nproc-per-node 4 -m autoshard run" in result.stderr


def test_a_world_of_the_wrong_size(invoke: Invoke, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke("run", program)
    assert result.exit_code == 2 and "2 ranks" in result.stderr and "has 4" in result.stderr


def test_debug_shows_where_an_error_comes_from(invoke: Invoke) -> None:
    with pytest.raises(autoshard.UsageError):
        invoke("plan", "t:mlp", "--mesh", "dp=two", "--debug")


# -- four processes -----------------------------------------------------------------------------------

WORKER = """
import contextlib
import os
import sys
from pathlib import Path
import torch
from torch import nn
from torch.distributed.tensor import DTensor
import autoshard
from autoshard.cli.main import app
from autoshard.program.store import load_program
from autoshard.runtime.groups import device_mesh_for
from targets_of_cli import mlp

device_mesh_for("dp=2,tp=2")
torch.manual_seed(0)
model, x = mlp()
model(x).backward()
grads = [p.grad for p in model.parameters()]
model.zero_grad()
parallel = autoshard.load(sys.argv[1], model)
for norm_type in (1.0, 2.0, 3.0, float("inf")):
    parallel.zero_grad()
    parallel(x).backward()
    extra = nn.Parameter(torch.zeros(3))  # a plain one among DTensors, the same on every rank
    extra.grad = torch.full((3,), 0.25)
    whole = torch.cat([g.flatten() for g in grads] + [extra.grad])
    norm = torch.linalg.vector_norm(whole, norm_type)
    assert any(isinstance(p, DTensor) for p in parallel.parameters())
    found = autoshard.clip_grad_norm_([*parallel.parameters(), extra], 0.1, norm_type)
    torch.testing.assert_close(found, norm)
    for p, g in zip(parallel.parameters(), grads):
        torch.testing.assert_close(p.grad.full_tensor(), g * min(1.0, 0.1 / (norm + 1e-6)))
    torch.testing.assert_close(extra.grad, torch.full((3,), 0.25) * min(1.0, 0.1 / (norm + 1e-6)))
os.chdir(Path(__file__).parent)
log = ["--metrics", sys.argv[3], "--cluster", "cpu-gloo"]
with open(f"found-{os.environ['RANK']}.json", "w") as found, contextlib.redirect_stdout(found):
    app(["run", sys.argv[2], "--steps", "4", "--clip", "0.5", "--json", *log])
"""


def test_four_processes_train_as_one(invoke: Invoke, place: Path, program: str) -> None:
    """Clipping by any norm, and the losses of `autoshard run`, are those of one process."""
    from autoshard.interop.targets import build
    from autoshard.runtime.corpus import load_corpus
    from autoshard.runtime.train import feed_of, train

    assert invoke("compile", "t:text", "--mesh", "dp=2,tp=2", "-o", "text").exit_code == 0
    (place / "worker.py").write_text(WORKER)
    log = place / "steps.jsonl"
    run_ranks([str(place / "worker.py"), program, str(place / "text"), str(log)])
    found = json.loads((place / "found-0.json").read_text())
    assert not (place / "found-1.json").read_text()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for key, all_ in (("loss", "losses"), ("grad_norm", "grad_norms"), ("seconds", "seconds")):
        assert [row[key] for row in rows] == found[all_]
    simulated = json.loads(invoke("simulate", "text", "--cluster", "cpu-gloo", "--json").stdout)
    for row in rows:
        assert row["tokens"] == simulated["items_per_step"]
        assert row["tokens_per_second"] == row["tokens"] / row["seconds"]
        # the peak of a cluster is what an MFU of one stands for
        peak = simulated["model_flop"] / simulated["mfu"] / simulated["step_seconds"]
        assert row["mfu"] == pytest.approx(simulated["model_flop"] / peak / row["seconds"])
        assert 2**26 < row["process_peak_bytes"] < 2**34
    assert found["parameter_bytes_rank"] <= found["parameter_bytes_model"]
    built = build("targets_of_cli.py:text", device="cpu")
    feed, _ = feed_of(((), built.inputs), load_corpus(), 256)
    eager = train(built.model, feed, steps=4, lr=1e-3, clip=0.5)
    torch.testing.assert_close(
        torch.tensor(found["losses"]), torch.tensor([r.loss for r in eager]), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        torch.tensor(found["grad_norms"]), torch.tensor([r.grad_norm for r in eager]), rtol=1e-4, atol=1e-6
    )


# -- parts ------------------------------------------------------------------------------------------------


def test_help_and_import_do_not_import_torch() -> None:
    code = (
        "import sys, autoshard, autoshard.cli.main; autoshard.errors; autoshard.Mesh; "
        "assert 'torch' not in sys.modules; print(autoshard.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert CliRunner().invoke(app, ["--version"]).stdout == f"autoshard {done.stdout}"
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0


def test_public_names() -> None:
    for name in autoshard.__all__:
        assert getattr(autoshard, name) is not None
    with pytest.raises(AttributeError):
        _ = autoshard.nothing


@pytest.mark.parametrize(
    "text, size", [("16GiB", 2**34), ("80 GB", 80 * 10**9), ("512MiB", 2**29), ("1e3", 1000), ("1.5k", 1500)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "16 gibi", "nan"])
def test_not_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


def test_units() -> None:
    assert (bytes_text(0), bytes_text(3.5 * 2**20), bytes_text(2**37)) == ("0 B", "3.50 MiB", "128 GiB")
    assert (seconds_text(0), seconds_text(1.234e-2), seconds_text(2)) == ("0 us", "12.3 ms", "2.00 s")


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_clip_plain_tensors_as_torch_does(norm_type: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(n, dtype=dtype)) for n in (1, 7, 64, 0)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    found = autoshard.clip_grad_norm_(iter(ours), 0.5, norm_type)
    wanted = nn.utils.clip_grad_norm_(theirs[:3], 0.5, norm_type)
    torch.testing.assert_close(
        found, wanted.to(found.dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_clip_edges() -> None:
    model = nn.Linear(2, 2)
    assert autoshard.clip_grad_norm_(model, 1.0) == 0
    model(torch.full((1, 2), float("inf"))).sum().backward()
    with pytest.raises(RuntimeError):
        autoshard.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    with pytest.raises(autoshard.UsageError):
        autoshard.clip_grad_norm_(model, 1.0, 0.0)


def test_a_shared_parameter_counts_once() -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    assert autoshard.clip_grad_norm_([p, p], 10.0) == 2


def test_corpus(tmp_path: Path) -> None:
    from autoshard.runtime.corpus import load_corpus

    (tmp_path / "b.txt").write_text("world")
    (tmp_path / "a.txt").write_text("hello ")
    corpus = load_corpus(tmp_path)
    assert bytes(corpus.data.tolist()) == b"hello world"
    first = corpus.windows(3, 4, step=1, seed=5)
    assert torch.equal(first, corpus.windows(3, 4, step=1, seed=5)) and first.shape == (3, 4)
    for row in first.tolist():
        assert bytes(row) in b"hello world"
    with pytest.raises(autoshard.UsageError):
        corpus.windows(1, 11, step=0)
    with pytest.raises(autoshard.UsageError):
        load_corpus(tmp_path / "c.txt")


def test_loss_of() -> None:
    from autoshard.runtime.train import loss_of

    loss = torch.tensor(1.0)
    assert loss_of(loss) is loss
    assert loss_of({"loss": loss, "other": torch.tensor(2.0)}) is loss
    assert loss_of(SimpleNamespace(loss=loss)) is loss
    assert loss_of((torch.zeros(3), loss)) is loss
    with pytest.raises(autoshard.UsageError):
        loss_of(torch.zeros(3))
