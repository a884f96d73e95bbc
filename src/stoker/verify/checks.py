"""What a check before a run is, and what it looks at."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from stoker.core.console import Say
from stoker.core.errors import StokerError
from stoker.core.finding import Finding

if TYPE_CHECKING:
    from stoker.plan.records import Plan
    from stoker.profile.host import HostConfig, Machine
    from stoker.tasks.images.classify import TrainingData
    from stoker.tasks.images.layouts.sample_index import SampleSet
    from stoker.tasks.volumes.data import VolumeData
    from stoker.verify.nodes import RankFacts
    from stoker.verify.trial import Trial

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


@dataclass(frozen=True)
class Check:
    """One declaration: listing it in `stoker.verify.running` is all that is needed to add it."""

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
    """The only task that it applies to; None for all."""
    on_gpu: bool = False
    """Only on a host with an accelerator."""

    def applies_to(self, subject: Subject) -> bool:
        return self.task in (None, subject.config.task) and bool(subject.machine.accelerators or not self.on_gpu)


@dataclass(frozen=True)
class Subject:
    """The config that is checked, and its data. Everything is opened once, when the first check asks for it; if that
    fails, the same error is raised for each check."""

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
    ranks: tuple[RankFacts, ...] | StokerError | None = None
    """What each rank saw, or why the ranks could not meet; None for a single process."""
    _opened: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def arguments(self) -> str:
        """Config and overrides as the user typed them, for commands to type next."""
        return shlex.join([str(self.path), *self.overrides])

    def arguments_with(self, settings: Sequence[str]) -> str:
        """The same with these KEY=VALUE, which replace the user's for the same keys."""
        keys = {setting.partition("=")[0] for setting in settings}
        kept = [text for text in self.overrides if text.partition("=")[0] not in keys]
        return shlex.join([str(self.path), *kept, *settings])

    @cached_property
    def samples(self) -> tuple[SampleSet, SampleSet | None]:
        """Training and validation samples; None for data without a validation split."""
        return self.data.train, self.data.val

    @property
    def data(self) -> TrainingData:
        """The same with their decoder, as a run gets them."""
        if self.config.task == "segment3d":
            raise AssertionError("a check of images about volumes")
        from stoker.tasks.images.classify import open_data

        return self._once("data", lambda: open_data(self.config, self.say))

    @property
    def volumes(self) -> VolumeData:
        """The same for `task: segment3d`."""
        from stoker.tasks.volumes.data import open_data

        return self._once("data", lambda: open_data(self.config, self.say))

    def with_data(self, data: TrainingData | VolumeData) -> Subject:
        """The same, with data that is already open."""
        self._opened["data"] = data
        return self

    @property
    def plan(self) -> Plan:
        """What the run needs on this machine, and how long it takes."""
        from stoker.verify.machine import plan_run

        return self._once("plan", lambda: plan_run(self))

    @property
    def trial(self) -> Trial:
        """What a few real steps and a resumed checkpoint showed."""
        from stoker.verify.trial import try_run

        return self._once("trial", lambda: try_run(self))

    def _once(self, name: str, make: Callable[[], T]) -> T:
        if name not in self._opened:
            try:
                self._opened[name] = make()
            except Exception as error:
                self._opened[name] = error
        kept = self._opened[name]
        if isinstance(kept, Exception):
            raise kept
        result: T = kept
        return result
