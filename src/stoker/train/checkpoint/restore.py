"""Resuming a run from its checkpoint, and a model out of a checkpoint alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stoker.config import Config, load_config
from stoker.config.reading import remember_config
from stoker.config.reference import write_scalar
from stoker.config.schema import ALIASES, key_names
from stoker.console import say, say_notes
from stoker.errors import UserError
from stoker.machine.host import fit_to_machine, read_machine
from stoker.models.build import build_model
from stoker.train.checkpoint.folder import Checkpoints
from stoker.train.checkpoint.format import CheckpointCorrupt, read_checkpoint
from stoker.train.schedule import Horizon

if TYPE_CHECKING:
    from stoker.train.loop import Run


# Whether a checkpoint belongs to this model and config, and in words what differs.

MOST_SHOWN = 8
LONGEST_VALUE = 60


class CheckpointOther(UserError):
    """A whole checkpoint that was made by another model or config: names what differs."""

    def __init__(self, path: Path, differences: list[str]) -> None:
        assert differences, "a checkpoint without differences is ours"
        shown = differences[:MOST_SHOWN]
        if len(differences) > MOST_SHOWN:
            shown.append(f"and {len(differences) - MOST_SHOWN} more")
        super().__init__(
            "checkpoint-other",
            f"{path} was made by another model or config\n" + "\n".join(f"  - {line}" for line in shown),
            why="training would go on with weights or a schedule that do not belong to it",
            hint="the config that it was made with, another run_name, or --fresh to start anew",
        )
        self.path = path
        self.differences = tuple(differences)


def differences(saved: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> list[str]:
    """What differs, one line each, in the order of the checkpoint; tensors are compared by shape and type."""
    ours, theirs = _leaves(wanted), _leaves(saved)
    lines = []
    for key, value in theirs.items():
        if key not in ours:
            lines.append(f"{key}: only in the checkpoint")
        elif not _same(value, ours[key]):
            lines.append(f"{key}: {_shown(value)} in the checkpoint, {_shown(ours[key])} in this run")
    return lines + [f"{key}: only in this run" for key in ours if key not in theirs]


def _leaves(tree: Mapping[Any, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = value
    return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _shown(a) == _shown(b)
    # A tuple in a config is a list in a file; nan is as it was.
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or repr(a) == repr(b)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = "×".join(map(str, value.shape)) or "a single value"
        return f"{shape} {str(value.dtype).removeprefix('torch.')}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


# Going on with a run: from its last checkpoint, on as many ranks as there are now.

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


# A model out of a checkpoint alone: config, weights and the names of the classes are inside.

Say = Callable[[str], None]
EXAMPLE = "runs/NAME/checkpoints/last.ckpt, as `stoker train` writes it, or the run folder itself"


@dataclass(frozen=True)
class Restored:
    """A trained model, ready to judge images, and what is known about it."""

    path: Path
    model: nn.Module
    """On the CPU, in evaluation mode, float32."""
    config: Config
    """As it was trained, with the overrides of now."""
    classes: tuple[str, ...]
    """What its outputs stand for, in their order; outputs that training had no class for come last."""
    averaged: bool
    """Whether its weights are the moving average."""
    epoch: int
    step: int

    @property
    def size(self) -> int:
        """Side of the images that it judges, in pixels."""
        return self.config.val_img_size or self.config.img_size


def restore_model(
    path: Path, overrides: Sequence[str] = (), *, raw: bool = False, say: Say = lambda _text: None
) -> Restored:
    """The model of a checkpoint, or of a run folder's best one; its moving average where it has one, unless `raw`."""
    path = _checkpoint_in(path, say)
    state = _read(path)
    config = _with_overrides(state["config"], overrides)
    if config.task != "classify":
        raise UserError("task-not-built", f"{path} is of task: {config.task}; only classify can be used here")
    trained_size = int(state["config"]["img_size"])
    outputs = config.num_classes or len(state["classes"])
    model = build_model(
        config.model,
        outputs,
        # Weights may belong to positions in the image, so the network is made for the size that it was trained at.
        img_size=trained_size,
        other_sizes=[size for size in (config.img_size, config.val_img_size) if size is not None],
        channels_last=config.channels_last,
    )
    averaged = state["ema"] is not None and not raw
    _load(model, state, path, config.model, averaged)
    spare = (f"output {number}" for number in range(len(state["classes"]), outputs))
    return Restored(
        path=path,
        model=model.eval().requires_grad_(False),
        config=config,
        classes=(*state["classes"], *spare),
        averaged=averaged,
        epoch=int(state["progress"]["epoch"]),
        step=int(state["progress"]["step"]),
    )


def restore_for_command(
    checkpoint: Path, overrides: Sequence[str], *, raw: bool, data_root: str | None = None
) -> tuple[Restored, int]:
    """The model, and how many workers may decode for it."""
    given = [] if data_root is None else [f"data_root={write_scalar(data_root)}"]
    restored = restore_model(checkpoint, [*given, *overrides], raw=raw, say=say)
    machine = read_machine()
    config, notes = fit_to_machine(restored.config, machine)
    say_notes(notes)
    remember_config(config)
    workers = config.num_workers if isinstance(config.num_workers, int) else machine.cpus
    return replace(restored, config=config), workers


def _checkpoint_in(path: Path, say: Say) -> Path:
    """The path itself, or the best checkpoint of a run folder, else its last."""
    if not path.is_dir():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoints = Checkpoints(folder)
    found = next((file for file in (*checkpoints.best(), checkpoints.last) if file.is_file()), None)
    if found is None:
        raise UserError("no-checkpoint", f"{path} is a folder without checkpoints", hint=EXAMPLE)
    say(f"checkpoint: {found}")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        state = read_checkpoint(path)
    except CheckpointCorrupt as error:
        # Its own hint is for a run that goes on: here nobody should remove the file.
        raise UserError("checkpoint-corrupt", error.seen, why="nothing of it was used", hint=EXAMPLE) from None
    lacking = [key for key in ("config", "model", "ema", "progress", "classes") if key not in state]
    if lacking:
        raise UserError(
            "checkpoint-incomplete",
            f"{path} holds no {', '.join(lacking)}",
            why="without them nobody can tell what its outputs mean",
            hint="resume the run for one more step: its next checkpoint will have them",
        )
    return state


def _with_overrides(saved: dict[str, Any], overrides: Sequence[str]) -> Config:
    """The saved config with the overrides in place of what they name; keys of other versions are left out."""
    given = {text.partition("=")[0].strip() for text in overrides}
    replaced = {ALIASES.get(key, key) for key in given}
    known = set(key_names()) - replaced
    kept = [f"{key}={write_scalar(value)}" for key, value in saved.items() if key in known]
    return load_config(None, [*kept, *overrides]).config


def _load(model: nn.Module, state: dict[str, Any], path: Path, name: str, averaged: bool) -> None:
    differ = differences({"model": state["model"]}, {"model": model.state_dict()})
    if differ:
        shown = [*differ[:MOST_SHOWN], *([f"and {len(differ) - MOST_SHOWN} more"] if len(differ) > MOST_SHOWN else [])]
        raise UserError(
            "weights-do-not-fit",
            f"{path} does not hold the weights of {name}\n" + "\n".join(f"  - {line}" for line in shown),
            why="a network that is only partly loaded answers, and is wrong",
            hint=f"leave out model=, num_classes= and img_size=: it was trained as {state['config'].get('model')}",
        )
    model.load_state_dict(state["model"])
    if averaged:
        # After the raw ones: the average holds tensors that two parts share only once.
        model.load_state_dict(state["ema"]["tensors"], strict=False)
