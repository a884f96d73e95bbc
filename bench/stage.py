"""Staging 5,000 objects of about 110 KB from a real S3 server, compared with s5cmd, rclone and awscrt used directly.

Every contender is a program of its own that begins with an empty folder; its CPU seconds are those that the kernel
counted for it. The server runs on the same cores, so a client that needs less CPU is also faster here. Beside it: the
same requests whose bodies are thrown away, and the same files written from memory. The target is a file system in
memory, because this machine's disk takes fewer files a second than the clients bring; `--disk` measures that, where
only stoker waits until its files are on the disk.

    python -m bench.stage                 the clients
    python -m bench.stage --against OLD/.venv/bin/python
    python -m bench.stage concurrency     the concurrency found, against fixed ones, without and with 50 ms a request
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.s3_server import BUCKET, S3Server, running_s3_server

from bench.peers.environments import python_of
from bench.rounds import RESULTS, Spread, interleave, keep, ratio

PROJECT = Path(__file__).parents[1]
LATENCY_MS = 50
LEVELS = (16, 32, 64, 128, 256, 512)
PREFIX = "train"
MEMORY = "/dev/shm"
FORMER = "stoker of another checkout"


class Clients:
    """Programs that copy the bucket into an empty folder, and what each of them used."""

    def __init__(self, server: S3Server, work: Path, targets: Path, objects: int, size: int) -> None:
        self.server, self.work, self.targets, self.objects = server, work, targets, objects
        self.bytes = objects * size
        self._numbers = itertools.count()
        self.cpu_s: dict[str, list[float]] = defaultdict(list)
        self.list = work / "names"
        names = [f"{PREFIX}/n{number % 100:08}/image_{number:06}.JPEG" for number in range(objects)]
        self.list.write_text("\n".join(names))
        self.environment = {
            **os.environ, **server.environment(), "BUCKET": BUCKET, "PYTHONPATH": str(PROJECT), "HOME": str(work),
            "XDG_CACHE_HOME": str(work / "cache"),
        }  # fmt: skip
        self.crt = python_of("awscrt")
        assert self.crt is not None, "awscrt uploads the objects"
        self._run("upload", [str(self.crt), "-m", "bench.peers.awscrt_direct", "put", str(self.list), str(size)])

    def rate(self, name: str, command: list[str], endpoint: str | None = None) -> float:
        """Objects per second of one program."""
        # On a disk a new folder for each: ext4 skips the inodes that were freed in the last seconds one by one, so
        # after the copy of another contender was removed, creating a file took 1 ms instead of 0.06.
        target = self.targets / f"copy{next(self._numbers)}"
        os.sync()
        start = time.perf_counter()
        self._run(name, [part.replace("TARGET", str(target)) for part in command], endpoint)
        elapsed = time.perf_counter() - start
        found = sum(1 for path in target.rglob("*.JPEG"))
        if self.targets != self.work:
            shutil.rmtree(target, ignore_errors=True)
        assert found in (self.objects, 0), f"{name} copied {found} files"
        return self.objects / elapsed

    def _run(self, name: str, command: list[str], endpoint: str | None = None) -> None:
        environment = self.environment | ({} if endpoint is None else {"AWS_ENDPOINT_URL": endpoint})
        with (self.work / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, cwd=PROJECT, stdout=log, stderr=log)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{name}: {(self.work / 'log').read_text()[-2000:]}")
        self.cpu_s[name].append(used.ru_utime + used.ru_stime)

    def cpu_per_gb(self, name: str) -> Spread:
        return Spread(tuple(seconds / (self.bytes / 1e9) for seconds in self.cpu_s[name]))


def ours(*options: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", "stoker", "stage", f"s3://{BUCKET}/{PREFIX}", "TARGET", *options]


def contenders(clients: Clients, against: str | None) -> dict[str, Callable[[], float]]:
    endpoint = clients.server.endpoint
    found: dict[str, list[str]] = {"stoker": ours()}
    if against is not None:
        found[FORMER] = ours(python=against)
    if (python := python_of("s5cmd")) is not None:
        program = next((python.parent.parent / "lib").glob("python*/site-packages/s5cmd/bin/s5cmd"))
        found["s5cmd"] = [str(program), "--endpoint-url", endpoint, "cp", f"s3://{BUCKET}/{PREFIX}/*", "TARGET/"]
    if (python := python_of("rclone")) is not None:
        remote = f":s3,provider=SeaweedFS,env_auth=true,endpoint='{endpoint}',region=us-east-1:{BUCKET}/{PREFIX}"
        # Its default is 4 transfers; 64, like awscrt below, and neither was swept. It compares MD5 by itself.
        found["rclone"] = [
            str(python.parent / "rclone"), "copy", remote, "TARGET", "--transfers", "64", "--checkers", "64",
            "--fast-list",
        ]  # fmt: skip
    direct = [str(clients.crt), "-m", "bench.peers.awscrt_direct", "get", str(clients.list), "TARGET", "64"]
    found["awscrt directly"] = direct
    limits = {
        "fetch and discard": [sys.executable, "-m", "bench.stage", "discard"],
        "write only": [sys.executable, "-m", "bench.stage", "write", "TARGET", str(clients.objects),
                       str(clients.bytes // clients.objects)],
    }  # fmt: skip
    return {name: lambda name=name, command=command: clients.rate(name, command)  # type: ignore[misc]
            for name, command in (found | limits).items()}  # fmt: skip


def measure_clients(clients: Clients, rounds: int, against: str | None) -> None:
    spreads = interleave(contenders(clients, against), rounds)
    cpu = {name: clients.cpu_per_gb(name) for name in spreads}
    peers = [name for name in (FORMER, "s5cmd", "rclone", "awscrt directly") if name in spreads]
    ratios = {f"stoker / {peer}": ratio(spreads["stoker"], spreads[peer]) for peer in peers}
    if "s5cmd" in cpu:
        ratios["CPU, stoker / s5cmd"] = ratio(cpu["stoker"], cpu["s5cmd"])
    path = _keep_part(
        "clients_on_disk" if clients.targets == clients.work else "clients",
        {
            "objects": clients.objects,
            "mean_bytes": clients.bytes // clients.objects,
            "objects_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
            "cpu_seconds_per_gb": {name: spread.as_dict() for name, spread in cpu.items()},
            "ratios": {name: spread.as_dict() for name, spread in ratios.items()},
        },
    )
    for name, spread in spreads.items():
        print(f"{name:<28}{spread.median:>9.0f} objects/s  {cpu[name].median:>6.2f} CPU s/GB")
    for name, spread in ratios.items():
        print(f"{name:<28}{spread.median:>6.2f}  ({min(spread.values):.2f}-{max(spread.values):.2f})")
    print(f"wrote {path}")


def measure_concurrency(clients: Clients, rounds: int) -> None:
    document: dict[str, object] = {"objects": clients.objects, "latency_ms": LATENCY_MS}
    runs = {"found": ours(), **{str(level): ours("--concurrency", str(level)) for level in LEVELS}}
    with slow_proxy(clients.server) as endpoint:
        for label, at in (("without latency", None), (f"{LATENCY_MS} ms a request", endpoint)):
            spreads = interleave(
                {name: lambda name=name, at=at: clients.rate(f"{name}", runs[name], at) for name in runs},  # type: ignore[misc]
                rounds,
            )
            best = max(LEVELS, key=lambda level: spreads[str(level)].median)
            share = ratio(spreads["found"], spreads[str(best)])
            document[label] = {
                "objects_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
                "best_fixed": best,
                "found / best fixed": share.as_dict(),
            }
            print(f"{label}: found {spreads['found'].median:.0f}, best fixed ({best}) {spreads[str(best)].median:.0f} "
                  f"objects/s: {share.median:.2f}")  # fmt: skip
    print(f"wrote {_keep_part('concurrency', document)}")


def _keep_part(part: str, document: dict[str, object]) -> Path:
    """Both parts are measured separately, and kept in one file."""
    try:
        known = json.loads((RESULTS / "stage" / "result.json").read_text())["measured"]
    except (OSError, ValueError, KeyError):
        known = {}
    return keep("stage", known | {part: document})


@contextmanager
def slow_proxy(server: S3Server) -> Iterator[str]:
    """A proxy in front of the server that adds the latency to every request."""
    proxy = subprocess.Popen(
        [sys.executable, "-m", "tests.support.proxy", str(server.port), str(LATENCY_MS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT,
    )  # fmt: skip
    assert proxy.stdout is not None
    try:
        yield f"http://127.0.0.1:{proxy.stdout.readline().strip()}"
    finally:
        proxy.kill()


def discard() -> None:
    """Fetches the objects as `stoker stage` does, and throws them away."""
    from stoker.io.copy_manifest import CopiedFile
    from stoker.io.local_copy import LocalCopy
    from stoker.stage.sources import open_source
    from stoker.stage.transfer import StageOptions, Summary, Transfer

    class Nowhere(LocalCopy):
        def __init__(self) -> None:
            self.folder = MEMORY

        def check(self, path: str) -> None:
            del path

        def put(self, path: str, data: object, version: str = "", verified: str = "") -> CopiedFile:
            del data
            return CopiedFile(path, 0, version, "", verified)

        def commit(self, limit_bytes: int | None = None) -> int:
            del limit_bytes
            return 0

    source = open_source(f"s3://{BUCKET}/{PREFIX}")
    summary = Summary(source.url, "")
    transfer = Transfer(source, Nowhere(), StageOptions(), summary, lambda: None)
    transfer.copy(source.files())
    transfer.close()
    assert summary.complete, summary.failures[:3]


def write(target: str, objects: int, size: int) -> None:
    """Writes as many files from memory, under temporary names, and syncs."""
    from stoker.io.local_copy import LocalCopy

    copy, data = LocalCopy(target, "s3://nowhere"), os.urandom(size)
    for number in range(objects):
        copy.put(f"n{number % 100:08}/image_{number:06}.JPEG", data)
    copy.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("clients", "concurrency", "discard", "write"), default="clients")
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--objects", type=int)
    parser.add_argument("--bytes", type=int, default=110_000)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--against", metavar="PYTHON", help="also another checkout's stoker, run by its interpreter")
    parser.add_argument("--disk", action="store_true", help="copy to the disk of TMPDIR; otherwise to memory")
    wanted = parser.parse_args()
    if wanted.part == "discard":
        discard()
        return 0
    if wanted.part == "write":
        target, objects, size = wanted.arguments
        write(target, int(objects), int(size))
        return 0
    few = wanted.part == "concurrency"
    with (
        tempfile.TemporaryDirectory(prefix="stoker-bench-") as name,
        tempfile.TemporaryDirectory(prefix="stoker-bench-", dir=None if wanted.disk else MEMORY) as targets,
        running_s3_server() as server,
    ):
        places = (Path(name), Path(name if wanted.disk else targets))
        clients = Clients(server, *places, wanted.objects or (2500 if few else 5000), wanted.bytes)
        if few:
            measure_concurrency(clients, wanted.rounds or 2)
        else:
            measure_clients(clients, wanted.rounds or 5, wanted.against)
    return 0


if __name__ == "__main__":
    sys.exit(main())
