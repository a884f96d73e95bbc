"""Going on with a run: from its last checkpoint, on as many ranks as there are now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.training.checkpoint_match import differences
from stoker.training.schedule import Horizon

if TYPE_CHECKING:
    from stoker.training.loop import Run

# Where and how fast, but not what: a run is the same run with any of these.
_ELSEWHERE = {
    "run_name", "runs_dir", "devices", "num_nodes", "strategy", "rank_timeout", "log_every", "checkpoint_every_steps",
    "checkpoint_every", "save_top_k", "wandb", "wandb_project", "wandb_name", "tensorboard", "csv", "loader",
    "num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "worker_start", "index_dir", "cache_dir",
    "cache_size", "lookahead", "val_batch_size",
}  # fmt: skip
# Part of the course that was saved; a word about that follows anyway.
_COURSE = {
    "epochs", "warmup_epochs", "warmup_start", "min_lr", "lr_scheduler", "lr_update", "lr_step_epochs",
    "lr_step_factor",
}  # fmt: skip


def resume(run: Run, state: dict[str, Any], path: Path, say: Callable[[str], None]) -> None:
    """Puts a saved state into the run. Its learning rate keeps the course that it had."""
    run.progress = run.saver.parts.restore(state, path)
    progress = run.progress
    run.step.micro_batch = progress.micro_batch or run.step.micro_batch
    run.train_metrics.restore(state["sums"] if run.ranks.is_first else None)
    for line in changed_keys(state["config"], run.saver.parts.config):
        say(f"changed since the checkpoint: {line}")
    saved = Horizon(**state["horizon"])
    wanted = run.horizon
    if saved.steps_per_epoch != wanted.steps_per_epoch:
        # Another total batch, or other data: the epoch has other steps, and the step number means another moment.
        share = progress.step / saved.steps_per_epoch
        progress.step = round(share * wanted.steps_per_epoch)
        say(
            f"an epoch now has {wanted.steps_per_epoch:,} steps and had {saved.steps_per_epoch:,}: "
            f"the run is at step {progress.step:,} in the new count"
        )
        saved = replace(saved, steps_per_epoch=wanted.steps_per_epoch)
    if saved != wanted:
        say(
            f"going on with the course that the run began with ({saved.epochs} epochs, {saved.scheduler}, "
            f"{saved.warmup_epochs} of warmup); --fresh begins a new one"
        )
    run.horizon = run.saver.parts.horizon = saved


def changed_keys(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """The keys that make it another run than the one that was saved, one line each."""
    counted = [key for key in ours if key in saved and key not in _ELSEWHERE | _COURSE]
    return differences({key: saved[key] for key in counted}, {key: ours[key] for key in counted})
