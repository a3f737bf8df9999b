"""Four gloo processes: losses, gradients and parameters after three AdamW steps equal eager's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from families import FAMILIES, MESHES, family

from autoshard.analysis import analyse
from autoshard.api import compile_analysed, plan_analysed
from autoshard.cluster import Mesh, load_cluster
from autoshard.passes.capture import capture
from autoshard.program.store import save_program
from autoshard.search.plan import Recompute

HERE = Path(__file__).parent
#: meshes on which a step is so many microbatches
PIECES = (("fsdp=4", 2), ("dp=2,tp=2", 4))


def torchrun(arguments: list[str], timeout: float = 600, ranks: int = 4) -> str:
    """Run a script on some processes, which end with this call whatever happens."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*command, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode == 0, told(output)
    return output


def told(output: str) -> str:
    """The end of what processes printed, and where one crashed, which stands before torchrun's own report."""
    crash = output.find("Fatal Python error")
    return (output[crash : crash + 4000] + "\n...\n" if crash >= 0 else "") + output[-4000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, float]]:
    """One start of four processes runs all cases."""
    folder = tmp_path_factory.mktemp("gloo")
    cases = []
    for each in FAMILIES:
        model, inputs = each.make()
        analysis = analyse(capture(model, (), inputs))
        for mesh in MESHES:
            planned = plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("cpu-gloo"))
            program = folder / f"{each.name}-{mesh}"
            save_program(compile_analysed(planned), program)
            cases.append({"family": each.name, "mesh": mesh, "program": str(program), "steps_of": "call"})
    cases += [_in_pieces(folder, mesh, pieces) for mesh, pieces in PIECES]
    (folder / "cases.json").write_text(json.dumps(cases))
    torchrun([str(HERE / "gloo_worker.py"), str(folder / "cases.json"), str(folder / "results.json")])
    rows = json.loads((folder / "results.json").read_text())
    return {(row["family"], Path(row["program"]).name): row for row in rows}


def _in_pieces(folder: Path, mesh: str, pieces: int) -> dict[str, str]:
    """A llama whose step is several microbatches, with its layers computed again by backward."""
    model, inputs = family("llama").make()
    piece = {name: x[: len(x) // pieces] for name, x in inputs.items()}
    planned = plan_analysed(analyse(capture(model, (), piece)), [Mesh.parse(mesh)], load_cluster("cpu-gloo"))
    again = {"layers_fwd": Recompute("full", 2)}
    planned = replace(planned, plan=replace(planned.plan, microbatches=pieces, recompute=again))
    program = folder / f"llama-{mesh}-in-{pieces}"
    save_program(compile_analysed(planned), program)
    return {"family": "llama", "mesh": mesh, "program": str(program), "steps_of": "microbatches"}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [f.name for f in FAMILIES])
def test_training_equals_eager(
    results: dict[tuple[str, str], dict[str, float]], name: str, mesh: str
) -> None:
    row = results[name, f"{name}-{mesh}"]
    assert row["error"] < 1e-4, f"{row['worst']} is off by {row['error']:.2e}"


@pytest.mark.parametrize(("mesh", "pieces"), PIECES)
def test_microbatches_equal_the_whole_batch(
    results: dict[tuple[str, str], dict[str, float]], mesh: str, pieces: int
) -> None:
    row = results["llama", f"llama-{mesh}-in-{pieces}"]
    assert row["error"] < 1e-4, f"{row['worst']} is off by {row['error']:.2e}"


def test_api_on_four_processes(tmp_path: Path) -> None:
    """DeviceMesh, decorator, lazy form, kinds of inputs, dropout, checkpoint, wrong worlds."""
    assert "all ways work" in torchrun([str(HERE / "gloo_api_worker.py"), str(tmp_path)])
