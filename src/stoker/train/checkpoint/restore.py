"""Resuming a run from a checkpoint, on as many ranks as there are now; and opening one to use its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from stoker.config import load_config
from stoker.config.reading import remember_config
from stoker.config.reference import write_scalar
from stoker.config.schema import ALIASES, Config, key_names
from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.profile.host import HostConfig, fit_to_machine, read_machine
from stoker.train.checkpoint.changes import (
    ScheduleChanged,
    SettingChange,
    applied_line,
    as_event,
    by_the_user,
    changes_since,
    from_hint,
    nothing_left,
    of_kind,
    replanned_lines,
    used_values,
)
from stoker.train.checkpoint.folder import EXAMPLE, Checkpoints, FoundCheckpoint, checkpoint_in
from stoker.train.checkpoint.format import CheckpointCorrupt, is_ours, peek, read_checkpoint
from stoker.train.optimizers import load_state
from stoker.train.schedule import Progress

if TYPE_CHECKING:
    from stoker.train.loop import Run

MOST_SHOWN = 8

# How much data a training run reads says nothing about how the model is used afterwards.
_OF_TRAINING = {"limit_train_batches", "limit_val_batches", "fast_dev_run"}


class CheckpointOther(UserError):
    """A whole checkpoint, but of another model or config; lists what differs."""

    def __init__(self, path: Path, differences: list[str]) -> None:
        super().__init__(
            "checkpoint-other",
            f"{path} was made by another model or config\n{_listed(differences)}",
            why="training would continue with weights or a schedule that do not belong to it",
            hint=f"{from_hint(path)} begins a new run with its weights; --fresh starts over, and keeps the old run",
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
            return latest.begun_from(explicit)
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


class Resumed(NamedTuple):
    """A run at the point where it continues, or begins."""

    run: Run
    events: tuple[tuple[str, dict[str, Any]], ...]
    """What metrics.jsonl should say about differences from the checkpoint: name and details."""


def resume(run: Run, found: FoundCheckpoint, say: Say, *, replan: bool = False) -> Resumed:
    """The run at the point where the checkpoint left it, with the settings of its config from that step on.

    Loads the tensors into the run's model, optimizer and average. Refuses another model, optimizer or data
    (CheckpointOther) and, unless `replan`, another schedule (ScheduleChanged), before anything is loaded.
    """
    state, path = found.state, found.path
    changes = changes_since(state, {**run.record.config, "decoder": run.record.decoder or run.record.config["decoder"]})
    _refuse_other(run, state, path, of_kind("other", changes))
    progress, schedule = _progress_in(run, state), of_kind("schedule", changes)
    # The rates of the last step and of the next: a learning rate is a function of the step, its horizon and its peak.
    rates = float(state["optimizer"]["param_groups"][0]["lr"]), run.schedule.lr_at(progress.step)
    if progress.finished:
        if asked := by_the_user(changes):
            early = None if run.schedule.stopping is None else run.schedule.stopping.reason(progress)
            raise nothing_left(path, asked, progress.epoch, run.schedule.horizon.epochs, early)
        # No step is left that another batch size would count: those that were taken do.
        progress.step = state["progress"]["step"]
        return Resumed(replace(run, progress=progress), ())
    if schedule and not replan:
        raise ScheduleChanged(path, schedule, progress.step, *rates)

    run.model.load_state_dict(state["model"])
    load_state(run.step.optimizer, state["optimizer"])
    if state["scaler"]:  # empty unless it was saved in float16; a new scaler begins with its own scale
        run.step.precision.scaler.load_state_dict(state["scaler"])
    if run.ema is not None:
        if state["ema"] is None:
            run.ema.restart(progress.step)
        else:
            run.ema.load_state_dict(state["ema"])
            if progress.step != state["progress"]["step"]:
                run.ema.steps = progress.step
    if run.ranks.is_first:  # the sums are those of all ranks
        run.scores.train_metrics.restore(state["sums"])
    _keep_what_memory_forced(run, progress, used_values(state)["batch_size"], say)
    events = _say_changes(run, state, progress, changes, rates, say)
    record = replace(run.record, branched_from=state.get("branched_from"))
    return Resumed(replace(run, progress=progress, record=record), events)


def _progress_in(run: Run, state: Mapping[str, Any]) -> Progress:
    """Where the checkpoint is in the run's own count of steps."""
    progress, saved, wanted = Progress(**state["progress"]), state["horizon"]["steps_per_epoch"], run.schedule.horizon
    if saved != wanted.steps_per_epoch:
        # Another total batch, or other data: the same step number is another moment of the schedule.
        progress.step = round(progress.step / saved * wanted.steps_per_epoch)
        if progress.position // run.schedule.total_batch >= wanted.steps_per_epoch:
            progress.step = (progress.epoch + 1) * wanted.steps_per_epoch  # this epoch is already longer than one
    progress.finished = run.schedule.is_over(progress)
    return progress


def _keep_what_memory_forced(run: Run, progress: Progress, batch_size: int, say: Say) -> None:
    """Micro-batches smaller than the batch were forced by the device's memory; others follow the batch size."""
    forced = progress.micro_batch
    if forced is None or forced >= batch_size:
        return
    run.step.micro_batch = min(forced, run.step.micro_batch)
    say(f"each batch is computed in pieces of {run.step.micro_batch} samples, as before: more did not fit into memory")


def _say_changes(
    run: Run, state: Mapping[str, Any], progress: Progress, changes: Sequence[SettingChange],
    rates: tuple[float, float], say: Say,
) -> tuple[tuple[str, dict[str, Any]], ...]:  # fmt: skip
    """Reports what differs from here on, and returns it as events."""
    events: list[tuple[str, dict[str, Any]]] = []
    lr_line = f"learning rate {rates[0]:.4g} at the last step, {rates[1]:.4g} at the next"
    if applied := of_kind("applied", changes):
        for change in applied:
            say(applied_line(change, progress.step))
        events.append(("settings_changed", {"changed": as_event(applied)}))
    had, has = state["horizon"]["steps_per_epoch"], run.schedule.horizon.steps_per_epoch
    if had != has:
        say(
            f"an epoch now has {has:,} steps and had {had:,}: the run is at step {progress.step:,} in the new count; "
            f"{lr_line}"
        )
    if schedule := of_kind("schedule", changes):
        for line in replanned_lines(schedule, used_values(state), run.record.config, progress):
            say(line)
        say(f"{lr_line}, {run.schedule.lr_at(run.schedule.horizon.total_steps):.4g} at the end")
        details = {"changed": as_event(schedule), "lr_before": rates[0], "lr_after": rates[1]}
        events.append(("replanned", details))
    return tuple(events)


def weight_differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What differs between two tables of weights in names, shapes and types, one line each."""
    lines = []
    for name, value in saved.items():
        if name not in ours:
            lines.append(f"model.{name}: only in the checkpoint")
        elif (theirs := _shown(value)) != (wanted := _shown(ours[name])):
            lines.append(_differs(f"model.{name}", theirs, wanted))
    return lines + [f"model.{name}: only in this run" for name in ours if name not in saved]


@dataclass(frozen=True)
class TrainedState:
    """The state in a checkpoint, and the config that its model is used with."""

    path: Path
    state: dict[str, Any]
    config: HostConfig
    """As it was trained, with the overrides of this command, resolved for this machine."""
    averaged: bool
    """Whether its moving average is used."""

    def load_into(self, model: nn.Module) -> nn.Module:
        """The model with these weights, ready to be used; raises UserError if they are another network's."""
        differ = weight_differences(self.state["model"], model.state_dict())
        if differ:
            raise UserError(
                "weights-do-not-fit",
                f"{self.path} does not hold the weights of {self.config.model}\n{_listed(differ)}",
                why="a partly loaded network still answers, but wrongly",
                hint="leave out model=, num_classes= and img_size=: "
                f"it was trained as {self.state['config'].get('model')}",
            )
        model.load_state_dict(self.state["model"])
        if self.averaged:
            # After the raw weights: the average holds tensors that two layers share only once.
            model.load_state_dict(self.state["ema"]["tensors"], strict=False)
        return model.eval().requires_grad_(False)


def open_state(
    path: Path, overrides: Sequence[str] = (), *, raw: bool = False, say: Say = lambda _text: None
) -> TrainedState:
    """What a checkpoint holds, or a run folder's best one; its moving average if it has one, unless `raw`."""
    path = checkpoint_in(path, say)
    state = _read(path)
    here, notes = fit_to_machine(_with_overrides(state["config"], overrides), read_machine())
    for note in notes:
        say(f"note: {note}")
    remember_config(here)
    return TrainedState(path, state, here, state["ema"] is not None and not raw)


def task_of(path: Path) -> str:
    """The task that a checkpoint, or a run folder's best one, was trained for; files of other programs classify."""
    path = checkpoint_in(path, lambda _text: None)
    if not is_ours(path):
        return "classify"
    return str((peek(path, "config")["config"] or {}).get("task", "classify"))


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


def _refuse_other(run: Run, state: dict[str, Any], path: Path, changes: Sequence[SettingChange]) -> None:
    differ = [str(change) for change in changes]
    if (line := _other_classes(state.get("classes"), run.record.classes)) is not None:
        differ.insert(0, line)
    differ += weight_differences(state["model"], run.model.state_dict())
    if differ:
        raise CheckpointOther(path, differ)


def _other_classes(saved: tuple[str, ...] | None, ours: tuple[str, ...]) -> str | None:
    """The first class that differs: the same number of classes in another order fits every tensor, but is all wrong."""
    if saved is None or tuple(saved) == ours:
        return None
    if len(saved) != len(ours):
        return _differs("classes", len(saved), len(ours))
    number = next(number for number, pair in enumerate(zip(saved, ours, strict=True)) if pair[0] != pair[1])
    return _differs(f"class {number}", saved[number], ours[number])


def _differs(what: str, saved: object, ours: object) -> str:
    return f"{what}: {saved} in the checkpoint, {ours} in this run"


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return "\n".join(f"  - {line}" for line in [*lines[:MOST_SHOWN], *more])


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    shape = "×".join(map(str, value.shape)) or "a single value"
    return f"{shape} {str(value.dtype).removeprefix('torch.')}"


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
    known = set(key_names()) - {ALIASES.get(key, key) for key in given} - _OF_TRAINING
    kept = [f"{key}={write_scalar(value)}" for key, value in saved.items() if key in known]
    return load_config(None, [*kept, *overrides]).config
