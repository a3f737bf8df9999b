"""Lightning's Trainer: the same losses, metrics, checkpoints on four processes as on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import HERE, run_ranks
from test_trainer import close


def test_lightning_trains_logs_saves_and_resumes_as_on_one_process(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="make test-all installs it")

    def run(name: str, mesh: str, resumed: str) -> Any:
        """What a run saw; its second fit goes on from what another wrote."""
        arguments = [str(HERE / "lightning_worker.py"), mesh, str(tmp_path / name), str(tmp_path / resumed)]
        run_ranks(arguments, ranks=4 if mesh else 1)
        return json.loads((tmp_path / name / "found.json").read_text())

    wanted = run("one", "", "one")
    assert len(wanted["trained"]) == 12 and len(wanted["resumed"]) == 11
    close(run("tp", "dp=2,tp=2", "one"), wanted)
    close(run("fsdp", "fsdp=4", "tp"), wanted)
    close(run("other", "", "fsdp"), wanted)
    for file in ("step=6.ckpt", "more/step=12.ckpt"):
        first, *others = (
            torch.load(tmp_path / name / file, weights_only=True) for name in ("one", "tp", "fsdp")
        )
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
            for other in others:
                torch.testing.assert_close(other[key], first[key], rtol=1e-3, atol=1e-5)
