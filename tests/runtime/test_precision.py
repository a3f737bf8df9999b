"""Models in float32 that compute in 16 bits on four processes: see `precision_worker.py`."""

from __future__ import annotations

from pipelines import model_and_batch
from ranks import HERE, run_ranks
from sampling import all_cases

import autoshard
from autoshard.verify.lockstep import verify

MESHES = ("dp=2,tp=2", "fsdp=4", "pp=2,dp=2")


def test_training_is_that_of_one_process_in_16_bits() -> None:
    some = [] if all_cases() else ["Llama,Convolutions"]
    said = run_ranks(
        [str(HERE / "precision_worker.py"), ";".join(MESHES if all_cases() else MESHES[1:]), *some]
    )
    lines = [line for line in said.splitlines() if line.startswith(("ok", "BAD"))]
    assert len(lines) > 7 and all(line.startswith("ok") for line in lines), said


def test_tied_parameters_are_cast_once_in_eager() -> None:
    model, batch = model_and_batch("llama-odd", 2)
    planned = autoshard.plan(model, "dp=2,tp=2", example_inputs=batch, microbatches=2, precision="bf16")
    program = autoshard.compile(model, planned).program
    assert program.signature.tied
    assert verify(program, model, (), batch, steps=1).ok
