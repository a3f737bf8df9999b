"""What training scripts put around a model, on four processes as on one: see `features_worker.py`."""

from __future__ import annotations

import importlib.util

import pytest
from features_worker import ALL, SAMPLED, WITHOUT_PIPELINE
from ranks import HERE, run_ranks
from sampling import all_cases


@pytest.mark.parametrize("mesh", SAMPLED)
def test_training_scripts_do_what_they_do_on_one_process(mesh: str) -> None:
    cases = [case.__name__ for case in (*ALL, *(() if "pp" in mesh else WITHOUT_PIPELINE))]
    if importlib.util.find_spec("torchao") is None:
        cases = [name for name in cases if name != "in_8_bits"]
    if not all_cases():
        cases = SAMPLED[mesh].split()
    said = run_ranks([str(HERE / "features_worker.py"), mesh, *cases])
    lines = [line for line in said.splitlines() if line.startswith(("ok", "BAD"))]
    assert len(lines) == len(cases) and all(line.startswith("ok") for line in lines), "\n".join(lines)
