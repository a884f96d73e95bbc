"""Resuming a run from a checkpoint, on as many ranks as there are now; and a model out of a checkpoint alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stoker.config import load_config
from stoker.config.reading import check_task, remember_config
from stoker.config.reference import write_scalar
from stoker.config.schema import ALIASES, Config, key_names
from stoker.console import Say
from stoker.errors import UserError
from stoker.machine.host import HostConfig, fit_to_machine, read_machine
from stoker.models.build import build_model
from stoker.train.checkpoint.folder import Checkpoints, FoundCheckpoint
from stoker.train.checkpoint.format import CheckpointCorrupt, read_checkpoint
from stoker.train.schedule import Horizon, Progress

if TYPE_CHECKING:
    from stoker.train.loop import Run

MOST_SHOWN = 8
LONGEST_VALUE = 60
EXAMPLE = "runs/NAME/checkpoints/last.ckpt, as `stoker train` writes it, or the run folder itself"
# Keys that say where and how fast, but not what: whatever their values, it is the same run.
_NOT_THE_RESULT = {
    "run_name", "runs_dir", "devices", "num_nodes", "strategy", "rank_timeout", "log_every", "checkpoint_every_steps",
    "checkpoint_every", "save_top_k", "wandb", "wandb_project", "wandb_name", "tensorboard", "csv", "loader",
    "num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "worker_start", "index_dir", "cache_dir",
    "cache_size", "lookahead", "val_batch_size", "numa_binding",
}  # fmt: skip
# Part of the saved schedule, which has its own message.
_SCHEDULE = {
    "epochs", "warmup_epochs", "warmup_start", "min_lr", "lr_scheduler", "lr_update", "lr_step_epochs",
    "lr_step_factor",
}  # fmt: skip


class CheckpointOther(UserError):
    """A whole checkpoint, but of another model or config; lists what differs."""

    def __init__(self, path: Path, differences: list[str]) -> None:
        super().__init__(
            "checkpoint-other",
            f"{path} was made by another model or config\n{_listed(differences)}",
            why="training would continue with weights or a schedule that do not belong to it",
            hint="use the config it was made with, another run_name, or --fresh to start over",
        )


def load_for_resume(checkpoints: Checkpoints, explicit: Path | None) -> FoundCheckpoint | None:
    """The checkpoint to resume from: the one that was named, or the newest whole one; None for a new run.

    A scheduler restarts a job with the same command line: a named checkpoint is where the run begins, and from the
    second start on the run resumes from its own.
    """
    if explicit is None:
        return checkpoints.latest()
    origin = _identity(explicit)
    with suppress(UserError):
        latest = checkpoints.latest()
        if latest is not None and latest.state["progress"].get("origin") == origin:
            note = f"this run already began from {explicit}, and resumes where it stopped; --fresh begins from it again"
            return latest._replace(notes=(*latest.notes, note))
    state = read_checkpoint(explicit)
    lacking = [part for part in ("model", "optimizer", "progress", "horizon", "config") if part not in state]
    if lacking:
        raise UserError(
            "checkpoint-not-of-a-run",
            f"{explicit} holds no {', '.join(lacking)}",
            why="resuming a run needs more than weights",
            hint=f"weights={explicit} starts a new run from its weights",
        )
    state["progress"]["origin"] = origin
    return FoundCheckpoint(state, explicit)


def resume(run: Run, found: FoundCheckpoint, say: Say) -> Run:
    """The run at the point where the checkpoint left it, on the learning rate schedule it began with.

    Loads the tensors into the run's model, optimizer and average. Raises CheckpointOther if they do not fit.
    """
    state = found.state
    _refuse_other(run, state, found.path)
    run.model.load_state_dict(state["model"])
    run.step.optimizer.load_state_dict(state["optimizer"])
    run.step.precision.scaler.load_state_dict(state["scaler"])
    if run.ema is not None:
        run.ema.load_state_dict(state["ema"])
    progress = Progress(**state["progress"])
    run.step.micro_batch = progress.micro_batch or run.step.micro_batch
    if run.ranks.is_first:  # the sums are those of all ranks
        run.train_metrics.restore(state["sums"])
    for line in _changed_keys(state["config"], run.config):
        say(f"changed since the checkpoint: {line}")
    saved, wanted = Horizon(**state["horizon"]), run.horizon
    if saved.steps_per_epoch != wanted.steps_per_epoch:
        # Another total batch, or other data: the same step number is another moment of the schedule.
        progress.step = round(progress.step / saved.steps_per_epoch * wanted.steps_per_epoch)
        say(
            f"an epoch now has {wanted.steps_per_epoch:,} steps and had {saved.steps_per_epoch:,}: "
            f"the run is at step {progress.step:,} in the new count"
        )
        saved = replace(saved, steps_per_epoch=wanted.steps_per_epoch)
        if run.ema is not None:
            run.ema.steps = progress.step
    if saved != wanted:
        say(
            f"keeping the schedule that the run began with ({saved.epochs} epochs, {saved.scheduler}, "
            f"{saved.warmup_epochs} of warmup); --fresh starts a new one"
        )
    return replace(run, progress=progress, horizon=saved, branched_from=state.get("branched_from"))


def differences(saved: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> list[str]:
    """What differs, one line each, in the order of the checkpoint; tensors are compared by shape and type."""
    ours, theirs = _leaves(wanted), _leaves(saved)
    lines = []
    for key, value in theirs.items():
        if key not in ours:
            lines.append(f"{key}: only in the checkpoint")
        elif not _same(value, ours[key]):
            lines.append(_differs(key, _shown(value), _shown(ours[key])))
    return lines + [f"{key}: only in this run" for key in ours if key not in theirs]


@dataclass(frozen=True)
class Restored:
    """A trained model, ready to classify images, and what is known about it."""

    path: Path
    model: nn.Module
    """On the CPU, in evaluation mode, float32."""
    config: HostConfig
    """As it was trained, with the overrides of this command, resolved for this machine."""
    classes: tuple[str, ...]
    """What its outputs stand for, in order; outputs without a class in training come last."""
    averaged: bool
    """Whether its weights are the moving average."""
    epoch: int
    step: int

    @property
    def size(self) -> int:
        """Side of the images it classifies, in pixels."""
        return self.config.val_img_size or self.config.img_size


def restore_model(
    path: Path, overrides: Sequence[str] = (), *, raw: bool = False, say: Say = lambda _text: None
) -> Restored:
    """The model of a checkpoint, or of a run folder's best one: its moving average if it has one, unless `raw`."""
    path = checkpoint_in(path, say)
    state = _read(path)
    config = _with_overrides(state["config"], overrides)
    check_task(config, "used here")
    outputs = config.num_classes or len(state["classes"])
    model = build_model(
        config.model,
        outputs,
        # Weights may belong to positions in the image, so the network is built for the size it was trained at.
        img_size=int(state["config"]["img_size"]),
        other_sizes=[size for size in (config.img_size, config.val_img_size) if size is not None],
        channels_last=config.channels_last,
    )
    averaged = state["ema"] is not None and not raw
    _load(model, state, path, config.model, averaged)
    here, notes = fit_to_machine(config, read_machine())
    for note in notes:
        say(f"note: {note}")
    remember_config(here)
    spare = (f"output {number}" for number in range(len(state["classes"]), outputs))
    return Restored(
        path=path,
        model=model.eval().requires_grad_(False),
        config=here,
        classes=(*state["classes"], *spare),
        averaged=averaged,
        epoch=int(state["progress"]["epoch"]),
        step=int(state["progress"]["step"]),
    )


def _identity(path: Path) -> str:
    """The same text for the same file, another once the file was rewritten."""
    try:
        status = path.stat()
    except OSError as error:
        others = sorted(other.name for other in path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
        raise UserError(
            "checkpoint-not-found",
            f"{path} cannot be read: {error.strerror or error}",
            hint=f"found there: {', '.join(others[:6])}" if others else "leave out --resume to use the run's own last",
        ) from None
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def _refuse_other(run: Run, state: dict[str, Any], path: Path) -> None:
    ours = {"model": run.model.state_dict(), "ema": run.ema is not None}
    differ = differences({"model": state["model"], "ema": state["ema"] is not None}, ours)
    for key in ("model", "optimizer", "num_classes"):
        if state["config"].get(key) != run.config.get(key):
            differ.insert(0, _differs(key, state["config"].get(key), run.config.get(key)))
    if (line := _other_classes(state.get("classes"), run.classes)) is not None:
        differ.insert(0, line)
    if differ:
        raise CheckpointOther(path, differ)


def _other_classes(saved: tuple[str, ...] | None, ours: tuple[str, ...]) -> str | None:
    """The first class that differs: as many classes in another order fit every tensor, and all are wrong."""
    if saved is None or tuple(saved) == ours:
        return None
    if len(saved) != len(ours):
        return _differs("classes", len(saved), len(ours))
    number = next(number for number, pair in enumerate(zip(saved, ours, strict=True)) if pair[0] != pair[1])
    return _differs(f"class {number}", saved[number], ours[number])


def _changed_keys(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """The keys whose change makes the result another one, one line each."""
    counted = [key for key in ours if key in saved and key not in _NOT_THE_RESULT | _SCHEDULE]
    return differences({key: saved[key] for key in counted}, {key: ours[key] for key in counted})


def _differs(what: str, saved: object, ours: object) -> str:
    return f"{what}: {saved} in the checkpoint, {ours} in this run"


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return "\n".join(f"  - {line}" for line in [*lines[:MOST_SHOWN], *more])


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
    # A tuple in a config is a list in a file; nan equals itself here.
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or repr(a) == repr(b)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = "×".join(map(str, value.shape)) or "a single value"
        return f"{shape} {str(value.dtype).removeprefix('torch.')}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def checkpoint_in(path: Path, say: Say) -> Path:
    """The path itself, or the best checkpoint of a run folder, else its last."""
    if not path.is_dir():
        return path
    checkpoints = Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    found = next((file for file in (*checkpoints.best(), checkpoints.last) if file.is_file()), None)
    if found is None:
        raise UserError("no-checkpoint", f"{path} is a folder without checkpoints", hint=EXAMPLE)
    say(f"checkpoint: {found}")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        state = read_checkpoint(path)
    except CheckpointCorrupt as error:
        # Its own hint is for a run that resumes.
        raise UserError("checkpoint-corrupt", error.seen, why="none of it was loaded", hint=EXAMPLE) from None
    lacking = [key for key in ("config", "model", "ema", "progress", "classes") if key not in state]
    if lacking:
        raise UserError(
            "checkpoint-incomplete",
            f"{path} holds no {', '.join(lacking)}",
            why="without that, the meaning of its outputs is unknown",
            hint="resume the run for one more step: its next checkpoint will have it",
        )
    return state


def _with_overrides(saved: dict[str, Any], overrides: Sequence[str]) -> Config:
    """The saved config with the overrides applied; keys that this version does not know are ignored."""
    given = {text.partition("=")[0].strip() for text in overrides}
    known = set(key_names()) - {ALIASES.get(key, key) for key in given}
    kept = [f"{key}={write_scalar(value)}" for key, value in saved.items() if key in known]
    return load_config(None, [*kept, *overrides]).config


def _load(model: nn.Module, state: dict[str, Any], path: Path, name: str, averaged: bool) -> None:
    differ = differences({"model": state["model"]}, {"model": model.state_dict()})
    if differ:
        raise UserError(
            "weights-do-not-fit",
            f"{path} does not hold the weights of {name}\n{_listed(differ)}",
            why="a partly loaded network still answers, but wrongly",
            hint=f"leave out model=, num_classes= and img_size=: it was trained as {state['config'].get('model')}",
        )
    model.load_state_dict(state["model"])
    if averaged:
        # After the raw weights: the average holds tensors that two layers share only once.
        model.load_state_dict(state["ema"]["tensors"], strict=False)
