"""Started by `ranks`: one script with Lightning's Trainer, on one process or several; writes what it saw.

Arguments: a mesh, "" for one process with Lightning alone; a folder; a folder whose checkpoint is resumed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from leaving import leave
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric, SumMetric

import autoshard

ROWS = 8


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16), nn.Linear(16, 12))


def rows(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(44, 16, generator=generator), torch.randint(0, 12, (44,), generator=generator)
    return TensorDataset(x[:count], y[:count])


class Noisy(TensorDataset):
    """Rows with noise that the processes of a loader draw."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.randn(16) / 8, y


class Classifier(L.LightningModule):
    """As Lightning's guides write it."""

    def __init__(self, mesh: str, late: bool = False) -> None:
        super().__init__()
        self.mesh, self.net = mesh, built()
        self.scale = nn.Parameter(torch.ones(12))  # outside the model
        self.spare = nn.Parameter(torch.ones(3))  # never used: the optimizer has no state of it
        self.rights, self.seen = MeanMetric(), SumMetric()
        self.found: list[Any] = []
        self.divided = not mesh
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if not self.divided:
            self.net = autoshard.parallelize(self.net, self.mesh, example_inputs=rows(ROWS)[:][:1])
            self.divided = True

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x) * self.scale, y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = autoshard.clip_grad_norm_(self.parameters(), float("inf"))
        self.found.append([self.global_step, float(norm), self.lr_schedulers().get_last_lr()[0]])

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        outs = self.net(x) * self.scale
        self.rights((outs.argmax(-1) == y).float())
        self.seen(len(y))
        self.log("val_loss", F.cross_entropy(outs, y), batch_size=len(y))
        self.log("rights", self.rights)
        self.log("seen", self.seen)

    def on_validation_epoch_end(self) -> None:
        self.found.append(["validated", float(self.all_gather(self.trainer.callback_metrics["val_loss"]))])

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0]).argmax(-1)

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.found.append({name: float(x) for name, x in sorted(metrics.items())})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trainer_of(mesh: str, folder: Path, **kwargs: Any) -> L.Trainer:
    if mesh:
        from autoshard.interop.lightning import ParallelStrategy

        kwargs["strategy"] = ParallelStrategy()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **quiet, **kwargs)


def trained(
    mesh: str, folder: Path, steps: int, resume: Path | None = None, noisy: bool = False, **kwargs: Any
) -> Any:
    module = Classifier(mesh, late=resume is not None)
    saving = ModelCheckpoint(folder, filename="{step}", monitor="val_loss", save_top_k=-1)
    trainer = trainer_of(
        mesh, folder, max_steps=steps, accumulate_grad_batches=2, callbacks=[saving], **kwargs
    )
    # ranks of a script that seeds nothing have unlike states; the first one's counts
    torch.manual_seed(dist.get_rank() if mesh else 0)
    loader = DataLoader(rows(44), ROWS, shuffle=True)
    if noisy:
        L.seed_everything(3, workers=True, verbose=False)
        loader = DataLoader(Noisy(*rows(44).tensors), ROWS, num_workers=1)
    trainer.fit(module, loader, DataLoader(rows(21), ROWS), ckpt_path=resume)
    return trainer, module, saving


def refused(mesh: str, folder: Path) -> None:
    """Each by name of what to do."""
    loader = DataLoader(rows(16), ROWS)
    divided = DataLoader(rows(16), ROWS, sampler=DistributedSampler(rows(16)))
    cases = (
        ("is parallel", Classifier(""), loader, {}),
        ("precision", Classifier(mesh), loader, {"precision": "bf16-mixed"}),
        ("DistributedSampler", Classifier(mesh), divided, {}),
        ("pipeline", Classifier("pp=2,dp=2"), loader, {}),
    )
    for text, module, data, kwargs in cases:
        try:
            trainer_of(mesh, folder, max_steps=1, enable_checkpointing=False, **kwargs).fit(module, data)
        except autoshard.UsageError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")


def main() -> None:
    torch.set_num_threads(1)
    mesh, folder, other = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if mesh:
        dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    trainer, module, saving = trained(mesh, folder, 6, gradient_clip_val=0.1)
    found["trained"], found["best"] = module.found, float(saving.best_model_score)
    found["validated"] = trainer.validate(module, DataLoader(rows(21), ROWS), verbose=False)
    guesses = trainer.predict(module, DataLoader(rows(21), ROWS))
    found["guesses"] = [int(x) for each in guesses for x in each]
    _, module, _ = trained(mesh, folder / "more", 12, other / "step=6.ckpt", gradient_clip_val=0.1)
    found["resumed"] = module.found
    settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    _, module, _ = trained(mesh, folder / "noisy", 3, noisy=True, **settings)
    found["noisy, clipped by value"] = module.found
    if mesh:
        refused(mesh, folder)
    if not mesh or dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    if mesh:
        leave()


if __name__ == "__main__":
    main()
