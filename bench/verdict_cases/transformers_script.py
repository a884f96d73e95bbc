"""The same faults under Hugging Face's Trainer, which creates the DataLoader itself."""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from bench.verdict_cases.work import Collate, Faults, Samples, read_faults


class Classifier(torch.nn.Module):
    """A small network whose step takes the requested time without using a core."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.step_s = faults.step_ms / 1e3
        self.layer = torch.nn.Linear(16, 2)

    def forward(self, x0: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(self.layer(x0[:, :16]), label)
        time.sleep(self.step_s)
        return {"loss": loss}


class StopAfter(TrainerCallback):  # type: ignore[misc]
    """Stops the training after a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = 0.0

    def on_train_begin(self, *_about: Any, **_more: Any) -> None:
        self.end = time.monotonic() + self.seconds

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_more: Any) -> None:
        control.should_training_stop = control.should_training_stop or time.monotonic() > self.end


def main() -> int:
    faults = read_faults()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=100_000, per_device_train_batch_size=faults.batch,
            dataloader_num_workers=faults.workers, dataloader_pin_memory=False, report_to=[], save_strategy="no",
            dataloader_prefetch_factor=faults.prefetch if faults.workers else None, logging_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        Trainer(
            Classifier(faults), arguments, Collate(faults), Samples(faults), callbacks=[StopAfter(faults.seconds)]
        ).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
