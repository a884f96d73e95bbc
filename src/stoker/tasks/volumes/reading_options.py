"""How the volumes of a config are read: the share of the cache that a process has, and what counts as damaged."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.config import Config
from stoker.core.console import Say
from stoker.core.units import count, size_text
from stoker.io.cache import cache_place
from stoker.loader.loader import choose_engine
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.formats.opening import suffix_of
from stoker.tasks.volumes.formats.volume import ReadingOptions

# Training and validation have separate workers, and both stay alive between epochs.
_LOADERS = 2


def reading_options(
    config: Config,
    cases: Sequence[Case] = (),
    *,
    ranks: int = 1,
    workers: int = 0,
    say: Say = lambda _line: None,
) -> ReadingOptions:
    """The options of each process of a rank; `ranks` counts those of this node, `workers` those of one loader.

    Threads share the cache of their process. Worker processes cannot, so each gets its part of `volume_cache`."""
    engine = choose_engine(config.loader, workers, volumes=True)
    processes = 1 + (_LOADERS * workers if engine == "process" else 0)
    share = config.volume_cache // (max(1, ranks) * processes)
    if processes > 1:
        say(
            f"volume_cache: {size_text(config.volume_cache)} of this node are divided among "
            f"{count(max(1, ranks) * processes, 'process', 'processes')}, {size_text(share)} each; "
            "loader=thread has one cache for all workers of a rank"
        )
    return ReadingOptions(
        # Chunks are kept by tensorstore, decoded pages and files by us: two caches only if the data needs both.
        cache_bytes=share // max(1, _caches(cases)),
        missing_chunks="fill" if config.missing_chunks == "fill" else "error",
        copy=cache_place(config.cache_dir, config.cache_size),
    )


def _caches(cases: Sequence[Case]) -> int:
    """How many kinds of cache these volumes need; .npy and .nii files are mapped, and need none."""
    refs = [ref for case in cases for ref in (*case.images, case.label) if ref is not None]
    suffixes = {suffix_of(ref.location) for ref in refs}
    return len({"pages" if suffix.startswith((".tif", ".nii")) else "chunks" for suffix in suffixes - {".npy", ".nii"}})
