"""Inductor compiles what stands between the messages of a segment: the same numbers, in the same order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls_worker import batch, build
from codegen_worker import Net, X, net
from families import family
from ranks import HERE, run_ranks
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.errors import UsageError, VerificationError
from autoshard.ir.scaled import CAST_SCALED, SCALED_MM
from autoshard.program.store import load_program, save_program
from autoshard.runtime import compiled_subgraphs
from autoshard.runtime.compiled_segment import CompiledSegment
from autoshard.runtime.compiled_subgraphs import Subgraph, parts_of, separated
from autoshard.runtime.executor import RankProgram
from autoshard.runtime.prepared_call import PreparedCall
from autoshard.torch_adapters.inductor import forms_of

#: compiled code rounds once where ops round each, and multiplies and adds in one
ROUNDING = 2e-6


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parallel(layers: int, codegen: str, dropout: float = 0.0) -> Any:
    return autoshard.parallelize(
        net(layers, dropout), "dp=1", example_inputs=(X,), cluster="cpu-gloo", codegen=codegen
    )


def program_of(model: Any) -> RankProgram:
    found: RankProgram = model._autoshard_family.current.runner.rank_program
    return found


def codes(model: Any) -> dict[str, int]:
    """Segment -> how often it was compiled."""
    return {
        name: len(segment._run.codes)
        for name, segment in program_of(model).segments.items()
        if isinstance(segment._run, CompiledSegment)
    }


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_numbers_are_those_of_the_ops(dropout: float) -> None:
    """Dropout too: every layer draws its own mask, though its code is that of the others."""
    models = [parallel(3, codegen, dropout) for codegen in ("interpreter", "inductor")]
    for _ in range(3):
        plain, code = (model(X) for model in models)
        torch.testing.assert_close(code, plain, rtol=ROUNDING, atol=0)
        for loss in (plain, code):
            loss.backward()
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-7)
            for one in (p, q):
                one.grad = None
    assert program_of(models[1]).compiles and not program_of(models[0]).compiles


@pytest.mark.parametrize("products", ["float8-rowwise", "mxfp8"])
def test_casts_of_operands_are_compiled(products: str) -> None:
    inputs = batch(8, 16)
    plain, code = (
        autoshard.parallelize(build("Llama"), "dp=1", example_inputs=inputs, products=products, codegen=how)
        for how in ("interpreter", "inductor")
    )
    losses = [model(**inputs).loss for model in (plain, code)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    for p, q in zip(plain.parameters(), code.parameters(), strict=True):
        # a value between two codes may be rounded to either
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=4e-3 * float(p.grad.abs().max()))
    found = [
        step.node.op
        for segment in program_of(code).segments.values()
        for part in getattr(segment._run, "parts", ())
        if isinstance(part, Subgraph)
        for step in part.steps
    ]
    assert CAST_SCALED in found and SCALED_MM not in found


def test_more_layers_are_not_compiled_more_often() -> None:
    few, many = parallel(4, "inductor"), parallel(8, "inductor")
    for model in (few, many):
        for _ in range(2):
            model(X).backward()
    assert codes(many) == codes(few) and set(codes(few).values()) == {1}
    runs = [p for s in program_of(many).segments.values() for p in s._run.parts if isinstance(p, Subgraph)]
    assert 0 < len(runs) <= 8


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_runs_keep_the_order_and_wait_for_nothing_early(name: str) -> None:
    model, inputs = family(name).make()
    planned = autoshard.plan(model, "fsdp=2,tp=2", cluster="h100-dgx", example_inputs=inputs)
    rank = RankProgram(autoshard.compile(model, planned).program, 0, {}, torch.device("cpu"))
    seen = 0
    for segment in rank.segments.values():
        parts = parts_of(segment.steps, segment.outputs, segment.late)
        flat = [s for part in parts for s in (part.steps if isinstance(part, Subgraph) else (part,))]
        assert flat == segment.steps
        waiting = set(segment.late)
        for k, part in enumerate(parts):
            steps: tuple[PreparedCall, ...] = part.steps if isinstance(part, Subgraph) else (part,)
            waiting -= steps[0].uses
            for step in steps[1:]:
                assert not step.uses & waiting
            if isinstance(part, Subgraph):
                seen += 1
                assert all(step.node.op.startswith("aten.") and not step.sites for step in steps)
                after = [s for p in parts[k + 1 :] for s in (p.steps if isinstance(p, Subgraph) else (p,))]
                read = {slot for step in after for slot in step.uses} | set(segment.outputs)
                assert set(part.gives) == {o for step in steps for o in step.outs} & read
                assert not set(part.dead) & read
    assert seen > 4


def test_outputs_in_memory_of_others_are_copied() -> None:
    x = torch.ones(4)
    one = x * 2
    assert [form[2] for form in forms_of([x], [one, one.view(2, 2), x[:2]])] == [None, 1, 0]
    kept = separated([one, one], (1,))
    kept[1].mul_(3)
    assert float(kept[0].sum()) == 8 and float(kept[1].sum()) == 24


def test_another_type_is_other_code() -> None:
    """Code of fp32 would read the bytes of bf16 for numbers of its own."""
    model = parallel(1, "inductor")
    rank = program_of(model)
    name = next(n for n in rank.segments if "fwd" in n and "layers" in n)
    segment = rank.segments[name]
    args = [torch.randn(t.shape) for _, t in rank.program.lowered.segments[name].graph.inputs]
    wide = segment(list(args), 0)
    narrow = segment([x.bfloat16() for x in args], 0)
    assert len(segment._run.codes) == 2  # type: ignore[attr-defined]
    for x, y in zip(narrow, wide, strict=True):
        assert float((x.float() - y).norm() / y.norm()) < 0.05


def test_a_number_is_refused() -> None:
    steps = parts_of(next(iter(program_of(parallel(1, "inductor")).segments.values())).steps, (), ())
    part = next(p for p in steps if isinstance(p, Subgraph))
    with pytest.raises(UsageError, match="takes 3, which is no tensor"):
        part.compiled([3])  # type: ignore[list-item]


def test_what_inductor_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled_subgraphs, "compile_function", fails)
    with pytest.raises(UsageError, match=r"(?s)Inductor cannot compile.*no compiler here") as error:
        parallel(1, "inductor")(X)
    assert 'codegen="interpreter"' in error.value.hint


def test_strides_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiled_subgraphs.compile_function

    def other(*given: Any) -> Any:
        code, forms = real(*given)
        return code, [(shape, tuple(reversed(strides)), alias) for shape, strides, alias in forms]

    monkeypatch.setattr(compiled_subgraphs, "compile_function", other)
    with pytest.raises(VerificationError, match="other strides"):
        parallel(1, "inductor")(X)


def test_the_folder_says_it_and_a_call_of_load_overrides_it(tmp_path: Path) -> None:
    planned = autoshard.plan(Net(1), "dp=1", cluster="cpu-gloo", example_inputs=(X,))
    compiled = autoshard.compile(Net(1), planned, codegen="inductor").program
    save_program(compiled, tmp_path / "program")
    assert load_program(tmp_path / "program").codegen == "inductor"
    for given, compiles in (("", True), ("interpreter", False)):
        model = autoshard.load(tmp_path / "program", Net(1), codegen=given)
        assert program_of(model).compiles is compiles


def test_compiled_code_is_kept_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = autoshard.plan(Net(1), "dp=1", cluster="cpu-gloo", example_inputs=(X,))
    save_program(autoshard.compile(Net(1), planned, codegen="inductor").program, tmp_path / "program")

    def counts(machine: str, folder: str) -> tuple[int, int]:
        """(graphs compiled, graphs taken from a cache) by a machine that has compiled nothing yet."""
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / machine))
        counters["inductor"].clear()
        model = autoshard.load(tmp_path / "program", Net(1), code_cache=tmp_path / folder)
        model(X).sum().backward()
        found = counters["inductor"]
        return found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]

    compiled, taken = counts("first", "code")
    assert compiled and not taken and len(list((tmp_path / "code").iterdir())) == compiled
    assert counts("second", "code") == (0, compiled)
    assert counts("third", "other") == (compiled, 0)


def test_names() -> None:
    with pytest.raises(UsageError, match="codegen is 'c'"):
        autoshard.PassOptions(codegen="c")


def test_two_processes_equal_one_device() -> None:
    printed = run_ranks([str(HERE / "codegen_worker.py")], ranks=2)
    assert printed.count("compiled and equal") == 2


def test_sharded_programs_equal_eager(tmp_path: Path) -> None:
    """On four gloo processes, of programs whose folder says how they are run."""
    cases = []
    for name, mesh in (("llama", "fsdp=2,tp=2"), ("gpt2", "dp=2,tp=2")):
        model, inputs = family(name).make()
        planned = autoshard.plan(model, mesh, cluster="cpu-gloo", example_inputs=inputs)
        program = autoshard.compile(model, planned, codegen="inductor").program
        folder = tmp_path / name
        save_program(program, folder)
        cases.append({"family": name, "program": str(folder), "steps_of": "one"})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    paths = (HERE / "gloo_worker.py", tmp_path / "cases.json", tmp_path / "out.json")
    run_ranks(list(map(str, paths)))
    for row in json.loads((tmp_path / "out.json").read_text()):
        assert row["error"] < 1e-5, row
