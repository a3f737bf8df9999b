"""torchrun, started from a script: processes with imports, hashes and random seeds of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from autoshard.runtime.launch import torchrun

SCRIPT = """
import os, sys
import torch
from torch import nn
import autoshard

def step(model):
    loss = model(torch.arange(32.0).view(4, 8)).square().mean()
    loss.backward()
    return loss.detach()

def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

parallel, plain = autoshard.parallelize(made(), "tp=2", example_inputs=(torch.zeros(4, 8),)), made()
torch.testing.assert_close(step(parallel), step(plain))
for p, q in zip(parallel.parameters(), plain.parameters()):
    torch.testing.assert_close(p.grad.full_tensor(), q.grad)
names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "OTHER")
os.write(1, (" ".join([*map(os.environ.get, names), *sys.argv[1:]]) + "\\n").encode())
torch.distributed.destroy_process_group()
os._exit(0)
"""


def test_ranks_that_torchrun_starts_plan_and_train_as_one_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = torchrun([str(script), "word"], 2, env={"OTHER": "told"}, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["0 2 1 told word", "1 2 1 told word"]
