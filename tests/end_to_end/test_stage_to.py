"""`stage_to`: training from a bucket while a local copy fills: the samples of the folder, and then a whole copy."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.config import load_config
from stoker.core.errors import UserError
from stoker.io import cache
from stoker.io.local_copy import LocalCopy
from stoker.loader.loader import BatchLoader
from stoker.profile.host import fit_to_machine, read_machine
from stoker.tasks.building import loader_options
from stoker.tasks.images import classify
from stoker.tasks.images.data import open_data, open_loader
from stoker.tasks.images.image_staging import stage_images
from stoker.tasks.staging import Staging
from stoker.tasks.volumes import data as volumes
from stoker.tasks.volumes.patches.patch_collate import PatchBatch
from stoker.tasks.volumes.volume_staging import stage_volumes
from stoker.train.ranks import Ranks
from tests.support.layouts import images_of, write_parquet, write_tars
from tests.support.proxy import Proxy
from tests.support.ready_process import ReadyProcess
from tests.support.s3_server import S3Server
from tests.support.staging import files_of
from tests.support.tiny_training import assert_same_end, steps_done, write_config, write_images
from tests.support.tiny_volumes import write_volumes

Read = tuple[BatchLoader[Any], Staging | None, list[str]]
CLASSES = ["class0", "class1", "class2"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), train=20, val=5)


@pytest.fixture(scope="module")
def tars(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tars")
    for split in ("train", "val"):
        write_tars(root / split, images_of(images, split), CLASSES)
    (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root


@pytest.fixture(scope="module")
def scrolls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_volumes(tmp_path_factory.mktemp("scrolls"))


def open_images(root: str | Path, *overrides: str) -> Read:
    """The loader of a run, as training opens it, and what was said."""
    words = [f"data_root={root}", "img_size=16", "batch_size=8", "decoder=simplejpeg", "pin_memory=false", *overrides]
    config, _ = fit_to_machine(load_config(None, ["num_workers=2", *words]).config, read_machine())
    said: list[str] = []
    data = open_data(config, said.append)
    staging = stage_images(config, data, Ranks(), said.append)
    plan = classify.checked_training_plan(config, data, Ranks())
    keys: dict[str, Any] = {} if staging is None else {"copy": staging.place, "follow": staging.follow}
    return open_loader(config, plan, workers=config.num_workers, **keys), staging, said


def open_volumes(root: str | Path, *overrides: str) -> Read:
    words = [f"data_root={root}", "task=segment3d", "model=small_unet", "patch_size=[16,16,16]", "folds=3",
             "steps_per_epoch=6", "batch_size=2", "pin_memory=false", *overrides]  # fmt: skip
    config, _ = fit_to_machine(load_config(None, ["num_workers=2", *words]).config, read_machine())
    said: list[str] = []
    data = volumes.open_data(config, said.append)
    staging = stage_volumes(config, data, Ranks(), said.append)
    reading = data.reading if staging is None else replace(data.reading, copy=staging.place)
    follow = None if staging is None else staging.follow
    plan = volumes.training_plan(config, data)
    options = loader_options(config, config.num_workers)
    return volumes.PatchLoader(plan, reading, options, follow=follow), staging, said


def stream(loader: BatchLoader[Any], epoch: int) -> list[str]:
    """The samples and exact bytes of an epoch's batches."""
    return [f"{batch.indices.tolist()} {_digest(batch)}" for batch in loader.epoch(epoch)]


def _digest(batch: Any) -> str:
    if not isinstance(batch, PatchBatch):
        return hashlib.sha1(batch.images.numpy().tobytes()).hexdigest()
    # A row is longer than what was read into it.
    parts = [part.numpy() for slot in range(len(batch)) for part in batch.region(slot)]
    return hashlib.sha1(b"".join(part.tobytes() for part in parts)).hexdigest()


def assert_whole_copy(copy: Path, source: Path, url: str) -> None:
    """Every file of the source, byte for byte; all of them in the manifest, nothing half-written."""
    assert files_of(copy) == files_of(source)
    opened = LocalCopy(copy, url)
    assert {record.path for record in opened.records()} == set(files_of(source))
    opened.close()
    assert not list(copy.glob(".stage-*.tmp"))


@pytest.fixture
def lines(s3_proxy: Proxy) -> list[str]:
    s3_proxy.latency = 0.005
    return s3_proxy.requests


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("images", "thread"), ("images", "process"), ("tars", "thread"), ("tars", "process"), ("scrolls", "thread")],
)
def test_the_second_epoch_asks_the_server_for_nothing_and_every_epoch_is_that_of_the_folder(
    kind: str, engine: str, request: pytest.FixtureRequest, s3_server: S3Server, lines: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source: Path = request.getfixturevalue(kind)
    url, copy = s3_server.put_folder(source, f"overlap-{kind}-{engine}"), tmp_path / "copy"
    opens = open_volumes if kind == "scrolls" else open_images
    local, _, _ = opens(source, f"index_dir={tmp_path}/local")
    # The budget of what is fetched ahead is small, so that the filler has to fetch images, too.
    keys = [f"stage_to={copy}", f"index_dir={tmp_path}/index", f"loader={engine}", "lookahead=1MB"]
    loader, staging, said = opens(url, *keys)
    assert staging is not None
    first = stream(local, 0)
    assert stream(loader, 0) == first
    assert staging.filler.settle(120), said
    lines.clear()
    assert stream(loader, 1) == stream(local, 1)
    assert lines == []
    for one in (loader, local, staging):
        one.close()
    files = files_of(source)
    assert f"staging to {copy} while training: 0 of {len(files)} files (0 MB) are there" in said
    size = sum(map(len, files.values())) / 1e6
    assert f"the local copy is complete: {len(files)} files, {size:.0f} MB; next time data_root={copy}" in said
    assert_whole_copy(copy, source, url)
    # Next time: nothing to fetch, and any program can read it.
    again, _, _ = opens(copy, f"index_dir={tmp_path}/again")
    assert stream(again, 0) == first
    again.close()
    # It is a copy like that of `stoker stage`, for which there is nothing left to do.
    assert main(["stage", "--verify", str(copy)]) == 0
    capsys.readouterr()
    assert main(["stage", url, str(copy), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["copied"]["files"], done["already_present"]) == (0, len(files)), done


def test_a_killed_run_goes_on_with_what_its_copy_has_and_ends_like_one_on_the_folder(
    images: Path,
    s3_server: S3Server,
    s3_proxy: Proxy,
    ready: ReadyProcess,
    tmp_path: Path,
) -> None:
    url, copy = s3_server.put_folder(images, "overlap-killed"), tmp_path / "copy"
    keys = {"epochs": 2, "checkpoint_every_steps": 1}
    for name, root in (("folder", str(images)), ("staged", url)):
        (tmp_path / name).mkdir()
        more = {"stage_to": str(copy), "index_dir": str(tmp_path / "index"), "num_workers": 1} if root == url else {}
        write_config(tmp_path / name, Path(root), **keys | more | {"data_root": root, "runs_dir": str(tmp_path / name)})
    # Some images of validation stay away until the run is dead: however slow this machine, something is missing then.
    # The first and the last of each class are looked at before training begins.
    dead = threading.Event()
    s3_proxy.fault("/overlap-killed/val/class./00[123]", "call", times=1000, call=dead.wait)
    training = ready.start("train", tmp_path / "staged" / "tiny.yaml", cwd=tmp_path)
    manifest = copy / ".stage.jsonl"
    training.wait_for(
        lambda: manifest.exists() and manifest.stat().st_size > 0 and steps_done(tmp_path / "staged" / "tiny") > 0
    )
    training.send(signal.SIGKILL)
    training.wait()
    dead.set()
    before = LocalCopy(copy, url)
    kept = {record.path for record in before.records()}
    before.close()
    # Whatever else a kill leaves: an unfinished file, and a file that the manifest does not list.
    (copy / ".stage-000000-1-1.tmp").write_bytes(b"half of a")
    missing = next(path for path in sorted(files_of(images)) if path not in kept)
    (copy / missing).parent.mkdir(parents=True, exist_ok=True)
    (copy / missing).write_bytes(b"half of an image")
    s3_proxy.reset()
    for name in ("staged", "folder"):
        done = ready.run("train", tmp_path / name / "tiny.yaml", cwd=tmp_path)
        assert done.code == 0, done.err
    assert_same_end(tmp_path / "staged" / "tiny", tmp_path / "folder" / "tiny")
    (copy / ".stage-000000-1-1.tmp").unlink(missing_ok=True)  # of a host that we cannot ask
    assert_whole_copy(copy, images, url)
    asked = {line.split()[1].partition("/overlap-killed/")[2].partition("?")[0] for line in s3_proxy.requests}
    assert kept
    assert not asked & kept


def test_what_cannot_be_staged_while_training_is_refused_with_the_command_that_can(
    images: Path, tmp_path: Path
) -> None:
    write_parquet(tmp_path / "data" / "train-0.parquet", images_of(images, "train"), CLASSES)
    write_parquet(tmp_path / "data" / "val-0.parquet", images_of(images, "val"), CLASSES)
    with pytest.raises(UserError) as caught:
        open_images(tmp_path / "data", f"stage_to={tmp_path}/copy", f"index_dir={tmp_path}/index")
    assert caught.value.name == "cannot-stage-while-training"
    assert (caught.value.hint or "").startswith(f"stoker stage {tmp_path}/data {tmp_path}/copy")
    assert not (tmp_path / "copy").exists()
    folders = write_images(tmp_path / "folders", train=4, val=1)
    for wrong in (tmp_path, folders / "copy"):
        with pytest.raises(UserError) as caught:
            open_images(folders, f"stage_to={wrong}", f"index_dir={tmp_path}/index")
        assert caught.value.name == "folder-inside-data"


def test_a_full_disk_ends_the_keeping_and_nothing_else(
    images: Path, s3: S3Server, tmp_path: Path, disk_of: Callable[[str], Path]
) -> None:
    url, copy = s3.put_folder(images, "overlap-full"), disk_of("80k") / "copy"
    local, _, _ = open_images(images, f"index_dir={tmp_path}/local")
    loader, staging, said = open_images(url, f"stage_to={copy}", f"index_dir={tmp_path}/index")
    assert staging is not None
    for epoch in (0, 1):
        assert stream(loader, epoch) == stream(local, epoch)
    assert not staging.filler.settle(60)
    for one in (loader, local, staging):
        one.close()
    assert [line.partition(":")[0] for line in said if "incomplete" in line] == ["warning"], said
    # What was kept before is whole, and used by the next run.
    opened = LocalCopy(copy, url)
    kept = [record.path for record in opened.records()]
    opened.close()
    assert 0 < len(kept) < 75
    assert all((copy / path).read_bytes() == (images / path).read_bytes() for path in kept)


def test_a_file_that_was_changed_in_the_copy_or_does_not_fit_the_queue_is_read_from_the_source(
    images: Path, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MOST_WAITING_BYTES", 2000)  # two or three images
    url, copy = s3.put_folder(images, "overlap-changed"), tmp_path / "copy"
    keys = [f"stage_to={copy}", f"index_dir={tmp_path}/index"]
    local, _, _ = open_images(images, f"index_dir={tmp_path}/local")
    loader, staging, said = open_images(url, *keys)
    assert staging is not None
    assert stream(loader, 0) == stream(local, 0)
    assert staging.filler.settle(120), said
    (copy / "train" / "class0" / "000.jpg").unlink()
    (copy / "train" / "class1" / "001.jpg").write_bytes(b"shorter")
    monkeypatch.undo()
    for epoch in (1, 2, 3):  # each leaves out other images at its end
        assert stream(loader, epoch) == stream(local, epoch)
    for one in (loader, local, staging):
        one.close()
    assert_whole_copy(copy, images, url)  # both were fetched again, and kept
