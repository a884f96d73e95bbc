"""The whole plan of a config on a machine: memory, time, cost, and what to change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stoker.config import Config
from stoker.core.errors import UsageError
from stoker.core.finding import Finding
from stoker.core.units import size_text
from stoker.loader.loader import DEFAULT_PREFETCH, choose_engine
from stoker.loader.loader_memory import STATED, LoaderMemory
from stoker.plan.host_memory import HostShape, LoaderSettings, open_files_budget, ram_budget, shm_budget
from stoker.plan.records import Budget, Plan, RamBudget, Rate, ScalingRow, VramBudget
from stoker.plan.roofline import AllReduce, step_seconds
from stoker.plan.timing import StorageKind, loader_rate, time_budget, time_findings
from stoker.plan.tracing import Trace
from stoker.plan.vram import trace_vram
from stoker.profile.datasheets import Datasheet
from stoker.profile.host import workers_for
from stoker.profile.mounts import LocalDisk
from stoker.tasks.base import Task, task_for
from stoker.tasks.plan_facts import DataFacts
from stoker.train.schedule import lr_warning, scaled_lr
from stoker.train.step import TraceableStep
from stoker.train.transfers import batches_in_hand


@dataclass(frozen=True)
class Hardware:
    """Identical nodes. None means unknown, and nothing is refused because of it."""

    gpus: int
    """Accelerators per node; without one, the number of training processes: 1."""
    nodes: int
    cpus: int
    """Per node; two hyper-threads of a core count as two."""
    cores: int | None = None
    """Physical ones behind them; None counts each CPU as one."""
    sheet: Datasheet | None = None
    """The accelerator; None if it is unknown, or the CPU."""
    vram_bytes: int | None = None
    """Memory of one accelerator, as torch reports it."""
    on_cpu: bool = False
    """The model runs on the host and uses its memory."""
    ram_bytes: int | None = None
    shm_bytes: int | None = None
    disk_bytes: int | None = None
    room: LocalDisk | None = None
    """The local disk that a copy of the data could go to."""
    storage: StorageKind | None = None
    price_per_hour: float | None = None
    """Price of one node."""
    is_here: bool = True
    """Whether it is the machine that we run on."""
    stated: tuple[str, ...] = ()
    """What the user did not describe and where it was taken from, one line each."""

    @property
    def world(self) -> int:
        return self.gpus * self.nodes

    def describe(self) -> str:
        """One line for people."""
        device = "CPU" if self.on_cpu else (self.sheet.name if self.sheet is not None else "unknown accelerator")
        shared = self.cores is not None and self.cores < self.cpus
        processors = f"{self.cpus} vCPUs on {self.cores} cores" if shared else f"{self.cpus} cores"
        parts = [f"{self.gpus} x {device}" if not self.on_cpu else device, processors]
        if self.ram_bytes is not None:
            parts.append(f"{self.ram_bytes / 1e9:.0f} GB of RAM")
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return nodes + ", ".join(parts) + (" (this machine)" if self.is_here else "")


def check_counts(cpus: int | None, cores: int | None) -> None:
    """Refuses numbers below 1, and more cores than CPUs."""
    for option, value in (("--cpus", cpus), ("--cores", cores)):
        if value is not None and value < 1:
            raise UsageError(
                "nothing-to-plan",
                f"{option} {value} leaves nothing to train on",
                hint=f"{option} 1; without --gpu, --cpus and --ram the plan is for this machine",
            )
    if cores is not None and (cpus is None or cores > cpus):
        raise UsageError(
            "cores-without-cpus" if cpus is None else "more-cores-than-cpus",
            f"--cores {cores} " + ("without --cpus" if cpus is None else f"of --cpus {cpus}"),
            why="--cores says how many physical cores the CPUs are threads of",
            hint=f"--cpus {cores} --cores {cores} if no two of them share a core",
        )


SCALING = (1, 2, 4, 8)
# last.ckpt, the one before it, and the one being written.
CHECKPOINTS_BESIDE_THE_BEST = 3
# ImageNet's validation images per training image, used if only the training images were counted.
VALIDATION_SHARE = 0.04
DAY_S = 86400.0


@dataclass(frozen=True)
class MeasuredHere:
    """What was measured on this machine for the plan; otherwise None, or assumed figures."""

    loader_memory: LoaderMemory = STATED
    images_per_core_second: float | None = None
    used_by_others_bytes: int | None = None


@dataclass(frozen=True)
class StepNeeds:
    """What one traced step needs on one accelerator, for one batch size."""

    vram: VramBudget
    step_s: float | None
    """Time of forward, backward and update; None if the device is unknown."""
    trace: Trace | None = None
    """Used to compute the time on other numbers of accelerators."""


@dataclass(frozen=True)
class PlannedRun:
    config: Config
    hardware: Hardware
    data: DataFacts
    measured: MeasuredHere = field(default_factory=MeasuredHere)

    @property
    def task(self) -> Task:
        return task_for(self.config)

    @property
    def step(self) -> TraceableStep:
        return self.task.traceable_step(self.config, self.data)

    @property
    def total_batch(self) -> int:
        return self.config.batch_size * self.hardware.world * self.config.gradient_accumulation

    @property
    def workers(self) -> int:
        """Per rank."""
        number = self.config.num_workers
        if isinstance(number, int):
            return number
        return workers_for(self.hardware.cpus, self.hardware.gpus, on_gpu=not self.hardware.on_cpu)

    @property
    def prefetch(self) -> int:
        return self.config.prefetch_factor or DEFAULT_PREFETCH

    @property
    def steps_per_epoch(self) -> int | None:
        return self.task.updates_per_epoch(self.config, self.data.samples, self.hardware.world)

    @property
    def lr(self) -> float:
        return scaled_lr(self.config.lr, self.total_batch, self.config.lr_reference_batch, self.config.scale_lr)


def trace_needs(job: PlannedRun, *, search: bool = True) -> StepNeeds:
    """VRAM and time of the real step, from tracing it. Without `search`, the largest batch is only searched for if this
    one does not fit: that takes three more traces."""
    config, hardware = job.config, job.hardware
    vram, trace = trace_vram(
        job.step, config.batch_size, hardware.vram_bytes, compiled=config.compile_model, gpus=hardware.world,
        search=search,
    )  # fmt: skip
    if not search and vram.fits is False:
        return trace_needs(job)
    return StepNeeds(vram, None if trace is None else step_s_of(job, trace), trace)


def step_s_of(job: PlannedRun, trace: Trace) -> float | None:
    """The time of a traced step on the job's accelerators; None if they are unknown."""
    config, hardware = job.config, job.hardware
    if hardware.sheet is None:
        return None
    return step_seconds(
        trace.ops, hardware.sheet, channels_last=config.channels_last, compiled=config.compile_model,
        tf32=config.matmul_precision != "highest",
        all_reduce=AllReduce(trace.trained_bytes, hardware.gpus, hardware.nodes),
    ).total_s  # fmt: skip


def make_plan(job: PlannedRun, needs: StepNeeds | None, *, name: str = "config", scaling: bool = True) -> Plan:
    """Puts the parts together. Without `needs` the plan leaves out the accelerator."""
    config, hardware = job.config, job.hardware
    time = time_budget(_rates(job, None if needs is None else needs.step_s), job)
    vram = needs.vram if needs is not None and not hardware.on_cpu else None
    shape, ram = _ram(job, needs)
    shm, disk, files = shm_budget(shape, hardware.shm_bytes), _disk(job, needs), open_files_budget(shape)
    if not hardware.is_here:
        files = replace(files, limit=None)  # it was read on this machine
    found = [
        *_batch_findings(job.total_batch, job.data.samples),
        *_vram_findings(vram, job),
        *_ram_findings(ram, job, needs),
        *_other_findings(shm, disk, files),
        *time_findings(time, job, name),
    ]  # fmt: skip
    warning = lr_warning(config.optimizer, job.lr, job.total_batch)
    if warning and "lr_reference_batch" not in config.model_fields_set:
        found.append(Finding(warning, name="lr-above-published"))
    return Plan(
        hardware=hardware.describe(), batch_size=config.batch_size, total_batch=job.total_batch, lr=job.lr,
        steps_per_epoch=job.steps_per_epoch, epochs=config.epochs, vram=vram, ram=ram, shm=shm, disk=disk,
        open_files=files, time=time, scaling=_scaling(job, needs) if scaling else (),
        findings=tuple(found), assumptions=_assumptions(job, ram), unit=job.task.unit,
        on_cpu=hardware.on_cpu, cpus=hardware.cpus, cores=hardware.cores or hardware.cpus,
    )  # fmt: skip


def _rates(job: PlannedRun, step_s: float | None) -> dict[str, Rate]:
    """Images per second of each part with a known rate."""
    hardware, rates = job.hardware, {}
    if step_s and hardware.sheet is not None:
        rates["accelerator"] = Rate(job.total_batch / step_s, f"roofline of {hardware.world} x {hardware.sheet.title}")
    per_core, source = job.measured.images_per_core_second, "measured here"
    if per_core is None and job.data.figures is not None:
        per_core, source = job.data.figures.samples_per_core_second, "assumed; results/loaders"
    if per_core is not None:
        rates["loader"] = loader_rate(job, per_core, source)
    if hardware.storage is not None and job.data.sample_bytes is not None:
        rates["storage"] = hardware.storage.rate(job.data.sample_bytes, hardware.world)
    return rates


def host_shape(job: PlannedRun, needs: StepNeeds | None) -> HostShape:
    config, hardware, data = job.config, job.hardware, job.data
    engine = choose_engine(config.loader, job.workers, volumes=job.task.releases_gil)
    on_gpu = not hardware.on_cpu
    train = LoaderSettings(
        engine, job.workers, job.prefetch, config.batch_size, data.row_bytes, data.whole_files,
        held=batches_in_hand(config.gradient_accumulation, on_gpu=on_gpu),
    )  # fmt: skip
    val = replace(
        train, batch=config.val_batch_size or config.batch_size, sample_bytes=data.val_row_bytes,
        held=batches_in_hand(1, on_gpu=on_gpu),
    )  # fmt: skip
    parts = {} if needs is None else needs.vram.parts
    weights = parts.get("parameters", 0)
    state = weights + parts.get("optimizer", 0) + parts.get("ema", 0)
    samples = None if data.samples is None else int(data.samples * (1 + VALIDATION_SHARE))
    # On the CPU the step uses host memory, and there is no driver and no caching allocator.
    outside = sum(parts.get(name, 0) for name in ("context", "workspace", "fragmentation"))
    return HostShape(
        loader=train, validation=val, persistent_workers=config.persistent_workers, processes=hardware.gpus,
        on_gpu=on_gpu, samples=samples, lookahead_bytes=config.lookahead,
        remote="://" in (config.data_root or ""), model_bytes=weights, state_bytes=state,
        step_bytes=needs.vram.peak_bytes - outside if needs is not None and hardware.on_cpu else 0,
        cache_bytes=job.task.kept_bytes(config),
    )  # fmt: skip


def _ram(job: PlannedRun, needs: StepNeeds | None) -> tuple[HostShape, RamBudget]:
    shape = host_shape(job, needs)
    measured = job.measured
    budget = ram_budget(
        shape, measured.loader_memory, limit_bytes=job.hardware.ram_bytes, os_bytes=measured.used_by_others_bytes
    )
    return shape, budget


def _disk(job: PlannedRun, needs: StepNeeds | None) -> Budget | None:
    """Checkpoints, cache and local copy; None if the size of the model is unknown."""
    if needs is None:
        return None
    parts = needs.vram.parts
    state = parts.get("parameters", 0) + parts.get("optimizer", 0) + parts.get("ema", 0)
    kept = 0 if job.config.fast_dev_run else job.config.save_top_k + CHECKPOINTS_BESIDE_THE_BEST
    wanted = {"checkpoints": kept * state}
    if job.config.cache_dir is not None:
        everything = job.data.dataset_bytes or 0.0
        wanted["cache"] = int(min(everything, job.config.cache_size or everything))
    if job.config.stage_to is not None:
        wanted[LOCAL_COPY] = int(job.data.dataset_bytes or 0.0)
    return Budget(sum(wanted.values()), job.hardware.disk_bytes, wanted)


def _scaling(job: PlannedRun, needs: StepNeeds | None) -> tuple[ScalingRow, ...]:
    """The same settings per accelerator, for more accelerators in one node."""
    if job.hardware.on_cpu:
        return ()
    rows = []
    for gpus in SCALING:
        more = replace(job, hardware=replace(job.hardware, gpus=gpus, nodes=1))
        rates = _rates(more, None if needs is None or needs.trace is None else step_s_of(more, needs.trace))
        pace = min(rate.images_per_second for rate in rates.values()) if "accelerator" in rates else None
        steps = more.steps_per_epoch
        days = None
        if pace is not None and steps is not None:
            days = steps * more.total_batch / pace * job.config.epochs / DAY_S
        ram = _ram(more, needs)[1].total_bytes
        rows.append(ScalingRow(more.hardware.world, more.total_batch, job.workers * gpus, ram, more.lr, pace, days))
    return tuple(rows)


def _assumptions(job: PlannedRun, ram: RamBudget) -> tuple[str, ...]:
    said, task, figures = [*job.data.assumptions, *job.hardware.stated], job.task, job.data.figures
    if not ram.measured:
        said.append("memory per worker: figures for torch 2.15 on Linux; --measure measures it here")
    if job.measured.images_per_core_second is None:
        said.append(
            f"reading: unknown, so no limit is assumed; --measure measures it on your {task.items}"
            if figures is None
            else f"{task.unit}/s per core: figures for {figures.source}; --measure measures it on yours"
        )
    if job.hardware.storage is None:
        said.append("storage: unknown, so no limit is assumed; --storage fsx, s3, gp3 or 500MB/s")
    else:
        said.append(f"storage {job.hardware.storage.name}: {job.hardware.storage.source}")
    said.append("time: without validation, start-up and compilation")
    if job.config.early_stopping is not None:
        said.append(f"time: all {job.config.epochs} epochs, though early_stopping may end the run sooner")
    return tuple(said)


# Above this share of a limit, the error of the plan itself decides whether it fits.
TIGHT = 0.9
LOCAL_COPY = "local copy"
"""The part of the disk that `stage_to` takes."""


def _vram_findings(vram: VramBudget | None, job: PlannedRun) -> list[Finding]:
    """Whether the step fits on the accelerator, and the batch size that does."""
    if vram is None or vram.limit_bytes is None:
        return []
    batch_size, accumulation = job.config.batch_size, job.config.gradient_accumulation
    needed, limit = size_text(vram.peak_bytes), size_text(vram.limit_bytes)
    sizes = f"a step needs up to {needed} of VRAM, the accelerator has {limit}"
    if vram.fits:
        if vram.peak_bytes > TIGHT * vram.limit_bytes:
            smaller_batch = f"batch_size={batch_size * 3 // 4}" if batch_size >= 4 else None
            return [Finding(f"{sizes}: it fits, with little to spare", smaller_batch, name="vram-tight")]
        return []
    fixes = []
    if vram.largest_batch:
        pieces = -(-batch_size * accumulation // vram.largest_batch)
        fitting = max(1, batch_size * accumulation // pieces)
        fixes.append(f"batch_size={fitting} gradient_accumulation={pieces} (the same total batch)")
    checkpointed = vram.largest_batch_checkpointed
    if checkpointed and checkpointed > (vram.largest_batch or 0):
        fixes.append(f"gradient_checkpointing=true batch_size={min(batch_size, checkpointed)}")
    if not fixes:
        smaller = "" if job.task.size_key is None else f"a smaller {job.task.size_key}=, "
        fixes.append(f"{smaller}a smaller model, or an accelerator with more memory")
    return [Finding(sizes, "; or ".join(fixes), name="vram-exceeded", status="failed")]


def _ram_findings(ram: RamBudget, job: PlannedRun, needs: StepNeeds | None) -> list[Finding]:
    """Whether the host has enough memory, and the most workers and batches in flight that fit."""
    if ram.limit_bytes is None:
        return []
    sizes = f"the run needs {size_text(ram.total_bytes)} of RAM, the host has {size_text(ram.limit_bytes)}"
    if ram.fits:
        if ram.total_bytes > TIGHT * ram.limit_bytes:
            return [Finding(f"{sizes}: it fits, with little to spare for the page cache", name="ram-tight")]
        return []
    fix = "a lower num_workers=, prefetch_factor= or batch_size="
    # Fewer batches first, but two for each worker: that costs the least speed.
    prefetches = range(job.prefetch, min(2, job.prefetch) - 1, -1)
    fewer = [(workers, prefetch) for workers in range(max(1, job.workers), 0, -1) for prefetch in prefetches]
    for workers, prefetch in (*fewer, (1, 1)):
        less = job.config.model_copy(update={"num_workers": workers, "prefetch_factor": prefetch})
        if _ram(replace(job, config=less), needs)[1].total_bytes <= TIGHT * ram.limit_bytes:
            fix = f"num_workers={workers} prefetch_factor={prefetch}"
            break
    return [Finding(sizes, fix, name="ram-exceeded", status="failed")]


def _other_findings(shm: Budget, disk: Budget | None, open_files: Budget) -> list[Finding]:
    """What else can run out: shared memory, disk, open files."""
    found = []
    if shm.fits is False:
        found.append(
            Finding(
                f"the loader needs {size_text(shm.needed)} of shared memory, /dev/shm has {size_text(shm.limit or 0)}",
                "loader=thread, a lower prefetch_factor=, or docker run --shm-size / mount -o remount,size=",
                name="shm-exceeded",
                status="failed",
            )
        )
    if disk is not None and disk.fits is False:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in disk.parts.items() if size)
        found.append(
            Finding(
                f"the run needs {size_text(disk.needed)} of disk ({parts}), {size_text(disk.limit or 0)} are free",
                "a lower save_top_k= or cache_size=, or runs_dir= or stage_to= on a larger disk",
                name="disk-exceeded",
                # A local copy that does not fit is left incomplete, and the rest is read from the source.
                status="failed" if disk.needed - disk.parts.get(LOCAL_COPY, 0) > (disk.limit or 0) else "advice",
            )
        )
    if open_files.fits is False:
        found.append(
            Finding(
                f"the run needs {open_files.needed:,} open files, {open_files.limit:,} are allowed",
                f"ulimit -n {open_files.needed * 2}",
                name="open-files-exceeded",
                status="failed",
            )
        )
    return found


def _batch_findings(total_batch: int, samples: int | None) -> list[Finding]:
    """A total batch larger than the data set: every epoch would be empty."""
    if samples is None or total_batch <= samples:
        return []
    return [
        Finding(
            f"a total batch of {total_batch:,} from {samples:,} images: the last partial batch is dropped, "
            "so every epoch would be empty",
            "a lower batch_size=, or fewer accelerators",
            name="batch-larger-than-data",
            status="failed",
        )
    ]
