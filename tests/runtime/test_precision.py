"""Models in float32 that compute in 16 bits on four processes: see `precision_worker.py`."""

from __future__ import annotations

from ranks import HERE, run_ranks
from sampling import all_cases

MESHES = ("dp=2,tp=2", "fsdp=4", "pp=2,dp=2")


def test_training_is_that_of_one_process_in_16_bits() -> None:
    some = [] if all_cases() else ["Llama,Convolutions"]
    said = run_ranks(
        [str(HERE / "precision_worker.py"), ";".join(MESHES if all_cases() else MESHES[1:]), *some]
    )
    lines = [line for line in said.splitlines() if line.startswith(("ok", "BAD"))]
    assert len(lines) > 7 and all(line.startswith("ok") for line in lines), said
