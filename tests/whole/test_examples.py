"""The examples: those that need no processes run, the others compile and import."""

from __future__ import annotations

import py_compile
from pathlib import Path
from types import ModuleType

import pytest
from python_files import module_of

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def load(name: str) -> ModuleType:
    """An example as a module; what it does when it is started does not happen."""
    path = next(p for p in EXAMPLES if p.stem == name)
    return module_of(path, f"example_{name}")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_compiles_and_says_how_to_start_it(path: Path, tmp_path: Path) -> None:
    py_compile.compile(str(path), cfile=str(tmp_path / "out.pyc"), doraise=True)
    assert f"python examples/{path.name}" in path.read_text()


@pytest.mark.parametrize("name", ["train_decorator", "fsdp", "load_and_checkpoint"])
def test_imports(name: str) -> None:
    assert callable(load(name).main)


def test_plan_offline(capsys: pytest.CaptureFixture[str]) -> None:
    load("plan_offline").main(layers=4)
    out = capsys.readouterr().out
    assert "B parameters on fsdp=8,tp=8: 64 ranks" in out
    assert "mlp.c_fc.weight" in out and "a rank holds" in out


def test_demo_without_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of the demo but the training: compile, verify, show."""
    monkeypatch.chdir(tmp_path)
    demo = load("demo")
    example = demo.EXAMPLES[0]
    demo.OUT.mkdir(parents=True)
    config = demo.OUT / "llama.json"
    example.config.to_json_file(config)
    demo.compile_program(f"hf:{config}", demo.OUT / "llama")
    demo.check(f"hf:{config}", demo.OUT / "llama")
    demo.show_program(demo.OUT / "llama", {"parameter_bytes_rank": 1, "parameter_bytes_model": 2})
