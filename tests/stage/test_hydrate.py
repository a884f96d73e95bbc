"""Files that a lazy file system has not fetched yet: found, restored in batches, and read where that does not work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.stage.concurrency import RateLimit
from stoker.stage.hydrate import (
    Hydrated,
    HydrateOptions,
    hydrate,
    read_through,
)
from tests.support.lustre import FakeLustre
from tests.support.waiting import DEADLINE_S, wait_until

STRANGE = ["-rf", "with space.jpg", "line\nbreak: (0x0000000d) released", "ümlaut", "a: (0x00000009) exists", "$(x)`"]


def write_files(folder: Path, names: list[str], size: int = 1000) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in names]
    for path in paths:
        path.write_bytes(bytes(size))
    return paths


def numbered(count: int) -> list[str]:
    return [f"{number:05d}.jpg" for number in range(count)]


@pytest.fixture
def lustre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLustre:
    server = FakeLustre(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{server.folder}:{os.environ['PATH']}")
    return server


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_released_files_are_restored_in_batches_whatever_they_are_called(tmp_path: Path, lustre: FakeLustre) -> None:
    data = tmp_path / "data"
    plain = write_files(data / "train" / "a", numbered(700))
    odd = write_files(data / "train" / "-b", [*STRANGE, os.fsdecode(b"\xff\xfe")])
    (data / "back").symlink_to(data)
    (data / "linked").symlink_to(odd[0])
    gone = write_files(data, ["lost.jpg"])
    lustre.behave(restored_per_second=2000)
    lustre.release([*plain[:300], *odd])
    lustre.release(gone, lost=True)
    steps: list[tuple[int, ...]] = []
    said: list[str] = []
    found = hydrate(data, how=HydrateOptions(batch=100), progress=lambda *now: steps.append(now), say=said.append)
    assert (found.way, found.released, found.restored, found.read) == ("restore", 308, 307, 0)
    assert found.failed == ((str(gone[0]), "lost from the archive, too"),)
    assert lustre.released() == gone
    state = lustre.state()
    assert state["most_queued"] <= 100
    assert max(files for action, files in state["calls"] if action == "hsm_restore") <= 52
    assert steps[0] == (0, 307, 0, 307_000)
    assert steps[-1] == (307, 307, 307_000, 307_000)
    assert "307 files of 708 not there yet; asking for 100 at a time" in said

    # State is in the file system: the second time there is nothing left to ask for.
    before = len(lustre.state()["calls"])
    again = hydrate(data)
    assert (again.way, again.restored) == ("nothing to do", 0)
    assert all(action == "hsm_state" for action, _ in lustre.state()["calls"][before:])


def test_names_too_long_for_one_command_line_are_asked_about_in_smaller_groups(
    tmp_path: Path, lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "data"
    while len(str(deep)) < 3700:
        deep /= "x" * 100
    paths = write_files(deep, [f"{number:0240d}" for number in range(500)], size=10)
    for number in range(4):  # the environment has a share of the limit
        monkeypatch.setenv(f"LARGE_{number}", "x" * 100_000)
    lustre.release(paths[:1])
    found = hydrate(tmp_path / "data")
    assert (found.way, found.files, found.restored, found.failed) == ("restore", 500, 1, ())
    assert max(files for _, files in lustre.state()["calls"]) == 250


def test_a_file_that_vanishes_or_is_refused_does_not_hold_up_the_others(tmp_path: Path, lustre: FakeLustre) -> None:
    paths = write_files(tmp_path / "data", numbered(60))
    lustre.behave(restored_per_second=300, most_files=7)  # a client with small requests
    lustre.release(paths)
    gone: list[str] = []

    def delete_two(files: int, *_: int) -> None:
        # One before anything is asked for, and one later, when others have arrived and half are still to come.
        if len(gone) < 2 and files >= 10 * len(gone):
            path = lustre.released()[-1]
            path.unlink()
            gone.append(str(path))

    found = hydrate(tmp_path / "data", how=HydrateOptions(batch=30), progress=delete_two)
    assert found.way == "restore"
    assert found.restored == 58
    assert [(name, "No such file" in reason) for name, reason in found.failed] == [
        (name, True) for name in sorted(gone)
    ]


def test_restores_that_stall_are_asked_for_again_and_then_read(tmp_path: Path, lustre: FakeLustre) -> None:
    paths = write_files(tmp_path / "data", numbered(40))
    lustre.behave(stalls_after=10, wakes_on_request=True)
    lustre.release(paths)
    said: list[str] = []
    woken = hydrate(tmp_path / "data", how=HydrateOptions(stall_s=0.6), say=said.append)
    assert (woken.way, woken.restored, woken.failed) == ("restore", 40, ())
    assert any("nothing was restored for 1 s; asking for 30 files again" in line for line in said)

    lustre.behave(stalls_after=45, wakes_on_request=False)
    lustre.release(paths)
    read = hydrate(tmp_path / "data", how=HydrateOptions(stall_s=0.6), say=said.append)
    assert (read.way, read.restored, read.read, read.failed) == ("restore, then read", 5, 35, ())
    assert "reading the remaining 35 files instead" in said[-1]
    assert lustre.released() == []


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ({"refuses": True}, "Operation not permitted"),
        ({"hangs": True}, "did not answer in 1 s"),
        ({"not_lustre": True}, "Inappropriate ioctl"),
    ],
)
def test_an_lfs_that_is_of_no_use_is_replaced_by_reading(
    tmp_path: Path, lustre: FakeLustre, behaviour: dict[str, bool], told: str
) -> None:
    paths = write_files(tmp_path / "data", numbered(20))
    lustre.release(paths)
    lustre.behave(**behaviour)
    before = content(tmp_path / "data") if "refuses" not in behaviour else {}
    said: list[str] = []
    # The others answer, however long that takes on a busy machine.
    call_s = 1.0 if "hangs" in behaviour else DEADLINE_S
    found = hydrate(tmp_path / "data", how=HydrateOptions(call_s=call_s), say=said.append)
    assert (found.way, found.read, found.failed) == ("read", 20, ())
    assert told in (found.note or "")
    assert any(told in line for line in said)
    lustre.behave(hangs=False)
    assert lustre.released() == []
    assert not before or content(tmp_path / "data") == before


def test_other_mounts_are_read_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no lfs here
    data = tmp_path / "data"
    write_files(data / "deep" / "er", STRANGE, size=3_000_000)
    write_files(data, ["empty"], size=0)
    (data / "dangling").symlink_to(data / "nowhere")
    steps: list[tuple[int, ...]] = []
    said: list[str] = []
    found = hydrate(data, progress=lambda *now: steps.append(now), say=said.append)
    assert (found.way, found.read, found.released, found.bytes) == ("read", 7, None, 18_000_000)
    assert found.failed == ((str(data / "dangling"), "No such file or directory"),)
    assert found.kind in said[0]
    assert steps[-1] == (7, 7, 18_000_000, 18_000_000)
    assert found.as_dict()["failed"][0]["reason"] == "No such file or directory"
    one: Hydrated = hydrate(data / "deep" / "er" / "-rf")
    assert (one.files, one.read) == (1, 1)


def test_reading_keeps_to_its_limit_and_gives_up_on_a_dead_server(tmp_path: Path) -> None:
    paths = [os.fsencode(path) for path in write_files(tmp_path, numbered(8), size=250_000)]
    began = time.monotonic()
    assert read_through(paths, RateLimit(2e6), lambda _files, _bytes: None, readers=32, stall_s=30) == {}
    assert time.monotonic() - began > 0.7  # 2 MB at 2 MB/s, less the first reads, which need not wait
    os.mkfifo(tmp_path / "dead")  # opening it waits for a writer that never comes
    failed = read_through(
        [*paths, os.fsencode(tmp_path / "dead")], RateLimit(None), lambda _files, _bytes: None, readers=32, stall_s=1
    )
    assert failed == {os.fsencode(tmp_path / "dead"): "not a byte for 1 s"}


def test_the_command_fetches_reports_and_can_be_interrupted(
    tmp_path: Path, lustre: FakeLustre, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_files(tmp_path / "data", numbered(50))
    lustre.release(paths[:20])
    lustre.release(paths[20:21], lost=True)
    (tmp_path / "empty").mkdir()
    command = ["stage", "--hydrate", str(tmp_path / "data")]
    assert main([*command, "--limit-rate", "1MB/s"]) == 1
    said = capsys.readouterr()
    assert "restored  20 files by lfs" in said.out
    assert f"{paths[20]}: lost from the archive, too" in said.out
    assert "present   29 files already there" in said.out
    paths[20].unlink()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["way"] == "nothing to do"
    assert main([*command, "--verify"]) == 2
    assert main([*command, "/elsewhere"]) == 2
    capsys.readouterr()
    refused = {"nowhere": (1, "No such file"), "empty": (1, "holds no files"), "s3://b/d": (2, "is a URL")}
    for place, (code, words) in refused.items():
        assert main(["stage", "--hydrate", place if "://" in place else str(tmp_path / place)]) == code
        assert words in capsys.readouterr().err

    lustre.behave(restored_per_second=5)
    lustre.release(path for path in paths if path.exists())
    running = subprocess.Popen(
        [sys.executable, "-m", "stoker", *command], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    wait_until(lambda: len(lustre.released()) < 49)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 130
    assert "run the same command again" in err
    # The server forgot what it had been asked for.
    lustre.behave(restored_per_second=1e9, queue=[])
    left = set(lustre.released()) - {paths[20]}
    assert left
    capsys.readouterr()
    assert main(command) == 0
    assert f"restored  {len(left)} files by lfs" in capsys.readouterr().out
    assert set(lustre.released()) == {paths[20]}
