"""What does not fit, and which key to change to what."""

from __future__ import annotations

from collections.abc import Callable

from stoker.core.finding import Finding
from stoker.core.units import size_text
from stoker.plan.records import Budget, RamBudget, VramBudget

# Above this share of a limit, the error of the plan itself decides whether it fits.
TIGHT = 0.9
LOCAL_COPY = "local copy"
"""The part of the disk that `stage_to` takes."""


def vram_findings(
    vram: VramBudget | None, batch_size: int, accumulation: int, size_key: str | None = None
) -> list[Finding]:
    """Whether the step fits on the accelerator, and the batch size that does; `size_key` is the config key for the size
    of a sample."""
    if vram is None or vram.limit_bytes is None:
        return []
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
        smaller = "" if size_key is None else f"a smaller {size_key}=, "
        fixes.append(f"{smaller}a smaller model, or an accelerator with more memory")
    return [Finding(sizes, "; or ".join(fixes), name="vram-exceeded", status="failed")]


def ram_findings(
    ram: RamBudget, workers: int, prefetch: int, total_with: Callable[[int, int], int] | None = None
) -> list[Finding]:
    """Whether the host has enough memory; `total_with` returns the total for other workers and prefetch."""
    if ram.limit_bytes is None:
        return []
    sizes = f"the run needs {size_text(ram.total_bytes)} of RAM, the host has {size_text(ram.limit_bytes)}"
    if ram.fits:
        if ram.total_bytes > TIGHT * ram.limit_bytes:
            return [Finding(f"{sizes}: it fits, with little to spare for the page cache", name="ram-tight")]
        return []
    fix = "a lower num_workers=, prefetch_factor= or batch_size="
    if total_with is not None:
        fitting = fitting_loader(workers, prefetch, lambda w, p: total_with(w, p) <= TIGHT * ram.limit_bytes)  # type: ignore[operator]
        if fitting is not None:
            fix = f"num_workers={fitting[0]} prefetch_factor={fitting[1]}"
    return [Finding(sizes, fix, name="ram-exceeded", status="failed")]


def fitting_loader(workers: int, prefetch: int, fits: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """The most workers and batches in flight that fit; reduces batches first, which costs the least speed."""
    for fewer in range(max(1, workers), 0, -1):
        for less in range(prefetch, 0, -1):
            if fits(fewer, less):
                return fewer, less
            if less <= 2:
                break
    return (1, 1) if fits(1, 1) else None


def budget_findings(shm: Budget, disk: Budget | None, open_files: Budget) -> list[Finding]:
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


def batch_finding(total_batch: int, samples: int | None) -> list[Finding]:
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
