"""A check before a run, what it looks at, and what a task says about the run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from stoker.core.console import Say
from stoker.core.errors import StokerError
from stoker.core.finding import Finding
from stoker.tasks.base import task_for
from stoker.train.schedule import scaled_lr

if TYPE_CHECKING:
    from stoker.profile.host import HostConfig, Machine

T = TypeVar("T")
Topic = Literal["config", "data", "labels", "model", "machine", "nodes"]
TOPICS: tuple[Topic, ...] = get_args(Topic)
"""In the order in which they are checked and shown."""


def passed(seen: str, *details: str, **facts: Any) -> Finding:
    return Finding(seen, status="passed", details=details, facts=facts)


def failed(seen: str, fix: str, *details: str, **facts: Any) -> Finding:
    return Finding(seen, fix, status="failed", details=details, facts=facts)


def unknown(seen: str, fix: str | None = None, *details: str, **facts: Any) -> Finding:
    """It could not be checked; `fix` says what would allow it."""
    return Finding(seen, fix, status="unknown", details=details, facts=facts)


def first_lines(lines: Sequence[str], most: int = 12, note: str = "") -> list[str]:
    """The first of many lines, and how many are left."""
    return [*lines[:most], *([f"and {len(lines) - most} more{note}"] if len(lines) > most else [])]


@dataclass(frozen=True)
class Check:
    """One declaration: listing it in `Task.checks`, or in a module of `stoker.verify` if it is for all tasks, is all
    that is needed to add it."""

    name: str
    """As in `--skip NAME`, in lower case with hyphens."""
    topic: Topic
    title: str
    """What is checked, as a noun phrase."""
    run: Callable[[Subject], Finding | None]
    """None if the check does not apply, such as that of a missing validation split."""
    deep: bool = False
    """Only with `--deep`: takes longer than a few seconds."""
    cheap: bool = False
    """Takes less than a second and no model: `stoker train` runs it too."""
    task: str | None = None
    """The task that declares it; None for all."""
    after: str | None = None
    """The general check that a task's check follows; None if it comes first in its topic."""
    on_gpu: bool = False
    """Only on a host with an accelerator."""

    def applies_to(self, subject: Subject) -> bool:
        return self.task in (None, subject.config.task) and bool(subject.machine.accelerators or not self.on_gpu)


@dataclass(frozen=True)
class Subject:
    """The config that is checked, and its data. What takes time is made once, when the first check needs it; if that
    fails, every check that needs it gets the same error."""

    config: HostConfig
    path: Path
    overrides: Sequence[str]
    machine: Machine
    weights: Path | None = None
    """A trained network that shows whether the labels are right."""
    out: Path | None = None
    """Folder for pictures."""
    deep: bool = False
    say: Say = lambda _text: None
    price_per_hour: float | None = None
    """Price of one node."""
    ranks: tuple[Any, ...] | StokerError | None = None
    """What each rank saw (`stoker.verify.nodes.RankFacts`), or why the ranks could not meet; None for a single
    process."""
    _made: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def arguments(self) -> str:
        """Config and overrides as the user typed them, for commands to type next."""
        return shlex.join([str(self.path), *self.overrides])

    def arguments_with(self, settings: Sequence[str]) -> str:
        """The same with these KEY=VALUE, which replace the user's for the same keys."""
        keys = {setting.partition("=")[0] for setting in settings}
        kept = [text for text in self.overrides if text.partition("=")[0] not in keys]
        return shlex.join([str(self.path), *kept, *settings])

    @property
    def total_batch(self) -> int:
        """Samples of one update, over all ranks."""
        config = self.config
        return config.batch_size * config.devices * config.num_nodes * config.gradient_accumulation

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warmup, as the optimizer gets it."""
        config = self.config
        return scaled_lr(config.lr, self.total_batch, config.lr_reference_batch, config.scale_lr)

    @property
    def data(self) -> Any:
        """What the task's `open_data` returns."""
        return self.once("data", lambda subject: task_for(subject.config).open_data(subject.config, subject.say))

    def with_made(self, name: str, made: Any) -> Subject:
        """The same, with what `once` would return for a name."""
        self._made[name] = made
        return self

    def once(self, name: str, make: Callable[[Subject], T]) -> T:
        """What `make` returns or raises, which is called only once for a name."""
        if name not in self._made:
            try:
                self._made[name] = make(self)
            except Exception as error:
                self._made[name] = error
        kept = self._made[name]
        if isinstance(kept, Exception):
            raise kept
        result: T = kept
        return result


@dataclass(frozen=True)
class EpochLength:
    """Steps of an epoch, over all ranks."""

    updates: int
    val_samples: int | None = None
    """None without validation."""
    val_steps: int | None = None
    samples: int | None = None
    """Samples of a pass over the data; None if they are chosen at random and fill any number of updates."""
    assumed: str | None = None
    """The source of the numbers if the data could not be opened, such as "ImageNet's counts"."""


@dataclass(frozen=True)
class StepInput:
    """What the network of a config takes in a step."""

    size: str
    """The size of one sample, as in '224 px'."""
    fix: str
    """What to change if the network cannot compute it."""
    values: int
    """Numbers in one sample."""
    activations: int
    """The most activations that networks keep for each of them."""
    trial_samples: int = 8
    """Enough to try a step. Batch norm needs a few; ResNet-50 at 224 px takes about a second for 8 on two cores."""
