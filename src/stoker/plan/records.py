"""What a config will need before anything runs: memory, time and cost. None always means 'unknown', never zero."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from stoker.core.finding import Finding, as_json

if TYPE_CHECKING:
    from stoker.tasks.plan_facts import PlanPart

PACKED_BYTES = 54_000
"""The mean of 400 of ImageNet's images, packed at 500 px and quality 90; their files have 113,000 on average. Smaller
files would not shrink, and packing is not offered for them."""


Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class TracedOp:
    """One operator of a training step, as a device would run it; views do not count as operators."""

    name: str
    """Name in aten, without the overload: convolution, native_batch_norm_backward, _foreach_add_."""
    phase: Phase
    flops: int
    """A multiplication and an addition count as two; 0 for everything but matrix products and convolutions."""
    dtype: str
    """In which it computes: float32, float16, bfloat16."""
    read_bytes: int
    """Inputs, each tensor counted once."""
    written_bytes: int
    """Outputs, and tensors changed in place."""
    kernels: int = 1
    depthwise: bool = False
    """A convolution with one channel per group, which tensor cores cannot speed up."""
    volumetric: bool = False
    """A convolution over three dimensions."""


@dataclass(frozen=True)
class VramBudget:
    peak_bytes: int
    """As nvidia-smi would show it."""
    parts: dict[str, int]
    """At the moment of the peak; they add up to it."""
    limit_bytes: int | None = None
    largest_batch: int | None = None
    """Found by search; None if there is no limit, 0 if not even one sample fits."""
    largest_batch_checkpointed: int | None = None
    """The same with gradient_checkpointing; None if the model does not support it."""
    note: str | None = None
    """A caveat, such as an operator that could not be traced."""

    @property
    def fits(self) -> bool | None:
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True)
class RamBudget:
    """Memory of one host, for all its accelerators."""

    total_bytes: int
    loader_bytes: int
    """Workers, batches in flight, bytes fetched ahead."""
    parts: dict[str, int]
    """They add up to the total."""
    limit_bytes: int | None = None
    measured: bool = False
    """Whether the memory of a worker was measured on this machine, or is the default."""
    torch_loader_bytes: int | None = None
    """Memory of the batches in flight in torch's own loader, which returns float32."""
    torch_loader_verdict: Literal["safe", "risky", "refused"] | None = None
    """Whether that would fit in addition to everything else; None if the memory is unknown."""

    @property
    def fits(self) -> bool | None:
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes


@dataclass(frozen=True)
class Budget:
    """Any other limited resource: /dev/shm, disk, open files."""

    needed: int
    limit: int | None = None
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else self.needed <= self.limit


@dataclass(frozen=True)
class Rate:
    """Images per second of one part, for the whole job, and the source of the figure."""

    images_per_second: float
    source: str
    """'measured here', 'roofline of an A10G', '16 cores x 280 images/s' …"""


@dataclass(frozen=True)
class TimeBudget:
    images_per_second: float | None
    bound_by: str | None
    """The slowest known part: accelerator, loader or storage."""
    rates: dict[str, Rate]
    step_s: float | None
    epoch_s: float | None
    total_s: float | None
    cost: float | None
    """In the currency of the given price."""
    torch_loader: Rate | None = None
    """What torch's DataLoader with PIL would reach with the same workers on the same cores; never the pace itself."""


@dataclass(frozen=True)
class ScalingRow:
    """The same job on this many accelerators."""

    gpus: int
    total_batch: int
    workers: int
    ram_bytes: int
    lr: float
    images_per_second: float | None
    days: float | None


@dataclass(frozen=True)
class Plan:
    """One budget for everything that can run out."""

    hardware: str
    """The machine it was planned for, in one line."""
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
    """What was assumed instead of measured, one line each."""
    unit: str = "images"
    """What a sample is called."""
    part: PlanPart | None = None
    """What only a plan of this task has."""
    on_cpu: bool = False
    """Whether the model computes on the host's cores."""
    cpus: int | None = None
    """CPUs of a node; two hyper-threads of a core count as two."""
    cores: int | None = None
    """Physical ones behind them."""

    @property
    def refused(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == "failed")

    def as_dict(self) -> dict[str, Any]:
        document = asdict(self)
        del document["on_cpu"], document["part"]
        document["volumes"] = None if self.part is None else asdict(self.part.document)  # the first task that had any
        for name in ("vram", "ram", "shm", "disk", "open_files"):
            if (budget := getattr(self, name)) is not None:
                document[name]["fits"] = budget.fits
        keys = ("id", "message", "fix", "speedup", "refuses")
        return document | {"findings": [as_json(finding, *keys) for finding in self.findings]}
