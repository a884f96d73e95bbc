"""A new run from somebody's weights (`--from`): its own schedule and optimizer, and a record of where it came from.

The record is kept in the run's checkpoints and in metrics.jsonl. A run that has a checkpoint of its own resumes from
that: the file is where the run began, once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.core.console import Say, some
from stoker.core.errors import UsageError, UserError
from stoker.train.checkpoint.folder import Checkpoints, FoundCheckpoint
from stoker.train.checkpoint.format import peek
from stoker.train.checkpoint.restore import weight_differences
from stoker.train.checkpoint.weights import (
    WeightsFile,
    Which,
    file_hash,
    load_weights,
    open_source,
)
from stoker.train.ranks import from_first

if TYPE_CHECKING:
    from stoker.train.loop import Run


@dataclass(frozen=True)
class Start:
    """What `--from` and the options beside it ask for."""

    path: Path
    which: Which | None = None
    """None: the average if there is one; the raw weights if the optimizer is kept, whose momenta belong to them."""
    keep_optimizer: bool | None = False
    """None: if it is the same."""
    command_path: Path | None = None
    """As it was typed, if `path` is where `--fresh` moved it."""

    @property
    def given(self) -> str:
        """The same text for the same command, wherever the file goes meanwhile."""
        return str((self.command_path or self.path).resolve())

    def moved(self, run: Path, aside: Path) -> Start:
        """The same, after `--fresh` moved the files of the run's folder aside."""
        if self.path.resolve() in (run.resolve(), (run / "checkpoints").resolve()):
            return replace(self, path=aside, command_path=self.path)
        if self.path.resolve().parent == (run / "checkpoints").resolve():
            return replace(self, path=aside / "checkpoints" / self.path.name, command_path=self.path)
        return self


@dataclass(frozen=True)
class BranchedFrom:
    """Where a run began, as its checkpoints and metrics.jsonl hold it."""

    given: str
    """The path on the command line, absolute."""
    file: str
    """Name of the file; if a run folder was given, of its best checkpoint."""
    maker: str
    epoch: int | None
    step: int | None
    bytes: int
    xxh3_128: str
    weights: Which
    optimizer_kept: bool
    new: tuple[str, ...]
    """Tensors that begin with random values: a classifier of another size."""


@dataclass(frozen=True)
class _FirstState:
    """What the first rank read, for all ranks."""

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    record: BranchedFrom
    lines: tuple[str, ...]


def start_from(path: Path | None, *, ema: bool | None, keep_optimizer: bool | None) -> Start | None:
    if path is not None:
        return Start(path, None if ema is None else "ema" if ema else "raw", keep_optimizer)
    if ema is not None or keep_optimizer:
        option = "--keep-optimizer" if keep_optimizer else "--ema" if ema else "--raw"
        raise UsageError("usage", f"{option} says how to use the checkpoint of --from, which is not given")
    return None


def check_start(start: Start, folder: Path, *, resume: Path | None, weights: str | None, fresh: bool) -> None:
    """Refuses what contradicts `--from`, before anything is opened or written; `folder` has the run's checkpoints."""
    if resume is not None:
        raise UsageError(
            "usage",
            f"--from {start.path} begins a new run, --resume {resume} continues one",
            hint="leave out one of them",
        )
    refuse_two_sources(start, weights)
    last = Checkpoints(folder).last
    if not fresh and last.is_file():
        try:
            origin = peek(last, "branched_from")["branched_from"]
        except UserError:
            return  # the run itself says what is wrong with it, and looks for an older one
        _refuse_other_run(folder, origin, start)
    else:
        check_exists(start)


def refuse_two_sources(start: Start, weights: str | None) -> None:
    if weights is not None:
        raise UsageError(
            "usage",
            f"--from {start.path} and weights: {weights} both say where the weights come from",
            hint="weights=null, or leave out --from",
        )


def check_exists(start: Start) -> None:
    """Refuses a file that is not there, before anything takes time."""
    if not start.path.exists():
        others = sorted(other.name for other in start.path.parent.glob("*.ckpt"))[:6]
        raise UserError(
            "checkpoint-not-found",
            f"--from {start.path}: no such file or folder",
            hint=f"found there: {', '.join(others)}" if others else "--from runs/NAME, or a checkpoint file",
        )


def own_checkpoint(checkpoints: Checkpoints, start: Start) -> FoundCheckpoint | None:
    """The newest checkpoint of the run that this command began earlier; None if it has yet to begin."""
    found = checkpoints.latest()
    if found is None:
        return None
    _refuse_other_run(checkpoints.folder, found.state.get("branched_from"), start)
    return found.begun_from(start.path)


def begin(run: Run, start: Start, say: Say) -> Run:
    """The run at its first step, with the weights that `start` names; the file is read by the first rank only.

    Loads the tensors into the run's model, average and, if it is kept, optimizer. Raises UserError if they do not fit.
    """
    begun = from_first(lambda: _read(run, start), run.ranks)
    run.model.load_state_dict(begun.model)
    if begun.optimizer is not None:
        run.step.optimizer.load_state_dict(begun.optimizer)
    if run.ema is not None:
        tensors = {name: value for name, value in run.model.state_dict().items() if name in run.ema.tensors}
        run.ema.load_state_dict({"updates": 0, "tensors": tensors})
    for line in begun.lines:
        say(line)
    return replace(run, record=replace(run.record, branched_from=asdict(begun.record)))


def _read(run: Run, start: Start) -> _FirstState:
    lines: list[str] = []
    file, state = open_source(start.path, lines.append)
    differ = _other_optimizer(run, file, state)
    if start.keep_optimizer and differ:
        raise UserError(
            "optimizer-differs",
            f"--keep-optimizer: the optimizer of {file.path} is not that of this run\n"
            + "\n".join(f"  - {line}" for line in differ[:8]),
            why="momenta belong to one parameter of one network, and to one kind of optimizer",
            hint="leave out --keep-optimizer: the new run then begins with a new optimizer",
        )
    kept = start.keep_optimizer is not False and not differ
    report = load_weights(run.model, file, start.which or ("raw" if kept else None))
    lines.append(report.describe())
    if kept:
        lines.append("the optimizer's state is that of the checkpoint; its settings are those of this config")
    elif start.keep_optimizer is None:
        lines.append(f"the optimizer begins anew: {some(differ)}")
    optimizer = None
    if kept and state is not None:
        # The saved momenta under this run's own settings: weight_decay, betas and the rest.
        own = run.step.optimizer.state_dict()
        optimizer = {"state": state["optimizer"]["state"], "param_groups": own["param_groups"]}
    record = BranchedFrom(
        given=start.given, file=file.path.name, maker=file.maker, epoch=file.epoch, step=file.step,
        bytes=file.path.stat().st_size, xxh3_128=file_hash(file.path), weights="ema" if report.averaged else "raw",
        optimizer_kept=kept, new=report.skipped,
    )  # fmt: skip
    return _FirstState(
        model={name: value.cpu() for name, value in run.model.state_dict().items()},
        optimizer=optimizer,
        record=record,
        lines=tuple(lines),
    )


def _other_optimizer(run: Run, file: WeightsFile, state: dict[str, Any] | None) -> list[str]:
    if state is None:
        return [f"the file is {file.maker}, which does not say which parameter a momentum belongs to"]
    if "optimizer" not in state:
        return ["the checkpoint holds none"]
    saved, ours = state["config"].get("optimizer"), run.record.config.get("optimizer")
    lines = [] if saved == ours else [f"optimizer: {saved} in the checkpoint, {ours} in this run"]
    lines += weight_differences(state["model"], run.model.state_dict())
    counts = [
        [len(group["params"]) for group in groups]
        for groups in (state["optimizer"]["param_groups"], run.step.optimizer.state_dict()["param_groups"])
    ]
    if counts[0] != counts[1] and not lines:
        lines.append(f"parameters in its groups: {counts[0]} in the checkpoint, {counts[1]} in this run")
    return lines


def _refuse_other_run(folder: Path, origin: dict[str, Any] | None, start: Start) -> None:
    if origin is not None and origin.get("given") == start.given:
        return
    root = folder.parent
    began = "without --from" if origin is None else f"from {origin.get('given')}"
    raise UserError(
        "run-began-elsewhere",
        f"{root} holds a run that began {began}, not from {start.path}",
        why="a new run would replace its checkpoints",
        hint=f"run_name={root.name}-2 for the new run; --fresh to use this name, which keeps the old run beside it",
    )
