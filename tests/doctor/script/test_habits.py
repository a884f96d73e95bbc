"""What is noticed about a data set from outside: files opened again, caches that evict, shapes, memory, precision."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.attach.habits import Caches, FileOpens, Memory, Shapes
from stoker.attach.precision import in_32_bits
from stoker.attach.ring import BUCKETS, Habits
from stoker.attach.stage_clock import STAGE_COUNT
from stoker.doctor.script.loop_facts import preparation_of
from stoker.doctor.script.timeline import FetchFile

ENTRY = np.zeros(50_000, np.float32)


class Keeper:
    def __init__(self) -> None:
        self.entries: OrderedDict[int, Any] = OrderedDict()


class Dataset:
    def __init__(self) -> None:
        self.cache = Keeper()
        self.labels = {number: np.zeros(2) for number in range(3)}

    def ask(self, number: int, most: int) -> None:
        self.cache.entries[number] = ENTRY, ENTRY
        while len(self.cache.entries) > most:
            self.cache.entries.popitem(last=False)


def caches_after(most: int, *, mapped: Path | None = None) -> dict[str, tuple[int, int, int]]:
    dataset, caches = Dataset(), Caches()
    for number in range(6):
        dataset.ask(number, most)
        if mapped is not None:
            dataset.cache.entries[number] = np.lib.format.open_memmap(mapped, mode="r")
        caches.look(dataset)
    return caches.found


def test_a_cache_in_an_object_of_the_data_set_is_found_and_its_evictions_are_counted(tmp_path: Path) -> None:
    assert caches_after(2) == {"self.cache.entries": (2, 2 * 2 * ENTRY.nbytes, 4)}
    assert caches_after(10)["self.cache.entries"][2] == 0
    np.save(tmp_path / "volume.npy", ENTRY)
    assert caches_after(2, mapped=tmp_path / "volume.npy") == {}, "mapped files are not a cache"


@lru_cache(maxsize=2)
def load(number: int) -> Any:
    return ENTRY + number


def test_a_function_behind_lru_cache_is_a_cache_too() -> None:
    caches = Caches()
    for number in range(5):
        load(number)
    caches.look(Dataset())
    assert caches.found["load"] == (2, -1, 3)


def test_samples_that_open_only_known_files_read_again() -> None:
    files = FileOpens()
    for paths in (["a", "a.label"], [], ["b"], ["a", "a.label"]):
        for path in paths:
            files.opened(path)
        files.sample_ends()
    assert (files.samples, files.that_read, files.that_read_again, files.opens, files.known) == (4, 3, 1, 5, 3)


def test_shapes_change_only_if_a_sample_does() -> None:
    shapes = Shapes()
    for side, count in ((4, 2), (4, 2), (6, 2), (6, 1)):
        shapes.look((torch.zeros(count, 1, side, side, side), torch.zeros(count)), count)
    assert (shapes.seen, shapes.changes, shapes.examples) == (4, 1, ("1x4x4x4", "1x6x6x6"))
    assert (shapes.smallest, shapes.largest, shapes.dimensions) == (64, 216, 5)
    shapes.look([torch.zeros(3, 4, 4), torch.zeros(3, 5, 5)], 2)  # a list of images is not a batch of one shape
    assert shapes.seen == 4


def worker(number: int, side: int, changes: int = 0, seen: int = 50) -> FetchFile:
    """A worker that made batches of one shape, unless there are changes."""
    none, size = (0,) * STAGE_COUNT, side**2
    return FetchFile(
        pid=100 + number, loader=0, batches=seen, samples=4 * seen, read_bytes=None, socket_bytes=0, worker=number,
        threads=1, knows_run_queue=False, wall_ns=none, cpu_ns=none, run_queue_ns=none, calls=none,
        histogram=(0,) * (2 * BUCKETS), slow=(), path=None, records=(),
        habits=Habits(shapes_seen=seen, shape_changes=changes, elements=seen * size, smallest=size, largest=size,
                      dimensions=4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "changes"),
    [
        ([worker(0, 8), worker(1, 8)], 0),
        ([worker(0, 8), worker(1, 12)], 100),  # in turn: every batch
        ([worker(0, 8), worker(1, 12), worker(2, 12)], 100),  # two of three
        ([worker(0, 8, changes=20), worker(1, 8, changes=25)], 45),
        ([worker(-1, 8)], 0),  # no workers
    ],
)
def test_shapes_that_differ_between_workers_change_from_batch_to_batch(workers: list[FetchFile], changes: int) -> None:
    seen = preparation_of(workers)
    assert seen.shape_changes == changes


def test_memory_of_a_worker_counts_what_it_allocates() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far may be that of another test
    memory = Memory(is_forked=True)
    if (before := memory.private_bytes()) < 0:
        pytest.skip("this kernel does not provide it")
    # Not by malloc, which may reuse what other tests freed.
    held = mmap.mmap(-1, 60_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held[:] = bytes(len(held))
    assert memory.private_bytes() - before > 0.5 * len(held)


def test_a_loss_knows_whether_it_was_computed_in_32_bits() -> None:
    model = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3), torch.nn.Mish(), torch.nn.Conv3d(2, 1, 1))
    inputs = torch.zeros(1, 1, 4, 4, 4)
    assert in_32_bits(model(inputs).mean().grad_fn) is True
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs).mean()
    assert in_32_bits(loss.grad_fn) is False
    assert in_32_bits(torch.compile(model, backend="aot_eager")(inputs).mean().grad_fn) is None
    assert in_32_bits((torch.zeros(3, requires_grad=True) * 2).sum().grad_fn) is None, "a loss without a network"
