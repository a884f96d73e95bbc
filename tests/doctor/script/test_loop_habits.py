"""Mistakes in a training loop are named with their lines; and torch is as it was afterwards."""

from __future__ import annotations

import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.attach import ring
from stoker.attach.session import Session
from stoker.attach.watched_loop import GrowingContainers, Modes, Reads
from stoker.doctor.script.loop_facts import validations_of
from stoker.doctor.script.process_watch import ProcessWatch, seen_from
from tests.doctor.script.conftest import SCRIPTS, diagnosed, line_of
from tests.doctor.script.test_timeline import Loop, train

SCRIPT = SCRIPTS / "careless.py"
HABITS = {
    "values-read-every-step", "model-in-eval-mode", "loader-made-anew", "long-validation", "shapes-change",
    "cudnn-benchmark-with-changing-shapes",
}  # fmt: skip


def test_what_a_careless_loop_does_is_named_with_its_lines(capfd: pytest.CaptureFixture[str]) -> None:
    said = {finding["id"]: finding["message"] for finding in diagnosed(capfd, SCRIPT)["findings"]}
    assert set(said) >= HABITS
    assert f"{line_of(SCRIPT, '# in every step')} .item()" in said["values-read-every-step"]
    assert line_of(SCRIPT, "# and never train() again") in said["model-in-eval-mode"]
    assert line_of(SCRIPT, "in enumerate(loader)") in said["loader-made-anew"]
    assert "4 times" in said["loader-made-anew"]


def test_a_careful_loop_whose_data_set_keeps_samples_is_told_of_the_memory_and_of_nothing_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    document = diagnosed(capfd, SCRIPT, "--careful", "--keeps", "--samples", "2400", "--epochs", "1")
    said = {finding["id"]: finding["message"] for finding in document["findings"]}
    assert "each of 2 workers grows by" in said["memory-grows"]
    assert "`self.seen` went from" in said["memory-grows"]
    assert HABITS.isdisjoint(said)
    assert all(p["settings"].get("num_workers", 0) <= 2 for p in document["what_if"])


@pytest.fixture
def opened(tmp_path: Path) -> Session:
    return Session(str(tmp_path), None, None)


def told(session: Session) -> list[dict[str, Any]]:
    (path,) = Path(session.folder).glob("about-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_reads_are_counted_by_line_and_torch_is_as_it_was_afterwards(opened: Session) -> None:
    before = {name: getattr(torch.Tensor, name) for name in ("item", "cpu", "__float__", "__bool__")}
    value = torch.ones(())

    @torch.compile(backend="eager", fullgraph=True)
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu() * 2

    reads = Reads()
    reads.begin(torch, 0)
    try:
        for _ in range(10):
            assert value.item() == 1.0
            assert float(value) + float(value) == 2.0
            assert double(value).shape == ()
            with torch.no_grad():
                value.tolist()
    finally:
        reads.end(10, opened)
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert "item" not in vars(torch.Tensor)
    (said,) = told(opened)
    found = {call: per_step for call, place, per_step, on_device in said["reads"] if __file__ in place}
    assert found == {"float()": 2.0, ".item()": 1.0}


def test_a_model_is_in_eval_mode_only_if_all_of_what_is_trained_is(opened: Session) -> None:
    modes = Modes()

    class Module(torch.nn.Sequential):
        pass

    modes.patch(type("module", (), {"Module": Module}))
    model = Module(Module(torch.nn.Linear(2, 2), torch.nn.Dropout()), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for switch in (model.eval, model.train, model[0].eval):
        switch()
        modes.look(optimizer, opened)
    assert [said["in_eval_mode"] for said in told(opened)] == ["Module", None]
    assert told(opened)[0]["eval_layers"] == 1
    assert __file__ in told(opened)[0]["eval_at"]


def test_losses_that_keep_their_graphs_are_seen_and_nothing_is_kept_alive(opened: Session) -> None:
    class Batch:
        pass

    kept, weight = GrowingContainers(), torch.ones(2, requires_grad=True)

    def loop() -> None:
        losses, names, total = [], ["a"], torch.zeros(())
        for _ in range(40):
            loss = (weight * 2).sum()
            losses.append(loss)
            total = total + loss
            batch = Batch()
            alive = weakref.ref(batch)
            kept.look(sys._getframe(), opened)
            batch = None
            assert alive() is None
        assert len(names) == 1

    loop()
    found = {said["held"]: said for said in told(opened)}
    assert set(found) == {"losses", "total"}
    assert all(said["keeps_graph"] and said["now"] >= said["before"] + 16 for said in found.values())


def test_a_validation_counts_when_it_has_ended_after_training() -> None:
    loop = Loop()
    train(loop, 3)
    assert validations_of(loop.records, {1}) == (0, None)
    for _ in range(2):
        loop.take(2, 7)
    assert validations_of(loop.records, {1}) == (0, 0.014)
    loop.epoch_ends(2)
    loop.take(2, 7)
    loop.epoch_ends(2)  # a second test set, say
    assert validations_of(loop.records, {1}) == (1, pytest.approx(0.021))


def test_what_was_seen_of_processes_survives_being_written(tmp_path: Path) -> None:
    steps = ring.Ring(str(tmp_path / f"steps-{os.getpid()}.ring"), ring.STEP, 4)
    watch = ProcessWatch(tmp_path)
    steps.append(*[0] * 11)
    watch.look()
    watch._due_s = 0.0
    watch.look()  # no batch since then: the loop may have ended
    (seen,) = watch.seen()
    assert len(seen.points) == 1
    assert seen.points[0][1] > 1e6
    assert seen.own_points[0][1] > 1e6
    assert seen.threads_now[os.getpid()][0] > 0
    assert seen_from(json.loads(json.dumps(watch.as_records()))) == [seen]
    assert seen_from([{"pid": "x"}, 3]) == seen_from(None) == []
