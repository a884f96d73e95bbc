"""The stream of samples is the same with any engine, any number of workers and ranks, and after any resume."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.config import Config, load_config
from stoker.core.errors import UserError
from stoker.loader import processes
from stoker.loader.batch import TooManyBad, allowed_bad
from stoker.loader.processes import Casualties, WorkerDied, killed_for_memory
from stoker.tasks.images.data import (
    ALONE,
    choose_decoding,
    open_loader,
    open_samples,
    training_plan,
    validation_plan,
)
from stoker.tasks.images.image_loader import ImageBatch, ImageLoader
from stoker.train.ranks import Ranks
from tests.support.waiting import is_running, wait_until

SAMPLES = 47  # a prime, so that nothing divides it


def make_images(root: Path, split: str, count: int, classes: int = 3) -> None:
    random = np.random.default_rng(7)
    for number in range(count):
        folder = root / split / f"class{number % classes}"
        folder.mkdir(parents=True, exist_ok=True)
        height, width = int(random.integers(24, 60)), int(random.integers(24, 60))
        pixels = random.integers(0, 255, (height // 4, width // 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((width, height)).save(folder / f"{number:03d}.jpg", quality=92)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    make_images(root, "train", SAMPLES)
    make_images(root, "val", SAMPLES)
    return root


def config_for(data: Path, *overrides: str) -> Config:
    fixed = [f"data_root={data}", "img_size=16", "decoder=simplejpeg", "pin_memory=false", "seed=5"]
    return load_config(None, [*fixed, *overrides]).config


def loader_for(
    data: Path,
    *overrides: str,
    workers: int = 0,
    ranks: Ranks = ALONE,
    split: str = "train",
    quarantine: Path | None = None,
) -> ImageLoader:
    config = config_for(data, *overrides)
    samples = open_samples(config, split)  # type: ignore[arg-type]
    decoding, _ = choose_decoding(config, samples.index)
    plan = (training_plan if split == "train" else validation_plan)(config, samples, decoding, ranks)
    return open_loader(config, plan, workers=workers, quarantine_file=quarantine)


Entry = tuple[int, int, bool, str]


def entries(batch: ImageBatch) -> list[Entry]:
    """The contents of a batch, sample by sample: index, label, flip and exact pixels."""
    images = batch.images.numpy()
    return [
        (int(sample), int(label), bool(flip), hashlib.sha1(image.tobytes()).hexdigest())
        for sample, label, flip, image in zip(batch.indices, batch.labels, batch.flips, images, strict=True)
    ]


def ledger(loader: ImageLoader, epoch: int = 0, start: int = 0, steps: int | None = None) -> list[list[Entry]]:
    found = []
    try:
        for batch in loader.epoch(epoch, start):
            found.append(entries(batch))
            if len(found) == steps:
                break
    finally:
        loader.close()
    return found


@pytest.fixture(scope="module")
def reference(data: Path) -> list[list[Entry]]:
    return ledger(loader_for(data, "batch_size=8", "loader=thread"), epoch=3)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_the_stream_does_not_depend_on_the_workers(
    data: Path, reference: list[list[Entry]], engine: str, workers: int
) -> None:
    assert len(reference) == SAMPLES // 8
    assert ledger(loader_for(data, "batch_size=8", f"loader={engine}", workers=workers), epoch=3) == reference


@pytest.mark.parametrize("world", [2, 4])
def test_the_stream_does_not_depend_on_the_ranks(data: Path, reference: list[list[Entry]], world: int) -> None:
    shares = [
        ledger(loader_for(data, f"batch_size={8 // world}", ranks=Ranks(r, world=world)), epoch=3) for r in range(world)
    ]
    for step, whole in enumerate(reference):
        together = [None] * len(whole)
        for rank, share in enumerate(shares):
            together[rank::world] = share[step]  # type: ignore[assignment]
        assert together == whole


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_resume_anywhere_continues_the_same_stream(data: Path, reference: list[list[Entry]], engine: str) -> None:
    loader = loader_for(data, "batch_size=8", f"loader={engine}", workers=2)
    try:
        for position in range(0, SAMPLES // 8 * 8, 8):
            resumed = [entries(batch) for batch in loader.epoch(3, position)]
            assert resumed == reference[position // 8 :]
    finally:
        loader.close()


@pytest.mark.parametrize("world", [1, 3])
def test_validation_counts_every_sample_once(data: Path, world: int) -> None:
    seen = []
    for rank in range(world):
        for batch in ledger(loader_for(data, "batch_size=4", split="val", ranks=Ranks(rank, world=world), workers=2)):
            seen += [entry[0] for entry in batch]
    assert sorted(seen) == list(range(SAMPLES))


def test_epochs_differ_and_repeats_are_augmented_differently(data: Path) -> None:
    one = ledger(loader_for(data, "batch_size=8", workers=1), epoch=0)
    two = ledger(loader_for(data, "batch_size=8", workers=1), epoch=1)
    assert one != two
    repeated = ledger(loader_for(data, "batch_size=8", "repeated_augmentation=2", workers=1))
    for batch in repeated:
        for first, second in zip(batch[::2], batch[1::2], strict=True):
            assert first[0] == second[0]
            assert first[3] != second[3]


def test_labels_belong_to_their_samples(data: Path) -> None:
    loader = loader_for(data, "batch_size=8", workers=2)
    index = loader.plan.samples.index
    for batch in loader.epoch(0):
        for sample, label in zip(batch.indices, batch.labels, strict=True):
            assert index.name(int(sample)).startswith(f"class{label}/")
    loader.close()


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_each_batch_carries_its_cost(data: Path, engine: str) -> None:
    loader = loader_for(data, "batch_size=8", f"loader={engine}", workers=1)
    for batch in loader.epoch(0):
        cost = batch.cost
        assert cost.samples == 8
        assert cost.bytes_read > 8 * 100
        assert cost.wall_of("decode") > 0
        assert cost.fetch_s + cost.wall_of("decode") + cost.wall_of("collate") <= cost.wall_s
        assert cost.on_cpu_s is not None
        assert cost.run_queue_s is not None
        assert cost.blocked_s is not None
        assert cost.on_cpu_s + cost.run_queue_s + cost.blocked_s == pytest.approx(cost.wall_s, abs=0.02)
    loader.close()


@pytest.fixture
def spoiled(data: Path, tmp_path: Path) -> Path:
    """The same images with some bad ones added."""
    make_images(tmp_path, "train", SAMPLES)
    folder = tmp_path / "train" / "class0"
    whole = (folder / "000.jpg").read_bytes()
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "text.jpg").write_text("not an image")
    (folder / "folder.jpg").mkdir()
    (folder / "gone.jpg").symlink_to("nowhere")
    Image.new("L", (1, 1)).save(folder / "bomb.png")
    bomb = bytearray((folder / "bomb.png").read_bytes())
    bomb[16:24] = (100_000).to_bytes(4, "big") * 2
    (folder / "bomb.png").write_bytes(bytes(bomb))
    return tmp_path


BAD = {"empty.jpg", "truncated.jpg", "text.jpg", "folder.jpg", "gone.jpg", "bomb.png"}


@pytest.mark.parametrize(("engine", "workers"), [("thread", 0), ("thread", 2), ("process", 2)])
def test_bad_images_are_named_and_replaced_the_same_way_everywhere(
    spoiled: Path, tmp_path: Path, engine: str, workers: int
) -> None:
    import json

    file = tmp_path / "quarantine.jsonl"
    arguments = ["batch_size=1", "max_bad_fraction=0.5"]
    loader = loader_for(spoiled, *arguments, f"loader={engine}", workers=workers, quarantine=file)
    found = ledger(loader)
    assert len(found) == SAMPLES + len(BAD)
    named = {Path(json.loads(line)["name"]).name: json.loads(line)["reason"] for line in file.read_text().splitlines()}
    assert set(named) == BAD
    assert all(named.values())
    assert found == ledger(loader_for(spoiled, *arguments))


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_too_many_bad_images_stop_the_run_with_the_list(spoiled: Path, engine: str) -> None:
    loader = loader_for(spoiled, "batch_size=8", "max_bad_fraction=0.001", f"loader={engine}", workers=2)
    with pytest.raises(TooManyBad, match="cannot be read") as caught:
        ledger(loader)
    assert any(name in caught.value.seen for name in BAD)


def test_a_few_bad_samples_of_a_small_set_do_not_end_a_run() -> None:
    assert allowed_bad(0.01, seen=100, samples=100) >= 2
    assert allowed_bad(0.01, seen=1, samples=6) == 1
    assert allowed_bad(0.01, seen=20, samples=20) == 2  # not ten, which would be half of it
    assert allowed_bad(0.01, seen=10, samples=10**6) == 10
    assert allowed_bad(0.01, seen=10**6, samples=10**6) == 10**4
    assert allowed_bad(0.5, seen=30, samples=40) == 15
    assert allowed_bad(0.0, seen=10, samples=10) == 0


def test_nothing_but_bad_images_stops_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    for number in range(30):
        (folder / f"{number}.jpg").write_text("no")
    with pytest.raises(UserError) as caught:
        ledger(loader_for(tmp_path, "batch_size=8", "max_bad_fraction=1", workers=1))
    assert caught.value.name == "no-readable-sample"


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_leaving_an_epoch_early_does_not_affect_the_next_one(
    data: Path, reference: list[list[Entry]], engine: str
) -> None:
    loader = loader_for(data, "batch_size=8", f"loader={engine}", workers=2)
    try:
        for _ in range(3):
            stream: Iterator[ImageBatch] = loader.epoch(2)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            del stream
            assert [entries(batch) for batch in loader.epoch(3)] == reference
    finally:
        loader.close()


def test_buffers_are_reused_but_never_while_in_use(data: Path) -> None:
    loader = loader_for(data, "batch_size=8", "loader=thread", workers=2)
    kept = [(batch, entries(batch)) for batch in loader.epoch(0)]
    for batch, then in kept:
        assert entries(batch) == then
    del kept, batch
    gc.collect()
    pool = loader._engine._buffers  # type: ignore[union-attr]
    before = len(pool)
    for epoch in range(5):
        for _ in loader.epoch(epoch):
            pass
    assert len(pool) <= max(before, 8)
    loader.close()


def test_shared_slots_are_reused_but_never_while_in_use(data: Path) -> None:
    loader = loader_for(data, "batch_size=4", "loader=process", workers=2)
    slots = loader._engine._slots  # type: ignore[union-attr]
    assert slots is not None
    try:
        addresses = set()
        for batch in loader.epoch(0):
            addresses.add(batch.images.data_ptr())
        assert addresses <= {tensor.data_ptr() for tensor in slots.tensors}
        del batch
        # A consumer that keeps every batch gets separate memory once the slots are used up, and no batch changes.
        kept = [(batch, entries(batch)) for batch in loader.epoch(1)]
        assert len(kept) > len(slots.tensors)
        assert all(entries(batch) == then for batch, then in kept)
    finally:
        loader.close()


ORPHANS = """# warm
import sys
from pathlib import Path
from tests.loader.test_loader import loader_for
if __name__ == "__main__":
    loader = loader_for(Path(sys.argv[1]), "batch_size=2", "loader=process", workers=2)
    stream = loader.epoch(0)
    next(stream)
    print([worker.pid for worker in loader._engine._loader._iterator._workers], flush=True)
    import time; time.sleep(600)
"""


def test_no_worker_outlives_a_killed_parent(data: Path, tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, str(script), data], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().strip("[]\n").split(",")]
    assert len(workers) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(map(is_running, workers)))


def test_a_worker_that_was_killed_is_named_with_its_signal(data: Path) -> None:
    loader = loader_for(data, "batch_size=2", "loader=process", workers=2)
    try:
        stream = loader.epoch(0)
        next(stream)
        victim = loader._engine._loader._iterator._workers[1]  # type: ignore[union-attr]
        os.kill(victim.pid, signal.SIGSTOP)  # so that it cannot have finished its work before
        os.kill(victim.pid, signal.SIGBUS)
        os.kill(victim.pid, signal.SIGCONT)
        with pytest.raises(WorkerDied) as caught:
            for _ in range(1000):
                next(stream)
    finally:
        loader.close()
    assert f"loader worker 1 (process {victim.pid}) was killed by SIGBUS, of 2" in caught.value.seen
    assert "/dev/shm" in str(caught.value.why)
    assert "num_workers" in str(caught.value.hint)
    assert caught.value.exit_code == 1


def leave_soon() -> None:
    time.sleep(0.3)
    os._exit(7)


def test_a_broken_pipe_of_a_dying_worker_is_not_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pipe breaks before the process counts as ended, so that torch passes the EOFError on.
    worker = multiprocessing.get_context("fork").Process(target=leave_soon)
    casualties = Casualties()
    worker.start()
    explained = casualties.explain(EOFError(), [worker])
    assert isinstance(explained, WorkerDied)
    assert "loader worker 0" in explained.seen
    assert "exited with code 7" in explained.seen
    monkeypatch.setattr(processes, "SETTLE_S", 0.1)
    living = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    living.start()
    try:
        other = ValueError("nobody died")
        assert casualties.explain(other, [living]) is other
        assert isinstance(casualties.explain(ConnectionResetError(), [living]), WorkerDied)
    finally:
        living.kill()
        living.join()
    log = tmp_path / "kmsg"
    log.write_text(f"4,1,2,-;Out of memory: Killed process {worker.pid} (python) total-vm:1kB\n")
    assert killed_for_memory(log) == {worker.pid}
    assert killed_for_memory(tmp_path / "absent") == set()
