"""The same faults under Lightning's Trainer, written the way its users would."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning
import torch

from bench.verdict_cases.work import Faults, make_loader, read_faults


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A small network whose step takes the requested time without using a core."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.layers(batch["x0"][:, :16]), batch["label"])
        time.sleep(self.faults.step_ms / 1e3)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.layers.parameters(), lr=1e-3)


class StopAfter(lightning.Callback):  # type: ignore[misc]
    """Stops the training after a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = 0.0

    def on_train_start(self, *_about: Any) -> None:
        self.end = time.monotonic() + self.seconds

    def on_train_batch_end(self, trainer: lightning.Trainer, *_about: Any) -> None:
        trainer.should_stop = trainer.should_stop or time.monotonic() > self.end


def main() -> int:
    faults = read_faults()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[StopAfter(faults.seconds)],
    )  # fmt: skip
    trainer.fit(Classifier(faults), make_loader(faults, torch.utils.data.DataLoader))
    return 0


if __name__ == "__main__":
    sys.exit(main())
