"""The steps of `stoker plan`, in order: config, machine, data, trace, plan."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.config import Config, config_values, load_config
from stoker.config.fields import parse_bytes
from stoker.config.reading import load_for_command
from stoker.core.console import progress_bar, say_notes
from stoker.core.errors import StokerError, UsageError
from stoker.io.cache import copied_bytes
from stoker.loader.loader_memory import STATED
from stoker.plan.break_even import ANY_DISK
from stoker.plan.budget import (
    Hardware,
    MeasuredHere,
    PlannedRun,
    StepNeeds,
    check_counts,
    host_shape,
    make_plan,
    step_s_of,
    trace_needs,
)
from stoker.plan.records import Plan
from stoker.plan.roofline import step_seconds
from stoker.plan.timing import CLOUD_THREADS_PER_CORE, SECOND_THREAD_GAIN, cores_worth, read_storage
from stoker.plan.tracing import CannotTrace, trace_forward, trace_step
from stoker.plan.vram import outside_bytes, parts_at_peak, replay, usage_under
from stoker.profile.accelerators import measure_cpu
from stoker.profile.datasheets import Datasheet, datasheet_for_device, load_datasheet
from stoker.profile.host import HostConfig, Machine, fit_to_machine, physical_cores, read_machine, usable_cpus
from stoker.profile.memory import used_by_others_bytes
from stoker.profile.mounts import LocalDisk, find_local_disk
from stoker.run.folder import run_folder_for
from stoker.tasks.base import task_for
from stoker.tasks.building import trial_run
from stoker.tasks.plan_facts import ForwardCost, StepCost, loader_memory

TRIAL_S = 3.0
MOST_BATCH = 64


def samples_per_core_second(config: HostConfig) -> float | None:
    """Samples per second and physical core; None if the data cannot be read from here."""
    task, workers = task_for(config), usable_cpus()
    # Small batches: the first ones are ready sooner, and only samples are counted.
    small = config.model_copy(update={"batch_size": min(config.batch_size, MOST_BATCH), "pin_memory": False})
    try:
        data = task.open_data(small, lambda _line: None)
    except StokerError:
        return None
    speed = task.measure_speed(small, data, workers=workers, seconds=TRIAL_S)
    return speed.images_per_second / cores_worth(workers, physical_cores(workers) or workers)


# The default size limit of a tmpfs is half of the memory (Linux, Documentation/filesystems/tmpfs).
SHM_SHARE_OF_RAM = 0.5
# 430 to 558 images/s for one config on one machine, which was not idle; bench/plan_spread.py measures it.
SPREAD = 0.15
BUSY_LOAD = 0.5
"""Runnable processes per core from which measurements share the cores with other programs."""


@dataclass(frozen=True)
class WantedMachine:
    """The machine as the user describes it; None means the value of this machine."""

    gpu: str | None = None
    cpus: int | None = None
    ram: str | None = None
    shm: str | None = None
    disk: str | None = None
    price: float | None = None
    storage: str | None = None
    samples: int | None = None
    measure: bool = False
    cores: int | None = None
    """Physical ones behind the `cpus`; None: two threads each, as in the clouds."""
    alone: bool = False
    """One accelerator, whatever the config says."""


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from."""

    plan: Plan
    job: PlannedRun
    needs: StepNeeds
    path: Path
    overridden: dict[str, Any]
    """Keys that the command line set on top of the file."""


def plan_config(path: Path, overrides: Sequence[str], wanted: WantedMachine) -> Planned:
    config = load_for_command(path, overrides).config
    in_file = config_values(load_config(path, []).config) if overrides else config_values(config)
    overridden = {key: value for key, value in config_values(config).items() if value != in_file[key]}
    config = trial_run(config)
    hardware = hardware_for(config, path, wanted, read_machine())
    config, notes = fit_to_machine(
        config,
        Machine(cpus=hardware.cpus, accelerators=0 if hardware.on_cpu else hardware.gpus),
    )
    say_notes(notes)
    with progress_bar("listing", None) as advance:
        data = task_for(config).plan_facts(config, wanted.samples, advance)
    measured = MeasuredHere(STATED, None, used_by_others_bytes() if hardware.is_here else None)
    if wanted.measure:
        with progress_bar("measuring the loader", None):
            memory, speed = loader_memory(), samples_per_core_second(config)
        measured = replace(measured, loader_memory=memory, images_per_core_second=speed)
    job = PlannedRun(config, hardware, data, measured)
    with progress_bar("tracing the step", None):
        needs = trace_needs(job)
        plan = with_part(make_plan(job, needs, name=path.name), job, needs)
    return Planned(plan, job, needs, path, overridden)


@dataclass(frozen=True)
class _Accelerator:
    sheet: Datasheet | None
    vram_bytes: int | None
    count_here: int
    on_cpu: bool = False


def hardware_for(
    config: Config, path: Path | None, wanted: WantedMachine, machine: Machine, *, for_start: bool = False
) -> Hardware:
    """The machine that the user describes, or this one; with `for_start` nothing is measured."""
    check_counts(wanted.cpus, wanted.cores)
    described = any(value is not None for value in (wanted.gpu, wanted.cpus, wanted.ram))
    accelerator = _accelerator(config, wanted, machine, for_start=for_start)
    here = accelerator.count_here if not described else 1
    gpus, nodes = (config.devices if isinstance(config.devices, int) else here), config.num_nodes
    if wanted.alone:
        gpus = nodes = 1
    ram = _bytes("--ram", wanted.ram) or (machine.ram_bytes if wanted.gpu is None or wanted.cpus is None else None)
    shm = _bytes("--shm", wanted.shm)
    if shm is None:
        shm = int(SHM_SHARE_OF_RAM * ram) if wanted.ram is not None and ram is not None else machine.shm_bytes
    stated = []
    if described and wanted.cpus is None:
        stated.append(f"cores: {machine.cpus}, as on this machine; --cpus for another number")
    cores = wanted.cores
    if cores is None and wanted.cpus is not None:
        cores = -(-wanted.cpus // CLOUD_THREADS_PER_CORE)
        if cores < wanted.cpus:
            stated.append(
                f"cores: {wanted.cpus} vCPUs are the threads of {cores} cores, and a second thread adds "
                f"{SECOND_THREAD_GAIN:.0%}; --cores {wanted.cpus} if each has its own"
            )
    elif cores is None:
        cores = machine.cores
    if described and wanted.ram is None:
        stated.append(
            "RAM: unknown, so no limit is assumed; --ram 62GB"
            if ram is None
            else f"RAM: {ram / 1e9:.0f} GB, as on this machine; --ram for another size"
        )
    if accelerator.on_cpu and not for_start:
        stated += cpu_caveats(machine.cpus)
    disk = _bytes("--disk", wanted.disk) or (None if described else _free_disk(config, path))
    room = None  # for a copy of the data
    if not for_start and not described:
        room = find_local_disk()
    elif not for_start and disk is not None:
        room = LocalDisk(ANY_DISK, disk)
    return Hardware(
        gpus=max(1, gpus), nodes=nodes, cpus=wanted.cpus or machine.cpus,
        cores=cores,
        sheet=accelerator.sheet, vram_bytes=accelerator.vram_bytes, on_cpu=accelerator.on_cpu, ram_bytes=ram,
        shm_bytes=shm, disk_bytes=disk, storage=None if wanted.storage is None else read_storage(wanted.storage),
        room=room, price_per_hour=wanted.price,
        is_here=not described, stated=tuple(stated),
    )  # fmt: skip


def cpu_caveats(cpus: int) -> list[str]:
    """How reliable figures measured on these cores are."""
    load = os.getloadavg()[0]
    spread = f"{100 * SPREAD:.0f} %"
    said = [f"the model's time: measured on these cores just now; another measurement may differ by {spread}"]
    if load > BUSY_LOAD * cpus:
        said.append(f"this machine is busy (load {load:.1f} on {cpus} cores): idle, it would be faster")
    return said


def _accelerator(config: Config, wanted: WantedMachine, machine: Machine, *, for_start: bool) -> _Accelerator:
    named = wanted.gpu or (config.accelerator if machine.accelerators or not for_start else None)
    if named is not None:
        sheet = load_datasheet(named)
        return _Accelerator(sheet, sheet.vram_bytes, max(1, machine.accelerators or 1))
    if machine.accelerators:
        import torch

        if torch.cuda.is_available():
            # GPU only.
            sheet_here = datasheet_for_device(torch.cuda.get_device_name(0))
            return _Accelerator(sheet_here, torch.cuda.mem_get_info(0)[1], torch.cuda.device_count())
    return _Accelerator(None if for_start else measure_cpu(), None, 1, on_cpu=True)


def _bytes(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError("size-without-unit", f"{option} {text}: {error}", hint=f"{option} {text}GB") from None


def _free_disk(config: Config, path: Path | None) -> int | None:
    """Disk space for this run: what is free, plus what its own checkpoints and its local copy already take."""
    own = run_folder_for(config, path).checkpoints
    taken = sum(file.stat().st_size for file in own.glob("*.ckpt")) if own.is_dir() else 0
    if config.stage_to is not None:
        taken += _for_local_copy(Path(config.stage_to).expanduser(), Path(config.runs_dir))
    try:
        return shutil.disk_usage(_existing(Path(config.runs_dir))).free + taken
    except OSError:
        return None


def _for_local_copy(folder: Path, runs_dir: Path) -> int:
    """Bytes that a local copy already has, and what is free for the rest if it is on a disk of its own."""
    with suppress(OSError):
        disk = _existing(folder)
        apart = disk.stat().st_dev != _existing(runs_dir).stat().st_dev
        return copied_bytes(folder) + (shutil.disk_usage(disk).free if apart else 0)
    return 0


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def with_part(plan: Plan, job: PlannedRun, needs: StepNeeds) -> Plan:
    """The plan with what its task adds to it."""
    pace = plan.time.rates.get("accelerator")
    costs = _JobCosts(job, needs, None if pace is None else pace.images_per_second)
    part = job.task.plan_part(job.config, job.data, costs)
    return plan if part is None else replace(plan, part=part, findings=(*plan.findings, *part.findings))


@dataclass(frozen=True)
class _JobCosts:
    """`tasks.plan_facts.StepCosts` of a planned run."""

    job: PlannedRun
    needs: StepNeeds
    samples_per_second: float | None

    @property
    def worker_bytes(self) -> int:
        loader, memory = host_shape(self.job, self.needs).loader, self.job.measured.loader_memory
        each = memory.worker if loader.engine == "process" else memory.thread
        return each + self.job.prefetch * loader.batch_bytes

    def step(self, config: Config) -> StepCost | None:
        job = replace(self.job, config=config)
        if job.hardware.on_cpu:
            return None
        try:
            own = self.needs.trace if config == self.job.config else None
            trace = own or trace_step(job.step)
        except CannotTrace:
            return None
        limit = job.hardware.vram_bytes
        outside = outside_bytes(trace, compiled=config.compile_model, gpus=job.hardware.world)
        usage = usage_under(trace, limit, outside)
        peak = sum(parts_at_peak(trace, usage, outside).values())
        step_s = step_s_of(job, trace)
        return StepCost(
            usage.allocated_peak, peak, None if limit is None else peak <= limit,
            None if step_s is None else job.total_batch / step_s,
        )  # fmt: skip

    def forward(self, batch: int) -> ForwardCost | None:
        config, hardware = self.job.config, self.job.hardware
        try:
            trace = trace_forward(self.job.step, batch)
        except CannotTrace:
            return None
        vram = seconds = None
        if not hardware.on_cpu:
            outside = outside_bytes(trace, compiled=False, gpus=1)
            vram = replay(trace.events, trace.sizes).reserved_peak + sum(outside.values())
        if hardware.sheet is not None:
            tf32 = config.matmul_precision != "highest"
            seconds = step_seconds(trace.ops, hardware.sheet, channels_last=config.channels_last, tf32=tf32).total_s
        return ForwardCost(seconds, vram)
