"""What was observed of a training loop, our own or a script's: the one input of the doctor's checks.

None always means 'not measured', never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class StageTime:
    """What one stage of preparing batches (fetch, decode, augment, collate, other) took, all workers together."""

    wall_s: float
    cpu_s: float | None = None
    """On a core."""
    runq_s: float | None = None
    """Runnable, waiting for a core: high means too many workers."""
    blocked_s: float | None = None
    """Neither on a core nor runnable: storage, network, locks, sleeping."""
    read_bytes: int | None = None
    calls: int = 0


@dataclass(frozen=True)
class BatchTime:
    """One batch, prepared by one worker."""

    wall_s: float
    cpu_s: float | None
    runq_s: float | None
    blocked_s: float | None
    samples: int
    worker: int = 0
    fetch_s: float | None = None
    """Part of the wall time that was spent fetching bytes; None if the stages are not known."""
    bytes: int | None = None
    """Size of the batch as it is handed over."""
    collect_s: float = 0.0
    """Part of the wall time that full garbage collections took; counted in scripts only."""


@dataclass(frozen=True)
class SlowSample:
    """A sample that took far longer than the others."""

    name: str
    seconds: float
    typical_s: float


@dataclass(frozen=True)
class LoaderShape:
    """How the training loader is set up."""

    workers: int
    """0: batches are prepared in the training process."""
    prefetch: int | None = None
    """Batches that each worker has in flight."""
    engine: Literal["process", "thread", "main"] = "process"
    start_method: str | None = None
    persistent: bool | None = None
    pin_memory: bool | None = None
    batch_size: int | None = None
    samples: int | None = None
    """Samples of an epoch."""
    threads_per_worker: int | None = None
    """Threads that torch, OpenMP or OpenCV may start in each worker."""


@dataclass(frozen=True)
class HostFacts:
    """The host as the run could use it."""

    cpus: int
    ram_bytes: int | None = None
    throttled_share: float | None = None
    """Share of the time in which the cgroup's CPU quota stopped it."""
    shm_bytes: int | None = None
    shm_used_bytes: int | None = None
    """The most that was in use during the observation."""
    cpu_busy_share: float | None = None
    """Share of all usable cores that any program kept busy."""
    page_cache_bytes: int | None = None
    """Memory that can cache files: what is available, less what the run takes."""
    available_bytes: int | None = None
    """The least memory that was available to new processes at any time of the observation."""


@dataclass(frozen=True)
class StorageFacts:
    """How fast the source of the samples is."""

    remote: bool | None = None
    """An object store or a network file system; None if unknown."""
    kind: str | None = None
    """s3, nfs, lustre, fuse, ext4 …"""
    cold_bytes_per_second: float | None = None
    """One reader, files that are not in the page cache."""
    warm_bytes_per_second: float | None = None
    parallel_bytes_per_second: float | None = None
    """Many readers, cold."""
    local_bytes_per_second: float | None = None
    """One reader of this host's own disk, if the samples are elsewhere: the rate after staging."""
    latency_s: float | None = None
    """Time to the first byte of a cold read."""
    dataset_bytes: int | None = None
    bytes_per_sample: float | None = None
    packed: bool | None = None
    """Shards of many samples, rather than a file per sample."""
    root: str | None = None
    """The folder or URL that all samples are below, as far as it is known."""
    local_folder: str | None = None
    """A folder on this host's own disk for a copy, if the samples are elsewhere."""
    local_free_bytes: int | None = None
    """Free space there."""


@dataclass(frozen=True)
class AcceleratorFacts:
    """The device that computes."""

    name: str | None = None
    count: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    device_busy_share: float | None = None
    """Share of compute time in which the device was busy; low with many small kernels means launch-bound."""
    transfer_bytes_per_second: float | None = None


@dataclass(frozen=True)
class HotSpot:
    """A line of the user's code in which batches are prepared, from samples of the workers' stacks."""

    function: str
    file: str
    line: int
    share: float
    """Share of the time spent preparing batches, all workers together."""
    calls: str | None = None
    """The library function that is called there: scipy.ndimage.median_filter."""


@dataclass(frozen=True)
class FilterWork:
    """The work of one filtering function."""

    name: str
    calls: int
    elements: int
    """Elements of its input arrays, all calls together."""


@dataclass(frozen=True)
class CacheFacts:
    """A container of arrays in the data set, or a function behind lru_cache."""

    name: str
    entries: int
    """In each worker."""
    bytes: int | None
    """In each worker."""
    evicted: int
    """Entries that were seen to vanish, all workers together; a lower bound."""


@dataclass(frozen=True)
class Preparation:
    """How a script prepares its samples, all workers together."""

    samples: int
    """Samples that were counted one by one."""
    spots: tuple[HotSpot, ...] = ()
    """Largest first."""
    filters: tuple[FilterWork, ...] = ()
    caches: tuple[CacheFacts, ...] = ()
    samples_that_read: int = 0
    """Samples for which a file was opened."""
    opens: int = 0
    files: int = 0
    """Different files that were opened; counted once for each worker that did."""
    sample_elements: float | None = None
    """Elements of the largest array of a sample, as it is handed over."""
    sample_dimensions: int | None = None
    """Dimensions of that array: 4 for the patch of a volume with channels."""
    batches_seen: int = 0
    shape_changes: int = 0
    """How many of the batches seen had another shape than the one before."""
    shapes: tuple[str, ...] = ()
    """Two consecutive ones."""
    size_spread: float = 1.0
    """The largest sample over the smallest, in elements."""
    worker_bytes: int | None = None
    """The most private memory that a single worker had."""


@dataclass(frozen=True)
class Held:
    """A container that gained entries while it was watched, or a tensor whose graph got longer."""

    name: str
    """As in the code: `self.cache`, `losses`."""
    before: int
    now: int
    """Entries; for a tensor, the number of steps that its graph reaches back."""
    in_worker: bool
    """In the data set of each worker; otherwise in the training loop."""
    keeps_graph: bool = False
    """Its newest entry is a tensor with its autograd graph."""
    keyed: bool = False
    """A dict: it has at most one entry for each key."""


@dataclass(frozen=True)
class MemoryGrowth:
    """How fast the memory of single processes grew after a warm-up; 0 if it did not grow all the time."""

    watched_s: float
    worker_bytes_per_second: float | None = None
    """Growth of one worker, the median; None without worker processes that lived long enough."""
    loop_bytes_per_second: float | None = None
    worker_grown_bytes: float | None = None
    loop_grown_bytes: float | None = None
    """How much one of them grew since it was first looked at."""
    held: tuple[Held, ...] = ()
    """The fastest-growing come first."""


@dataclass(frozen=True)
class LoopThreads:
    """CPU threads of the loop's own process, and of its workers, while they were watched."""

    watched_s: float
    threads: int
    """Threads that torch uses for one operation (`torch.get_num_threads`)."""
    main_cpu_s: float
    main_runq_s: float
    """Times of the thread that runs the loop: on a core, and waiting for one."""
    others_cpu_s: float = 0.0
    others_runq_s: float = 0.0
    """Times of the other threads that torch computes with, all together."""
    others: int = 0
    """How many of them ran."""
    ranks: int = 1
    """Processes of this run on this host, as far as the launcher says."""
    worker_cpu_s: float | None = None
    """CPU time of the workers' main threads, all workers together."""
    worker_threads_cpu_s: float | None = None
    """CPU time of all other threads in worker processes: OpenCV's, BLAS's, OpenMP's."""


@dataclass(frozen=True)
class DeviceRead:
    """A place where the loop reads a tensor's value, which waits for the device."""

    call: str
    """`.item()`, `float()` ..."""
    place: str
    """file:line."""
    per_step: float
    on_device: bool
    """Whether the tensor was on an accelerator."""


@dataclass(frozen=True)
class LoopHabits:
    """What a script's loop does repeatedly besides its steps."""

    reads: tuple[DeviceRead, ...] = ()
    """Most frequent first."""
    in_eval_mode: str | None = None
    """The model's class, if it was trained in eval mode."""
    eval_at: str | None = None
    """file:line of the call that switched it."""
    eval_layers: int = 0
    """Its layers that behave differently in eval mode: batch norm, dropout."""
    cudnn_benchmark: bool | None = None
    loader_builds: int = 1
    """How often the training loader was made."""
    loader_at: str | None = None
    """file:line where it is iterated."""
    validations: int = 0
    """Complete validations, each after an epoch of training."""
    validation_wait_s: float | None = None
    """Part of the validation time spent waiting for data."""


@dataclass(frozen=True)
class LoopTimes:
    """Where the time of steady steps went."""

    elapsed_s: float = 0.0
    """Duration of those steps: wait + transfer + compute + other."""
    wait_s: float = 0.0
    """Time that the loop spent in the loader's `__next__`."""
    transfer_s: float | None = None
    compute_s: float | None = None
    other_s: float | None = None
    consumer_cpu_s: float | None = None
    """CPU time of the loop's own process in those steps, all its threads except those that prepare batches."""
    consumer_runq_s: float | None = None
    """How long the loop's own thread was runnable and waited for a core in those steps."""
    validation_s: float | None = None
    epoch_starts_s: tuple[float, ...] = ()
    """Waits for the first batch of each epoch; not included in the sums above."""
    waits_s: tuple[float, ...] = ()
    """Waits of single steps, in order; the newest few hundred."""
    steps_s: tuple[float, ...] = ()
    """The same steps without their wait."""

    @property
    def wait_share(self) -> float | None:
        """Share of the steps' time in which the loop waited for data."""
        return self.wait_s / self.elapsed_s if self.elapsed_s > 0 else None


@dataclass(frozen=True)
class LoopRates:
    """Samples per second of parts of the loop on their own."""

    ceiling: float | None = None
    """With batches that are already in memory."""
    pace: float | None = None
    """The pace of a consumer that replaced the model; None if the model itself ran."""
    loader: float | None = None
    """The loader's, with a consumer that takes no time."""


@dataclass(frozen=True)
class Observed:
    """Facts about steady training, without the first batch of an epoch and without validation."""

    source: Literal["run", "script", "trial"]
    steps: int
    samples: int
    """Samples consumed by those steps, on this rank."""
    times: LoopTimes
    rates: LoopRates = field(default_factory=LoopRates)
    loader: LoaderShape | None = None
    stages: dict[str, StageTime] = field(default_factory=dict)
    batches: tuple[BatchTime, ...] = ()
    """The newest few hundred batches, in the order in which they were handed out."""
    slow_samples: tuple[SlowSample, ...] = ()
    host: HostFacts | None = None
    storage: StorageFacts | None = None
    accelerator: AcceleratorFacts | None = None
    preparation: Preparation | None = None
    memory: MemoryGrowth | None = None
    threads: LoopThreads | None = None
    habits: LoopHabits | None = None
    scaled_in_32_bits: bool | None = None
    """Whether a GradScaler scaled a loss that was computed in float32; None if none was seen."""
    scaled_at: str | None = None
    """file:line of that call."""
    torch_version: str | None = None
    convolves_3d: bool | None = None
    missing: tuple[str, ...] = ()
    """What could not be measured, and why, in words."""
    config: str | None = None
    """The config file, with KEY=VALUE if any were given, as one would type it; None for scripts."""

    @property
    def faster_model(self) -> str:
        """What to call a step of half the time: without an accelerator, nobody can buy a faster one."""
        return "half the model's time" if self.accelerator is None else "a 2x faster accelerator"

    @property
    def unit(self) -> str:
        """What a sample is: an image, a patch of a volume, or the 3D sample of a script."""
        if not self.convolves_3d:
            return "images"
        return "samples" if self.source == "script" else "patches"

    @property
    def images_per_second(self) -> float | None:
        return self.samples / self.times.elapsed_s if self.times.elapsed_s > 0 else None
