"""What a task tells a plan: about its samples, about loading them, and what only a plan of this task has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from stoker.config import Config
    from stoker.core.finding import Finding
    from stoker.loader.loader_memory import LoaderMemory


def loader_memory() -> LoaderMemory:
    """What the parts of a loader take on this machine. Processes and batches take the same for any kind of data, so it
    is measured once, with images."""
    from stoker.tasks.images.memory_trial import measure_loader_memory

    return measure_loader_memory()


@dataclass(frozen=True)
class LoaderFigures:
    """What was measured of our loader, and of torch's, on samples of one kind."""

    samples_per_core_second: float
    source: str
    """Whose samples they were: "ImageNet's files"."""
    faster_than_torch: float
    """Our loader's rate by that of torch's DataLoader with PIL."""
    faster_than_torch_range: tuple[float, float]
    packing_speedup: float


@dataclass(frozen=True)
class DataFacts:
    """The samples of a config, as far as a plan needs to know them; what is unknown is assumed, and reported."""

    row_bytes: int
    """What a batch reserves for a sample to train on, and for one to validate on."""
    val_row_bytes: int
    samples: int | None = None
    """None if that is unknown, or if samples are drawn at random and fill any number of updates."""
    sample_bytes: float | None = None
    """Mean of what is read for a sample."""
    assumptions: tuple[str, ...] = ()
    """What was assumed, a line each."""
    whole_files: bool = False
    """Whether a worker holds the files of all samples of the batch that it makes, as one of torch's does."""
    figures: LoaderFigures | None = None
    """None if nothing is published about loading such samples."""

    @property
    def dataset_bytes(self) -> float | None:
        return None if self.samples is None or self.sample_bytes is None else self.samples * self.sample_bytes


class StepCost(NamedTuple):
    """A training step on the accelerators of a plan."""

    live_bytes: int
    """Live tensors at the peak."""
    vram_bytes: int
    """What the allocator reserves for them, and the rest of what nvidia-smi would show."""
    fits: bool | None
    samples_per_second: float | None


class ForwardCost(NamedTuple):
    """A forward pass without gradients, on one accelerator; None where that is unknown."""

    seconds: float | None
    vram_bytes: int | None


class StepCosts(Protocol):
    """What a plan can say about other steps on its machine; each is traced, which takes seconds."""

    @property
    def samples_per_second(self) -> float | None:
        """What the accelerators of all nodes can take."""

    @property
    def worker_bytes(self) -> int:
        """Memory of one worker and the batches that it has in flight."""

    def step(self, config: Config) -> StepCost | None:
        """The step of another config; None without an accelerator, or if it cannot be traced."""

    def forward(self, batch: int) -> ForwardCost | None:
        """A forward pass of the plan's own config; None if it cannot be traced."""


class PlanPart(NamedTuple):
    """What only a plan of one task has."""

    document: Any
    """For `--json`: a dataclass."""
    lines: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
