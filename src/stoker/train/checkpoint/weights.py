"""Loads weights from a local file into a model, without running any code from the file.

Files of other programs wrap the network: `model.`, `module.`, `_orig_mod.` before each name, an average beside the
weights, a loss or metrics with their own tensors. The prefix under which most of the model's names are found decides
which tensors are the network's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.train.checkpoint.folder import checkpoint_in
from stoker.train.checkpoint.format import is_ours, read_checkpoint
from stoker.train.checkpoint.weights_file import (
    FileFormat,
    Table,
    WeightsFile,
    is_tensor,
    listed,
    open_weights,
    says_averaged,
)

Which = Literal["ema", "raw"]
# A wrapper's own entries, which belong to no network: torch's AveragedModel counts its updates.
_COUNTERS = ("n_averaged",)
# A table counts as the network's if it has at least this share of the names in the best one.
_ENOUGH = 0.5


@dataclass(frozen=True)
class WeightsReport:
    """What was loaded, and from where."""

    path: Path
    file_format: FileFormat
    part: str | None
    """The entry of the file with the weights; None if the file has nothing else."""
    averaged: bool
    """Whether they are a moving average (EMA)."""
    both: bool
    """Whether the file has the average and the weights themselves, so that there was a choice."""
    loaded: int
    """Number of tensors."""
    skipped: tuple[str, ...]
    """The classifier's tensors, if the file has another number of classes: they keep their random values."""
    others: tuple[str, ...]
    """Entries of the table that do not belong to the network: a loss, metrics, a second network."""
    origin: str
    """Who wrote the file and when, in a few words."""

    def describe(self) -> str:
        """One line for people."""
        kind = "the average (EMA)" if self.averaged else "the weights"
        beside = (", not their average" if not self.averaged else ", not the raw weights") if self.both else ""
        parts = [f"weights from {self.path} ({self.origin}): {kind}{beside}"]
        if self.skipped:
            parts.append(f"new, because the number of classes differs: {', '.join(self.skipped)}")
        if self.others:
            parts.append(f"not the network's, left out: {listed(list(self.others))}")
        return "; ".join(parts)


@dataclass(frozen=True)
class NetworkTable:
    """The network inside a table: its values are those whose names begin with the prefix."""

    table: Table
    prefix: str
    found: int
    """How many of the network's names it has."""

    @property
    def averaged(self) -> bool:
        return self.table.averaged or says_averaged(self.prefix)

    def values(self) -> dict[str, Any]:
        return {
            name.removeprefix(self.prefix): value
            for name, value in self.table.values.items()
            if isinstance(name, str) and name.startswith(self.prefix) and name not in _COUNTERS
        }

    def beside(self) -> list[str]:
        """The other entries of the table."""
        return [str(name) for name in self.table.values if not (isinstance(name, str) and name.startswith(self.prefix))]


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


def load_weights(model: nn.Module, source: WeightsFile | Path | str, which: Which | None = None) -> WeightsReport:
    """Loads all weights or none: the average if the file has one, unless `which` says otherwise.

    Only a classifier of another size is skipped, and reported. Tensors that do not belong to the network are left out.
    """
    file = source if isinstance(source, WeightsFile) else open_weights(Path(source))
    own = model.state_dict()
    chosen, both = choose_network(file, own, which)
    values = chosen.values()
    tops = {name.partition(".")[0] for name in own}
    # Extra names that share their first part with the network mean another architecture (layer4.2 for a network that
    # ends at layer4.1); any others belong to the program that trained it.
    apart = [name for name in values if name not in own and name.partition(".")[0] not in tops]
    found = {name: file.tensor(value) for name, value in values.items() if name in own}
    unexpected = [name for name in values if name not in own and name not in apart]
    skipped = _other_classifier(model, own, found)
    _check_fit(file.path, own, found, skipped, unexpected)
    taken = {name: value for name, value in found.items() if name not in skipped}
    model.load_state_dict(taken, strict=False)
    others = [*(f"{chosen.prefix}{name}" for name in apart), *_apart(chosen, own)]
    return WeightsReport(
        path=file.path, file_format=file.file_format, part=chosen.table.part, averaged=chosen.averaged, both=both,
        loaded=len(taken), skipped=tuple(sorted(skipped)), others=tuple(others), origin=file.origin,
    )  # fmt: skip


def choose_network(file: WeightsFile, own: Mapping[str, Any], which: Which | None = None) -> tuple[NetworkTable, bool]:
    """The network's part of the file, and whether there is both an average and the weights themselves."""
    places = [place for table in file.tables for place in _places(table, own)]
    most = max(place.found for place in places)
    fitting = [place for place in places if place.found >= _ENOUGH * most]
    averaged = [place for place in fitting if place.averaged]
    raw = [place for place in fitting if not place.averaged]
    wanted = averaged if which == "ema" or (which is None and averaged) else raw
    if not wanted:
        missing, there = ("moving average (EMA)", "raw") if which == "ema" else ("raw weights", "ema")
        raise UserError(
            "weights-of-the-other-kind",
            f"{file.path} ({file.origin}) holds no {missing}",
            hint=f"--{there}, or leave out --{which}",
        )
    best = max(wanted, key=lambda place: place.found)  # ties go to the first: tables are in order of preference
    rivals = [place for place in wanted if place.found == best.found and place.table is best.table]
    # If only a few names agree by chance, the error about missing ones says more.
    if len(rivals) > 1 and best.found >= _ENOUGH * len(own):
        raise UserError(
            "weights-ambiguous",
            f"{file.path} holds this network {len(rivals)} times: {', '.join(place.prefix + '*' for place in rivals)}",
            why="they may be different networks, such as a student and its teacher",
            hint="save the tensors of one: safetensors.torch.save_file(state_dict, new)",
        )
    return best, bool(averaged and raw)


def _places(table: Table, own: Mapping[str, Any]) -> list[NetworkTable]:
    """The prefixes under which the network's names are found, and how many; if there are none, the prefix of all."""
    counts: Counter[str] = Counter()
    names = [name for name in table.values if isinstance(name, str) and name not in _COUNTERS]
    for name in names:
        start = 0
        while True:  # each place where a name of the network could begin
            if name[start:] in own:
                counts[name[:start]] += 1
            start = name.find(".", start) + 1
            if start == 0:
                break
    if not counts:
        return [NetworkTable(table, _common_prefix(names), 0)]
    return [NetworkTable(table, prefix, found) for prefix, found in counts.items()]


def _common_prefix(names: list[str]) -> str:
    prefix = ""
    while names:
        part = names[0][len(prefix) :].partition(".")[0]
        longer = f"{prefix}{part}."
        if not all(name.startswith(longer) for name in names):
            break
        prefix = longer
    return prefix


def _apart(chosen: NetworkTable, own: Mapping[str, Any]) -> list[str]:
    """Entries beside the network that hold tensors: not its average, nor counters."""
    copies = {place.prefix for place in _places(chosen.table, own) if place.found >= _ENOUGH * chosen.found}
    return [
        name
        for name in chosen.beside()
        if is_tensor(chosen.table.values.get(name))
        and not any(prefix and name.startswith(prefix) for prefix in copies)
        and name.rpartition(".")[2] not in _COUNTERS
    ]


def _other_classifier(model: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> set[str]:
    """The names of the classifier's tensors, if they have other shapes in the file."""
    heads = classifier_names(model)
    names = {name for name in own.keys() & found.keys() if name.startswith(heads)} if heads else set()
    # The first dimension is the number of classes; if others differ, it is another network.
    differ = {name for name in names if own[name].shape != found[name].shape}
    if any(own[name].shape[1:] != found[name].shape[1:] for name in differ):
        return set()
    return names if differ else set()


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """How the names of the classifier's tensors begin."""
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    named = config.get("classifier") or ()
    return tuple(f"{head}." for head in ((named,) if isinstance(named, str) else named))


def _check_fit(
    path: Path, own: Mapping[str, Tensor], found: Mapping[str, Tensor], skipped: set[str], unexpected: list[str]
) -> None:
    # A counter that batch norm has had since torch 0.4.1 and does not need here: torchvision's older files lack it.
    missing = [name for name in own if name not in found and not name.endswith(".num_batches_tracked")]
    shapes = [
        f"{name} {tuple(found[name].shape)} for {tuple(own[name].shape)}"
        for name in own
        if name in found and name not in skipped and own[name].shape != found[name].shape
    ]
    parts = [
        f"{len(names)} {what}: {listed(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    if parts:
        raise UserError(
            "weights-do-not-fit",
            f"weights: {path} does not fit this model; {'; '.join(parts)}",
            why="a partly loaded network would train, and be silently worse",
            hint="set model to the architecture that the file was saved from",
        )
