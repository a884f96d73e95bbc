"""Several processes train as one: same numbers, same way of ending."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.ready_process import ReadyProcess, Started
from tests.support.tiny_training import (
    largest_difference,
    last_state,
    metrics,
    steps_done,
    write_config,
    write_images,
)
from tests.support.training_faults import BAD_STEPS, MOST, SMALL
from tests.support.waiting import DEADLINE_S, processes_with, wait_until

# No batch norm, whose statistics are per process. Large enough for a signal to arrive before the end.
SAME = {
    "model": "test_convnext",
    "img_size": 96,
    "ema_decay": 0.8,
    "label_smoothing": 0.1,
    "clip_grad_norm": 5.0,
    "epochs": 2,
}


@pytest.fixture(scope="module")
def prime_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training images, and 13 for validation, which no number of ranks divides."""
    root = write_images(tmp_path_factory.mktemp("prime"), train=16, val=5)
    for name in ("class0/000.jpg", "class1/001.jpg"):
        (root / "val" / name).unlink()
    return root


@pytest.fixture(scope="module")
def alone(ready: ReadyProcess, tmp_path_factory: pytest.TempPathFactory, prime_images: Path) -> Path:
    """The folder of a run by a single process."""
    folder = tmp_path_factory.mktemp("alone")
    done = ready.run("train", write_config(folder, prime_images, batch_size=16, **SAME), cwd=folder)
    assert done.code == 0, done.err
    return folder / "runs" / "tiny"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start_ranks(ready: ReadyProcess, config: Path, *overrides: str, before: str = "", world: int = 2) -> list[Started]:
    """Ranks as torchrun would start them."""
    port = free_port()
    return [
        ready.start(
            "train", config, *overrides, cwd=config.parent, before=before, RANK=str(rank), LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank in range(world)
    ]  # fmt: skip


def assert_equal_within_rounding(run: Path, alone: Path) -> None:
    ours, theirs = metrics(run, "epoch"), metrics(alone, "epoch")
    assert len(ours) == len(theirs) == 2
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["train/lr"] == other["train/lr"]
        for name in ("train/loss", "val/loss"):
            assert mine[name] == pytest.approx(other[name], rel=1e-4), name
        # Exact: every sample is evaluated once, by the same model.
        assert (mine["val/acc1"], mine["val/acc5"]) == (other["val/acc1"], other["val/acc5"])
        assert mine["val/acc1"] * 13 / 100 == pytest.approx(round(mine["val/acc1"] * 13 / 100), abs=1e-9)
    for part in ("model", "ema"):
        mine, other = (last_state(folder)[part] for folder in (run, alone))
        if part == "ema":
            mine, other = mine["tensors"], other["tensors"]
        assert largest_difference(mine, other) < 1e-5, part


def test_two_ranks_equal_one_process_with_the_same_total_batch(
    ready: ReadyProcess, tmp_path: Path, prime_images: Path, alone: Path
) -> None:
    config = write_config(tmp_path, prime_images, batch_size=8, **SAME)
    ranks = start_ranks(ready, config)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert "total batch 16 (8 x 2 ranks), 3 steps an epoch" in ranks[0].err
    assert "learning rate 0.03125 = 0.5 x 16 / 256" in ranks[0].err
    assert ranks[1].err == "", "one rank speaks for all"
    assert_equal_within_rounding(tmp_path / "runs" / "tiny", alone)


@pytest.mark.release  # ranks with the variables that torchrun sets are above
def test_torchrun_starts_the_same_program(tmp_path: Path, prime_images: Path, alone: Path) -> None:
    import subprocess

    config = write_config(tmp_path, prime_images, batch_size=8, **SAME)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "stoker", "train",
         str(config)],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ | {"HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_equal_within_rounding(tmp_path / "runs" / "tiny", alone)


def test_devices_starts_ranks_that_sigterm_ends_and_one_process_resumes(
    ready: ReadyProcess, tmp_path: Path, prime_images: Path, alone: Path
) -> None:
    config = write_config(tmp_path, prime_images, batch_size=8, **SAME)
    run = tmp_path / "runs" / "tiny"
    launcher = ready.start("train", config, "devices=2", "checkpoint_every_steps=1", cwd=tmp_path)
    launcher.wait_for(lambda: steps_done(run) >= 1)
    launcher.send(signal.SIGTERM)
    assert launcher.wait() == 143, launcher.err
    step = last_state(run)["progress"]["step"]
    assert f"SIGTERM: saved at step {step}" in launcher.err
    assert processes_with(str(config)) == []
    assert last_state(run)["progress"]["position"] in (step * 16, (step - 3) * 16)
    rest = ready.run("train", config, "batch_size=16", cwd=tmp_path)
    assert rest.code == 0, rest.err
    assert "batch_size 16, was 8" in rest.err
    assert_equal_within_rounding(run, alone)


def test_all_ranks_stop_when_only_one_is_asked_to(ready: ReadyProcess, tmp_path: Path, prime_images: Path) -> None:
    config = write_config(tmp_path, prime_images, batch_size=8, epochs=200)
    run = tmp_path / "runs" / "tiny"
    ranks = start_ranks(ready, config)
    ranks[0].wait_for(lambda: steps_done(run) >= 2)
    ranks[1].send(signal.SIGINT)
    assert [rank.wait() for rank in ranks] == [130, 130], ranks[0].err
    step = last_state(run)["progress"]["step"]
    assert f"Ctrl-C: saved at step {step}" in ranks[0].err
    assert step == steps_done(run)


def test_a_notice_while_two_ranks_start_ends_all_with_the_documented_code(
    ready: ReadyProcess, tmp_path: Path, prime_images: Path
) -> None:
    config = write_config(tmp_path, prime_images, devices=2, batch_size=8)
    launcher = ready.start("train", config, cwd=tmp_path, COLD_START="1")
    # New interpreters, which begin with seconds of imports.
    launcher.wait_for(lambda: len(ranks_of(launcher)) == 2)
    launcher.send(signal.SIGUSR1)
    assert launcher.wait() == 143, launcher.err
    assert "stopped by SIGUSR1" in launcher.err
    assert not (tmp_path / "runs" / "tiny").exists()


def ranks_of(launcher: Started) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [pid for pid in processes_with("STOKER_LAUNCHED=1") if str(pid) in children]


def test_a_rank_that_is_killed_ends_the_others(ready: ReadyProcess, tmp_path: Path, prime_images: Path) -> None:
    config = write_config(tmp_path, prime_images, batch_size=8, epochs=500)
    ranks = start_ranks(ready, config)
    ranks[0].wait_for(lambda: steps_done(tmp_path / "runs" / "tiny") >= 2)
    ranks[1].send(signal.SIGKILL)
    assert ranks[0].wait() == 1, ranks[0].err
    assert "error: rank-lost" in ranks[0].err
    assert "Traceback" not in ranks[0].err
    wait_until(lambda: processes_with(str(config)) == [])


def test_two_launchers_on_two_nodes_train_together(
    ready: ReadyProcess, tmp_path: Path, prime_images: Path, alone: Path
) -> None:
    # Each node has its own folder, and WORLD_SIZE is the number of nodes, as some schedulers export it.
    port, launchers = free_port(), []
    for node in range(2):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        config = write_config(folder, prime_images, batch_size=8, num_nodes=2, devices=1, **SAME)
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": str(node), "WORLD_SIZE": "2"}
        launchers.append(ready.start("train", config, cwd=folder, **variables))
    assert [launcher.wait() for launcher in launchers] == [0, 0], launchers[0].err
    assert_equal_within_rounding(tmp_path / "node0" / "runs" / "tiny", alone)
    assert not (tmp_path / "node1" / "runs" / "tiny" / "checkpoints").exists()


def test_a_checkpoint_on_the_first_nodes_disk_is_enough(
    ready: ReadyProcess, tmp_path: Path, prime_images: Path, alone: Path
) -> None:
    config = write_config(tmp_path, prime_images, batch_size=8, checkpoint_every_steps=2, **SAME)
    assert ready.run("train", config, "epochs=1", "gradient_accumulation=2", cwd=tmp_path).code == 0
    ranks = [
        ready.start(
            "train", config, "epochs=1", f"runs_dir={tmp_path}/{'runs' if rank == 0 else 'elsewhere'}", cwd=tmp_path,
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for port in [free_port()] for rank in range(2)
    ]  # fmt: skip
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert "is finished: 3 steps" in ranks[0].err


def test_an_error_found_by_the_first_rank_ends_all_ranks_the_same_way(
    ready: ReadyProcess, tmp_path: Path, prime_images: Path
) -> None:
    config = write_config(tmp_path, prime_images, batch_size=8)
    (tmp_path / "runs" / "tiny" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt").write_bytes(b"nothing")
    ranks = start_ranks(ready, config)
    assert [rank.wait() for rank in ranks] == [1, 1], ranks[0].err
    assert "holds no whole checkpoint" in ranks[0].err


def test_one_rank_out_of_memory_splits_the_batch_on_all_without_changing_the_update(
    ready: ReadyProcess, tmp_path: Path, prime_images: Path, alone: Path
) -> None:
    config = write_config(tmp_path, prime_images, batch_size=8, **SAME)
    ranks = start_ranks(ready, config, before="tests.support.training_faults:little_memory_on_the_second_rank")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert ranks[0].err.count("out of device memory: each batch is now computed in pieces of") == 1
    assert last_state(tmp_path / "runs" / "tiny")["progress"]["micro_batch"] == MOST
    assert_equal_within_rounding(tmp_path / "runs" / "tiny", alone)


def test_a_nan_loss_on_one_rank_is_skipped_by_all_and_its_samples_are_named(
    ready: ReadyProcess, tmp_path: Path, prime_images: Path
) -> None:
    config = write_config(tmp_path, prime_images, batch_size=4, max_bad_steps=3)
    before = "tests.support.training_faults:bad_images_on_the_second_rank"
    ranks = start_ranks(ready, config, before=before)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    run = tmp_path / "runs" / "tiny"
    bad: list[dict[str, Any]] = [line for line in metrics(run) if line.get("event") == "bad_step"]
    assert [(line["step"], line["in_a_row"]) for line in bad] == [(step + 1, i + 1) for i, step in enumerate(BAD_STEPS)]
    assert all(len(line["samples"]) == 4 and line["samples"][0].startswith("class") for line in bad)
    assert all(line["train/loss"] is not None for line in metrics(run, "epoch"))
    stopped = start_ranks(ready, config, "run_name=stopped", "max_bad_steps=1", before=before)
    assert [rank.wait() for rank in stopped] == [1, 1], stopped[0].err
    assert (
        "the loss or its gradient was NaN or infinite for 2 steps in a row, up to step 5; last for class"
        in stopped[0].err
    )


def test_memory_that_runs_out_when_the_images_grow_splits_the_batch_as_at_the_start(
    ready: ReadyProcess, tmp_path: Path, prime_images: Path
) -> None:
    growing = SAME | {"img_size": 64, "start_img_size": SMALL, "resize_epochs": 1}
    (tmp_path / "alone").mkdir()
    whole = write_config(tmp_path / "alone", prime_images, batch_size=16, **growing)
    assert ready.run("train", whole, cwd=whole.parent).code == 0
    config = write_config(tmp_path, prime_images, batch_size=8, **growing)
    before = "tests.support.training_faults:little_memory_for_large_images_on_the_second_rank"
    ranks = start_ranks(ready, config, before=before)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert ranks[0].err.count("out of device memory: each batch is now computed in pieces of 4") == 1
    assert last_state(tmp_path / "runs" / "tiny")["progress"]["micro_batch"] == MOST
    assert_equal_within_rounding(tmp_path / "runs" / "tiny", whole.parent / "runs" / "tiny")


def test_a_step_exchanges_its_gradients_and_one_message(
    ready: ReadyProcess, tmp_path: Path, prime_images: Path
) -> None:
    config = write_config(tmp_path, prime_images, batch_size=4, epochs=1, checkpoint_every="1 h")
    ranks = start_ranks(ready, config, before="tests.support.training_faults:counted_messages")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    for rank in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"messages-{rank}.jsonl").read_text().splitlines()]
        assert len(lines) == 6
        # The first two steps look for a lack of memory, and average their gradients by hand.
        steady = list(pairwise(lines[2:]))
        assert [after["others"] - before["others"] for before, after in steady] == [1] * len(steady)
        assert all(after["gradients"] > before["gradients"] for before, after in steady)
