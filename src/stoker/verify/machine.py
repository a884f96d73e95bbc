"""Checks of the host: memory, disk and files for the whole run, its cores, and its accelerators (count, driver, link,
clocks, memory errors, a product that comes out right); and what to expect of the run: time, memory and cost by plan,
accuracy where it is published."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.core.errors import StokerError
from stoker.core.finding import Finding
from stoker.core.units import count, duration_text, size_text
from stoker.profile.host import allowed_cores
from stoker.tasks.base import task_for
from stoker.tasks.checks import Check, Subject, failed, passed, unknown

if TYPE_CHECKING:
    import torch

    from stoker.plan.records import Plan

# With a single core, a rank's loader and its training thread take turns. Only reported if the host has many more: a
# small machine cannot be changed.
LEAST_CORES = 2
FAR_MORE = 4


def plan_of(subject: Subject) -> Plan:
    """What the run needs on this machine, and how long it takes: as `stoker plan` says without options."""
    return subject.once("plan", _make_plan)


def _make_plan(subject: Subject) -> Plan:
    from stoker.loader.loader_memory import STATED
    from stoker.plan.budget import MeasuredHere, PlannedRun, make_plan, trace_needs
    from stoker.plan.planning import WantedMachine, hardware_for
    from stoker.profile.memory import used_by_others_bytes

    config = subject.config
    wanted = WantedMachine(price=subject.price_per_hour)
    hardware = hardware_for(config, subject.path, wanted, subject.machine)
    data = task_for(config).plan_facts(config)
    job = PlannedRun(config, hardware, data, MeasuredHere(STATED, None, used_by_others_bytes()))
    return make_plan(job, trace_needs(job, search=False), name=subject.path.name, scaling=False)


def check_ram(subject: Subject) -> Finding:
    ram = plan_of(subject).ram
    return _judge(plan_of(subject), "ram-exceeded", ram.total_bytes, ram.limit_bytes, "of RAM")


def check_shm(subject: Subject) -> Finding:
    shm = plan_of(subject).shm
    return _judge(plan_of(subject), "shm-exceeded", shm.needed, shm.limit, "of shared memory")


def check_vram(subject: Subject) -> Finding | None:
    vram = plan_of(subject).vram
    if vram is None:
        return None
    return _judge(plan_of(subject), "vram-exceeded", vram.peak_bytes, vram.limit_bytes, "of VRAM")


def check_disk(subject: Subject) -> Finding:
    """The disk holds all checkpoints of the run, and its folder can be written."""
    folder = Path(subject.config.runs_dir).absolute()
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        return failed(f"{existing} is not writable, and runs are kept in {folder}", "runs_dir=/a/writable/folder")
    disk = plan_of(subject).disk
    if disk is None:
        return unknown("the size of the checkpoints is not known")
    return _judge(plan_of(subject), "disk-exceeded", disk.needed, disk.limit, f"of disk at {existing}")


def check_open_files(subject: Subject) -> Finding:
    files = plan_of(subject).open_files
    return _judge(plan_of(subject), "open-files-exceeded", files.needed, files.limit, "open files", lambda n: f"{n:,}")


def _judge(
    plan: Plan, refusal: str, needed: int, limit: int | None, what: str, show: Callable[[int], str] = size_text
) -> Finding:
    """What the plan says about one resource: its refusal, with the fix, or how much of the limit is needed."""
    facts: dict[str, Any] = {"needed": needed, "limit": limit}
    for finding in plan.refused:
        if finding.name == refusal:
            return failed(finding.seen, finding.fix or "a smaller batch_size=", **facts)
    if limit is None:
        return unknown(f"{show(needed)} {what} needed; the limit is not known", None, **facts)
    return passed(f"{show(needed)} of {show(limit)} {what}", **facts)


def check_cores(subject: Subject) -> Finding:
    """The affinity of this process leaves it enough of the host's cores."""
    return judge_cores(len(allowed_cores()), os.cpu_count() or 1, subject.machine.ranks or subject.config.devices)


def judge_cores(allowed: int, present: int, ranks: int) -> Finding:
    """`allowed` cores of those `present`, for this many ranks on this host."""
    facts = {"allowed": allowed, "present": present, "ranks": ranks}
    if allowed < LEAST_CORES * ranks and present > FAR_MORE * allowed:
        return failed(
            f"this process may run on {allowed} of {present} cores, for {count(ranks, 'rank')}",
            "srun --cpus-per-task=N, taskset -c 0-N, or docker run --cpuset-cpus; unset OMP_PROC_BIND",
            **facts,
        )
    return passed(f"{allowed} of {present} cores may be used", **facts)


def check_cpu_quota(subject: Subject) -> Finding | None:
    """A container's CPU quota is not smaller than the number of workers: each of them would be stopped in turn."""
    from stoker.core.cgroups import cpu_quota

    quota = cpu_quota()
    ranks = subject.machine.ranks or subject.config.devices
    return None if quota is None else judge_quota(quota, subject.config.num_workers * ranks, ranks)


def judge_quota(quota: float, workers: int, ranks: int) -> Finding:
    facts = {"quota_cores": quota, "workers": workers}
    if workers > max(quota, ranks):
        fitting = max(1, int(quota) // ranks)
        return failed(
            f"the container may use {quota:g} cores, and {workers} workers want to run: the kernel stops all of them "
            "in turn, the training thread too",
            f"num_workers={fitting}, or docker run --cpus={workers + ranks}",
            **facts,
        )
    return passed(f"{quota:g} cores for {workers} workers", **facts)


def check_threads(subject: Subject) -> Finding:
    """OpenMP's variables do not make threads spin, pin ranks to the same cores, or start too many."""
    return judge_threads(os.environ, subject.machine.cpus, subject.machine.ranks or subject.config.devices)


def judge_threads(environment: Mapping[str, str], cpus: int, ranks: int) -> Finding:
    names = (
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "OMP_PROC_BIND",
        "GOMP_CPU_AFFINITY",
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
    )
    seen = {name: environment[name] for name in names if name in environment}
    said = ", ".join(f"{name}={value}" for name, value in seen.items())
    # 142 s against 20 s for the same training on two shared cores (stoker.commands.options).
    if seen.get("OMP_WAIT_POLICY", "").lower() == "active" or seen.get("KMP_BLOCKTIME", "").lower() == "infinite":
        return failed(
            f"{said}: threads spin while they wait, and take the cores from the loader",
            "unset OMP_WAIT_POLICY KMP_BLOCKTIME",
            **seen,
        )
    bound = seen.get("OMP_PROC_BIND", "false").lower() not in ("false", "0") or "GOMP_CPU_AFFINITY" in seen
    if bound and ranks > 1:
        return failed(
            f"{said}: each of the {ranks} ranks is bound to the same first cores",
            "unset OMP_PROC_BIND GOMP_CPU_AFFINITY",
            **seen,
        )
    threads = seen.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads.isdigit() and int(threads) > cpus:
        return failed(
            f"{said}: more threads than the {cpus} cores that may be used",
            f"OMP_NUM_THREADS={max(1, cpus // ranks)}",
            **seen,
        )
    # Ours, set when a command starts.
    usual = {"OMP_WAIT_POLICY": "PASSIVE"}
    return passed("one thread for each core, which sleeps while it waits" if seen in ({}, usual) else said, **seen)


def check_wandb(subject: Subject) -> Finding | None:
    from importlib.util import find_spec

    from stoker.run.trackers import why_offline

    config = subject.config
    mode = os.environ.get("WANDB_MODE")
    if not (config.wandb or config.wandb_project is not None) or mode == "disabled":
        return None
    if find_spec("wandb") is None:
        return failed("the wandb package is not installed", "pip install 'stoker[trackers]', or wandb=false")
    if mode in ("offline", "dryrun"):
        return passed(f"offline (WANDB_MODE={mode}); `wandb sync` sends it later", online=False)
    why = why_offline()
    if why is not None:
        fix = "wandb login" if why.startswith("no key") else "check the network or WANDB_BASE_URL"
        return failed(f"the run would be logged offline: {why}", f"{fix}; or WANDB_MODE=offline", online=False)
    return passed("reachable, with a key", online=True)


# Accelerators. What the driver knows comes from nvidia-smi; nothing is concluded from a field that it does not know.

TIMEOUT_S = 10.0
SIDE = 1024
_XID = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<number>\d+)")
# By NVIDIA's list of Xid messages, these come from a program's mistake or its end (13, 31, 43, 45), or record a repair
# (63); all others can mean a damaged device.
HARMLESS_XIDS = {13, 31, 43, 45, 63}


def query_gpus(*fields: str) -> list[dict[str, str | None]] | None:
    """These fields of every GPU, as nvidia-smi prints them; None where it cannot tell."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0:
        return None  # no driver, or a field that this version does not know
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [
        {name: None if part.startswith("[") or part == "N/A" else part for name, part in zip(fields, row, strict=False)}
        for row in rows
    ]


def check_gpus(subject: Subject) -> Finding:
    """As many GPUs as the config wants, all alike."""
    wanted = subject.config.devices
    seen = query_gpus("name", "driver_version")
    if seen is None:
        return unknown("nvidia-smi does not answer", "install NVIDIA's driver, or check it with: nvidia-smi")
    present = min(len(seen), subject.machine.accelerators or 0)
    names = sorted({str(gpu["name"]) for gpu in seen})
    driver = seen[0]["driver_version"] if seen else None
    facts = {"present": present, "wanted": wanted, "names": names, "driver": driver}
    if wanted > present:
        return failed(f"the config wants {wanted} GPUs, and {present} are here", f"devices={present}", **facts)
    if len(names) > 1 and wanted > 1:
        return failed(
            f"the GPUs differ ({', '.join(names)}): every step waits for the slowest",
            "CUDA_VISIBLE_DEVICES= with GPUs of one kind",
            **facts,
        )
    return passed(f"{wanted} of {present} {names[0]}, driver {driver}", **facts)


def check_torch_sees_gpus(_subject: Subject) -> Finding:
    import torch

    return judge_torch(torch.cuda.is_available(), torch.version.cuda, torch.__version__)


def judge_torch(available: bool, cuda: str | None, version: str) -> Finding:
    """Whether torch can use the GPUs that the kernel shows."""
    if cuda is None and not available:
        return failed(f"torch {version} is built for the CPU only", "pip install a torch build with CUDA or ROCm")
    if not available:
        return failed(
            f"torch {version} cannot use the GPU: it needs a driver for CUDA {cuda}",
            "a newer NVIDIA driver, or a torch build for an older CUDA; `nvidia-smi` shows the driver's version",
        )
    return passed(f"torch {version} with CUDA {cuda}")


def check_link(_subject: Subject) -> Finding:
    """Every lane of the PCIe link works. Its generation says nothing: an idle link runs slower to save power."""
    seen = query_gpus("index", "pcie.link.width.current", "pcie.link.width.max")
    known = [
        (gpu["index"], _number(gpu["pcie.link.width.current"]), _number(gpu["pcie.link.width.max"]))
        for gpu in seen or []
    ]
    widths = [(index, now, most) for index, now, most in known if now is not None and most is not None]
    if not widths:
        return unknown("nvidia-smi does not report the link")
    narrow = [(index, now, most) for index, now, most in widths if now < most]
    facts = {"widths": [now for _, now, _ in widths], "widest": [most for _, _, most in widths]}
    if narrow:
        said = ", ".join(f"GPU {index} has {now:g} of {most:g} lanes" for index, now, most in narrow)
        return failed(said, "reseat the card or use another slot; a virtual machine may report it wrongly", **facts)
    return passed(f"{widths[0][1]:g} lanes each", **facts)


def check_clocks(_subject: Subject) -> Finding:
    """No GPU is slowed down by heat or by its power supply."""
    # Drivers from 535 on call it an event, older ones throttling.
    for prefix in ("clocks_event_reasons", "clocks_throttle_reasons"):
        reasons = [f"{prefix}.hw_slowdown", f"{prefix}.hw_thermal_slowdown", f"{prefix}.sw_thermal_slowdown"]
        seen = query_gpus("index", "clocks.sm", "clocks.max.sm", "temperature.gpu", *reasons)
        if seen:
            break
    else:
        return unknown("nvidia-smi does not report clocks")
    slowed = [
        f"GPU {gpu['index']} ({', '.join(name.rpartition('.')[2] for name in reasons if gpu[name] == 'Active')}, "
        f"{gpu['temperature.gpu']} °C)"
        for gpu in seen
        if any(gpu[name] == "Active" for name in reasons)
    ]
    facts = {"sm_mhz": [gpu["clocks.sm"] for gpu in seen], "max_sm_mhz": [gpu["clocks.max.sm"] for gpu in seen]}
    if slowed:
        return failed(
            f"slowed down: {', '.join(slowed)}", "check cooling and power: nvidia-smi -q -d PERFORMANCE", **facts
        )
    return passed(f"up to {seen[0]['clocks.max.sm']} MHz, none slowed down by heat or power", **facts)


def check_memory_errors(_subject: Subject) -> Finding:
    """No uncorrected memory errors, and no serious Xid message of the driver in the kernel's log."""
    seen = query_gpus("index", "ecc.errors.uncorrected.volatile.total")
    errors = [(gpu["index"], _number(gpu["ecc.errors.uncorrected.volatile.total"])) for gpu in seen or []]
    xids = read_xids()
    facts = {"ecc_uncorrected": [count for _, count in errors], "xids": xids}
    broken = [f"GPU {index}: {count:g} uncorrected memory errors" for index, count in errors if count]
    serious = sorted({number for number in xids or () if number not in HARMLESS_XIDS})
    if serious:
        broken.append(f"the kernel's log has Xid {', '.join(map(str, serious))}")
    if broken:
        return failed("; ".join(broken), "nvidia-smi --gpu-reset, a reboot, or another machine", **facts)
    ecc = "no uncorrected memory errors" if any(count is not None for _, count in errors) else "ECC is not reported"
    log = "no serious Xid messages" if xids is not None else "the kernel's log cannot be read (sudo dmesg)"
    both = any(count is not None for _, count in errors) or xids is not None
    return passed(f"{ecc}; {log}", **facts) if both else unknown(f"{ecc}; {log}", "sudo dmesg | grep Xid", **facts)


def read_xids() -> list[int] | None:
    """The numbers of the driver's error messages since the host started; None where the log cannot be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=TIMEOUT_S, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0:
        return None
    return [int(match["number"]) for match in _XID.finditer(done.stdout)]


def check_product(_subject: Subject) -> Finding:
    """A large matrix product on each GPU has the right result, to the last bit."""
    import torch

    if not torch.cuda.is_available():
        return unknown("torch cannot use the GPU")
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return judge_products(devices, torch.mm)


def judge_products(
    devices: Sequence[torch.device], multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], side: int = SIDE
) -> Finding:
    """Compares products with those of the host. The factors are -1, 0 and 1: sums of a thousand such products are exact
    in float32, TF32 and float16, so that any difference is an error of the hardware."""
    import torch

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-1, 2, (side, side), generator=generator) for _ in range(2))
    expected = (left.double() @ right.double()).float()
    wrong: list[str] = []
    facts: dict[str, Any] = {}
    for device in devices:
        for dtype in (torch.float32, torch.float16):
            product = multiply(left.to(device, dtype), right.to(device, dtype)).cpu().float()
            count = int((product != expected).sum())
            name = f"{device} {str(dtype).removeprefix('torch.')}"
            facts[name] = count
            if count:
                wrong.append(f"{name}: {count:,} of {side * side:,} numbers are wrong")
    if wrong:
        return failed("; ".join(wrong), "do not train on this device: CUDA_VISIBLE_DEVICES= without it", **facts)
    return passed(f"{side} x {side} products in float32 and float16 are exact on {len(devices)} devices", **facts)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


CHECKS = (
    Check("ram", "machine", "memory for the loader, the model and checkpoints", check_ram),
    Check("shared-memory", "machine", "/dev/shm for worker processes", check_shm),  # noqa: S108 - a label
    Check("vram", "machine", "memory of the accelerator for a step", check_vram),
    Check("disk", "machine", "disk for all checkpoints of the run", check_disk),
    Check("open-files", "machine", "the limit of open files", check_open_files),
    Check("cores", "machine", "cores that this process may run on", check_cores, cheap=True),
    Check("cpu-quota", "machine", "the container's CPU quota", check_cpu_quota, cheap=True),
    Check("threads", "machine", "OpenMP's threads", check_threads, cheap=True),
    Check("wandb", "machine", "Weights & Biases: reachable, or offline on purpose", check_wandb),
    Check("gpus", "machine", "as many GPUs as the config wants, of one kind", check_gpus, on_gpu=True),
    Check("torch-and-driver", "machine", "torch can use the GPUs", check_torch_sees_gpus, on_gpu=True),
    Check("gpu-link", "machine", "the width of the PCIe link", check_link, on_gpu=True),
    Check("gpu-clocks", "machine", "clocks that are not slowed down", check_clocks, on_gpu=True),
    Check("gpu-errors", "machine", "memory errors (ECC) and Xid messages", check_memory_errors, on_gpu=True),
    Check("gpu-product", "machine", "a matrix product with the right result", check_product, on_gpu=True),
)


@dataclass(frozen=True)
class Forecast:
    hours: float | None = None
    images_per_second: float | None = None
    bound_by: str | None = None
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    cost: float | None = None
    milestones: tuple[tuple[int, float], ...] = ()
    """(epoch, val/acc1 in percent), only where a source publishes them for this recipe."""
    milestones_source: str | None = None


def expect(subject: Subject) -> Forecast:
    """What the plan and the recipe say about this run."""
    milestones, source = task_for(subject.config).milestones(subject.config)
    try:
        plan = plan_of(subject)
    except StokerError:
        return Forecast(milestones=milestones, milestones_source=source)
    time = plan.time
    return Forecast(
        hours=None if time.total_s is None else time.total_s / 3600,
        images_per_second=time.images_per_second,
        bound_by=time.bound_by,
        vram_bytes=None if plan.vram is None else plan.vram.peak_bytes,
        ram_bytes=plan.ram.total_bytes,
        disk_bytes=None if plan.disk is None else plan.disk.needed,
        cost=time.cost,
        milestones=milestones,
        milestones_source=source,
    )


def forecast_lines(forecast: Forecast) -> list[str]:
    """How long the run takes, what it needs and costs, and the accuracy that its recipe publishes."""
    lines = []
    if forecast.hours is not None:
        pace = "" if forecast.images_per_second is None else f" at {forecast.images_per_second:,.0f} images/s"
        bound = "" if forecast.bound_by is None else f", bound by the {forecast.bound_by}"
        lines.append(f"time    {duration_text(3600 * forecast.hours)}{pace}{bound} (a plan, not a measurement)")
    sizes = (("VRAM", forecast.vram_bytes), ("RAM", forecast.ram_bytes), ("disk", forecast.disk_bytes))
    memory = [f"{size_text(size)} of {name}" for name, size in sizes if size is not None]
    if memory:
        lines.append(f"memory  {', '.join(memory)}")
    if forecast.cost is not None:
        lines.append(f"cost    {forecast.cost:,.2f}")
    if forecast.milestones:
        points = ", ".join(f"{value:g} % after epoch {epoch}" for epoch, value in forecast.milestones)
        lines.append(f"val     {points} ({forecast.milestones_source})")
    return lines or ["nothing is known: the plan could not be made"]
