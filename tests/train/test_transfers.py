"""A device that copies late gets every batch as it was made, in training and in validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.config import load_config
from stoker.profile.host import fit_to_machine, read_machine
from stoker.tasks.building import RunContext
from stoker.tasks.images.classify import build_run
from stoker.tasks.images.data import open_data
from stoker.train import transfers
from stoker.train.loop import Run, train
from stoker.train.ranks import Ranks
from stoker.train.schedule import Progress
from stoker.train.transfers import Uploader
from tests.support.delayed_device import DelayedDevice
from tests.support.tiny_training import write_config, write_images


class LateQueue:
    """The queues of a device whose copies are late; it computes at once, on whatever has arrived."""

    def __init__(self, device: DelayedDevice) -> None:
        self.device = device
        self.asides = 0

    def aside(self) -> AbstractContextManager[Any]:
        self.asides += 1
        return nullcontext()

    def copy(self, source: Tensor) -> Tensor:
        return self.device.copy(source)

    def mark(self) -> Any:
        return self.device.event()

    def join(self, ready: Any, tensors: Sequence[Tensor]) -> None: ...

    def fetch(self, source: Tensor) -> Callable[[], list[float]]:
        return source.tolist


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), train=24, val=21)


@pytest.fixture(scope="module", params=["thread", "process"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[Run]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that spin would take the cores of the workers
    folder = tmp_path_factory.mktemp("run")
    keys = {"model": "test_resnet", "batch_size": 4, "num_workers": 2, "mixup_alpha": 0.2, "epochs": 1}
    config = load_config(write_config(folder, images, loader=request.param, gradient_accumulation=2, **keys), []).config
    fitted, _ = fit_to_machine(config, read_machine())
    built = build_run(fitted, open_data(fitted, lambda _text: None), RunContext(Ranks(), torch.device("cpu")))
    yield built
    built.input.close()
    torch.set_num_threads(threads)


def train_on(device: DelayedDevice, run: Run) -> LateQueue:
    """An epoch of training and validation, with the loader of the run and another device."""
    queue = LateQueue(device)
    run.input.uploader.queue = queue
    train(replace(run, progress=Progress()))
    device.finish()
    return queue


@pytest.mark.parametrize("ahead", [transfers.MOST_AHEAD, 100])
def test_no_batch_is_overwritten_before_it_is_copied(ahead: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # With nothing to hold it back, only the sources that the uploader keeps protect the batches.
    monkeypatch.setattr(transfers, "MOST_AHEAD", ahead)
    for delay in (1, 2, 3, 4, 5, 6, None):
        device = DelayedDevice(delay, seed=7)
        queue = train_on(device, run)
        batches = 18 + 16  # 72 training and 63 validation images
        assert queue.asides == batches
        assert device.executed == device.asked == 2 * batches, "the images, and everything else about them"
        assert device.corrupted == 0, delay


def test_an_uploader_that_forgets_its_sources_lets_batches_be_overwritten(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "MOST_AHEAD", 100)
    monkeypatch.setattr(LateQueue, "join", lambda *_: run.input.uploader._in_flight.clear())
    device = DelayedDevice(5)
    train_on(device, run)
    assert device.corrupted > 0


class Places(LateQueue):
    """A queue that only remembers how far it was waited for."""

    def __init__(self) -> None:
        self.asides = self.marks = 0
        self.waited: list[int] = []

    def copy(self, source: Tensor) -> Tensor:
        return source.clone()

    def mark(self) -> Any:
        self.marks += 1
        return _Place(self, self.marks)


class _Place:
    def __init__(self, queue: Places, number: int) -> None:
        self._queue, self._number = queue, number

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._queue.waited.append(self._number)


class Made:
    """What is prepared."""

    tensors = (torch.zeros(1),)


def test_the_host_prepares_two_batches_ahead_of_the_model_and_no_more() -> None:
    queue = Places()
    uploader = Uploader(queue)  # type: ignore[arg-type]
    for _ in range(5):
        uploader.prepare(Made)
    # Two marks a batch: of the model's work before it, and of its own copies. The third batch waits for what was queued
    # for the model before the first, and so on.
    assert queue.waited == [1, 3, 5]


def test_sources_are_kept_until_all_their_copies_have_passed_even_if_preparing_fails() -> None:
    queue = Places()
    uploader = Uploader(queue)  # type: ignore[arg-type]
    source = torch.zeros(3)

    def fail() -> Made:
        uploader.copy(source)
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(torch.OutOfMemoryError):
        uploader.prepare(fail)
    assert any(source is kept for _, sources in uploader._in_flight for kept in sources)
    uploader.finish()
    assert queue.waited == [2]
    assert not uploader._in_flight
