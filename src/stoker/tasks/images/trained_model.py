"""A trained network that classifies images, from any file: a checkpoint or run folder of ours, or another program's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from stoker.config import Config, load_config
from stoker.config.reading import check_task, remember_config
from stoker.config.reference import write_scalar
from stoker.config.schema import ALIASES
from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.profile.host import HostConfig, fit_to_machine, read_machine
from stoker.tasks.images.layouts.imagenet import synsets
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.images.models import build_model
from stoker.tasks.light_timm import timm
from stoker.train.checkpoint.format import is_ours
from stoker.train.checkpoint.restore import open_state
from stoker.train.checkpoint.weights import WeightsFile, choose_network, classifier_names, load_weights, open_weights


@dataclass(frozen=True)
class TrainedImageModel:
    """A trained model, ready to classify images, and what is known about it."""

    path: Path
    model: nn.Module
    """On the CPU, in evaluation mode, float32."""
    config: HostConfig
    """As it was trained, with the overrides of this command, resolved for this machine."""
    classes: tuple[str, ...]
    """The classes of its outputs, in order; outputs without a class in training come last."""
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
) -> TrainedImageModel:
    """The model of a checkpoint, or of a run folder's best one: its moving average if it has one, unless `raw`."""
    trained = open_state(path, overrides, raw=raw, say=say)
    state, config = trained.state, trained.config
    check_task(config, "used here")
    outputs = config.num_classes or len(state["classes"])
    model = build_model(
        # Weights may belong to positions in the image, so the network is built for the size it was trained at.
        config.model, outputs, img_size=int(state["config"]["img_size"]),
        other_sizes=(config.img_size, config.val_img_size), channels_last=config.channels_last,
    )  # fmt: skip
    spare = (f"output {number}" for number in range(len(state["classes"]), outputs))
    return TrainedImageModel(
        path=trained.path, model=trained.load_into(model), config=config, classes=(*state["classes"], *spare),
        averaged=trained.averaged, epoch=int(state["progress"]["epoch"]), step=int(state["progress"]["step"]),
    )  # fmt: skip


def open_model(
    path: Path, overrides: Sequence[str] = (), *, raw: bool = False, say: Say = lambda _text: None
) -> TrainedImageModel:
    """A trained model, ready to classify, from any file; the average if the file has one, unless `raw`.

    Files of other programs know neither class names nor image settings: those come from the overrides.
    """
    if not path.is_file() or is_ours(path):
        return restore_model(path, overrides, raw=raw, say=say)
    file = open_weights(path)
    config = _config_for(file, overrides)
    check_task(config, "used here")
    model = build_model(
        config.model, _outputs(file, config), img_size=config.img_size, other_sizes=(config.val_img_size,),
        channels_last=config.channels_last,
    )  # fmt: skip
    report = load_weights(model, file, "raw" if raw else None)
    say(report.describe())
    if report.skipped:
        raise UserError(
            "weights-other-classes",
            f"{path} has another number of classes than num_classes={config.num_classes}",
            why="its classifier does not fit, and a new one would answer at random",
            hint="leave out num_classes=",
        )
    here, notes = fit_to_machine(config, read_machine())
    for note in notes:
        say(f"note: {note}")
    remember_config(here)
    outputs = int(getattr(model, "num_classes", 0))
    classes = file.classes or _classes_of(here, outputs, say) or tuple(f"class {number}" for number in range(outputs))
    return TrainedImageModel(
        path=path, model=model.eval().requires_grad_(False), config=here, classes=classes, averaged=report.averaged,
        epoch=file.epoch or 0, step=file.step or 0,
    )  # fmt: skip


def open_for_classes(path: Path, config: HostConfig, classes: tuple[str, ...], say: Say) -> TrainedImageModel:
    """The network in a checkpoint or run folder of ours, or in a file with weights of the config's model, whose outputs
    are these classes, or ImageNet's if these are some of them."""
    try:
        return restore_model(path, say=say)
    except UserError as error:
        if path.is_dir():
            raise
        not_ours = error
    for names in (classes, synsets()) if set(classes) < set(synsets()) else (classes,):
        model = build_model(
            config.model, len(names), img_size=config.img_size, other_sizes=(config.val_img_size,),
            channels_last=config.channels_last,
        )  # fmt: skip
        report = load_weights(model, path)
        # A classifier of another size is skipped: then these are not the names of its outputs.
        if not report.skipped:
            model = model.eval().requires_grad_(False)
            return TrainedImageModel(path, model, config, tuple(names), report.averaged, epoch=0, step=0)
    raise UserError(
        "weights-other-classes",
        f"{path} has a classifier for another number of classes than the data's {len(classes)}",
        why="without the names of its outputs it cannot tell which class an image is of",
        hint="--weights with a checkpoint of ours, which has the names",
    ) from not_ours


def _config_for(file: WeightsFile, overrides: Sequence[str]) -> Config:
    given = {ALIASES.get(key, key) for key in (text.partition("=")[0].strip() for text in overrides)}
    known = dict(file.settings)
    if "model" not in given:
        if file.model is None or not timm.is_model(file.model.partition(".")[0]):
            named = f" (it says {file.model}, which is not one of timm's)" if file.model else ""
            raise UserError(
                "model-unknown",
                f"{file.path} ({file.origin}) does not say which network it holds{named}",
                why="tensors alone do not describe a network",
                hint="add model=NAME, as in timm: model=resnet50",
            )
        known["model"] = file.model
    kept = [f"{key}={write_scalar(value)}" for key, value in known.items() if key not in given]
    return load_config(None, [*kept, *overrides]).config


def _outputs(file: WeightsFile, config: Config) -> int:
    """The number of classes: the config's, else that of the classifier in the file."""
    if config.num_classes is not None:
        return config.num_classes
    probe = build_model(config.model, 2, img_size=config.img_size)
    chosen, _ = choose_network(file, probe.state_dict())
    heads = classifier_names(probe)
    rows = {
        file.tensor(value).shape[0]
        for name, value in chosen.values().items()
        if heads and name.startswith(heads) and name.endswith(".weight") and name in probe.state_dict()
    }
    if len(rows) != 1:
        raise UserError(
            "weights-do-not-fit",
            f"{file.path} ({file.origin}) has no classifier of {config.model}",
            why="the number of its classes is unknown",
            hint="set model to the architecture that the file was saved from, or num_classes",
        )
    return rows.pop()


def _classes_of(config: Config, outputs: int, say: Say) -> tuple[str, ...] | None:
    """The classes of `data_root`, if there are as many as outputs."""
    if config.data_root is None:
        return None
    index_dir = Path(config.index_dir) if config.index_dir else None
    found: list[tuple[str, ...]] = []
    for split in ("val", "train", ""):
        if split or not found:
            with suppress(UserError):  # the command says what is wrong with the data
                found.append(open_index(config.data_root, split, index_dir=index_dir).classes)
    names = next((names for names in found if len(names) == outputs), None)
    if names is not None:
        say(f"the file names no classes: its outputs are taken as {names[0]} to {names[-1]}, sorted")
    return names
