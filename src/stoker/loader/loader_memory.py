"""The memory of a loader: how many batches it holds, and what its parts take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Batches held besides those in flight by a consumer that holds one: that one, and the one that it has just released.
IN_HAND = 2


@dataclass(frozen=True)
class LoaderMemory:
    """Bytes that the parts of a loader take, apart from the batches themselves."""

    process: int
    """A process with Python, torch and the loader's modules."""
    fork_server: int
    """The process that worker processes are forked from: one for each process that loads."""
    worker: int
    """Each worker process, apart from the files of the batch that it decodes."""
    thread: int
    """Each worker thread: decoder, scratch space, its share of the heap."""
    image_bytes: int
    """Mean size of an image file: a worker holds all files of the batch that it decodes."""
    measured: bool
    """False for the stated figures."""


# Measured with torch 2.15 on Linux (results/loader_memory); the process includes the imports of training (240 MB);
# image_bytes is ImageNet's mean.
STATED = LoaderMemory(
    process=820_000_000,
    fork_server=320_000_000,
    worker=18_000_000,
    thread=12_000_000,
    image_bytes=110_000,
    measured=False,
)


def beyond_flight(held: int) -> int:
    """Batches in memory besides those in flight, for a consumer that holds `held` of them when it asks for the next."""
    return IN_HAND + held - 1


def batches_held(engine: Literal["process", "thread"], workers: int, prefetch: int, held: int = 1) -> int:
    """The most batches that a loader has in memory, if the consumer holds `held` at once: with gradient accumulation,
    those of a whole update. Worker processes fill slots that exist from the start; a thread takes a buffer when it
    begins a batch, by which time the released one is free again."""
    if workers == 0:
        return beyond_flight(held)
    return workers * prefetch + beyond_flight(held) - (1 if engine == "thread" else 0)
