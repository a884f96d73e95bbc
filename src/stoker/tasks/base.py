"""`Task`: everything that differs between kinds of data. Nothing outside `tasks/` and `config/` asks which one it is.

A kind of data is a folder here with a subclass of `Task`. Other packages can add one: an entry point
`NAME = "module:Class"` in the group `stoker.tasks` makes `task: NAME` work.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from stoker.config import Config
from stoker.config.keys import BUILT_IN_TASKS, place_of_task
from stoker.core.console import Advance, Answer, Say
from stoker.core.errors import StokerError, UserError
from stoker.profile.observed import StorageFacts
from stoker.run.metrics import Metric

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stoker.loader.loader import BatchLoader, LoaderSpeed
    from stoker.profile.host import HostConfig
    from stoker.run.folder import RunFolder
    from stoker.tasks.building import RunContext
    from stoker.tasks.checks import Check, EpochLength, StepInput
    from stoker.tasks.contact_sheet import Preview
    from stoker.tasks.export_formats import Exportable
    from stoker.tasks.packing import PackVariants
    from stoker.tasks.plan_facts import DataFacts, PlanPart, StepCosts
    from stoker.tasks.staging import Staging
    from stoker.train.checkpoint.changes import Contents, Listings
    from stoker.train.checkpoint.folder import FoundCheckpoint
    from stoker.train.compute import Utilisation
    from stoker.train.loop import Run
    from stoker.train.ranks import Ranks
    from stoker.train.step import TraceableStep


class RunData(Protocol):
    """What training needs to know about a task's data, a dataclass: a trial has it with None for `val`."""

    @property
    def samples(self) -> int:
        """Samples to train on; for random patches, those of an epoch."""

    @property
    def val(self) -> Any:
        """What to validate on, if anything."""

    def storage(self) -> StorageFacts: ...

    def names(self, samples: Sequence[int]) -> list[str]:
        """What samples are called, from their numbers in the data set."""
        ...


SUPPORT = (".csv", ".jsonl", ".json", ".txt", ".mat", ".npy", ".yaml", ".yml", ".md")
"""Lists, labels and indexes, which are copied with the images that they describe."""


@dataclass(frozen=True)
class Selection:
    """The part of a source that is copied; without folders and paths, all of it."""

    folders: tuple[str, ...] = ("",)
    """Folders below which files are listed."""
    paths: frozenset[str] | None = None
    """The files that are wanted; None for all below the folders."""
    support_in: frozenset[str] = frozenset()
    """Folders whose lists, labels and indexes are wanted, too."""
    left_out: tuple[str, ...] = ()
    """Prefixes of paths that are not wanted."""
    empty_folders: tuple[str, ...] = ()
    """Class folders, which count even if they have no images."""
    record: dict[str, Any] | None = None
    """The content of `subset.json`; None if everything was taken."""
    below: tuple[str, ...] | None = None
    """In place of `paths`: files, and folders with everything below them, such as Zarr volumes."""

    def wanted(self, path: str) -> bool:
        if path.startswith(self.left_out):
            return False
        if self.below is not None:
            return path in self.below or path.startswith(tuple(f"{folder}/" for folder in self.below))
        if self.paths is None or path in self.paths:
            return True
        folder, _, name = path.rpartition("/")
        return folder in self.support_in and name.lower().endswith(SUPPORT)


class Task(ABC):
    """One kind of data. `data` is whatever `open_data` returned: a `RunData` with what the task's other methods need.

    A subclass is a table: most of its methods are functions of its folder, named by `at`.
    """

    unit: ClassVar[str] = "samples"
    """What samples are called: 'images', 'patches'."""
    metric: ClassVar[str] = "loss"
    """The figure of a validation that `best_by: auto` means."""
    scores: ClassVar[tuple[str, ...]] = ("train/loss", "train/lr", "val/loss")
    """What metrics.csv has columns for."""
    scores_of_eval: ClassVar[str | None] = None
    """What `stoker eval` adds to a run's own scores, if anything."""
    size_key: ClassVar[str | None] = None
    """The config key for the size of a sample."""
    tuned_keys: ClassVar[tuple[str, ...]] = ()
    """Config keys that change how fast this task's samples are made, but not the samples."""
    releases_gil: ClassVar[bool] = False
    """Whether making a batch hardly needs the GIL: `loader: auto` is threads then, however many workers there are."""
    convolves_3d: ClassVar[bool | None] = None
    """Whether its networks do; None if that is not known before one is built."""
    name: str
    """What configs call it."""
    items: ClassVar[str] = "samples"
    """What the data consists of: 'images', 'volumes'."""
    usual_keys: ClassVar[Mapping[str, str]] = {}
    """Config keys that this task cannot do without, for data that comes without a config."""
    flags: ClassVar[Mapping[str, frozenset[str]]] = {}
    """For each command the arguments that only this task takes; for other tasks they are refused."""

    classifies: ClassVar[bool] = False
    """Whether a sample has one class, so that an untrained network's loss is that of a guess."""

    # Data

    def recognises(self, source: str) -> bool:
        """Whether a folder or a file has this task's data; a config is no data."""
        return False

    @abstractmethod
    def open_data(self, config: HostConfig, say: Say, progress: Any = None) -> Any:
        """The data to train and to validate on; raises UserError if it cannot be trained on."""

    def prepare_data(self, config: HostConfig, say: Say) -> None:
        """Lists, calibrates and indexes once: processes that open the data afterwards find what was saved."""
        self.open_data(config, say)

    @abstractmethod
    def listings(self, data: Any) -> Listings:
        """Which samples the data has, in order."""

    def contents(self, config: HostConfig, data: Any) -> Contents:
        """A hash of some samples, to notice data that was made again under the same names."""
        return {}

    def record_choice(self, config: HostConfig, data: Any, folder: RunFolder, say: Say) -> None:
        """Reports and records which part of the data a config selects."""
        return

    def as_it_began(self, found: FoundCheckpoint, config: HostConfig, data: Any, say: Say) -> Any:
        """The data as the run read it before it was resumed."""
        return data

    def open_staging(self, config: HostConfig, data: Any, ranks: Ranks, say: Say) -> Staging | None:
        """The local copy that training fills, if the config names one."""
        return None

    def needed_files(
        self,
        config: Config,
        class_list: tuple[str, ...] | None,
        progress: Advance | None,
        say: Say | None,
    ) -> tuple[str, Selection]:
        """The root that a config reads from, and which files of it `stoker stage` copies; `class_list` are the classes
        that are wanted."""
        refuse_classes(config, class_list, self.items)
        assert config.data_root is not None
        return config.data_root, Selection()

    def root_in_copy(self, config: Config, folder: str) -> str:
        """What `data_root` is in a copy."""
        return folder

    # Training

    @abstractmethod
    def build_run(self, config: HostConfig, data: Any, context: RunContext) -> Run:
        """The run that the config describes, at its beginning: model, optimizer, loaders, augmentation; alike on every
        rank. `resume` moves it to where a checkpoint was saved."""

    def describe_run(self, config: Config, run: Run, data: Any) -> str:
        """What is about to be trained, in a few lines that people check before they leave it running."""
        from stoker.tasks.building import describe_schedule

        lines = describe_schedule(config, run.ranks, run.device, run.schedule.horizon)
        return "\n".join([f"{config.model}: {data.samples:,} training {self.items}", *lines])

    # Measuring

    @abstractmethod
    def open_training_loader(self, config: HostConfig, data: Any) -> BatchLoader[Any]:
        """The loader of one process, without a model to feed."""

    def measure_speed(self, config: HostConfig, data: Any, *, workers: int, seconds: float) -> LoaderSpeed:
        """How fast the loader is for a consumer that takes no time."""
        from stoker.loader.loader import measure_loader

        with_these = config.model_copy(update={"num_workers": workers})
        return measure_loader(lambda: self.open_training_loader(with_these, data), workers, seconds)

    def measure_storage(self, config: HostConfig, seconds: float) -> tuple[StorageFacts, list[str]]:
        """How fast the storage of the data is, in about `seconds`, and what could not be measured."""
        facts: StorageFacts = self.open_data(config, lambda _text: None).storage()
        return facts, ["the storage's speed: it is measured for images only"]

    def kept_bytes(self, config: Config) -> int:
        """What the loaders of a node may keep of decoded data, all together."""
        return 0

    def decoded_bytes(self, config: HostConfig) -> int | None:
        """Decoded size of all the data, as far as loaders could keep it; None if they keep nothing, or if unknown."""
        return None

    def pack_variants(self, config: HostConfig) -> PackVariants:
        """The ways to pack the data without changing a sample."""
        raise self.cannot("packed")

    def utilisation_of(self, config: Config, model: nn.Module, device: torch.device, world: int) -> Utilisation | None:
        """Model FLOPs utilisation; None if the FLOPs of a sample cannot be counted."""
        return None

    # Commands. Their keywords are those flags of the command that every task takes, and this task's own.

    def evaluate(
        self,
        checkpoint: Path,
        data_root: str | None,
        settings: Sequence[str],
        *,
        split: str | None,
        raw: bool,
        **own: Any,
    ) -> Answer:
        """How good a checkpoint is, on its own data or on others'; `settings` are KEY=VALUE, `data_root` among them."""
        raise self.cannot("evaluated")

    def score_masks(self, predictions: Path, labels: Path, settings: Sequence[str], **own: Any) -> Answer:
        """How good predictions of any program are, from files."""
        raise self.cannot("scored from files")

    def predict(
        self, checkpoint: Path, data: Sequence[str], settings: Sequence[str], *, raw: bool, **own: Any
    ) -> Answer:
        """What a checkpoint says about samples that need no labels."""
        raise self.cannot("predicted")

    def export(self, checkpoint: Path, settings: Sequence[str], *, image: Path | None, raw: bool) -> Exportable:
        """The network of a checkpoint, and what its file in another format is compared on: `image`, among others."""
        raise self.cannot("exported")

    def pack(self, config: Config, destination: Path, *, workers: int, fresh: bool, **own: Any) -> Answer:
        """Writes the data of a config to files that are faster to read; `fresh` removes the pack in DST first."""
        raise self.cannot("packed")

    def preview(
        self,
        config: HostConfig,
        data: Any,
        name: str,
        *,
        count: int | None = None,
        epoch: int = 0,
        world: int | None = None,
        patience_s: float = math.inf,
        largest: int = 224,
    ) -> Preview:
        """What the network gets in the first steps of an epoch on the first of `world` ranks: `count` training samples
        or as many as fit a run's sheet, in pictures of at most `largest` pixels. Reads nothing after `patience_s`."""
        raise self.cannot("previewed")

    def cannot(self, what: str) -> UserError:
        """The error of a command that this task does not have."""
        return UserError("task-cannot", f"task: {self.name} cannot be {what}")

    # Plan

    def plan_facts(self, config: Config, samples: int | None = None, progress: Any = None) -> DataFacts:
        """What is known about the data, or assumed if it cannot be opened here; `samples` replaces their number."""
        from stoker.tasks.plan_facts import DataFacts

        row, reason = 4 * self.step_input(config).values, "no data_root"  # floats
        if config.data_root is not None:
            try:
                data = self.open_data(cast("HostConfig", config), lambda _text: None, progress)
                return DataFacts(row, row, samples or data.samples, data.storage().bytes_per_sample)
            except StokerError as error:
                reason = error.seen
        return DataFacts(row, row, samples, assumptions=(f"data: of unknown size ({reason})",))

    @abstractmethod
    def traceable_step(self, config: Config, facts: Any = None) -> TraceableStep:
        """The training step, to be traced without a device; `facts` are what is known about the data, else assumed."""

    def updates_per_epoch(self, config: Config, samples: int | None, world: int) -> int | None:
        """Updates in an epoch of this many samples; None if it depends on their number and that is not known."""
        from stoker.tasks.building import updates_per_epoch

        return None if samples is None else updates_per_epoch(config, samples, world)

    def plan_part(self, config: Config, facts: Any, costs: StepCosts) -> PlanPart | None:
        """What only a plan of this task has."""
        return None

    # Verify

    @abstractmethod
    def step_input(self, config: Config) -> StepInput:
        """What the network of a config takes in a step."""

    def checks(self) -> Sequence[Check]:
        """The task's own checks."""
        return ()

    def epoch_length(self, config: HostConfig, data: Any | None) -> EpochLength | None:
        """Steps of an epoch; without data, what the config says or the task assumes. None if nothing is known."""
        from stoker.tasks.checks import EpochLength

        samples = None if data is None else data.samples
        updates = self.updates_per_epoch(config, samples, config.devices * config.num_nodes)
        return None if updates is None else EpochLength(updates, samples=samples)

    def random_data(self, config: HostConfig, folder: Path) -> tuple[Any, HostConfig] | None:
        """Random samples below a folder, opened, to try a step while the real data is not there, and the config for
        them."""
        return None

    def milestones(self, config: HostConfig) -> tuple[tuple[tuple[int, float], ...], str | None]:
        """Published results of exactly this config: (epoch, metric in percent), and who published them."""
        return (), None


def at(place: str) -> Any:
    """A method of a task that is the function at `place` (module:name), imported when it is called: a command loads
    only what it uses, and a report on a run loads no torch."""

    def method(_task: Task, *arguments: Any, **keys: Any) -> Any:
        return resolve_name(place)(*arguments, **keys)

    return method


def task_for(config: Config) -> Task:
    return task_named(config.task)


@cache
def task_named(name: str) -> Task:
    """The task that configs call `name`."""
    place = place_of_task(name)
    assert place is not None, "the config was checked"
    found = resolve_name(place)()
    assert isinstance(found, Task), f"{place} is no subclass of stoker.tasks.base.Task"
    found.name = name
    return found


def recorded_task(values: Mapping[str, Any]) -> type[Task]:
    """The task that the config keys of a run name, for its attributes; of one that is not installed here, those of
    `Task`. Earlier versions did not name it."""
    try:
        place = place_of_task(str(values.get("task") or Config.model_fields["task"].default))
        found = Task if place is None else resolve_name(place)
    except (ImportError, AttributeError):
        return Task
    assert issubclass(found, Task), place
    return found


def metric_of(values: Mapping[str, Any]) -> Metric:
    """The metric of a run from its config keys; those of earlier versions do not name one."""
    named = values.get("best_by") or "auto"
    return Metric(recorded_task(values).metric if named == "auto" else str(named))


def built_in_tasks() -> list[Task]:
    return [task_named(name) for name in BUILT_IN_TASKS]


def task_with(method: str) -> Task:
    """The first task that overrides this method."""
    return next(task for task in built_in_tasks() if getattr(type(task), method) is not getattr(Task, method))


def refuse_classes(config: Config, class_list: tuple[str, ...] | None, items: str) -> None:
    """Raises UserError for a choice of classes where the data has none."""
    if class_list is not None or config.subset_classes is not None:
        raise UserError("no-classes", f"{items} have no class folders to choose from", hint="leave out the classes")
