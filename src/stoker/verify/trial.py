"""A few real steps of the config's own model, and a checkpoint that is written, read and resumed: what was seen.

All of it is the code that trains: `build_run`, `TrainStep`, `Saver`, `resume`. Only the batch is small, so that it
takes seconds on any machine; `--deep` takes the config's own.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.core.errors import StokerError, UserError
from stoker.core.units import size_text
from stoker.plan.tracing import build_without_memory
from stoker.profile.host import HostConfig
from stoker.profile.memory import read_memory
from stoker.tasks.base import task_for
from stoker.tasks.building import RunContext
from stoker.tasks.checks import Subject
from stoker.train.checkpoint.folder import Checkpoints
from stoker.train.checkpoint.restore import load_for_resume, resume
from stoker.train.checkpoint.saver import Saver
from stoker.train.loop import Run, pending
from stoker.train.optimizers import set_lr
from stoker.train.ranks import Ranks
from stoker.train.step import StepResult
from stoker.trial.trial_server import ALONE

# Starting processes and compiling would take longer than the steps.
PLAIN: dict[str, Any] = {
    **ALONE, "compile_model": False, "gradient_accumulation": 1, "loader": "thread", "steps_per_epoch": None,
    "limit_train_batches": None, "limit_val_batches": 0, "early_stopping": None, "fast_dev_run": False,
    "cache_dir": None, "cache_size": None,
}  # fmt: skip


@dataclass(frozen=True)
class GroupFacts:
    weight_decay: float
    tensors: int
    parameters: int
    matrices: int
    """Tensors with more than one dimension; the others are biases and scales."""


@dataclass(frozen=True)
class Trial:
    """The observations. Names are those of parameters."""

    parameters: int
    outputs: int
    device: str
    samples: int
    """Samples of each step."""
    random_because: str | None
    """Why the samples were random ones; None for real ones."""
    first_loss: float
    skipped: bool
    """Whether the update was skipped because a gradient was NaN or infinite."""
    without_gradient: tuple[str, ...]
    unchanged: tuple[str, ...]
    """Parameters that had a gradient, and are the same after the update."""
    groups: tuple[GroupFacts, ...]
    in_no_group: tuple[str, ...]
    in_two_groups: tuple[str, ...]
    next_loss: float
    """Loss of the second step."""
    resumed_loss: float
    """Loss of the same step after a new run has read the checkpoint."""
    differing_weights: int
    """Tensors of the model that differ after that step."""
    checkpoint_bytes: int
    save_s: float


def try_run(subject: Subject) -> Trial:
    """Takes two steps, with a save between them, and repeats the second one from the checkpoint."""
    config, device = _small(subject), _ready_device(subject)
    _refuse_too_large(config, device)
    with tempfile.TemporaryDirectory(prefix="stoker-verify-") as name:
        data, config, random_because = _data(subject, config, Path(name))
        checkpoints = Checkpoints(Path(name) / "checkpoints")
        with _running(config, data, device) as run:
            saver = Saver(run, checkpoints)
            try:
                facts = _first_step(config, run, saver) | _grouping(run)
                began = time.perf_counter()
                if not saver.save(run.scores.train_metrics.total(), now=True):
                    raise UserError("trial-not-saved", f"the checkpoint could not be written to {name}")
                facts["save_s"] = time.perf_counter() - began
                facts["next_loss"] = float(_step(config, run, saver).loss)
            finally:
                saver.close()
            parameters = sum(value.numel() for value in run.model.parameters())
            outputs = config.num_classes or len(run.record.classes)
            after = {name: value.detach().cpu() for name, value in run.model.state_dict().items()}
        del run, saver  # frees their memory before the second run takes as much
        resumed_loss, differing = _resumed(config, data, device, checkpoints, after)
        return Trial(
            parameters=parameters, outputs=outputs, device=device.type, samples=config.batch_size,
            random_because=random_because, resumed_loss=resumed_loss, differing_weights=differing,
            checkpoint_bytes=checkpoints.last.stat().st_size, **facts,
        )  # fmt: skip


@dataclass(frozen=True)
class WholeStep:
    loss: float
    micro_batch: int
    """Samples that the device computed at a time."""
    step_s: float
    """Duration of the second step: the first one compiles and allocates."""


def try_whole_batch(subject: Subject) -> WholeStep:
    """Two steps with the config's own batch and compiler settings, on one device."""
    device = _ready_device(subject)
    keep = {"compile_model": subject.config.compile_model, "batch_size": subject.config.batch_size}
    config = _small(subject).model_copy(update=keep)
    _refuse_too_large(config, device)
    with tempfile.TemporaryDirectory(prefix="stoker-verify-") as name:
        data, config, _ = _data(subject, config, Path(name))
        with _running(config, data, device) as run:
            saver = Saver(run, None)
            _step(config, run, saver)
            began = time.perf_counter()
            loss = float(_step(config, run, saver).loss)  # waits for the device
            return WholeStep(loss, run.step.micro_batch, time.perf_counter() - began)


def _small(subject: Subject) -> HostConfig:
    config = subject.config
    enough, repeats = task_for(config).step_input(config).trial_samples, config.repeated_augmentation
    batch = min(config.batch_size, -(-enough // repeats) * repeats)
    # The peak of the whole run, not that of so small a batch.
    keys = {"batch_size": batch, "val_batch_size": batch, "lr": subject.peak_lr, "scale_lr": False}
    return config.model_copy(update=PLAIN | keys | {"num_workers": min(2, config.num_workers)})


def _ready_device(subject: Subject) -> torch.device:
    if torch.cuda.is_available():  # GPU only
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(subject.machine.cpus)
    return torch.device("cpu")


def _refuse_too_large(config: HostConfig, device: torch.device) -> None:
    """Raises if the trial would not fit into the host's memory, where the kernel would kill it."""
    state = read_memory()
    if device.type != "cpu" or state is None:
        return
    task = task_for(config)
    taken = task.step_input(config)
    model = build_without_memory(task.traceable_step(config).build_model)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    # Weights, gradients, optimizer state and average; then the checkpoint's copy, and copies to compare with.
    copies = 2 + (1 if config.optimizer == "sgd" else 2) + (config.ema_decay is not None)
    needed = weights * (2 * copies + 1)
    needed += config.batch_size * 4 * taken.values * taken.activations
    if needed > state.available_bytes:
        raise UserError(
            "trial-too-large",
            f"a step of {config.batch_size} {task.unit} may need {size_text(needed)} of memory, and "
            f"{size_text(state.available_bytes)} are free",
            hint="check it on the machine that will train",
        )


def _data(subject: Subject, config: HostConfig, folder: Path) -> tuple[Any, HostConfig, str | None]:
    """The config's data, or random samples if it cannot be opened and the task can make some; the config for it, and
    why."""
    try:
        return subject.data, config, None
    except StokerError as error:
        made = task_for(config).random_data(config, folder)
        if made is None:
            raise
        return *made, error.seen


@contextmanager
def _running(config: HostConfig, data: Any, device: torch.device) -> Iterator[Run]:
    """The run that the config describes, closed at the end of the block."""
    with _naming_the_model(config):
        run = build_run(config, data, RunContext(Ranks(), device))
    try:
        yield run
    finally:
        run.input.close()


def build_run(config: HostConfig, *arguments: Any) -> Run:
    return task_for(config).build_run(config, *arguments)


def _first_step(config: HostConfig, run: Run, saver: Saver) -> dict[str, Any]:
    """The facts of a first step: its loss, and what it did to the parameters."""
    before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    result = _step(config, run, saver)
    named = _trained(run)
    return {
        "first_loss": float(result.loss),
        "skipped": bool(result.skipped),
        "without_gradient": tuple(name for name, value in named if value.grad is None),
        "unchanged": tuple(
            name
            for name, value in named
            if value.grad is not None and bool(value.grad.any()) and torch.equal(value.detach(), before[name])
        ),
    }


def _grouping(run: Run) -> dict[str, Any]:
    """The optimizer's groups, and parameters that are not in exactly one."""
    groups = run.step.optimizer.param_groups
    times = Counter(id(value) for group in groups for value in group["params"])
    return {
        "groups": tuple(
            GroupFacts(
                weight_decay=float(group["weight_decay"]),
                tensors=len(group["params"]),
                parameters=sum(value.numel() for value in group["params"]),
                matrices=sum(value.ndim > 1 for value in group["params"]),
            )
            for group in groups
        ),
        "in_no_group": tuple(name for name, value in _trained(run) if times[id(value)] == 0),
        "in_two_groups": tuple(name for name, value in _trained(run) if times[id(value)] > 1),
    }


def _trained(run: Run) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, value) for name, value in run.model.named_parameters() if value.requires_grad]


def _step(config: HostConfig, run: Run, saver: Saver) -> StepResult:
    """One step, as the loop takes it."""
    progress = run.progress
    run.step.model.train()
    batch = next(run.input.train_loader(progress.epoch).epoch(progress.epoch, progress.position))
    set_lr(run.step.optimizer, run.schedule.lr_at(progress.step))
    with _naming_the_model(config):
        part = pending(run, batch, progress.epoch, progress.step)
        result = run.step([part], progress.step, before_update=saver.wait_for_copy)
    run.scores.train_metrics.add_step(result)
    if run.ema is not None:
        run.ema.update()
    progress.position, progress.step = batch.next_position, progress.step + 1
    progress.micro_batch = run.step.micro_batch
    return result


def _resumed(
    config: HostConfig, data: Any, device: torch.device, checkpoints: Checkpoints, after: dict[str, Any]
) -> tuple[float, int]:
    """The loss of the second step in a new run that resumed from the checkpoint, and how many tensors of its model
    differ from those of the run that was never interrupted."""
    with _running(config, data, device) as run:
        with torch.no_grad():
            for value in run.model.parameters():
                value.zero_()  # values that the checkpoint does not restore will differ
        found = load_for_resume(checkpoints, None)
        assert found is not None
        run = resume(run, found, lambda _text: None).run
        loss = float(_step(config, run, Saver(run, None)).loss)
        ours = run.model.state_dict()
        differing = sum(not torch.equal(value.detach().cpu(), after[name]) for name, value in ours.items())
        return loss, differing


@contextmanager
def _naming_the_model(config: HostConfig) -> Iterator[None]:
    """Turns any error that is not ours into one that says which model, and on what."""
    try:
        yield
    except StokerError:
        raise
    except Exception as error:
        taken = task_for(config).step_input(config)
        first = next(iter(str(error).splitlines()), type(error).__name__)
        seen = f"{config.model} at {taken.size}: {type(error).__name__}: {first}"
        raise UserError("model-does-not-run", seen, hint=taken.fix) from error
