"""Three ways to run the same job on a machine: safe, recommended, close to its limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.plan.records import Plan


@dataclass(frozen=True)
class Tier:
    """How much of a machine a setting uses."""

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


@dataclass(frozen=True)
class TierSetting:
    """The settings of a tier on one machine."""

    tier: Tier
    keys: dict[str, object]
    """The config keys it sets."""
    plan: Plan


def choose_tiers(
    plan_with: Callable[[dict[str, object]], Plan],
    largest_batch: Callable[[float, bool], int | None],
    *,
    cpus_per_gpu: float,
    most_samples: int | None,
) -> list[TierSetting]:
    """The keys of each tier, reduced until their plan stays within the tier's shares.

    `plan_with` plans with these keys; `largest_batch` returns the largest batch within a share of the VRAM, compiled or
    not, or None without an accelerator: then the batch size of the config stays.
    """
    found = []
    for tier in TIERS:
        keys: dict[str, object] = {
            "num_workers": max(1, round(cpus_per_gpu * tier.share_of_cores)),
            "prefetch_factor": tier.prefetch,
            "compile_model": tier.compiles,
        }
        batch = largest_batch(tier.share_of_vram, tier.compiles)
        if batch is not None:
            keys["batch_size"] = round_batch(min(batch, most_samples or batch))
        plan = plan_with(keys)
        while not _keeps(plan, tier.share_of_ram) and (smaller := _smaller(keys)):
            keys = smaller
            plan = plan_with(keys)
        found.append(TierSetting(tier, keys, plan))
    return found


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
