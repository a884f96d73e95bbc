"""How a DataLoader is set up, and a number for each one that stays the same when it is made anew each epoch."""

from __future__ import annotations

import weakref
from typing import Any


class LoaderNumbers:
    """Numbers loaders from 1; one that is set up like another that is gone takes over its number."""

    def __init__(self) -> None:
        self._holders: list[tuple[tuple[Any, ...], Any]] = []

    def number_of(self, loader: Any) -> int:
        for number, (_, held) in enumerate(self._holders, 1):
            if held() is loader:
                return number
        shape = shape_of(loader)
        signature = (*(shape[name] for name in sorted(shape)), type(loader.sampler).__name__, loader.drop_last)
        for number, (known, held) in enumerate(self._holders, 1):
            if held() is None and known == signature:
                self._holders[number - 1] = signature, weakref.ref(loader)
                return number
        self._holders.append((signature, weakref.ref(loader)))
        return len(self._holders)


def shape_of(loader: Any) -> dict[str, Any]:
    """The settings that a reader of the report wants to know."""
    size = loader.batch_size
    if size is None and loader.batch_sampler is not None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return {
        "workers": loader.num_workers,
        "prefetch": loader.prefetch_factor if loader.num_workers else None,
        "persistent": bool(loader.persistent_workers),
        "pin_memory": bool(loader.pin_memory),
        "start_method": _start_method(loader) if loader.num_workers else None,
        "batch_size": size if isinstance(size, int) else None,
        "samples": _length(loader),
        "dataset": type(loader.dataset).__name__,
    }


def _start_method(loader: Any) -> str | None:
    import multiprocessing

    context = loader.multiprocessing_context or multiprocessing
    return str(context.get_start_method())


def _length(loader: Any) -> int | None:
    """Samples of an epoch, on this rank; None for a stream."""
    from collections.abc import Sized

    if type(loader.sampler).__name__ == "_InfiniteConstantSampler":  # what torch gives to a stream
        return None
    batches = loader.batch_sampler
    own = getattr(batches, "sampler", None) if loader.batch_size is None and batches is not None else loader.sampler
    try:
        return len(own) if isinstance(own, Sized) else None
    except (TypeError, NotImplementedError):
        return None
