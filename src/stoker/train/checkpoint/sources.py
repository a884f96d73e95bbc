"""Weights from any file: a checkpoint or a run folder of ours, Lightning's, timm's, torchvision's, safetensors.

`open_source` gives the weights, for a network that the caller has; `open_model` a network that can classify, for
`eval`, `predict` and `export`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.config import Config, load_config
from stoker.config.reading import check_task, remember_config
from stoker.config.reference import write_scalar
from stoker.config.schema import ALIASES
from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.profile.host import fit_to_machine, read_machine
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.images.models import build_model
from stoker.train.checkpoint.format import is_ours, read_checkpoint
from stoker.train.checkpoint.restore import Restored, checkpoint_in, restore_model
from stoker.train.checkpoint.weights import choose_network, classifier_names, load_weights
from stoker.train.checkpoint.weights_file import Table, WeightsFile, open_weights
from stoker.train.light_timm import timm


def open_source(path: Path, say: Say = lambda _text: None) -> tuple[WeightsFile, dict[str, Any] | None]:
    """The weights of a file, or of a run folder's best checkpoint; and the whole state of a checkpoint of ours."""
    path = checkpoint_in(path, say)
    if not is_ours(path):
        return open_weights(path), None
    state = read_checkpoint(path)
    lacking = [part for part in ("model", "config", "progress") if part not in state]
    if lacking:
        raise UserError("checkpoint-incomplete", f"{path} holds no {', '.join(lacking)}", hint="another checkpoint")
    tables = [Table("model", state["model"], averaged=False)]
    if state.get("ema") is not None:
        # Over the raw ones: the average holds tensors that two layers share only once.
        tables.insert(0, Table("ema", {**state["model"], **state["ema"]["tensors"]}, averaged=True))
    file = WeightsFile(
        path=path, file_format="stoker", maker="a checkpoint of stoker", tables=tuple(tables),
        epoch=int(state["progress"]["epoch"]), step=int(state["progress"]["step"]), model=state["config"].get("model"),
        classes=tuple(state["classes"]) if state.get("classes") else None,
    )  # fmt: skip
    return file, state


def open_model(
    path: Path, overrides: Sequence[str] = (), *, raw: bool = False, say: Say = lambda _text: None
) -> Restored:
    """A trained model, ready to classify, from any file; the average if the file has one, unless `raw`.

    Files of other programs know neither class names nor image settings: those come from the overrides.
    """
    if not path.is_file() or is_ours(path):
        return restore_model(path, overrides, raw=raw, say=say)
    file = open_weights(path)
    config = _config_for(file, overrides)
    check_task(config, "used here")
    model = build_model(
        config.model, _outputs(file, config), img_size=config.img_size,
        other_sizes=[] if config.val_img_size is None else [config.val_img_size], channels_last=config.channels_last,
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
    return Restored(
        path=path, model=model.eval().requires_grad_(False), config=here, classes=classes, averaged=report.averaged,
        epoch=file.epoch or 0, step=file.step or 0,
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
    found = []
    for split in ("val", "train"):
        with suppress(UserError):  # the command says what is wrong with the data
            found.append(open_index(config.data_root, split, index_dir=index_dir).classes)
    if not found:
        with suppress(UserError):
            found.append(open_index(config.data_root, "", index_dir=index_dir).classes)
    names = next((names for names in found if len(names) == outputs), None)
    if names is not None:
        say(f"the file names no classes: its outputs are taken as {names[0]} to {names[-1]}, sorted")
    return None if names is None else tuple(names)
