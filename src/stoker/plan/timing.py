"""How long a job takes: the slowest of accelerator, loader and storage sets the pace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

from stoker.config.fields import parse_bytes
from stoker.core.errors import UsageError, did_you_mean
from stoker.core.finding import Estimate, Finding
from stoker.core.units import size_text
from stoker.plan.break_even import break_even, break_even_text, staging_fix
from stoker.plan.records import PACKED_BYTES, Rate, TimeBudget
from stoker.tasks.plan_facts import LoaderFigures

if TYPE_CHECKING:
    from stoker.plan.budget import PlannedRun

# Requests that our reader keeps in flight per rank (io/prefetch.py).
REQUESTS_IN_FLIGHT = 64
_BYTES_PER_SECOND = re.compile(r"(.+?)\s*(?:/\s*s|ps)", re.IGNORECASE)


@dataclass(frozen=True)
class StorageKind:
    name: str
    source: str
    bytes_per_second: float | None = None
    """For all readers together; None if only latency and the number of requests limit it."""
    latency_s: float | None = None
    connection_bytes_per_second: float | None = None

    def rate(self, sample_bytes: float, ranks: int) -> Rate:
        """Images per second for a job with this many ranks, each with its own reader."""
        limits = []
        if self.bytes_per_second is not None:
            limits.append(self.bytes_per_second / sample_bytes)
        if self.latency_s is not None:
            transfer_s = sample_bytes / self.connection_bytes_per_second if self.connection_bytes_per_second else 0.0
            limits.append(ranks * REQUESTS_IN_FLIGHT / (self.latency_s + transfer_s))
        return Rate(min(limits), f"{self.name}: {self.source}")


def read_storage(word: str) -> StorageKind:
    """Storage by name (`fsx`, `s3`) or by rate (`500MB/s`); raises UsageError for anything else."""
    stated = _BYTES_PER_SECOND.fullmatch(word.strip())
    if stated is not None:
        try:
            return StorageKind(word, "as given", bytes_per_second=float(parse_bytes(stated[1])))
        except ValueError as error:
            raise UsageError("storage-rate", f"--storage {word}: {error}", hint="--storage 500MB/s") from None
    text = resources.files("stoker.plan").joinpath("storage_rates.yaml").read_text()
    known: dict[str, dict[str, Any]] = yaml.safe_load(text)
    name = word.lower()
    if name not in known:
        meant = did_you_mean(name, known)
        raise UsageError(
            "unknown-storage",
            f"--storage {word} is not a known kind of storage" + (f"; {meant}" if meant else ""),
            hint=f"one of {', '.join(known)}, or a rate such as 500MB/s",
        )
    fields = known[name]
    numbers = {key: float(value) for key, value in fields.items() if key != "source"}
    return StorageKind(name, fields["source"], **numbers)


# What the second hyper-thread adds to a busy core. No measurement of decoding images is published that we know of; of
# other integer work one is: 4 and 8 threads on 4 cores took 9.21 and 7.07 s, 1.30 times as fast (Mercurial, 'perf: add
# threading capability to perfbdiff').
SECOND_THREAD_GAIN = 0.30
# Instances of the large clouds have two unless asked for one (EC2, CpuOptions: ThreadsPerCore; Google Cloud,
# AdvancedMachineFeatures: threads_per_core).
CLOUD_THREADS_PER_CORE = 2
# The rest is for the training loop, the driver and the kernel: with every core decoding, GPU kernels start late.
SHARE_OF_CORES = 0.9
# An accelerator that gets this share of the images it could process counts as busy.
FED = 0.97


def cores_worth(threads: float, cores: int) -> float:
    """Physical cores that would do the work of this many busy threads, which fill one core each before they share."""
    return min(threads, cores) + SECOND_THREAD_GAIN * max(0.0, threads - cores)


def loader_rate(job: PlannedRun, per_core: float, source: str) -> Rate:
    """Samples per second of all loaders together, at this rate per core; more workers than CPUs add nothing."""
    hardware = job.hardware
    cores, nodes = hardware.cores or hardware.cpus, hardware.nodes
    # Without workers the training process prepares the batches itself.
    threads = min(max(1, job.workers) * hardware.gpus, max(1.0, hardware.cpus * SHARE_OF_CORES))
    busy = cores_worth(threads, cores)
    what = f"{busy * nodes:.3g} cores"
    if busy < threads:
        what = f"{threads * nodes:g} threads on {cores * nodes} cores = {what}"
    return Rate(busy * nodes * per_core, f"{what} x {per_core:.0f} {job.task.unit}/s ({source})")


def torch_loader_rate(ours: Rate, figures: LoaderFigures) -> Rate:
    """What torch's DataLoader with PIL would reach with as many workers, from the ratio that was measured."""
    times, (low, high) = figures.faster_than_torch, figures.faster_than_torch_range
    return Rate(
        ours.images_per_second / times, f"ours is {times:g} times as fast ({low:g} to {high:g}; results/loaders)"
    )


def time_budget(rates: dict[str, Rate], job: PlannedRun) -> TimeBudget:
    """Time and cost, without validation and start-up."""
    if not rates:
        return TimeBudget(None, None, {}, None, None, None, None)
    bound_by = min(rates, key=lambda name: rates[name].images_per_second)
    pace = rates[bound_by].images_per_second
    step_s = job.total_batch / pace
    epoch_s = None if job.steps_per_epoch is None else job.steps_per_epoch * step_s
    total_s = None if epoch_s is None else epoch_s * job.config.epochs
    price, figures, loader = job.hardware.price_per_hour, job.data.figures, rates.get("loader")
    cost = None if total_s is None or price is None else total_s / 3600 * price * job.hardware.nodes
    theirs = None if loader is None or figures is None else torch_loader_rate(loader, figures)
    return TimeBudget(pace, bound_by, rates, step_s, epoch_s, total_s, cost, theirs)


def time_findings(time: TimeBudget, job: PlannedRun, config: str) -> list[Finding]:
    """What would have to change for the accelerator to be the slowest part, and the speed-up from it.

    `config` is the file to name in a command."""
    accelerator = time.rates.get("accelerator")
    if accelerator is None or time.images_per_second is None:
        return []
    wanted = accelerator.images_per_second
    if time.images_per_second < FED * wanted:
        return [*_loader_findings(time, job, wanted), *_storage_findings(time, job, wanted, config)]
    if "loader" not in time.rates:
        return []  # what else would be slower is not known
    if job.hardware.on_cpu:
        return [Finding("the model is the slowest part: faster storage would not help", name="model-bound")]
    said = "the accelerator is the slowest part: more cores or storage would not help"
    return [Finding(said, name="accelerator-bound")]


def _loader_findings(time: TimeBudget, job: PlannedRun, wanted: float) -> list[Finding]:
    loader, pace = time.rates.get("loader"), time.images_per_second
    hardware, data, unit = job.hardware, job.data, job.task.unit
    if loader is None or pace is None or loader.images_per_second >= FED * wanted:
        return []
    slow, cpus, nodes = loader.images_per_second, hardware.cpus, hardware.nodes
    others = min(rate.images_per_second for name, rate in time.rates.items() if name != "loader")
    kind = "cores" if hardware.cores in (None, cpus) else "vCPUs"
    found = [
        Finding(
            f"{cpus * nodes} {kind} prepare {slow:,.0f} {unit}/s, the {_takers(job)} can take {wanted:,.0f}: "
            f"that would need {cpus * wanted / slow * nodes:.0f} {kind}",
            f"more {kind}, or num_workers={max(1, round(cpus * SHARE_OF_CORES))} if it is lower",
            _at_most(others / pace),
            name="loader-bound",
        )
    ]
    packed = 0.0 if data.figures is None else slow * data.figures.packing_speedup
    gain = min(packed, others) / pace
    if gain > 1.02 and (data.sample_bytes is None or data.sample_bytes >= PACKED_BYTES):
        found.append(
            Finding(
                f"packed at 500 px, the same cores prepare about {packed:,.0f} {unit}/s",
                "stoker pack DATA_ROOT PACKED --longest 500 --quality 90",
                _at_most(gain),
                name="packing-helps",
            )
        )
    return found


def _storage_findings(time: TimeBudget, job: PlannedRun, wanted: float, config: str) -> list[Finding]:
    storage, pace = time.rates.get("storage"), time.images_per_second
    sample_bytes, dataset_bytes = job.data.sample_bytes, job.data.dataset_bytes
    if storage is None or pace is None or sample_bytes is None or storage.images_per_second >= FED * wanted:
        return []
    now = storage.images_per_second
    message = (
        f"storage delivers {size_text(now * sample_bytes)}/s, "
        f"the {_takers(job)} can take {size_text(wanted * sample_bytes)}/s"
    )
    rest = min(rate.images_per_second for name, rate in time.rates.items() if name != "storage")
    nearer = staging_fix(
        config, is_config=True, root=job.config.data_root, size_bytes=dataset_bytes, disk=job.hardware.room
    )
    if dataset_bytes is not None and nearer.share == 1:
        pays = break_even(dataset_bytes, now * sample_bytes, needed=rest * sample_bytes)
        if pays is not None and pays.epochs is not None:
            message += f"; {break_even_text(pays)}"
    if nearer.about:
        message += f" ({nearer.about})"
    faster = rest if nearer.share == 1 else min(rest, now / (1 - nearer.share))
    return [Finding(message, nearer.fix, _at_most(faster / pace) if nearer.share else None, name="storage-bound")]


def _takers(job: PlannedRun) -> str:
    return "model" if job.hardware.on_cpu else "accelerators"


def _at_most(speedup: float) -> Estimate:
    """The range of a speed-up computed from assumed rates: up to a third of the gain may not materialise."""
    gain = speedup - 1.0
    return Estimate(1.0 + gain * 2 / 3, speedup, speedup)
