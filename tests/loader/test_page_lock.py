"""Page-locked memory: each range is registered once, unregistered once, and never unmapped in between."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.config import load_config
from stoker.loader.buffers import BufferPool, PageLock, SharedSlots
from stoker.profile.host import Machine, fit_to_machine
from stoker.tasks.building import RunContext
from stoker.tasks.images.classify import open_input
from stoker.tasks.images.data import ALONE, choose_decoding, open_data, open_loader, open_samples, training_plan
from stoker.tasks.images.image_loader import ImageBatch, ImageLoader
from tests.support.recording_cudart import RecordingCudart
from tests.support.tiny_training import write_images

SIZE = 10_000
SLOTS = 5


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingCudart]:
    recorder = RecordingCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: recorder)
    yield recorder
    recorder.check()
    assert recorder.faults == []


def test_slots_that_nobody_closed_are_unregistered_before_they_are_unmapped(cudart: RecordingCudart) -> None:
    slots = SharedSlots(SLOTS, (SIZE,), page_lock=PageLock())
    cycle: list[Any] = [slots]
    cycle.append(cycle)
    del slots, cycle
    gc.collect()
    assert cudart.registered == {}
    assert cudart.unregistered == SLOTS


def test_a_register_that_fails_leads_to_ordinary_memory_and_one_line(cudart: RecordingCudart) -> None:
    cudart.fails_from = 2
    said: list[str] = []
    slots = SharedSlots(SLOTS, (SIZE,), page_lock=PageLock(said.append))
    assert len(cudart.registered) == 2
    assert cudart.calls == 3  # after a failure nothing more is tried
    assert cudart.last_error == 0
    assert len(said) == 1
    assert "error 801" in said[0]
    assert "pin_memory=false" in said[0]
    assert sorted(number for number in [slots.take() for _ in range(SLOTS)] if number is not None) == list(range(SLOTS))
    slots.give_back_all()
    slots.keep(1)
    slots.keep(SLOTS)
    slots.close()
    assert cudart.registered == {}
    assert len(said) == 1


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_to_the_slots_every_range_is_unregistered_once(seed: int, cudart: RecordingCudart) -> None:
    chance = random.Random(seed)
    cudart.fails_from = chance.choice([None, None, None, 0, 3, 9])
    said: list[str] = []
    slots = SharedSlots(SLOTS, (SIZE,), page_lock=PageLock(said.append))
    filling: list[int] = []
    held: list[tuple[torch.Tensor, int]] = []
    for step in range(80):
        what = chance.choice(["take", "take", "look", "look", "drop", "drop", "keep", "leave", "reopen"])
        if what == "take" and (number := slots.take()) is not None:
            slots.tensors[number].fill_(step % 250 + 1)
            filling.append(number)
        elif what == "look" and filling:
            number = filling.pop(chance.randrange(len(filling)))
            held.append((slots.look_at(number, chance.randint(1, SIZE)), int(slots.tensors[number][0])))
        elif what == "drop" and held:
            held.pop(chance.randrange(len(held)))
        elif what == "keep":
            slots.keep(chance.randint(1, SLOTS))
        elif what == "leave":
            filling.clear()
            slots.give_back_all()
        elif what == "reopen" and chance.random() < 0.2:  # as when the image size changes
            slots.close()
            filling.clear()
            slots = SharedSlots(SLOTS, (SIZE,), page_lock=PageLock(said.append))
        cudart.check()
        assert all(int(images.min()) == int(images.max()) == value for images, value in held)
    slots.close()
    held.clear()
    gc.collect()
    assert cudart.registered == {}
    assert cudart.fails_from is not None or cudart.unregistered == cudart.calls
    assert (cudart.fails_from is None or cudart.calls <= cudart.fails_from) == (said == [])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"), train=12, val=4)


def words(data: Path, *more: str) -> list[str]:
    fixed = ["img_size=16", "batch_size=4", "decoder=pillow", "loader=process", "pin_memory=true", "num_workers=2"]
    return [f"data_root={data}", f"index_dir={data.parent}", *fixed, *more]


def open_training(data: Path, said: list[str], *more: str) -> ImageLoader:
    config = load_config(None, words(data, *more)).config
    samples = open_samples(config, "train")
    decoding, _ = choose_decoding(config, samples.index)
    return open_loader(config, training_plan(config, samples, decoding), workers=2, say=said.append)


def test_a_loader_is_unregistered_over_epochs_limits_and_its_close(data: Path, cudart: RecordingCudart) -> None:
    loader = open_training(data, [])
    slots = len(cudart.registered)
    assert slots == 2 * 2 + 2
    for epoch, limit in enumerate((4, 1, 4)):
        loader.limit_prefetch(limit)
        for batch in loader.epoch(epoch):
            assert batch.images.data_ptr() in cudart.registered
    left: Iterator[ImageBatch] = loader.epoch(3)
    held = next(left).images
    loader.close()
    del batch, left, loader
    gc.collect()
    assert list(cudart.registered) == [held.data_ptr()]
    del held
    assert cudart.registered == {}


def test_a_loader_without_page_locking_gives_the_same_batches_and_says_so_once(
    data: Path, cudart: RecordingCudart
) -> None:
    batches = []
    for fails_from in (None, 0):
        cudart.fails_from, said = fails_from, list[str]()
        loader = open_training(data, said)
        batches.append([batch.images.clone() for batch in loader.epoch(0)])
        loader.close()
        assert len(said) == (0 if fails_from is None else 1)
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))
    assert cudart.registered == {}


def never(*_batch: Any) -> Any:
    raise AssertionError("nothing is prepared")


def test_progressive_resizing_unregisters_the_old_loader_and_repeats_no_line(
    data: Path, cudart: RecordingCudart
) -> None:
    loaded = load_config(None, words(data, "start_img_size=8", "resize_epochs=3", "epochs=4")).config
    config, _ = fit_to_machine(loaded, Machine(cpus=2, accelerators=1))
    said: list[str] = []
    samples = open_data(config, said.append)
    context = RunContext(ALONE, torch.device("cpu"), said.append)
    pipeline = open_input(config, replace(samples, val=None), context, never, never)
    sizes = set()
    for epoch in range(4):
        loader: Any = pipeline.train_loader(epoch)
        sizes.add(loader.plan.view.size)
        assert len(cudart.registered) == 6
        next(loader.epoch(epoch))
    assert len(sizes) > 1
    pipeline.close()
    assert cudart.registered == {}
    cudart.fails_from = 0
    pipeline = open_input(config, samples, context, never, never)
    for epoch in range(4):
        pipeline.train_loader(epoch)
    pipeline.close()
    assert len(said) == 1


@pytest.mark.skipif(torch.cuda.is_available() or torch.version.cuda is None, reason="needs CUDA's runtime and no GPU")
def test_the_real_runtime_without_a_driver_leads_to_ordinary_memory() -> None:
    said: list[str] = []
    lock = PageLock(said.append, cudart=torch.cuda._cudart)  # type: ignore[attr-defined]
    slots = SharedSlots(2, (SIZE,), page_lock=lock)
    assert slots.take() == 0
    assert len(said) == 1
    assert "driver" in said[0]
    slots.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_torch_without_a_gpu_leads_to_ordinary_memory_in_both_engines() -> None:
    said: list[str] = []
    SharedSlots(2, (SIZE,), page_lock=PageLock(said.append)).close()
    assert len(said) == 1
    pool = BufferPool(pinned=True, say=said.append)
    first, second = pool.get((SIZE,)), pool.get((SIZE,))
    first[:], second[:] = 1, 2
    assert int(first.max()) == 1
    assert len(said) == 2
    del first, second
    pool.keep(1)
    assert len(pool) == 1
