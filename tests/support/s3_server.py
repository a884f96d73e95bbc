"""A real S3 server (SeaweedFS) on free local ports, for tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.support.proxy import Proxy

KEY, SECRET, BUCKET = "testkey", "testsecret", "bucket"
_PORTS = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3", "admin") for kind in ("", ".grpc")]
_START_S = 90
_TRIES = 3


class S3Server:
    """A running server with one empty bucket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for attempt in range(_TRIES):
            try:
                self._start()
                return
            except RuntimeError:
                # Another process may have taken a port after we chose it and before the server opened it.
                self.stop()
                if attempt == _TRIES - 1:
                    raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def port(self) -> int:
        return self._ports["s3.port"]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """Environment variables that point a client at the server, or at a proxy in front of it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    def client(self, **options: Any) -> S3Store:
        """An obstore client for uploading objects."""
        options.setdefault("client_options", {"allow_http": True})
        return S3Store(BUCKET, endpoint=self.endpoint, access_key_id=KEY, secret_access_key=SECRET,
                       region="us-east-1", **options)  # fmt: skip

    def put(self, path: str, data: bytes) -> None:
        obstore.put(self.client(), path, data)

    def put_folder(self, folder: Path, prefix: str) -> str:
        """Uploads all files below a folder; returns the URL of what was the folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def stop(self) -> None:
        # A clean shutdown takes two seconds, and its data is not needed.
        self._process.kill()
        self._process.wait()
        for name, port in self._ports.items():  # the server leaves these behind
            Path(tempfile.gettempdir(), f"seaweedfs-{name.split('.')[0]}-grpc-{port}.sock").unlink(missing_ok=True)

    def _start(self) -> None:
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        program = shutil.which("weed") or str(Path(sysconfig.get_path("scripts")) / "weed")
        command = [
            program, "-logtostderr=true", "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-master.telemetry=false", f"-bucket={BUCKET}",
            f"-filer.localSocket={self.folder}/filer.sock", f"-s3.localSocket={self.folder}/s3.sock",
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        environment |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "HOME": str(self.folder)}
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, cwd=self.folder
            )
        self._wait()

    def _wait(self) -> None:
        """Waits until an object can be written and read back."""
        client = self.client(
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=20)},
            client_options={"allow_http": True, "timeout": "20s"},
        )
        deadline, last = time.monotonic() + _START_S, ""
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended: {self._log()}")
            try:
                obstore.put(client, ".ready", b"x")
                if bytes(obstore.get(client, ".ready").bytes()) == b"x":
                    obstore.delete(client, ".ready")
                    return
            except (BaseError, OSError) as error:
                last = str(error).split("\n", 1)[0]
            time.sleep(0.1)
        raise RuntimeError(f"the server is not ready after {_START_S} s: {last}: {self._log()}")

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]


def _free_ports(count: int) -> list[int]:
    """Ports that were all free at the same moment."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """A server that runs for the duration of the block."""
    with tempfile.TemporaryDirectory(prefix="s3") as folder:
        server = S3Server(Path(folder))
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests in this process; each test uses its own names in the bucket."""
    with running_s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with the environment variables set to use it."""
    use_environment(monkeypatch, s3_server.environment())
    return s3_server


@pytest.fixture
def s3_proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the server, with the environment variables set to use the proxy."""
    proxy = Proxy(s3_server.port).start()
    use_environment(monkeypatch, s3_server.environment(proxy.endpoint))
    yield proxy
    proxy.stop()


def use_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Replaces all AWS variables and hides the files in ~/.aws."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    # Nothing listens there: a test must never request credentials from the machine it runs on.
    nowhere = {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:9", "AWS_CONFIG_FILE": os.devnull,
               "AWS_SHARED_CREDENTIALS_FILE": os.devnull}  # fmt: skip
    for name, value in (nowhere | variables).items():
        monkeypatch.setenv(name, value)
