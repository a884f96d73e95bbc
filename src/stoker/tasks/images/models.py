"""Networks that classify images, and their losses: any of timm's as a config says, and trained ones from any file: a
checkpoint or run folder of ours, or another program's."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config import Config, load_config
from stoker.config.reading import check_task, remember_config
from stoker.config.reference import write_scalar
from stoker.config.schema import ALIASES
from stoker.core.console import Say
from stoker.core.errors import UserError, did_you_mean
from stoker.profile.host import HostConfig, fit_to_machine, read_machine
from stoker.tasks.images.augment.pipeline import soft_targets
from stoker.tasks.images.layouts.imagenet import synsets
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.light_timm import timm
from stoker.train.checkpoint.format import is_ours
from stoker.train.checkpoint.restore import open_state
from stoker.train.checkpoint.weights import WeightsFile, choose_network, classifier_names, load_weights, open_weights

_UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")
_KEY_OF_ARGUMENT = {"drop_path_rate": "drop_path", "drop_rate": "dropout"}


def build_model(
    name: str,
    num_classes: int,
    *,
    img_size: int | None = None,
    other_sizes: Sequence[int | None] = (),
    drop_path: float = 0.0,
    dropout: float = 0.0,
    gradient_checkpointing: bool = False,
    channels_last: bool = False,
    seed: int | None = None,
) -> nn.Module:
    """The network with random weights, on the CPU.

    `other_sizes` are the image sizes it will get besides `img_size` (validation, progressive resizing); None counts for
    nothing. With a seed the weights depend only on it, and torch's generator is not changed.
    """
    _check_name(name)
    variable = any(size not in (None, img_size) for size in other_sizes)
    arguments = {
        "num_classes": num_classes,
        # Always passed, even 0: some architectures have their own default (Swin drops 10 % of its paths).
        "drop_path_rate": drop_path,
        "drop_rate": dropout,
        "img_size": img_size,
        "dynamic_img_size": True if variable else None,
    }
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        model = _create(name, arguments, seed)
    if drop_path > 0 and not any("DropPath" in type(part).__name__ for part in model.modules()):
        raise _not_supported(name, "drop_path", drop_path)  # accepted and ignored by timm: res2net, hrnet, convmixer
    if gradient_checkpointing:
        try:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        except (AttributeError, AssertionError, NotImplementedError, TypeError):
            raise _not_supported(name, "gradient_checkpointing", True) from None
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    _check_sizes(model, name, [size for size in (img_size, *other_sizes) if size is not None])
    return model


def facts_about(name: str) -> dict[str, Any]:
    """What timm knows about a network without building it, as `pretrained_cfg` of the built one says it."""
    _check_name(name)
    known = timm.get_pretrained_cfg(name)
    return {} if known is None else known.to_dict()


def _check_name(name: str) -> None:
    if ":" in name:
        # timm would fetch the architecture from a hub, or from a folder that names it.
        raise UserError(
            "model-unknown",
            f"model: {name} is an address, not the name of a timm architecture",
            why="nothing is downloaded",
            hint="model=<architecture> weights=<local file>",
        )
    bare = name.partition(".")[0]  # resnet50.a1_in1k: the tag names weights, which are not fetched
    if timm.is_model(bare):
        return
    known = timm.list_models()
    question = did_you_mean(bare, known)
    if question is None and (near := difflib.get_close_matches(bare.lower(), known, n=5, cutoff=0.5)):
        question = f"similar names: {', '.join(near)}"
    raise UserError(
        "model-unknown",
        f"model: {name} is not one of timm's {len(known)} architectures",
        hint=question or "python -c \"import timm; print(timm.list_models('*resnet*'))\"",
    )


def _create(name: str, arguments: dict[str, Any], seed: int | None) -> nn.Module:
    """Builds the network with every argument, but without defaults that this architecture does not take."""
    wanted = dict(arguments)
    while True:
        if seed is not None:
            torch.manual_seed(seed)
        try:
            model: nn.Module = timm.create_model(name, pretrained=False, **wanted)
            return model
        except Exception as error:
            lacking = _UNKNOWN_ARGUMENT.search(str(error))
            argument = lacking.group(1) if lacking and isinstance(error, TypeError) else None
            if argument not in wanted:
                raise UserError(
                    "model-not-built",
                    f"model: {name} could not be built: {str(error) or type(error).__name__}",
                    hint="check model, img_size and num_classes",
                ) from error
            if argument in _KEY_OF_ARGUMENT and wanted[argument]:
                raise _not_supported(name, _KEY_OF_ARGUMENT[argument], wanted[argument]) from None
            # Sizes are tried out by _check_sizes.
            del wanted[argument]


def _check_sizes(model: nn.Module, name: str, sizes: list[int]) -> None:
    """Passes one image of each size through a network that is built for a fixed size; other networks take any."""
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    if not config.get("fixed_input_size"):
        return
    training = model.training
    model.eval()  # no batch statistics from this, and no random numbers
    try:
        for size in sorted(set(sizes)):
            try:
                with torch.no_grad():
                    model(torch.zeros(1, 3, size, size))
            except Exception as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise UserError(
                    "model-refuses-size",
                    f"model: {name} does not take images of {size} px: {reason}",
                    why="its weights are tied to positions in the image",
                    hint=f"img_size={config['input_size'][-1]}, with no other val_img_size or start_img_size",
                ) from error
    finally:
        model.train(training)


def _not_supported(name: str, key: str, value: object) -> UserError:
    shown = str(value).lower() if isinstance(value, bool) else f"{value}"
    off = "false" if isinstance(value, bool) else "0"
    return UserError(
        "model-lacks-feature",
        f"{key}: {shown} is not possible with model: {name}",
        why="this architecture does not support it; the setting would have no effect",
        hint=f"{key}={off}",
    )


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy. `smoothing` applies to labels only: soft targets are already smoothed."""
    # Float32 even under autocast: a sum over a thousand classes needs the digits.
    if targets.ndim == 1:
        return functional.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
    return functional.cross_entropy(logits.float(), targets.float())


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, threshold: float | None = None
) -> Tensor:
    """Binary cross-entropy over each class separately; with a threshold, targets above it count as 1, others as 0."""
    rows = soft_targets(targets, logits.shape[1], smoothing) if targets.ndim == 1 else targets.float()
    if threshold is not None:
        rows = present_classes(rows, threshold)
    return functional.binary_cross_entropy_with_logits(logits.float(), rows)


def present_classes(rows: Tensor, threshold: float) -> Tensor:
    """Soft targets as the binary loss with a threshold takes them: 1 above it, else 0."""
    # After smoothing, which it cancels; both classes of a mixed sample can then count as fully present.
    return rows.gt(threshold).float()


def build_loss(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """The config's training loss. Validation uses `cross_entropy`, which is comparable between recipes."""
    if config.loss == "bce":
        return partial(binary_cross_entropy, smoothing=config.label_smoothing, threshold=config.bce_target_threshold)
    return partial(cross_entropy, smoothing=config.label_smoothing)


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
    model = _built(config, _outputs(file, config))
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
        model = _built(config, len(names))
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


def _built(config: Config, outputs: int) -> nn.Module:
    return build_model(
        config.model, outputs, img_size=config.img_size, other_sizes=(config.val_img_size,),
        channels_last=config.channels_last,
    )  # fmt: skip


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
