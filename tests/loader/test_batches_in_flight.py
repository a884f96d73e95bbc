"""A device copies late: a batch's memory must stay as it is until the copy's event has passed.

The engines reuse memory when no reference to it is left, and an asynchronous copy holds none. So whoever copies has to
hold the batch: the first test shows the hazard, the others that holding is enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.config import load_config
from stoker.tasks.images.data import choose_decoding, open_loader, open_samples, training_plan, validation_plan
from stoker.tasks.images.image_loader import ImageLoader
from tests.support.delayed_device import LATEST, DelayedDevice, Event
from tests.support.recording_cudart import RecordingCudart
from tests.support.tiny_training import write_images

ENGINES = ["thread", "process"]
# One worker with two batches in flight has at most four in memory: after five copies, one is overwritten for certain.
WORKERS, PREFETCH = 1, 2
ALWAYS_TOO_LATE = 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"), train=24, val=24)


@pytest.fixture(params=["page-locked", "pageable"])
def pinned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether batches are page-locked, by a stand-in for CUDA that accepts all memory."""
    if request.param == "pageable":
        return False
    recorder, empty = RecordingCudart(), torch.empty

    def unpinned(*arguments: Any, pin_memory: bool = False, **keys: Any) -> torch.Tensor:
        return empty(*arguments, **keys)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: recorder)
    monkeypatch.setattr(torch, "empty", unpinned)
    return True


def open_split(data: Path, engine: str, split: str, pinned: bool, held: int = 1) -> ImageLoader:
    words = [
        f"data_root={data}", f"index_dir={data.parent}", "img_size=16", "batch_size=2", "decoder=pillow",
        f"prefetch_factor={PREFETCH}", f"loader={engine}", f"pin_memory={str(pinned).lower()}",
    ]  # fmt: skip
    config = load_config(None, words).config
    samples = open_samples(config, split)  # type: ignore[arg-type]
    decoding, _ = choose_decoding(config, samples.index)
    plan: Callable[..., Any] = training_plan if split == "train" else validation_plan
    return open_loader(config, plan(config, samples, decoding), workers=WORKERS, held=held)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("engine", ENGINES)
def test_hazard_batches_that_nobody_holds_are_overwritten_before_they_are_copied(
    data: Path, engine: str, split: str, pinned: bool
) -> None:
    loader = open_split(data, engine, split, pinned)
    device = DelayedDevice(ALWAYS_TOO_LATE)
    for batch in loader.epoch(0):
        device.copy(batch.images)
    loader_steps = loader.steps()
    assert device.corrupted > 0
    device.finish()
    loader.close()
    assert device.executed == loader_steps


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("engine", ENGINES)
def test_batches_that_are_held_until_their_event_has_passed_arrive_whole(
    data: Path, engine: str, split: str, pinned: bool
) -> None:
    loader = open_split(data, engine, split, pinned, held=LATEST + 1)
    reference = [batch.images.clone() for batch in loader.epoch(0)]
    for delay in (*range(1, LATEST + 1), None):
        device = DelayedDevice(delay, seed=17)
        held: deque[tuple[Event, torch.Tensor]] = deque()
        targets = []
        for batch in loader.epoch(0):
            targets.append(device.copy(batch.images))
            held.append((device.event(), batch.images))
            while held and held[0][0].query():
                held.popleft()
        if held:
            held[-1][0].synchronize()
        assert device.executed == len(reference)
        assert device.corrupted == 0
        assert all(torch.equal(one, other) for one, other in zip(targets, reference, strict=True))
        held.clear()
    loader.close()


def test_an_event_has_passed_only_when_all_copies_before_it_are_executed() -> None:
    device = DelayedDevice(2)
    sources = [torch.full((4,), number) for number in range(4)]
    targets, events = [], []
    for source in sources:
        targets.append(device.copy(source))
        events.append(device.event())
    assert [event.query() for event in events] == [True, True, False, False]
    assert [target.tolist() == source.tolist() for target, source in zip(targets, sources, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    events[2].synchronize()
    assert [event.query() for event in events] == [True, True, True, False]
    sources[3].fill_(9)
    device.finish()
    assert (device.executed, device.corrupted) == (4, 1)
    assert targets[3].tolist() == [9] * 4
