"""Four gloo processes: losses, gradients and parameters after three AdamW steps equal eager's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import FAMILIES, MESHES

from autoshard.analysis import analyse
from autoshard.api import compile_analysed, plan_analysed
from autoshard.cluster import Mesh, load_cluster
from autoshard.passes.capture import capture
from autoshard.program.store import save_program

HERE = Path(__file__).parent


def torchrun(arguments: list[str], timeout: float = 600) -> str:
    """Run a script on four processes, which end with this call whatever happens."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
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
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, float]]:
    """One start of four processes runs all cases."""
    folder = tmp_path_factory.mktemp("gloo")
    cases = []
    for family in FAMILIES:
        model, inputs = family.make()
        analysis = analyse(capture(model, (), inputs))
        for mesh in MESHES:
            planned = plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("cpu-gloo"))
            program = folder / f"{family.name}-{mesh}"
            save_program(compile_analysed(planned), program)
            cases.append({"family": family.name, "mesh": mesh, "program": str(program)})
    (folder / "cases.json").write_text(json.dumps(cases))
    torchrun([str(HERE / "gloo_worker.py"), str(folder / "cases.json"), str(folder / "results.json")])
    rows = json.loads((folder / "results.json").read_text())
    return {(row["family"], row["mesh"]): row for row in rows}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [f.name for f in FAMILIES])
def test_training_equals_eager(
    results: dict[tuple[str, str], dict[str, float]], name: str, mesh: str
) -> None:
    row = results[name, mesh]
    assert row["error"] < 1e-4, f"{row['worst']} is off by {row['error']:.2e}"


def test_api_on_four_processes(tmp_path: Path) -> None:
    """DeviceMesh, decorator, lazy form, kinds of inputs, dropout, checkpoint, wrong worlds."""
    assert "all ways work" in torchrun([str(HERE / "gloo_api_worker.py"), str(tmp_path)])
