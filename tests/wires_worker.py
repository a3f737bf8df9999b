"""Started by torchrun: train the programs ``fused`` and ``apart`` of a folder three steps; note the losses.

Arguments: the folder, to which ``losses.json`` is written, and the model, ``llama`` or ``gpt2``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sequence_gpt2
import sequence_llama
import torch
import torch.distributed as dist
from gloo_worker import train
from leaving import leave

import autoshard


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    losses = {}
    for name in ("fused", "apart"):
        model, inputs = {"llama": sequence_llama.make, "gpt2": sequence_gpt2.make}[sys.argv[2]]()
        losses[name] = train(autoshard.load(str(folder / name), model), inputs, clip=False, pieces=False)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    leave()


if __name__ == "__main__":
    main()
