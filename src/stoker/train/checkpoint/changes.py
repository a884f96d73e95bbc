"""What another value of a config key means for a run that resumes: nothing, another setting from this step on, another
schedule, or another run. Every key is in the table; the page docs/resume-and-continue.md shows it.

A schedule is a function of the step, so `--replan` needs no state but the new keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stoker.config import Config, config_values
from stoker.core.errors import UserError
from stoker.core.units import count
from stoker.train.schedule import Progress, default_resize_epochs, image_size

Kind = Literal["free", "applied", "schedule", "other"]

_NOT_COMPARABLE = "validation is not comparable with that of earlier epochs"
_REST_OF_EPOCH = "the rest of this epoch takes other samples: some come twice, some not at all"

FREE = (
    # They set where and how fast a run computes, not what: the same bits, apart from the order in which ranks add up.
    "index_dir", "cache_dir", "cache_size", "stage_to", "lookahead", "loader", "num_workers", "adjust_loader",
    "prefetch_factor", "pin_memory", "persistent_workers", "worker_start", "run_name", "runs_dir", "devices",
    "num_nodes", "strategy", "accelerator", "numa_binding", "rank_timeout", "log_every", "checkpoint_every_steps",
    "checkpoint_every", "save_top_k", "wandb", "wandb_project", "wandb_name", "tensorboard", "csv",
    "val_batch_size", "volume_cache",
    # Used only after training.
    "predict_overlap", "predict_flips", "predict_threshold", "predict_postprocess",
    # A trial run keeps no checkpoint, so it is never the one that resumes.
    "fast_dev_run",
)  # fmt: skip
"""Keys that do not change the result. `devices` and `num_nodes` change the total batch, which has its own message."""

APPLIED = {
    # Data: the classes have to be the same, and are compared by name.
    "data_root": "", "samples_csv": "", "train_csv": "", "val_csv": _NOT_COMPARABLE, "max_bad_fraction": "",
    "max_image_pixels": "", "max_decoded_bytes": "", "max_image_bytes": "", "subset_val_per_class": _NOT_COMPARABLE,
    "seed": _REST_OF_EPOCH,
    # Pixels. Every decoder gives the same ones at full size; only `draft` reduces while it decodes.
    "decoder": "the same pixels, unless decode_mode is draft", "decode_mode": "", "img_size": "", "val_img_size":
    _NOT_COMPARABLE, "crop_ratio": _NOT_COMPARABLE, "interpolation": "", "patch_size": "",
    "indivisible_patch": "", "small_volumes": "", "missing_chunks": "", "normalize": "", "foreground_patches": "",
    "limit_val_batches": _NOT_COMPARABLE,
    # Augmentation.
    "crop_scale": "", "crop_aspect": "", "horizontal_flip": "", "auto_augment": "", "randaugment_magnitude": "",
    "randaugment_magnitude_std": "", "randaugment_ops": "", "random_erasing": "", "repeated_augmentation":
    _REST_OF_EPOCH, "mixup_alpha": "", "cutmix_alpha": "", "mix_probability": "", "mix_switch_probability": "",
    "label_smoothing": "", "volume_flips": "", "volume_turns": "", "volume_rotation": "", "volume_degrees": "",
    "volume_scaling": "", "volume_scales": "", "volume_elastic": "", "volume_elastic_size": "", "volume_noise": "",
    "volume_blur": "", "volume_brightness": "", "volume_contrast": "", "volume_gamma": "",
    "volume_low_resolution": "", "volume_cutout": "",
    # How the network computes: the weights are the same, only its rounding or its noise changes.
    "compile_model": "", "compile_mode": "", "channels_last": "", "precision": "", "matmul_precision": "",
    "gradient_checkpointing": "", "drop_path": "", "dropout": "", "sync_batchnorm": "",
    # The average of a run without one begins with the weights of this step.
    "ema_decay": "", "ema_every": "", "ema_warmup": "",
    # The total batch: steps are counted anew, and with scale_lr the learning rate follows.
    "batch_size": "", "gradient_accumulation": "",
    # Loss and optimizer.
    "volume_loss": "", "surface_tolerance": _NOT_COMPARABLE,
    "loss": "", "bce_target_threshold": "", "momentum": "", "nesterov": "", "betas": "", "weight_decay": "",
    "decay_bias_and_norm": "", "clip_grad_norm": "", "max_bad_steps": "",
    "early_stopping": "", "early_stopping_min_delta": "",
}  # fmt: skip
"""Keys that apply from the checkpoint's step on, each with its effect where that may surprise a user."""

SCHEDULE = (
    "epochs", "steps_per_epoch", "limit_train_batches", "lr", "scale_lr", "lr_reference_batch", "lr_scheduler",
    "lr_update", "lr_step_epochs", "lr_step_factor", "min_lr", "warmup_epochs", "warmup_start", "start_img_size",
    "resize_epochs",
)  # fmt: skip
"""Keys of the learning rate, the length and the image sizes of the whole run: applied by `--replan` only."""

OTHER = (
    "task", "model", "num_classes", "optimizer", "weights", "subset_classes", "subset_seed", "subset_train_per_class",
    "val_fraction", "best_by", "ignore_label", "fold", "folds", "split_by", "split_margin", "deep_supervision",
)  # fmt: skip
"""Keys that make it another run: another network, other classes or training images, another optimizer."""

KINDS: dict[Kind, Iterable[str]] = {"free": FREE, "applied": APPLIED, "schedule": SCHEDULE, "other": OTHER}
ON_RESUME: dict[str, Kind] = {key: kind for kind, keys in KINDS.items() for key in keys}
"""What happens to a run that resumes with another value of a key."""

# Different on every machine (`fit_to_machine`, a missing decoder, a scheduler's temporary folder, the part of a
# batch that fits a GPU): these do not show that the user wants another result from a finished run.
_BY_MACHINE = frozenset({"decoder", "precision", "sync_batchnorm", "data_root", "batch_size", "gradient_accumulation"})
_IN_HORIZON = {
    "epochs": "epochs", "warmup_epochs": "warmup_epochs", "warmup_start": "warmup_start", "min_lr": "min_lr",
    "lr_scheduler": "scheduler", "lr_update": "update", "lr_step_epochs": "step_epochs", "lr_step_factor":
    "step_factor",
}  # fmt: skip


@dataclass(frozen=True)
class SettingChange:
    """A key that has another value than in the checkpoint."""

    key: str
    before: Any
    after: Any

    @property
    def kind(self) -> Kind:
        return ON_RESUME[self.key]

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} in the checkpoint, {_shown(self.after)} in this run"


def changes_since(state: Mapping[str, Any], ours: Mapping[str, Any]) -> list[SettingChange]:
    """Every key whose value differs between a saved run and this one, except those that do not change the result."""
    saved = used_values(state)
    found = [SettingChange(key, saved[key], ours[key]) for key in ours if _plain(saved[key]) != _plain(ours[key])]
    # The run has its weights: a file that it began with need not be there any more. Earlier versions did not record
    # which decoder `auto` had chosen.
    said_nothing = {"weights": ours["weights"] is None, "decoder": saved["decoder"] == "auto"}
    return [change for change in found if change.kind != "free" and not said_nothing.get(change.key, False)]


def used_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Every key as a saved run used it: one that its version did not know yet had its default."""
    known = config_values(Config())
    values = known | {key: value for key, value in state["config"].items() if key in known}
    # The horizon is what was really used: earlier versions recorded a changed schedule without applying it.
    values |= {key: state["horizon"][name] for key, name in _IN_HORIZON.items() if name in state["horizon"]}
    if state.get("decoder") is not None:
        values["decoder"] = state["decoder"]
    return values


def of_kind(kind: Kind, changes: Iterable[SettingChange]) -> list[SettingChange]:
    """The changes of one kind."""
    return [change for change in changes if change.kind == kind]


def by_the_user(changes: Iterable[SettingChange]) -> list[SettingChange]:
    """The changes that the user asked for, without those that the machine caused."""
    return [change for change in changes if change.key not in _BY_MACHINE]


def applied_line(change: SettingChange, step: int) -> str:
    """The line that is printed for a change that is applied."""
    note = f" ({APPLIED[change.key]})" if APPLIED[change.key] else ""
    return f"from step {step:,} on: {change.key} {_shown(change.after)}, was {_shown(change.before)}{note}"


def replanned_lines(
    changes: Sequence[SettingChange], before: Mapping[str, Any], after: Mapping[str, Any], progress: Progress
) -> list[str]:
    """The lines that are printed for a new schedule, apart from the learning rate."""
    listed = ", ".join(f"{change.key} {_shown(change.after)} (was {_shown(change.before)})" for change in changes)
    lines = [f"replanned from step {progress.step:,} on: {listed}"]
    if progress.epoch < after["warmup_epochs"]:
        lines.append(f"the warmup lasts until epoch {after['warmup_epochs']}; the run is in epoch {progress.epoch}")
    elif after["warmup_epochs"]:
        lines.append(f"the warmup ({count(after['warmup_epochs'], 'epoch')}) has passed, and is not repeated")
    sizes = _image_size(before, progress.epoch), _image_size(after, progress.epoch)
    if sizes[0] != sizes[1]:
        lines.append(f"images of {sizes[1]} px in epoch {progress.epoch}, instead of {sizes[0]} px")
    return lines


def _image_size(values: Mapping[str, Any], epoch: int) -> int:
    until = values["resize_epochs"] or default_resize_epochs(values["epochs"])
    return image_size(epoch, values["start_img_size"], values["img_size"], until)


def as_event(changes: Sequence[SettingChange]) -> dict[str, list[Any]]:
    """Before and after by key, for metrics.jsonl."""
    return {change.key: [change.before, change.after] for change in changes}


class ScheduleChanged(UserError):
    """A config with another schedule than the checkpoint's; names both ways to continue."""

    def __init__(self, path: Path, changes: Sequence[SettingChange], step: int, before: float, after: float) -> None:
        listed = "\n".join(f"  - {change}" for change in changes)
        super().__init__(
            "schedule-changed",
            f"{path} belongs to another schedule\n{listed}",
            why=f"at step {step:,}, where the run is, its learning rate would go from {before:.4g} to {after:.4g}",
            hint="--replan continues this run on the new schedule from this step on; "
            f"{from_hint(path)} begins a new run with its weights",
        )


def nothing_left(path: Path, changes: Sequence[SettingChange], epoch: int, epochs: int, early: str | None) -> UserError:
    """The error for settings that no step is left for; `early` is why the run stopped early, if it did."""
    listed = "\n".join(f"  - {change}" for change in changes)
    more = f"epochs={epoch + 1} --replan, or more, extends the run"
    how = more if early is None else "early_stopping=null continues it"
    return UserError(
        "run-is-finished",
        f"{path} has {count(epoch, 'epoch')} behind it, and the run is over: {early or f'epochs is {epochs}'}\n"
        f"{listed}",
        why="no step is left that would use these settings",
        hint=f"{how}; {from_hint(path)} begins a new run with its weights",
    )


def from_hint(path: Path) -> str:
    """How to begin a new run from a checkpoint."""
    return f"`stoker train CONFIG --from {path} run_name=NEW`"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    """A value as JSON returns it: a config's tuple is a list in a file. A count (1) and a share (1.0) stay distinct."""
    return list(value) if isinstance(value, list | tuple) else (type(value) is float, value)
