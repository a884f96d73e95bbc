"""What a config will need before anything runs (memory, time, money), and what a check or a plan found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# What a check or a plan found: what is wrong, what to do, and what that would bring.


@dataclass(frozen=True)
class Estimate:
    """A predicted figure: the expected value, and the range that contains the true one with 80 % probability."""

    low: float
    expected: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Finding:
    """One thing that a user should know."""

    id: str
    """A name that stays: `storage-bound`, `too-few-workers`."""
    message: str
    """What was seen, with the numbers."""
    fix: str | None = None
    """What to type or to set: a command, a config line, an argument of DataLoader."""
    speedup: Estimate | None = None
    """By how much the fix would make training faster; None where nothing was measured that says so."""
    refuses: bool = False
    """Whether a run must not start like this."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "message": self.message,
            "fix": self.fix,
            "speedup": None if self.speedup is None else self.speedup.as_dict(),
            "refuses": self.refuses,
        }


# What a config will need before anything runs: memory, time and money.
#
# None always means 'not known', never zero.

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class TracedOp:
    """One operator of a training step, as a device would run it. Views are none."""

    name: str
    """Of aten, without overload: convolution, native_batch_norm_backward, _foreach_add_."""
    phase: Phase
    flops: int
    """Multiply and add counted as two; 0 for everything that is no product."""
    dtype: str
    """Of the computation: float32, float16, bfloat16."""
    read_bytes: int
    """Tensors that go in, each counted once."""
    written_bytes: int
    """Tensors that come out, or are changed in place."""
    kernels: int = 1
    depthwise: bool = False
    """A convolution with one channel in each group: tensor cores have no use for it."""
    volumetric: bool = False
    """A convolution over three dimensions."""


@dataclass(frozen=True)
class VramBudget:
    """Memory of one accelerator."""

    peak_bytes: int
    """As nvidia-smi would show it."""
    parts: dict[str, int]
    """At the moment of the peak; they add up to it."""
    limit_bytes: int | None = None
    largest_batch: int | None = None
    """By search; None where there is no limit to search under, 0 where not even one sample fits."""
    largest_batch_checkpointed: int | None = None
    """The same with gradient_checkpointing; None where the model has none."""
    note: str | None = None
    """What the figures leave open: an operator that could not be traced, say."""

    @property
    def fits(self) -> bool | None:
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}


@dataclass(frozen=True)
class RamBudget:
    """Memory of one host, for all accelerators in it."""

    total_bytes: int
    loader_bytes: int
    """Workers, batches in flight, what is fetched ahead."""
    parts: dict[str, int]
    """They add up to the total."""
    limit_bytes: int | None = None
    measured: bool = False
    """Whether the memory of a worker was measured on this machine, or is the stated default."""
    torch_loader_bytes: int | None = None
    """What batches in flight take in torch's own loader, which hands over float32."""
    torch_loader_verdict: Literal["safe", "risky", "refused"] | None = None
    """Whether that would fit beside everything else; None where the memory is not known."""

    @property
    def fits(self) -> bool | None:
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}


@dataclass(frozen=True)
class Budget:
    """Anything of which there is only so much: /dev/shm, disk, open files."""

    needed: int
    limit: int | None = None
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else self.needed <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}


@dataclass(frozen=True)
class Rate:
    """Images a second of one part, for the whole job, and where the figure is from."""

    images_per_second: float
    source: str
    """'measured here', 'roofline of an A10G', '16 cores x 280 images/s' …"""


@dataclass(frozen=True)
class TimeBudget:
    """How long, and what it costs."""

    images_per_second: float | None
    bound_by: str | None
    """accelerator, loader or storage: the slowest of those that are known."""
    rates: dict[str, Rate]
    step_s: float | None
    epoch_s: float | None
    total_s: float | None
    cost: float | None
    """In the currency of the price that was given."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ScalingRow:
    """The same job on so many accelerators."""

    gpus: int
    total_batch: int
    workers: int
    ram_bytes: int
    lr: float
    images_per_second: float | None
    days: float | None


@dataclass(frozen=True)
class Plan:
    """One budget over everything that can run out."""

    hardware: str
    """What it was planned for, in a line."""
    batch_size: int
    total_batch: int
    lr: float
    steps_per_epoch: int | None
    epochs: int
    vram: VramBudget | None
    ram: RamBudget
    shm: Budget
    disk: Budget | None
    open_files: Budget
    time: TimeBudget
    scaling: tuple[ScalingRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    assumptions: tuple[str, ...] = ()
    """What was not measured and had to be stated, each in a line."""

    @property
    def refused(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.refuses)

    def as_dict(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {
            "hardware": self.hardware,
            "batch_size": self.batch_size,
            "total_batch": self.total_batch,
            "lr": self.lr,
            "steps_per_epoch": self.steps_per_epoch,
            "epochs": self.epochs,
            "vram": None if self.vram is None else self.vram.as_dict(),
            "ram": self.ram.as_dict(),
            "shm": self.shm.as_dict(),
            "disk": None if self.disk is None else self.disk.as_dict(),
            "open_files": self.open_files.as_dict(),
            "time": self.time.as_dict(),
            "scaling": [asdict(row) for row in self.scaling],
            "findings": [finding.as_dict() for finding in self.findings],
            "assumptions": list(self.assumptions),
        }
