"""Fewer batches in flight: the batches stay the same, and memory is really returned to the system."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stoker.loader.buffers import BufferPool
from stoker.loader.loader import Engine, LoaderOptions
from stoker.profile.memory import own_and_children_bytes, tree_memory
from stoker.tasks.images.decode.calibration import choose_decoder
from stoker.tasks.images.image_loader import ImageLoader
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.images.layouts.sample_index import all_samples, repeated
from stoker.tasks.images.memory_trial import plan_over
from tests.support.waiting import wait_until

WORKERS, PREFETCH = 2, 4
MEGABYTE = 1_000_000
ENGINES: list[Engine] = ["thread", "process"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(3)
    for number in range(20):
        folder = root / f"class{number % 2}"
        folder.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 255, (24, 32, 3), np.uint8)).save(folder / f"{number:02d}.png")
    return root


@contextmanager
def opened(images: Path, engine: Engine, *, size: int, batch: int, steps: int, held: int = 1) -> Iterator[ImageLoader]:
    samples = repeated(all_samples(open_index(str(images), "", index_dir=images.parent / "index")), batch * steps)
    decoding, _ = choose_decoder("pillow", list, size)
    options = LoaderOptions(engine=engine, workers=WORKERS, prefetch=PREFETCH, held=held)
    loader = ImageLoader(plan_over(samples, decoding, size, batch), options)
    try:
        yield loader
    finally:
        loader.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_batches_are_the_same_whatever_the_limit_does(images: Path, engine: Engine) -> None:
    with opened(images, engine, size=16, batch=5, steps=30) as loader:
        steps = loader.steps()
        untouched = [(batch.step, batch.indices.tolist(), batch.images.numpy().tobytes()) for batch in loader.epoch(0)]
        limited = []
        for batch, limit in zip(loader.epoch(0), [1, 3, 8, 2, 8, 1, 100, 0] * steps, strict=False):
            limited.append((batch.step, batch.indices.tolist(), batch.images.numpy().tobytes()))
            loader.limit_prefetch(limit)
    assert len(limited) == steps
    assert limited == untouched


@pytest.mark.parametrize("engine", ENGINES)
def test_a_limit_holds_within_the_epoch_and_in_the_next_one_and_can_be_lifted(images: Path, engine: Engine) -> None:
    with opened(images, engine, size=16, batch=4, steps=40) as loader:
        assert loader.in_flight == loader.most_in_flight == WORKERS * PREFETCH
        # Threads start the next batch when it is requested, worker processes when the previous one is handed out.
        unasked = 1 if engine == "thread" else 0
        epoch = loader.epoch(0)
        next(epoch)
        wait_until(lambda: loader.ready() == WORKERS * PREFETCH - unasked)
        loader.limit_prefetch(2)
        for _ in range(WORKERS * PREFETCH):
            next(epoch)
        wait_until(lambda: loader.ready() == 2 - unasked)
        for _ in epoch:
            assert loader.ready() <= 2
        epoch = loader.epoch(1)
        next(epoch)
        wait_until(lambda: loader.ready() == 2 - unasked)
        loader.limit_prefetch(loader.most_in_flight)
        next(epoch)
        next(epoch)
        wait_until(lambda: loader.ready() == WORKERS * PREFETCH - unasked)


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_falls_and_rises_with_the_limit(images: Path, engine: Engine) -> None:
    def in_use() -> int:
        if engine == "process":
            return tree_memory().shared_bytes
        # Not its share of pages in common with other processes of the suite: that changes as they come and go.
        own, _ = own_and_children_bytes() or (0, 0)
        return own

    with opened(images, engine, size=224, batch=32, steps=60) as loader:
        many = (loader.most_in_flight - 1) * loader.batch_bytes
        assert many > 30 * MEGABYTE
        epoch = loader.epoch(0)

        def after(steps: int, *, filled: bool) -> int:
            for _ in range(steps):
                batch = next(epoch)
                wait_until(lambda: not filled or loader.ready() >= loader.most_in_flight - 1)
            in_use_now = in_use()
            del batch
            return in_use_now

        # Twice: an allocator that returns memory the first time may keep it the second time.
        for _ in range(2):
            full = after(4, filled=True)
            loader.limit_prefetch(1)
            after(loader.most_in_flight + 2, filled=False)
            # One in flight and two in use remain; a thread that waits for a core may be about to free one more.
            wait_until(lambda full=full: full - in_use() > many - 3 * loader.batch_bytes)
            few = in_use()
            loader.limit_prefetch(loader.most_in_flight)
        assert after(4, filled=True) - few > many - 3 * loader.batch_bytes


def test_a_consumer_that_accumulates_gets_every_batch_in_a_slot(images: Path) -> None:
    """In groups, as the batches of an update are taken, and in a window that slides, as copies in flight are held."""
    held = 4
    with opened(images, "process", size=16, batch=4, steps=40, held=held) as loader:
        addresses = {tensor.data_ptr() for tensor in loader._engine._slots.tensors}  # type: ignore[union-attr]
        assert len(addresses) == WORKERS * PREFETCH + 1 + held
        for limit in (loader.most_in_flight, 1):
            loader.limit_prefetch(limit)
            group: list[torch.Tensor] = []
            for batch in loader.epoch(0):
                group.append(batch.images)
                assert batch.images.data_ptr() in addresses
                if len(group) == held:
                    group.clear()
            window: deque[torch.Tensor] = deque(maxlen=held)
            for batch in loader.epoch(1):
                window.append(batch.images)
                assert batch.images.data_ptr() in addresses
            window.clear()


def test_a_buffer_in_use_is_kept() -> None:
    pool = BufferPool()
    arrays = [pool.get((MEGABYTE,)) for _ in range(4)]
    held = torch.from_numpy(arrays[2])
    held.fill_(9)
    del arrays
    pool.keep(1)
    assert len(pool) == 1
    assert int(held.min()) == 9
