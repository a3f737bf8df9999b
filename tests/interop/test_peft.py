"""Adapters of PEFT on a parallel model: see `peft_worker.py`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks import HERE, run_ranks
from sampling import all_cases, sampled

if find_spec("peft") is None:  # not imported here: every worker of xdist collects this file
    pytest.skip("adapters need peft", allow_module_level=True)

CASES = (
    "lora dora ia3 prompts saved_modules all_linear switched dropout several merged unloaded saved base_saved"
)
#: with a pipeline: training and saving. A rank with nothing to train (prompts) has no optimizer
WITH_MESH = {"dp=2,tp=2": CASES.split(), "pp=2,dp=2": ["lora", "dora", "saved"]}


@pytest.mark.parametrize("mesh", WITH_MESH)
def test_adapters_are_those_of_one_process(mesh: str, tmp_path: Path) -> None:
    cases = WITH_MESH[mesh] if all_cases() else sorted({"saved", *sampled(WITH_MESH[mesh], 4)})
    said = run_ranks([str(HERE / "peft_worker.py"), str(tmp_path), mesh, *cases])
    lines = [line for line in said.splitlines() if line.startswith(("ok", "BAD"))]
    assert len(lines) == len(cases) and all(line.startswith("ok") for line in lines), "\n".join(lines)
