"""Going on with a run: from its last checkpoint, on as many ranks as there are now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.training.loop import Run
from stoker.training.schedule import Horizon


def resume(run: Run, state: dict[str, Any], path: Path, say: Callable[[str], None]) -> None:
    """Puts a saved state into the run. Its learning rate keeps the course that it had."""
    run.progress = run.saver.parts.restore(state, path)
    progress = run.progress
    run.step.micro_batch = progress.micro_batch or run.step.micro_batch
    run.train_metrics.restore(state["sums"] if run.ranks.is_first else None)
    saved = Horizon(**state["horizon"])
    wanted = run.horizon
    if saved.steps_per_epoch != wanted.steps_per_epoch:
        # Another total batch: the epoch has other steps, and the step number means another moment.
        share = progress.step / saved.steps_per_epoch
        progress.step = round(share * wanted.steps_per_epoch)
        say(f"the total batch changed: step {progress.step:,} of {wanted.steps_per_epoch:,} an epoch from here")
        saved = replace(saved, steps_per_epoch=wanted.steps_per_epoch)
    if saved != wanted:
        say(
            f"going on with the course that the run began with ({saved.epochs} epochs, {saved.scheduler}, "
            f"{saved.warmup_epochs} of warmup); --fresh begins a new one"
        )
    run.horizon = run.saver.parts.horizon = saved
