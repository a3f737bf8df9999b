"""The code of guides is what is tested: see `guide_worker.py`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from calls_worker import build
from ranks import HERE, run_ranks
from sampling import sampled

# not imported here: every worker of xdist collects this file
if not (find_spec("peft") and find_spec("accelerate")):
    pytest.skip("guides need peft and accelerate", allow_module_level=True)


def test_guides_run_as_they_stand(tmp_path: Path) -> None:
    build("Llama").save_pretrained(tmp_path / "path" / "to" / "model")
    guides = sampled(["weights", "peft", "checkpoints", "precision", "training_features", "trainer"], 6)
    said = run_ranks([str(HERE / "guide_worker.py"), str(tmp_path), *guides])
    assert said.count("ok ") == len(guides), said
