"""A few real steps of the config's own model, and a checkpoint that is written, read and resumed: what was seen.

All of it is the code that trains: `build_run`, `TrainStep`, `Saver`, `resume`. Only the batch is small, so that it
takes seconds on any machine; `--deep` takes the config's own.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stoker.errors import StokerError, UserError
from stoker.machine.host import HostConfig
from stoker.machine.memory import read_memory
from stoker.plan.guard import MOST_ACTIVATIONS_PER_INPUT
from stoker.plan.tracing import build_without_memory
from stoker.tasks.classify import TrainingData, build_run, open_data, traceable_step
from stoker.train.checkpoint.folder import Checkpoints
from stoker.train.checkpoint.restore import load_for_resume, resume
from stoker.train.checkpoint.saver import Saver
from stoker.train.loop import Run, pending
from stoker.train.optimization import set_lr
from stoker.train.ranks import Ranks
from stoker.train.schedule import learning_rate
from stoker.train.step import StepResult
from stoker.verify.checks import size_text
from stoker.verify.config import peak_lr

if TYPE_CHECKING:
    from stoker.verify.checks import Subject

# Batch norm needs a few samples; ResNet-50 at 224 px takes about a second for these on two cores.
SAMPLES = 8
UNKNOWN_CLASSES = 1000
# One device shows the same; starting processes and compiling would take longer than the steps.
ALONE: dict[str, Any] = {
    "devices": 1, "num_nodes": 1, "sync_batchnorm": False, "compile_model": False, "gradient_accumulation": 1,
    "loader": "thread", "steps_per_epoch": None, "cache_dir": None, "cache_size": None,
}  # fmt: skip


@dataclass(frozen=True)
class GroupFacts:
    """One parameter group of the optimizer."""

    weight_decay: float
    tensors: int
    parameters: int
    matrices: int
    """Tensors with more than one dimension; the others are biases and scales."""


@dataclass(frozen=True)
class Trial:
    """What was seen. Names are those of parameters."""

    parameters: int
    outputs: int
    device: str
    samples: int
    """Images of each step."""
    random_because: str | None
    """Why the images were random ones; None for real ones."""
    first_loss: float
    skipped: bool
    """Whether the update was skipped because a gradient was NaN or infinite."""
    without_gradient: tuple[str, ...]
    unchanged: tuple[str, ...]
    """Had a gradient, and are the same after the update."""
    groups: tuple[GroupFacts, ...]
    in_no_group: tuple[str, ...]
    in_two_groups: tuple[str, ...]
    next_loss: float
    """Of the second step."""
    resumed_loss: float
    """Of the same step after the checkpoint was read by a new run."""
    differing_weights: int
    """Tensors of the model that differ after that step."""
    checkpoint_bytes: int
    save_s: float
    step_s: float


def try_run(subject: Subject) -> Trial:
    """Takes two steps, with a save between them, and repeats the second one from the checkpoint."""
    config, device = _small(subject.config), _device()
    _refuse_too_large(config, device)
    if device.type == "cpu":
        torch.set_num_threads(subject.machine.cpus)
    with tempfile.TemporaryDirectory(prefix="stoker-verify-") as name:
        folder = Path(name)
        data, config, random_because = _data(subject, config, folder)
        checkpoints = Checkpoints(folder / "checkpoints")
        run = _built(config, data, device)
        saver = Saver(run, checkpoints)
        try:
            before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
            began = time.perf_counter()
            first = _step(run, saver)
            first_loss, skipped = float(first.loss), bool(first.skipped)
            step_s = time.perf_counter() - began
            named = [(name, value) for name, value in run.model.named_parameters() if value.requires_grad]
            without = tuple(name for name, value in named if value.grad is None)
            unchanged = tuple(
                name
                for name, value in named
                if value.grad is not None and bool(value.grad.any()) and torch.equal(value.detach(), before[name])
            )
            groups = _groups(run)
            counts = Counter(id(value) for group in run.step.optimizer.param_groups for value in group["params"])
            missing = tuple(name for name, value in named if not counts[id(value)])
            twice = tuple(name for name, value in named if counts[id(value)] > 1)
            del before, named
            began = time.perf_counter()
            saved = saver.save({**run.train_metrics.total()}, now=True)
            save_s = time.perf_counter() - began
            if not saved:
                raise UserError("trial-not-saved", f"the checkpoint could not be written to {folder}")
            next_loss = float(_step(run, saver).loss)
            after = {name: value.detach().cpu() for name, value in run.model.state_dict().items()}
            parameters, outputs = sum(value.numel() for value in run.model.parameters()), _outputs(run, config)
        finally:
            saver.close()
            run.close()
        del run, saver
        resumed_loss, differing = _resumed(config, data, device, checkpoints, after)
        size = checkpoints.last.stat().st_size
    return Trial(
        parameters=parameters, outputs=outputs, device=device.type, samples=config.batch_size,
        random_because=random_because, first_loss=first_loss, skipped=skipped, without_gradient=without,
        unchanged=unchanged, groups=groups, in_no_group=missing, in_two_groups=twice, next_loss=next_loss,
        resumed_loss=resumed_loss, differing_weights=differing, checkpoint_bytes=size, save_s=save_s, step_s=step_s,
    )  # fmt: skip


@dataclass(frozen=True)
class WholeStep:
    """A step with the config's own batch."""

    loss: float
    micro_batch: int
    """Samples that the device computed at a time."""
    step_s: float
    """Of the second step: the first one compiles and allocates."""


def try_whole_batch(subject: Subject) -> WholeStep:
    """Two steps with the config's own batch and compiler settings, on one device."""
    device = _device()
    keep = {"compile_model": subject.config.compile_model, "batch_size": subject.config.batch_size}
    config = _small(subject.config).model_copy(update=keep)
    _refuse_too_large(config, device)
    if device.type == "cpu":
        torch.set_num_threads(subject.machine.cpus)
    with tempfile.TemporaryDirectory(prefix="stoker-verify-") as name:
        data, config, _ = _data(subject, config, Path(name))
        run = _built(config, data, device)
        saver = Saver(run, None)
        try:
            _step(run, saver)
            began = time.perf_counter()
            loss = float(_step(run, saver).loss)  # waits for the device
            return WholeStep(loss, run.step.micro_batch, time.perf_counter() - began)
        finally:
            run.close()


def _small(config: HostConfig) -> HostConfig:
    repeats = config.repeated_augmentation
    batch = min(config.batch_size, -(-SAMPLES // repeats) * repeats)
    # The peak of the whole run, not that of so small a batch.
    keys = {"batch_size": batch, "val_batch_size": batch, "lr": peak_lr(config), "scale_lr": False}
    return config.model_copy(update=ALONE | keys | {"num_workers": min(2, config.num_workers)})


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _refuse_too_large(config: HostConfig, device: torch.device) -> None:
    """Raises if the trial would not fit into the host's memory, where the kernel would kill it."""
    state = read_memory()
    if device.type != "cpu" or state is None:
        return
    step = traceable_step(config, config.num_classes or UNKNOWN_CLASSES)
    model = build_without_memory(step.build_model)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    # Weights, gradients, optimizer state and average; then the checkpoint's copy, and copies to compare with.
    copies = 2 + (1 if config.optimizer == "sgd" else 2) + (config.ema_decay is not None)
    needed = weights * (2 * copies + 1)
    needed += config.batch_size * 3 * config.img_size**2 * 4 * MOST_ACTIVATIONS_PER_INPUT
    if needed > state.available_bytes:
        raise UserError(
            "trial-too-large",
            f"a step of {config.batch_size} images may need {size_text(needed)} of memory, and "
            f"{size_text(state.available_bytes)} are free",
            hint="check it on the machine that will train",
        )


def _data(subject: Subject, config: HostConfig, folder: Path) -> tuple[TrainingData, HostConfig, str | None]:
    """The config's data, or random images if it cannot be opened; the config for it, and why."""
    try:
        data = subject.data
    except StokerError as error:
        classes = config.num_classes or config.subset_classes or UNKNOWN_CLASSES
        _write_random_images(folder / "images", config)
        keys = {
            "data_root": str(folder / "images"), "index_dir": str(folder / "index"), "num_classes": classes,
            "subset_classes": None, "subset_train_per_class": None, "subset_val_per_class": None, "decoder": "pillow",
        }  # fmt: skip
        config = config.model_copy(update=keys)
        return replace(open_data(config, lambda _text: None), val=None), config, error.seen
    return replace(data, val=None), config, None


def _write_random_images(root: Path, config: HostConfig) -> None:
    from PIL import Image

    generator = np.random.default_rng(config.seed)
    for number in range(max(2, 3 * config.batch_size)):
        path = root / "train" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (config.img_size, config.img_size, 3), np.uint8)
        Image.fromarray(pixels).save(path)


def _built(config: HostConfig, data: TrainingData, device: torch.device) -> Run:
    try:
        return build_run(config, data, Ranks(), device)
    except StokerError:
        raise
    except Exception as error:
        raise _does_not_run(config, error) from error


def _step(run: Run, saver: Saver) -> StepResult:
    """One step, as the loop takes it."""
    progress = run.progress
    run.step.model.train()
    batch = next(run.train_loader(progress.epoch).epoch(progress.epoch, progress.position))
    set_lr(run.step.optimizer, learning_rate(progress.step, run.horizon, run.peak_lr))
    try:
        part = pending(run, batch, progress.epoch, progress.step)
        result = run.step([part], progress.step, before_update=saver.wait_for_copy)
    except StokerError:
        raise
    except Exception as error:
        raise _does_not_run(run.config, error) from error
    run.train_metrics.add_step(result)
    if run.ema is not None:
        run.ema.update()
    progress.position, progress.step = batch.next_position, progress.step + 1
    progress.micro_batch = run.step.micro_batch
    return result


def _resumed(
    config: HostConfig, data: TrainingData, device: torch.device, checkpoints: Checkpoints, after: dict[str, Any]
) -> tuple[float, int]:
    """The loss of the second step in a new run that resumed from the checkpoint, and how many tensors of its model
    differ from those of the run that was never interrupted."""
    # Other initial weights: what the checkpoint does not restore, shows.
    other = config.model_copy(update={"weights": None})
    run = _built(other, data, device)
    saver = Saver(run, None)
    try:
        with torch.no_grad():
            for value in run.model.parameters():
                value.zero_()
        found = load_for_resume(checkpoints, None)
        assert found is not None
        run = resume(run, found, lambda _text: None)
        saver = Saver(run, None)
        loss = float(_step(run, saver).loss)
        ours = run.model.state_dict()
        differing = sum(not torch.equal(value.detach().cpu(), after[name]) for name, value in ours.items())
        return loss, differing
    finally:
        run.close()


def _groups(run: Run) -> tuple[GroupFacts, ...]:
    return tuple(
        GroupFacts(
            weight_decay=float(group["weight_decay"]),
            tensors=len(group["params"]),
            parameters=sum(value.numel() for value in group["params"]),
            matrices=sum(value.ndim > 1 for value in group["params"]),
        )
        for group in run.step.optimizer.param_groups
    )


def _outputs(run: Run, config: HostConfig) -> int:
    return config.num_classes or len(run.classes)


def _does_not_run(config: HostConfig | dict[str, Any], error: Exception) -> UserError:
    values = config if isinstance(config, dict) else dict(config)
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return UserError(
        "model-does-not-run",
        f"{values['model']} at {values['img_size']} px: {type(error).__name__}: {first}",
        hint="another img_size= or model=; `python -c 'import timm; print(timm.list_models())'` lists them",
    )
