"""What does not fit, and which key to change to what."""

from __future__ import annotations

from collections.abc import Callable

from stoker.plan.records import Budget, Finding, RamBudget, VramBudget

# Above this share of a limit the plan's own error decides.
TIGHT = 0.9


def vram_findings(vram: VramBudget | None, batch_size: int, accumulation: int) -> list[Finding]:
    """Whether the step fits onto the accelerator, and the batch that does."""
    if vram is None or vram.limit_bytes is None:
        return []
    sizes = f"{_gb(vram.peak_bytes)} of VRAM at the peak of a step, the accelerator has {_gb(vram.limit_bytes)}"
    if vram.fits:
        if vram.peak_bytes > TIGHT * vram.limit_bytes:
            return [Finding("vram-tight", f"{sizes}: it fits, with little to spare", _smaller_batch(batch_size))]
        return []
    cures = []
    if vram.largest_batch:
        pieces = -(-batch_size * accumulation // vram.largest_batch)
        fitting = max(1, batch_size * accumulation // pieces)
        cures.append(f"batch_size={fitting} gradient_accumulation={pieces} (the same total batch)")
    checkpointed = vram.largest_batch_checkpointed
    if checkpointed and checkpointed > (vram.largest_batch or 0):
        cures.append(f"gradient_checkpointing=true batch_size={min(batch_size, checkpointed)}")
    if not cures:
        cures.append("img_size= smaller, a smaller model, or an accelerator with more memory")
    return [Finding("vram-exceeded", sizes, "; or ".join(cures), refuses=True)]


def ram_findings(
    ram: RamBudget, workers: int, prefetch: int, total_with: Callable[[int, int], int] | None = None
) -> list[Finding]:
    """Whether the host's memory lasts; `total_with` tells what other workers and prefetch would take."""
    if ram.limit_bytes is None:
        return []
    sizes = f"{_gb(ram.total_bytes)} of RAM, the host has {_gb(ram.limit_bytes)}"
    if ram.fits:
        if ram.total_bytes > TIGHT * ram.limit_bytes:
            return [Finding("ram-tight", f"{sizes}: it fits, with little to spare for the page cache")]
        return []
    cure = "num_workers=, prefetch_factor= or batch_size= lower"
    if total_with is not None:
        fitting = fitting_loader(workers, prefetch, lambda w, p: total_with(w, p) <= TIGHT * ram.limit_bytes)  # type: ignore[operator]
        if fitting is not None:
            cure = f"num_workers={fitting[0]} prefetch_factor={fitting[1]}"
    return [Finding("ram-exceeded", sizes, cure, refuses=True)]


def fitting_loader(workers: int, prefetch: int, fits: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """The most workers and batches in flight that fit: fewer batches first, they cost least."""
    for fewer in range(max(1, workers), 0, -1):
        for less in range(prefetch, 0, -1):
            if fits(fewer, less):
                return fewer, less
            if less <= 2:
                break
    return (1, 1) if fits(1, 1) else None


def budget_findings(shm: Budget, disk: Budget | None, open_files: Budget) -> list[Finding]:
    """What else may run out."""
    found = []
    if shm.fits is False:
        found.append(
            Finding(
                "shm-exceeded",
                f"{_gb(shm.needed)} of shared memory, /dev/shm has {_gb(shm.limit or 0)}",
                "loader=thread, prefetch_factor= lower, or docker run --shm-size / mount -o remount,size=",
                refuses=True,
            )
        )
    if disk is not None and disk.fits is False:
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in disk.parts.items() if size)
        found.append(
            Finding(
                "disk-exceeded",
                f"{_gb(disk.needed)} of disk ({parts}), {_gb(disk.limit or 0)} are free",
                "save_top_k= lower, cache_size= lower, or runs_dir= on a larger disk",
                refuses=True,
            )
        )
    if open_files.fits is False:
        found.append(
            Finding(
                "open-files-exceeded",
                f"{open_files.needed:,} open files, {open_files.limit:,} are allowed",
                f"ulimit -n {open_files.needed * 2}",
                refuses=True,
            )
        )
    return found


def batch_finding(total_batch: int, samples: int | None) -> list[Finding]:
    """A batch that is larger than the data makes every epoch empty."""
    if samples is None or total_batch <= samples:
        return []
    return [
        Finding(
            "batch-larger-than-data",
            f"a total batch of {total_batch:,} from {samples:,} images: the last partial batch is dropped, "
            "so every epoch would be empty",
            "batch_size= lower, or fewer accelerators",
            refuses=True,
        )
    ]


def _smaller_batch(batch_size: int) -> str | None:
    return f"batch_size={batch_size * 3 // 4}" if batch_size >= 4 else None


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
