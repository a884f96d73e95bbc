"""Staging that is disturbed: how many faults and kills it survives, and how many wrong files it accepts (none).

Part one: a proxy resets, cuts short, stalls and corrupts responses at many places, answers 503 and 500, and objects are
replaced while they are read. Part two: SIGKILL at random moments, each followed by a check of every file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import obstore
from tests.support.proxy import Proxy
from tests.support.s3_server import BUCKET, S3Server, running_s3_server
from tests.support.staging import files_of, kill_at_random_moments

from bench.rounds import keep
from stoker.io.connection import Patience
from stoker.io.local_copy import LocalCopy
from stoker.stage.copying import copy_all, find_work, verify_copy
from stoker.stage.sources import open_source
from stoker.stage.transfer import StageOptions
from stoker.tasks.base import Selection

HASTE = Patience(connect_s=2, stall_s=0.5, request_s=10, retry_s=30, max_retries=40)
OBJECTS = 300
URL = f"s3://{BUCKET}/data"


def upload(server: S3Server) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    contents = {f"c{number % 9}/{number:04}.jpg": rng.bytes(50_000 + 400 * number) for number in range(OBJECTS)}
    contents["large.tar"] = rng.bytes(40_000_000)
    for name, data in contents.items():
        obstore.put(server.client(), f"data/{name}", data, use_multipart=False)
    return contents


def faults(server: S3Server, contents: dict[str, bytes], target: Path) -> dict[str, object]:
    """Stages through a proxy that breaks most responses; again until it is complete."""
    proxy = Proxy(server.port).start()
    os.environ.update(server.environment(proxy.endpoint))
    injected = []
    for after in range(0, 50_000, 1_000):
        for kind in ("reset", "short", "flip"):
            injected.append(proxy.fault(r"GET /bucket/data/c", kind, times=2, after=after))
    for after in range(0, 8_000_000, 500_000):
        for kind in ("reset", "short"):
            injected.append(proxy.fault(r"GET /bucket/data/large", kind, times=1, after=after))
    injected.append(proxy.fault(r"GET /bucket/data/c", "stall", times=10, after=1000, seconds=2.0))
    injected.append(proxy.fault(r"GET /bucket/data/c", "status", times=150, code=503))
    injected.append(proxy.fault(r"GET /bucket/data/c", "status", times=50, code=500))
    for number in range(5):
        name, data = f"c{number}/{number:04}.jpg", os.urandom(1000 + number)

        def replace(name: str = name, data: bytes = data) -> None:
            server.put(f"data/{name}", data)
            contents[name] = data

        injected.append(proxy.fault(f"GET /bucket/data/{name}", "call", call=replace))
    runs, wrong = 0, 0
    while True:
        runs += 1
        source = open_source(URL, HASTE)
        copy = LocalCopy(target, source.url)
        work = find_work(source, copy, Selection())
        summary = copy_all(source, copy, Selection(), work, StageOptions(), lambda _so_far, _of: None)
        copy.close()
        found = files_of(target)
        wrong += sum(data != contents[name] for name, data in found.items())
        # A file that was replaced after it had been copied is right again after the next run.
        if summary.complete and found == contents:
            break
        assert runs < 20, summary.failures[:5]
    proxy.stop()
    kinds: Counter[str] = Counter()
    for fault in injected:
        kinds[fault.kind] += fault.seen
    return {
        "injected": kinds.total(),
        "by_kind": dict(kinds),
        "wrong_files_accepted": wrong,
        "runs_until_complete": runs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name, running_s3_server() as server:
        work = Path(name)
        contents = upload(server)
        document: dict[str, object] = {"faults": faults(server, contents, work / "faults")}
        os.environ.update(server.environment())
        at_work = kill_at_random_moments(URL, work / "kills", contents, arguments.kills)
        again = verify_copy(LocalCopy(work / "kills", URL), lambda _done, _total: None)
        document["kills"] = {
            "kills": arguments.kills,
            "while_copying": at_work,
            "wrong_files_in_the_manifest": len(again.wrong),
        }
    print(document)
    print(f"wrote {keep('stage_faults', document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
