"""Started by `ranks`: runs the Python blocks of guides, one after the other, in a folder.

Arguments: the folder, in which ``path/to/model`` is a small Llama; guides. They find ``batch`` and
``build``; the function of a guide's name checks what its blocks leave.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from calls_worker import batch, build, full
from guide_blocks import blocks, run_blocks
from leaving import leave
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


def weights(names: dict[str, Any]) -> None:
    plain = AutoModelForCausalLM.from_pretrained("path/to/model")
    torch.testing.assert_close(full(names["loss"]), plain(**names["batch"]).loss, rtol=1e-5, atol=1e-6)


def peft(names: dict[str, Any]) -> None:
    plain = AutoModelForCausalLM.from_pretrained("path/to/model")
    before = plain(**names["batch"]).loss
    torch.testing.assert_close(full(names["before"]), before, rtol=1e-5, atol=1e-6)
    adapted = PeftModel.from_pretrained(plain, "adapter")(**names["batch"]).loss
    here = full(names["model"](**names["batch"]).loss)
    torch.testing.assert_close(here, adapted, rtol=1e-4, atol=1e-5)
    assert adapted < before


def checkpoints(names: dict[str, Any]) -> None:
    assert names["checkpoints"].steps() == [5, 10]
    assert names["checkpoints"].load() == 10


def precision(names: dict[str, Any]) -> None:
    assert {p.dtype for p in names["model"].parameters()} == {torch.float32}
    plain = AutoModelForCausalLM.from_pretrained("path/to/model", dtype=torch.bfloat16)
    assert full(names["model"](**names["batch"]).logits).dtype == torch.bfloat16
    assert names["loss"] < plain(**names["batch"]).loss


def training_features(names: dict[str, Any]) -> None:
    """The same script without its line about parallelizing."""
    plain = {"batch": batch(8, 16)}
    for block in blocks("training_features"):
        exec(re.sub(r"model = autoshard\.parallelize.*\n", "", block), plain)
    torch.testing.assert_close(full(names["averaged"]), plain["averaged"], rtol=1e-4, atol=1e-5)
    assert names["averaged"] > names["loss"]


def trainer(names: dict[str, Any]) -> None:
    """What the first block saved is what its model has; the others went on to their ends."""
    saved = AutoModelForCausalLM.from_pretrained("out/final")(**names["batch"]).loss
    begun = AutoModelForCausalLM.from_pretrained("path/to/model")(**names["batch"]).loss
    assert saved < begun - 1e-3, (saved, begun)
    assert full(names["model"](**names["batch"]).loss) < begun - 1e-3
    assert os.path.isdir("state/parallel_0")
    if "L" in names:
        assert names["trainer"].global_step == 3


def _given(guide: str) -> dict[str, Any]:
    """What a guide's reader has."""
    names: dict[str, Any] = {"batch": batch(8, 16), "build": partial(build, "Llama")}
    if guide == "trainer":
        rows = [{name: x[k % 8] for name, x in names["batch"].items()} for k in range(16)]
        loader = partial(DataLoader, rows, batch_size=8)
        names |= {"rows": rows, "held_out": rows[:8], "batches": loader(), "loader": loader()}
        names |= {"validation": loader(), "Classifier": _classifier}
    return names


def _classifier(net: Any) -> Any:
    """A LightningModule."""
    import lightning.pytorch as L

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, given: Any, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**given).loss
            return loss

        def validation_step(self, given: Any, number: int) -> None:
            self.log("loss", self.net(**given).loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Classifier()


def main() -> None:
    folder, *guides = sys.argv[1:]
    os.chdir(folder)
    dist.init_process_group()
    for guide in guides:
        names = _given(guide)
        run_blocks(guide, names)
        globals()[guide](names)
        if dist.get_rank() == 0:
            print("ok", guide)
    leave()


if __name__ == "__main__":
    main()
