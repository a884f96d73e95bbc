"""A model out of a checkpoint alone: config, weights and the names of the classes are inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from stoker.config import Config, load_config
from stoker.config.loading import remember_config
from stoker.config.machine import fit_to_machine
from stoker.config.schema import ALIASES, key_names
from stoker.config.writing import write_scalar
from stoker.errors import UserError
from stoker.models.build import build_model
from stoker.output.text import say, say_notes
from stoker.probe.host import read_machine
from stoker.training.checkpoint_file import CheckpointCorrupt, read_checkpoint
from stoker.training.checkpoint_match import MOST_SHOWN, differences
from stoker.training.checkpoints import Checkpoints

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
