"""The checkpoint folder: what is kept, where training resumes, and saving in the background."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.train.checkpoint import folder as policy
from stoker.train.checkpoint.folder import Checkpoints
from stoker.train.checkpoint.format import CheckpointCorrupt, read_checkpoint
from stoker.train.checkpoint.saver import BackgroundWriter
from tests.support.training_state import same
from tests.support.waiting import DEADLINE_S, wait_until


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weight": torch.full((4, 4), float(step))}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_last_and_the_one_before_it_are_kept(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path / "checkpoints")
    for step in range(4):
        assert folder.save_last(state(step)).failure is None
    assert names(folder.folder) == ["last.ckpt", "previous.ckpt"]
    assert read_checkpoint(folder.previous)["step"] == 2
    found = folder.latest()
    assert found is not None
    assert (found.path, found.notes) == (folder.last, ())
    assert same(found.state, state(3))


def test_a_file_system_without_hard_links_keeps_both_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(policy.os, "link", link)
    folder = Checkpoints(tmp_path)
    for step in range(3):
        assert folder.save_last(state(step)).failure is None
    assert [read_checkpoint(path)["step"] for path in (folder.last, folder.previous)] == [2, 1]
    assert names(tmp_path) == ["last.ckpt", "previous.ckpt"]


def test_a_damaged_last_falls_back_to_the_previous_and_says_so(tmp_path: Path) -> None:
    for step in range(2):
        Checkpoints(tmp_path).save_last(state(step))
    damage(tmp_path / "last.ckpt")
    found = Checkpoints(tmp_path).latest()
    assert found is not None
    assert found.state["step"] == 0
    assert "last.ckpt" in found.notes[0]
    assert "resuming from previous.ckpt" in found.notes[-1]


def test_a_damaged_last_never_takes_the_place_of_a_whole_previous_one(tmp_path: Path) -> None:
    for step in range(2):
        Checkpoints(tmp_path).save_last(state(step))
    damage(tmp_path / "last.ckpt")
    folder = Checkpoints(tmp_path)
    folder.latest()
    folder.save_last(state(2))
    assert [read_checkpoint(path)["step"] for path in (folder.last, folder.previous)] == [2, 0]
    folder.save_last(state(3))
    assert [read_checkpoint(path)["step"] for path in (folder.last, folder.previous)] == [3, 2]


def test_without_last_and_previous_the_newest_of_the_best_is_taken(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path)
    for epoch, value in ((1, 0.9), (10, 0.5), (9, 0.7)):
        folder.save_best(state(epoch), epoch, value)
    found = folder.latest()
    assert found is not None
    assert found.path.name == "epoch=10-val_acc1=0.5000.ckpt"
    assert found.notes == ("last.ckpt is missing", "resuming from epoch=10-val_acc1=0.5000.ckpt instead")


def test_an_error_instead_of_a_fresh_start_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path)
    for step in range(2):
        folder.save_last(state(step))
    for path in tmp_path.iterdir():
        damage(path)
    with pytest.raises(CheckpointCorrupt, match=r"no whole checkpoint.*last\.ckpt.*previous\.ckpt"):
        Checkpoints(tmp_path).latest()


def test_the_best_five_are_kept_and_the_newer_of_equal_ones(tmp_path: Path) -> None:
    (tmp_path / "notes.ckpt").write_text("somebody's own")
    values = [0.5, 0.1, 0.3, 0.3, 0.2, 0.3, 0.1, 0.30001, 0.9]
    for epoch, value in enumerate(values):
        Checkpoints(tmp_path).save_best(state(epoch), epoch, value)
    assert [path.name for path in Checkpoints(tmp_path).best()] == [
        "epoch=8-val_acc1=0.9000.ckpt",
        "epoch=0-val_acc1=0.5000.ckpt",
        "epoch=7-val_acc1=0.3000.ckpt",
        "epoch=5-val_acc1=0.3000.ckpt",
        "epoch=3-val_acc1=0.3000.ckpt",
    ]
    assert (tmp_path / "notes.ckpt").exists()
    assert read_checkpoint(tmp_path / "epoch=5-val_acc1=0.3000.ckpt")["step"] == 5


def test_one_that_is_not_among_the_best_is_not_written(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path, keep_best=1)
    assert folder.save_best(state(0), 0, 0.5) is not None
    assert folder.save_best(state(1), 1, 0.4) is None
    assert folder.save_best(state(2), 2, 0.5) is not None
    assert names(tmp_path) == ["epoch=2-val_acc1=0.5000.ckpt"]
    assert Checkpoints(tmp_path / "none", keep_best=0).save_best(state(0), 0, 1.0) is None


def test_leftovers_are_removed_by_the_first_save_and_not_by_reading(tmp_path: Path) -> None:
    leftover = tmp_path / ".last.ckpt.abc.tmp"
    leftover.write_bytes(b"half")
    folder = Checkpoints(tmp_path)
    assert folder.latest() is None
    assert leftover.exists()
    folder.save_last(state(0))
    assert names(tmp_path) == ["last.ckpt"]


def test_updates_after_an_asynchronous_save_do_not_reach_the_file(tmp_path: Path) -> None:
    gate = threading.Event()
    folder = Checkpoints(
        tmp_path, stop=lambda point: gate.wait(DEADLINE_S) and None if point == "before temp" else None
    )
    weight = torch.zeros(64, 3, 7, 7).to(memory_format=torch.channels_last)
    holed = torch.zeros(10, 10)[:, ::3]
    progress = {"step": 1}
    training = {"weight": weight, "tied": weight, "holed": holed, "count": torch.tensor(1), "progress": progress}
    with closing(BackgroundWriter(folder)) as saver:
        saver.save(training)
        # The thread is held before its first byte: everything that follows happens after the snapshot.
        for tensor in (weight, holed, training["count"]):
            tensor.add_(5)
        progress["step"] = 99
        gate.set()
    found = read_checkpoint(folder.last)
    assert found["weight"].count_nonzero() == found["holed"].count_nonzero() == 0
    assert found["weight"].is_contiguous(memory_format=torch.channels_last)
    assert found["tied"] is found["weight"]
    assert (int(found["count"]), found["progress"]) == (1, {"step": 1})


def test_weights_are_copied_during_the_next_step_and_the_update_waits_for_the_copy(tmp_path: Path) -> None:
    weight, running_mean = torch.zeros(1000, 100), torch.zeros(100)
    gate = threading.Event()
    with closing(BackgroundWriter(Checkpoints(tmp_path))) as saver, ThreadPoolExecutor(1) as pool:
        saver._thread.submit(gate.wait, DEADLINE_S)  # the thread is busy: nothing is copied in the background yet
        saver.save({"weight": weight, "running_mean": running_mean}, changing=[running_mean])
        running_mean += 1  # a forward pass
        waiting = pool.submit(saver.wait_for_copy)
        wait_until(lambda: saver._copying is None)
        assert not waiting.done()
        gate.set()
        assert waiting.result()
        weight += 1  # an update
        assert saver.wait_for_copy() is None
    found = read_checkpoint(tmp_path / "last.ckpt")
    assert found["weight"].count_nonzero() == found["running_mean"].count_nonzero() == 0


def test_a_second_asynchronous_save_waits_for_the_first_and_nothing_is_dropped(tmp_path: Path) -> None:
    gate = threading.Event()
    folder = Checkpoints(
        tmp_path, stop=lambda point: gate.wait(DEADLINE_S) and None if point == "before temp" else None
    )
    with closing(BackgroundWriter(folder)) as saver, ThreadPoolExecutor(1) as pool:
        saver.prepare(state(1))
        assert saver.save(state(1), best=(0, 0.25)).finished == ()
        saving = pool.submit(saver.save, state(2))
        wait_until(lambda: saver._under_way is None)
        assert not saving.done()
        gate.set()
        second = saving.result()
        assert second.waited_s > 0
        assert [outcome.path.name for outcome in second.finished] == ["epoch=0-val_acc1=0.2500.ckpt", "last.ckpt"]
        assert [outcome.path.name for outcome in saver.wait()] == ["last.ckpt"]
        assert saver.wait() == ()
    assert [read_checkpoint(path)["step"] for path in (folder.last, folder.previous)] == [2, 1]


def test_an_error_in_the_thread_is_raised_at_the_next_call(tmp_path: Path) -> None:
    def fail(point: str) -> None:
        raise ZeroDivisionError("our bug")

    saver = BackgroundWriter(Checkpoints(tmp_path, stop=fail))
    saver.save(state(1))
    with pytest.raises(ZeroDivisionError, match="our bug"):
        saver.save(state(2))
    assert saver.close() == ()
