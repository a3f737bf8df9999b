"""`autoshard.audit`: ranks as threads, what they hold, how their ends are told, and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import cases_tensor as nets
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import autoshard
from autoshard.auditing.findings import AuditReport
from autoshard.cli.main import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "audit.py"


def stepped(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    """Forward, backward, clipping, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(tokens, labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def one_device(model: nets.Net) -> None:
    stepped(model, nets.TOKENS, nets.LABELS)


def with_ddp(model: nets.Net) -> None:
    stepped(DistributedDataParallel(model), nets.rank_chunk(nets.TOKENS), nets.rank_chunk(nets.LABELS))


def with_fsdp(model: nets.Net) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    stepped(model, nets.rank_chunk(nets.TOKENS), nets.rank_chunk(nets.LABELS))


def with_tensor_parallel(model: nets.Net) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    model(nets.TOKENS, nets.LABELS).backward()


class Stage(nn.Module):
    """The first or the second half of the net."""

    def __init__(self, net: nets.Net, first: bool) -> None:
        super().__init__()
        self.words, self.head = (net.words, None) if first else (None, net.head)
        self.layer = net.layers[0 if first else 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.words is None else self.words(x)
        x = x + self.layer.down(F.gelu(self.layer.up(self.layer.norm(x))))
        return x if self.head is None else self.head(x)


def with_stages(model: nets.Net) -> None:
    rank = dist.get_rank()
    stage = PipelineStage(Stage(model, rank == 0), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()))
    schedule.step(nets.TOKENS) if rank == 0 else schedule.step(target=nets.LABELS)


@pytest.mark.parametrize(
    ("mesh", "rank_step"),
    [("dp=4", with_ddp), ("fsdp=4", with_fsdp), ("tp=2", with_tensor_parallel), ("pp=2", with_stages)],
)
def test_parallel_code_of_torch_equals_one_device(mesh: str, rank_step: object) -> None:
    step = one_device if mesh in ("dp=4", "fsdp=4") else nets.one_device
    with autoshard.audit(nets.Net(), mesh, step=step) as audit:
        audit.rank(rank_step)  # type: ignore[arg-type]
    audit.check()


def test_parameters_may_be_used_without_their_modules() -> None:
    def rank_step(model: nets.Net) -> None:
        x = model.words(nets.TOKENS)
        for layer in model.layers:
            up, down = layer.up, layer.down
            x = x + F.linear(F.gelu(F.linear(layer.norm(x), up.weight, up.bias)), down.weight)
        logits = F.linear(x, model.head.weight)
        F.cross_entropy(logits.flatten(0, 1), nets.LABELS.flatten()).backward()

    with autoshard.audit(nets.Net(), "dp=2", step=nets.one_device) as audit:
        audit.rank(rank_step)
    audit.check()


def test_parameters_of_fewer_bits() -> None:
    def in_float32(model: nets.Net) -> None:
        nets.one_device(model.float())

    with autoshard.audit(nets.Net(), "dp=2", step=nets.one_device) as audit:
        report = audit.rank(in_float32)
        half = audit.rank(lambda model: nets.one_device(model.bfloat16()))
    assert report.ok and report.tolerance == 1e-4
    assert "a parameter of a rank is bfloat16" in half.findings[0].what


def ended(rank_step: object) -> AuditReport:
    """The audit of two ranks that do not come to their end."""
    with autoshard.audit(nets.Net(), "dp=2", step=nets.one_device) as audit:
        report = audit.rank(rank_step)  # type: ignore[arg-type]
    with pytest.raises(autoshard.VerificationError, match="do not compute"):
        audit.check()
    return report


def test_ranks_that_wait_forever_are_told_with_their_lines() -> None:
    def rank_step() -> None:
        rank = dist.get_rank()
        received = torch.zeros(3)
        dist.recv(received, src=1 - rank)
        dist.send(received, dst=1 - rank)

    finding = ended(rank_step).findings[0]
    assert finding.kind == "deadlock"
    assert finding.ranks == (0, 1)
    line = rank_step.__code__.co_firstlineno + 3
    assert finding.lines == (f"{finding.lines[0].rpartition(':')[0]}:{line}",)
    assert "rank 0 waits for a message from rank 1" in finding.text()


def test_a_rank_that_never_comes_is_named() -> None:
    def rank_step() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))

    assert "ranks 1 never come to all_reduce(sum)" in ended(rank_step).text()


def test_unequal_collectives_are_named() -> None:
    def rank_step() -> None:
        op = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(3), op)

    finding = ended(rank_step).findings[0]
    assert (finding.kind, finding.what) == ("collective", "ranks of a group reduce in different ways")


def test_what_a_rank_raises_is_a_finding() -> None:
    def rank_step() -> None:
        dist.barrier()
        if dist.get_rank():
            raise ValueError("no such expert")
        dist.barrier()

    finding = ended(rank_step).findings[0]
    assert "rank 1 raised ValueError: no such expert" in finding.what
    assert finding.lines[0].endswith(f":{rank_step.__code__.co_firstlineno + 3}")


def test_ranks_have_their_random_numbers_and_variables() -> None:
    import os

    seen: dict[int, list[object]] = {0: [], 1: []}

    def rank_step(model: nets.Net) -> None:
        rank = dist.get_rank()
        for _ in range(2):
            seen[rank].append((os.environ["RANK"] == str(rank), torch.rand(()).item()))
            dist.barrier()
        nets.one_device(model)

    with autoshard.audit(nets.Net(), "dp=2", step=nets.one_device) as audit:
        audit.rank(rank_step)
    audit.check()
    assert seen[0] == seen[1]
    assert all(right for right, _ in seen[0])  # type: ignore[misc]


def test_the_reference_is_left_as_it_was() -> None:
    model, hook, numbers = nets.Net().bfloat16(), sys.excepthook, torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with autoshard.audit(model, "tp=2", step=nets.one_device) as audit:
        audit.rank(lambda copy: nets.layers(copy, ""))
    audit.check()
    after = model.state_dict()
    assert all(
        torch.equal(before[name], after[name]) and after[name].dtype is torch.bfloat16 for name in before
    )
    assert torch.get_default_dtype() is torch.float32
    assert sys.excepthook is hook
    assert torch.equal(numbers, torch.get_rng_state())
    assert not dist.is_initialized()


def test_ranks_that_share_the_reference_are_refused() -> None:
    model = nets.Net()

    def rank_step() -> None:
        with torch.no_grad():
            model.head.weight.zero_()

    with (
        pytest.raises(autoshard.UsageError, match="changed the reference"),
        autoshard.audit(model, "dp=2", step=nets.one_device) as audit,
    ):
        audit.rank(rank_step)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(autoshard.UsageError, match="step of one device"):
        autoshard.audit(nets.Net(), "dp=2")
    with (
        pytest.raises(autoshard.UsageError, match="no gradients"),
        autoshard.audit(nets.Net(), "dp=2", step=id),
    ):
        pass
    narrow = torch.ones(2, 3)
    with (
        pytest.raises(autoshard.UsageError, match="fails in float64"),
        autoshard.audit(nn.Linear(3, 1), "dp=2", step=lambda model: model(narrow).sum().backward()),
    ):
        pass
    audit = autoshard.audit(nets.Net(), "dp=2", step=nets.one_device)
    with pytest.raises(autoshard.UsageError, match="inside the audit"):
        audit.rank(nets.one_device)
    with pytest.raises(autoshard.UsageError, match="nothing was audited"):
        audit.check()


def sharded(model: nets.Net) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def saved_by_name(model: nn.Module, folder: str) -> None:
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)


def loaded_by_name(model: nn.Module, folder: str) -> None:
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)


def saved_by_rank(model: nn.Module, folder: str) -> None:
    state = {name: value.to_local() for name, value in model.state_dict().items()}
    torch.save(state, f"{folder}/{dist.get_rank()}.pt")


def loaded_by_rank(model: nn.Module, folder: str) -> None:
    state = torch.load(f"{folder}/{dist.get_rank() % 2}.pt")
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.to_local().copy_(state[name][: len(value.to_local())])


def test_checkpoints_are_followed_to_another_mesh() -> None:
    with autoshard.audit(nets.Net(), "fsdp=2", step=nets.one_device) as audit:
        assert audit.checkpoint(sharded, saved_by_name, loaded_by_name, "fsdp=4").ok
        assert audit.checkpoint(sharded, saved_by_rank, loaded_by_rank).ok
        report = audit.checkpoint(sharded, saved_by_rank, loaded_by_rank, "fsdp=4")
    (finding,) = report.findings
    assert "head.weight" in finding.names and finding.ranks == (1, 2, 3)
    assert "none of the values that were saved once fsdp=4" in finding.what


class Normed(nn.Module):
    """With running statistics, that are saved, and a table, that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.up(x)) * self.table).square().mean()


ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()


def with_adam(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def saved_all(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)


def loaded_all(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def loaded_model(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    states = {"model": get_model_state_dict(model)}
    dcp.load(states, checkpoint_id=folder)
    set_model_state_dict(model, states["model"])


def loaded_exchanged(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    loaded_all(model, optimizer, folder)
    for state in optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]
        state["step"].zero_()
    model.norm.running_mean.zero_()


class Frozen(nn.Module):
    """A frozen linear beside one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.trained = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
        self.fixed.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fixed(x) * self.trained(x)).square().mean()


def test_weights_that_are_cut_by_hand_are_the_references() -> None:
    def rank(model: Frozen, whole: bool) -> None:
        part = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
        fixed = nn.Parameter(model.fixed.weight.detach()[part].clone(), requires_grad=False)
        trained = model.trained.weight.detach()[part].clone().requires_grad_()  # no parameter
        out = F.linear(ROWS, fixed) * F.linear(ROWS, trained)
        (out.square().mean() / (1 if whole else 2)).backward()

    with autoshard.audit(Frozen(), "tp=2", batch=(ROWS,)) as audit:
        sound, wrong = audit.rank(lambda m: rank(m, False)), audit.rank(lambda m: rank(m, True))
    assert sound.ok and not sound.proof.why, sound.text()
    assert wrong.findings[0].names == ("trained.weight",) and wrong.findings[0].factor == pytest.approx(2)


def test_receives_take_messages_in_the_order_of_their_calls() -> None:
    def rank(model: nn.Module, swapped: bool) -> None:
        halves = [torch.empty(2, 6, dtype=torch.long) for _ in range(2)]
        if dist.get_rank() == 0:
            for part in nets.TOKENS.chunk(2):
                dist.send(part.contiguous(), 1)
            tokens = nets.TOKENS
        else:
            first, second = (dist.irecv(half, 0) for half in (reversed(halves) if swapped else halves))
            second.wait()
            first.wait()
            tokens = torch.cat(halves)
        model(tokens, nets.LABELS).backward()

    with autoshard.audit(nets.Net(), "pp=2", step=nets.one_device) as audit:
        assert audit.rank(lambda m: rank(m, False)).ok
        assert audit.rank(lambda m: rank(m, True)).findings[0].ranks == (1,)


class Quarter(nn.Module):
    """A stage."""

    def __init__(self, model: nets.Net, number: int) -> None:
        super().__init__()
        self.words = model.words if number == 0 else None
        self.layer = model.layers[number] if number < 2 else None
        self.head = model.head if number == 3 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) if self.words is not None else x
        if self.layer is not None:
            x = x + self.layer.down(F.gelu(self.layer.up(self.layer.norm(x))))
        return x.tanh() if self.head is None else self.head(x)


@pytest.mark.parametrize("kind", [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble])
def test_zero_bubble_schedules_are_sound(kind: type) -> None:
    def step(model: nets.Net) -> None:
        x = nets.TOKENS
        for number in range(4):
            x = Quarter(model, number)(x)
        F.cross_entropy(x.flatten(0, 1), nets.LABELS.flatten()).backward()

    def rank(model: nets.Net) -> None:
        me, folded = dist.get_rank(), kind is ScheduleZBVZeroBubble
        numbers = (me, 3 - me) if folded else (me, me + 2)
        stages = [PipelineStage(Quarter(model, k), k, 4, torch.device("cpu")) for k in numbers]
        schedule = kind(stages, 4, loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
        target = {"target": nets.LABELS} if 3 in numbers else {}
        schedule.step(*((nets.TOKENS,) if me == 0 else ()), **target)

    with autoshard.audit(nets.Net(), "pp=2", step=step) as audit:
        report = audit.rank(rank)
    assert report.ok and not report.proof.why, report.text()


def test_parameters_gathered_ahead_of_the_first_call_are_shards() -> None:
    def rank(model: nn.Module, early: bool) -> None:
        model = fully_shard(model)
        optimizer = None if early else torch.optim.SGD(model.parameters(), lr=0.1)
        model.unshard()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)  # of what FSDP frees
        model(nets.TOKENS.chunk(2)[dist.get_rank()], nets.LABELS.chunk(2)[dist.get_rank()]).backward()
        optimizer.step()

    def step(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nets.one_device(model)
        optimizer.step()

    with autoshard.audit(nets.Net(), "fsdp=2", step=step) as audit:
        sound, late = audit.rank(lambda m: rank(m, False)), audit.rank(lambda m: rank(m, True))
    assert sound.ok and not sound.proof.why, sound.text()
    assert "not changed by the step" in late.findings[0].what


def test_states_of_optimizers_and_buffers_are_followed() -> None:
    with autoshard.audit(Normed(), "fsdp=2", batch=(ROWS,)) as audit:
        assert audit.checkpoint(with_adam, saved_all, loaded_all, "fsdp=4").ok, audit.report()
        lost = audit.checkpoint(with_adam, saved_all, loaded_model)
        wrong = audit.checkpoint(with_adam, saved_all, loaded_exchanged)
        nothing = audit.checkpoint(lambda model: None, saved_all, loaded_all)
    assert "build returns no model" in nothing.findings[0].what
    states = {f"{key} of {name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in NORMED}
    assert {name for finding in lost.findings for name in finding.names} == states
    names = {name for finding in wrong.findings for name in finding.names}
    assert names == states | {"norm.running_mean"}


NORMED = ("up.weight", "up.bias", "norm.weight", "norm.bias")


def counted(model: nn.Module) -> None:
    """The bias of a router follows counts of tokens."""
    model.norm.eval()
    model(ROWS).backward()
    model.norm.running_mean += (model.up(ROWS) > 0).sum(0) * 0.01


def test_buffers_after_the_step_are_the_references() -> None:
    def rank(model: nn.Module, summed: bool, times: int = 1) -> None:
        model.norm.eval()
        rows = ROWS.chunk(2)[dist.get_rank()]
        (model(rows) / 2).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        count = (model.up(rows) > 0).sum(0) * 1.0
        if summed:
            dist.all_reduce(count)
        model.norm.running_mean += count * 0.01 * times

    with autoshard.audit(Normed(), "dp=2", step=counted) as audit:
        right, local = (
            audit.rank(lambda model: rank(model, True)),
            audit.rank(lambda model: rank(model, False)),
        )
        twice = audit.rank(lambda model: rank(model, True, 2))
    assert right.ok and not right.notes, right.text()
    assert "norm.running_mean has a part of the reference's on each rank" in local.notes[0]
    assert twice.findings[0].kind == "buffer" and twice.findings[0].factor == pytest.approx(2)
    assert "test_audit.py" in twice.findings[0].lines[0]


def test_the_example_prints_what_the_guide_shows() -> None:
    run = CliRunner().invoke(app, ["audit", f"{EXAMPLE}:build", "--ranks", "dp=2,tp=2"])
    assert run.exit_code == autoshard.VerificationError.exit_code, run.output
    guide = (EXAMPLE.parents[1] / "docs" / "guides" / "audit.md").read_text()
    shown = guide.split("```\n")[3].replace("examples/audit.py", "audit.py")
    printed = run.stdout.replace(str(EXAMPLE), "audit.py").replace("examples/audit.py", "audit.py")
    assert shown.strip() in printed.replace("../", "")


def test_the_guide_shows_the_proof_of_the_sound_example(tmp_path: Path) -> None:
    lines = EXAMPLE.read_text().splitlines(keepends=True)
    (tmp_path / "sound.py").write_text("".join(line for line in lines if "the mistake" not in line))
    run = CliRunner().invoke(app, ["audit", f"{tmp_path / 'sound.py'}:build", "--ranks", "dp=2,tp=2"])
    assert run.exit_code == 0, run.output
    guide = (EXAMPLE.parents[1] / "docs" / "guides" / "audit.md").read_text()
    assert guide.split("```\n")[5].strip() == run.stdout.strip()


def test_the_command_gives_one_document() -> None:
    arguments = ["audit", f"{EXAMPLE}:build", "--ranks", "dp=2,tp=2", "--json"]
    document = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert document["ok"] is False
    assert document["findings"][0]["factor"] == pytest.approx(2)
    run = CliRunner().invoke(app, ["audit", f"{EXAMPLE}:one_device_step", "--ranks", "dp=2"])
    assert run.exit_code != 0


def test_what_libraries_keep_once_a_process_is_each_ranks_own() -> None:
    state = pytest.importorskip("accelerate.state")
    model = nn.Linear(4, 4)
    places: list[tuple[int, int]] = []

    def step(copy: nn.Linear) -> None:
        copy(torch.ones(2, 4)).sum().backward()

    def rank_step(copy: nn.Linear) -> None:
        dist.barrier()
        kept = state.PartialState(cpu=True)
        places.append((kept.process_index, kept.num_processes))
        dist.barrier()
        assert state.PartialState().process_index == dist.get_rank()
        step(copy)

    before = dict(state.PartialState._shared_state)
    with autoshard.audit(reference=model, mesh="dp=3", step=step, prove=False) as session:
        assert session.rank(rank_step).ok
    assert sorted(places) == [(0, 3), (1, 3), (2, 3)]
    assert state.PartialState._shared_state == before


def test_variables_of_modules_are_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deepspeed.groups")
    vars(module).update(group=None, named={"world": None})
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.groups", module)
    model = nn.Linear(4, 4)

    def step(copy: nn.Linear) -> None:
        copy(torch.ones(2, 4)).sum().backward()

    def rank_step(copy: nn.Linear) -> None:
        variables = vars(module)
        assert variables["group"] is None and "mine" not in variables["named"]
        variables["group"], variables["named"]["mine"] = dist.get_rank(), dist.get_rank()
        variables["later"] = True
        dist.barrier()
        assert variables["group"] == variables["named"]["mine"] == dist.get_rank()
        step(copy)

    with autoshard.audit(reference=model, mesh="dp=3", step=step) as session:
        assert session.rank(rank_step).ok
    assert vars(module)["group"] is None and vars(module)["named"] == {"world": None}
    assert "later" not in vars(module)
