"""How the training loader of a config is set up, as the checks want to know it."""

from __future__ import annotations

from stoker.config import Config
from stoker.data.loader import DEFAULT_PREFETCH, choose_engine
from stoker.facts.observed import LoaderShape


def loader_shape(config: Config, samples: int, workers: int, world: int = 1) -> LoaderShape:
    """The shape of one rank's loader; `samples` are those of all ranks."""
    engine = choose_engine(config.loader, workers)
    processes = engine == "process" and workers > 0
    start = "forkserver" if config.worker_start == "auto" else config.worker_start
    return LoaderShape(
        workers=workers,
        prefetch=(config.prefetch_factor or DEFAULT_PREFETCH) if workers else None,
        engine=engine if workers else "main",
        start_method=start if processes else None,
        # Threads are kept from epoch to epoch in any case.
        persistent=config.persistent_workers if processes else None,
        pin_memory=config.pin_memory,
        batch_size=config.batch_size,
        samples=samples // world,
        threads_per_worker=1 if processes else None,
    )
