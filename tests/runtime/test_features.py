"""What training scripts put around a model, on four processes as on one: see `features_worker.py`."""

from __future__ import annotations

import importlib.util

import pytest
from features_worker import ALL, WITHOUT_PIPELINE
from ranks import HERE, run_ranks
from sampling import all_cases

#: what runs at every commit
QUICK = {
    "dp=2,tp=2": "hooks_that_change hooks_of_the_process copied_after_a_change data_assigned rows_by_hand "
    "averaged_model batch_norms_updated weight_norm_old parametrized_later compiled_step infinite_somewhere",
    "pp=2,dp=2": "gradient_hooks averages_by_hand rows_by_hand unfrozen",
}


@pytest.mark.parametrize("mesh", [*QUICK, *(["fsdp=4"] if all_cases() else [])])
def test_scripts_do_what_they_do_on_one_process(mesh: str) -> None:
    known = [case.__name__ for case in (*ALL, *(() if "pp" in mesh else WITHOUT_PIPELINE))]
    cases = known if all_cases() else QUICK[mesh].split()
    if importlib.util.find_spec("torchao") is None:
        cases = [name for name in cases if name != "in_8_bits"]
    said = run_ranks([str(HERE / "features_worker.py"), mesh, *cases])
    lines = [line for line in said.splitlines() if line.startswith(("ok", "BAD"))]
    assert set(cases) <= set(known)
    assert len(lines) == len(cases) and all(line.startswith("ok") for line in lines), "\n".join(lines)
