"""Configs with the settings that fit the planned machine: a careful one, a recommended one, one close to the limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from stoker.config.reference import write_scalar
from stoker.core.errors import UsageError
from stoker.core.files import write_text
from stoker.plan.budget import StepNeeds, make_plan
from stoker.plan.planning import Planned
from stoker.plan.records import Plan
from stoker.plan.vram import VramSearch


@dataclass(frozen=True)
class Tier:
    name: str
    share_of_vram: float
    """The rest is for validation, other library versions, and other processes on the device."""
    share_of_ram: float
    """The rest is for the page cache, which saves reading files twice."""
    share_of_cores: float
    prefetch: int
    compiles: bool
    about: str


# Workers and batches in flight as commonly recommended for 16 cores (8, 12, 16 workers; 2, 3, 4 batches each); the
# batch size follows from the traced memory.
TIERS = (
    Tier("conservative", 0.50, 0.50, 0.50, 2, False, "leaves room for whatever else runs on the machine"),
    Tier("balanced", 0.65, 0.65, 0.75, 3, True, "recommended"),
    Tier("aggressive", 0.85, 0.80, 1.00, 4, True, "close to the limits: try it for an epoch before leaving it alone"),
)


def write_tier_configs(planned: Planned, folder: Path) -> list[Path]:
    """Writes a config for each tier, based on the planned one."""
    folder.mkdir(parents=True, exist_ok=True)
    base, job = planned.path.resolve(), planned.job
    searches = {
        compiled: VramSearch(job.step, job.config.batch_size, compiled=compiled, gpus=job.hardware.world)
        for compiled in (False, True)
    }
    written = []
    for tier in TIERS:
        keys, plan = _fitted(tier, planned, searches[tier.compiles])
        path = folder / f"{planned.path.stem}_{tier.name}.yaml"
        if path.resolve() == base:
            raise UsageError("tier-is-its-base", f"{path} would overwrite the config it builds on", hint="another DIR")
        lines = [f"# {tier.name}: {tier.about}.", f"# Planned for {plan.hardware}:"]
        if plan.vram is not None and plan.vram.limit_bytes is not None:
            lines.append(f"# {plan.vram.peak_bytes / 1e9:.1f} of {plan.vram.limit_bytes / 1e9:.1f} GB of VRAM,")
        if plan.ram.limit_bytes is not None:
            lines.append(f"# {plan.ram.total_bytes / 1e9:.1f} of {plan.ram.limit_bytes / 1e9:.1f} GB of RAM.")
        if (pace := plan.time.images_per_second) is not None:
            lines.append(f"# About {pace:,.0f} {plan.unit}/s, bound by the {plan.time.bound_by}.")
        lines += [f"base: {write_scalar(str(base))}", ""]
        lines += [f"{key}: {write_scalar(value)}" for key, value in (planned.overridden | keys).items()]
        write_text(path, "\n".join(lines) + "\n")
        written.append(path)
    return written


def _fitted(tier: Tier, planned: Planned, search: VramSearch) -> tuple[dict[str, object], Plan]:
    """The keys of a tier, reduced until their plan stays within its shares. Without an accelerator the batch size of
    the config stays."""
    job, vram_bytes = planned.job, planned.job.hardware.vram_bytes

    def plan_with(keys: dict[str, object]) -> Plan:
        config = job.config.model_copy(update=keys)
        step_s = planned.needs.step_s
        scaled = None if step_s is None else step_s * config.batch_size / job.config.batch_size
        needs = StepNeeds(search.budget(config.batch_size, vram_bytes), scaled)
        return make_plan(replace(job, config=config), needs, scaling=False)

    keys: dict[str, object] = {
        "num_workers": max(1, round(job.hardware.cpus / job.hardware.gpus * tier.share_of_cores)),
        "prefetch_factor": tier.prefetch,
        "compile_model": tier.compiles,
    }
    batch = None if vram_bytes is None else search.largest(int(tier.share_of_vram * vram_bytes))
    if batch is not None:
        keys["batch_size"] = round_batch(min(batch, job.data.samples or batch))
    plan = plan_with(keys)
    while not _keeps(plan, tier.share_of_ram) and (smaller := _smaller(keys)):
        keys, plan = smaller, plan_with(smaller)
    return keys, plan


def round_batch(batch: int) -> int:
    """Rounds down to a batch size that suits tensor cores: a multiple of 32, or of 8 if small, or as it is."""
    for step in (32, 8):
        if batch >= 4 * step:
            return batch // step * step
    return max(1, batch)


def _keeps(plan: Plan, share: float) -> bool:
    ram, shm = plan.ram, plan.shm
    return (ram.limit_bytes is None or ram.total_bytes <= share * ram.limit_bytes) and shm.fits is not False


def _smaller(keys: dict[str, object]) -> dict[str, object] | None:
    """Fewer batches in flight first, then fewer workers; that order costs the least speed."""
    prefetch, workers = keys["prefetch_factor"], keys["num_workers"]
    assert isinstance(prefetch, int)
    assert isinstance(workers, int)
    if prefetch > 2:
        return {**keys, "prefetch_factor": prefetch - 1}
    if workers > 1:
        return {**keys, "num_workers": workers - max(1, workers // 4)}
    return None
