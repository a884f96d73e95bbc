"""A store that does not respond for a while is waited for, with a word about it, and training continues to the same
bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.io import outage
from stoker.io.connection import Patience
from stoker.io.object_store import ObjectStore
from stoker.io.stores import StoreDown
from tests.loader.test_loader import SAMPLES, ledger, loader_for, make_images
from tests.support.proxy import Proxy
from tests.support.s3_server import BUCKET, S3Server, running_s3_server
from tests.support.tiny_training import assert_same_end, steps_done, write_config, write_images
from tests.support.waiting import DEADLINE_S, wait_until
from tests.tasks.images.test_packing import pack

# The client's own retries are over after some 5 s.
OUTAGE_S = 7.0


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("local")
    make_images(root, "train", SAMPLES)
    return root


@pytest.fixture
def url(s3_server: S3Server, s3_proxy: Proxy, local: Path, request: pytest.FixtureRequest) -> str:
    return s3_server.put_folder(local, f"outage-{os.getpid()}-{abs(hash(request.node.name))}")


def break_down(proxy: Proxy, seconds: float) -> None:
    """An outage of every kind: connections are reset, then not answered, then refused."""
    proxy.outage = "reset"
    time.sleep(seconds / 4)
    proxy.outage = "stall"
    time.sleep(seconds / 4)
    proxy.stop()
    proxy.outage = None
    time.sleep(seconds / 2)
    proxy.start()


def said_so_far(capsys: pytest.CaptureFixture[str]) -> str:
    """All of stderr: reading it takes it away, so it is written back."""
    said = capsys.readouterr().err
    sys.stderr.write(said)
    return said


class During:
    """Runs an outage beside the test, and notes what is said about it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.said: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(work,)), threading.Thread(target=self._listen)]

    def __enter__(self) -> During:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _work(self, work: Callable[[], None]) -> None:
        work()
        self._over.set()

    def _listen(self) -> None:
        while not self._over.wait(0.1):
            if (text := outage.text()) is not None:
                self.said.append(text)


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a command that has no progress line of its own; other tests may have trained in this process, or started
    a thread that says it."""

    def end() -> None:
        outage.told_elsewhere()
        if outage._teller is not None:
            outage._teller.join(DEADLINE_S)

    end()
    monkeypatch.setattr(outage, "_is_told_elsewhere", False)
    monkeypatch.setattr(outage, "_teller", None)
    yield
    end()


@pytest.mark.usefixtures("telling")
def test_an_outage_longer_than_the_clients_retries_is_waited_for_and_said(
    url: str, local: Path, s3_proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = ledger(loader_for(local, "batch_size=4"), epoch=1)
    loader = loader_for(url, "batch_size=4", f"index_dir={tmp_path}", "loader=thread", "lookahead=1MB", workers=2)  # type: ignore[arg-type]
    next(batches := loader.epoch(0))  # connected
    batches.close()  # type: ignore[attr-defined]
    s3_proxy.outage = "reset"  # before anything is read
    with During(lambda: break_down(s3_proxy, OUTAGE_S)) as during:
        assert ledger(loader, epoch=1) == expected
    # A thread that listens ten times a second may miss any one of these.
    assert any(re.match(rf"waiting for {url}/train.* since [3-9] s", text) for text in during.said), during.said
    assert outage.current() is None
    wait_until(lambda: "it responds again" in (said := said_so_far(capsys)) and f"waiting for {url}/train" in said)


@pytest.mark.usefixtures("telling")
def test_workers_that_first_reach_out_in_an_outage_wait_for_its_end(
    url: str,
    local: Path,
    s3_proxy: Proxy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As at the first validation: its loader's workers start when it begins."""
    expected = ledger(loader_for(local, "batch_size=8"))
    options = ["batch_size=8", f"index_dir={tmp_path}", "loader=process"]
    assert ledger(loader_for(url, *options, workers=1)) == expected  # type: ignore[arg-type]
    later = loader_for(url, *options, workers=1)  # type: ignore[arg-type]
    monkeypatch.setattr(outage, "SAID_EVERY_S", DEADLINE_S)  # so that a slow return is not said twice

    def come_back() -> None:
        wait_until(lambda: (now := outage.current()) is not None and now.since_s > 3)
        s3_proxy.start()

    s3_proxy.stop()
    with During(come_back) as during:
        assert ledger(later) == expected
    assert [text for text in during.said if text.startswith(f"waiting for {url}/train since")], during.said
    # Workers wait, and the main process says so, once.
    wait_until(lambda: "it responds again" in said_so_far(capsys))
    assert said_so_far(capsys).count("since") == 2


@pytest.mark.usefixtures("telling")
def test_workers_that_pack_say_through_the_command_that_they_wait(
    url: str, s3_proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STOKER_OUTAGES_FILE", raising=False)

    def refuse() -> None:
        s3_proxy.stop()
        s3_proxy.outage = None
        wait_until(lambda: (now := outage.current()) is not None and now.since_s > 3)
        s3_proxy.start()

    def break_down_now() -> None:
        s3_proxy.outage = "stall"  # nothing more is answered, however late the thread is
        threading.Thread(target=refuse).start()

    # Of the samples, once a worker has reached the store.
    s3_proxy.fault("GET .*jpg", "call", times=1, call=break_down_now)
    result = pack(f"{url}/train", tmp_path / "packed", workers=1)
    assert (result.samples, result.skipped) == (SAMPLES, 0)
    wait_until(lambda: "it responds again" in said_so_far(capsys))


@pytest.mark.real_time
def test_a_loader_that_is_closed_in_an_outage_does_not_wait_for_its_end(
    url: str, s3_proxy: Proxy, tmp_path: Path
) -> None:
    loader = loader_for(url, "batch_size=4", f"index_dir={tmp_path}", "loader=thread", workers=2)  # type: ignore[arg-type]
    next(batches := loader.epoch(0))
    batches.close()  # type: ignore[attr-defined]
    s3_proxy.stop()
    began = time.monotonic()
    try:

        def take() -> None:
            with pytest.raises(RuntimeError, match="the reader was closed"):
                next(loader.epoch(1))

        taking = threading.Thread(target=take)
        taking.start()
        wait_until(lambda: outage.current() is not None)
        loader.close()
        taking.join(DEADLINE_S)
        assert time.monotonic() - began < Patience().retry_s / 4
    finally:
        outage._leaving.clear()


def test_an_outage_that_does_not_end_is_an_error_for_every_reader(url: str, s3_proxy: Proxy, local: Path) -> None:
    store = ObjectStore(f"{url}/train", patience=Patience(retry_s=1.5))
    names = [str(path.relative_to(local / "train")) for path in sorted((local / "train").rglob("*.jpg"))]
    store.read(names[0])
    s3_proxy.stop()
    seen: list[StoreDown] = []

    def read(name: str) -> None:
        with pytest.raises(StoreDown) as caught:
            store.read(name)
        seen.append(caught.value)

    threads = [threading.Thread(target=read, args=(name,)) for name in names[:8]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert {down.name for down in seen} == {"store-unreachable"}
    assert len(seen) == 8
    assert "waited for" in seen[0].seen


@pytest.fixture
def own_server() -> Iterator[S3Server]:
    with running_s3_server() as server:
        yield server


@pytest.mark.release
@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize("moment", ["training", "validation"])
def test_training_survives_20_s_without_its_store_and_ends_with_the_same_bits(
    own_server: S3Server, tmp_path: Path, engine: str, moment: str
) -> None:
    """The server is killed, and started again 20 s later."""
    data = write_images(tmp_path / "data", side=256)  # more than is read ahead
    url = own_server.put_folder(data, "tiny")
    proxy = Proxy(own_server.port, latency=0.3).start()
    environment = os.environ | own_server.environment(proxy.endpoint) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    keys = {"loader": engine, "num_workers": 1, "lookahead": "1MB", "prefetch_factor": 1}
    ended = []
    for name in ("reference", "outage"):
        config = write_config(tmp_path, Path(url.replace("s3://", "s3:/")), **keys, run_name=name)
        config.write_text(config.read_text().replace("s3:/b", "s3://b"))
        command = [sys.executable, "-m", "stoker", "train", str(config)]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        if name == "outage":
            wait_until(lambda: steps_done(tmp_path / "runs" / "outage") >= (2 if moment == "training" else 5))
            own_server.stop()
            time.sleep(20)
            own_server._start()
            proxy.upstream_port = own_server.port
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said
        ended.append(said)
    proxy.stop()
    assert f"waiting for s3://{BUCKET}/tiny" in ended[1]
    assert_same_end(tmp_path / "runs" / "outage", tmp_path / "runs" / "reference")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, and the run that was trained on them without an outage."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = write_config(folder, write_images(folder / "data", side=256))  # more than is read ahead
    command = [sys.executable, "-m", "stoker", "train", str(config)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DEADLINE_S)
    return folder


@pytest.mark.release
@pytest.mark.parametrize(
    ("engine", "notice", "code", "moment", "kind"),
    [
        ("thread", signal.SIGTERM, 143, "training", "stall"),
        ("process", signal.SIGINT, 130, "validation", "refuse"),
        ("process", signal.SIGUSR1, 143, "training", "stall"),
        ("thread", signal.SIGTERM, 143, "validation", "refuse"),
    ],
)
def test_a_notice_in_an_outage_saves_leaves_and_resumes_to_the_same_bits(
    s3_server: S3Server,
    undisturbed: Path,
    tmp_path: Path,
    engine: str,
    notice: signal.Signals,
    code: int,
    moment: str,
    kind: str,
) -> None:
    """A spot machine is gone after two minutes, or half a minute: no store is worth waiting for then."""
    data = undisturbed / "data"
    url = s3_server.put_folder(data, f"notice-{os.getpid()}-{engine}-{moment}")
    proxy = Proxy(s3_server.port, latency=0.1).start()
    environment = os.environ | s3_server.environment(proxy.endpoint) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    keys = {"loader": engine, "num_workers": 2, "lookahead": "1MB", "prefetch_factor": 1, "data_root": url}
    config = write_config(tmp_path, data, **keys)
    command = [sys.executable, "-m", "stoker", "train", str(config)]

    run = tmp_path / "runs" / "tiny"
    stopped = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: steps_done(run) >= (2 if moment == "training" else 6))
    if kind == "stall":
        proxy.outage = "stall"
    else:
        proxy.stop()
    time.sleep(2)  # what was read ahead is used up
    stopped.send_signal(notice)
    began = time.monotonic()
    _, said = stopped.communicate(timeout=DEADLINE_S)
    took_s = time.monotonic() - began
    assert stopped.returncode == code, said
    assert ": saved at step" in said
    assert took_s < Patience().retry_s / 4, f"it took {took_s:.0f} s to leave"
    if kind == "stall":
        proxy.outage = None
    else:
        proxy.start()
    resumed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    proxy.stop()
    assert_same_end(run, undisturbed / "runs" / "tiny")


PACKS_AND_LOADS = """
import pickle, subprocess, sys, time
from stoker.io import outage

if len(sys.argv) > 1:
    outage.adopt(pickle.loads(bytes.fromhex(sys.argv[1])))
    print(outage.current().url)
else:
    outage.share_with_children()
    handed = pickle.dumps(outage.shared()).hex()
    with outage.waiting("s3://bucket/far", time.monotonic() - 9):
        subprocess.run([sys.executable, __file__, handed], check=True)
"""


def test_loader_processes_of_a_program_that_also_packs_see_the_same_waits(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PACKS_AND_LOADS)
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout == "s3://bucket/far\n", done.stderr
