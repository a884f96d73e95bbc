"""Before the first byte is staged: how fast source and target are, how long copying takes, and when it pays off."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.io.storage_speed import drop_from_cache, measure_local_disk
from stoker.io.stores import ReadFailure, is_url
from stoker.plan.break_even import BreakEven, break_even, duration_text
from stoker.plan.storage_bench import Appetite, appetites, rate_text
from stoker.stage.sources import Source, SourceFile

SECONDS = 3.0
READERS = 64
PART = 16 << 20
"""Bytes read from a large file: enough to see its rate."""


@dataclass(frozen=True)
class Payback:
    """What is known before staging."""

    source_bytes_per_second: float
    local_bytes_per_second: float | None
    consumer: Appetite
    found: BreakEven

    def as_dict(self) -> dict[str, Any]:
        """The part of the `--json` document."""
        return {
            "source_bytes_per_second": self.source_bytes_per_second,
            "local_bytes_per_second": self.local_bytes_per_second,
            "consumer": f"{self.consumer.gpu}, {self.consumer.model}",
            "consumer_bytes_per_second": self.consumer.bytes_per_second,
        } | self.found.as_dict()


def measure_payback(
    source: Source, files: Sequence[SourceFile], folder: str, *, seconds: float = SECONDS
) -> Payback | None:
    """Reads some of the files for some seconds; None if too little could be read.

    Training that reads the source is compared with an A100 on ResNet-50, as we do not know what will read it.
    """
    rate = read_rate(source, files, seconds)
    if rate is None:
        return None
    size = sum(file.size for file in files)
    # Beside the target and not in it: if we are killed, no folder is left that a data set would take for a class.
    beside = Path(folder).absolute().parent
    local = measure_local_disk(beside, size / len(files), 1.0) if _same_disk(str(beside), folder) else None
    consumer = appetites(None)[0]
    found = break_even(size, rate, local=local, needed=consumer.bytes_per_second)
    return None if found is None else Payback(rate, local, consumer, found)


def payback_text(payback: Payback) -> str:
    """The lines that are printed before copying starts."""
    local = payback.local_bytes_per_second
    disk = "" if local is None else f", the local disk {rate_text(local)} to one"
    text = (
        f"the source delivers {rate_text(payback.source_bytes_per_second)} to {READERS} readers{disk}: "
        f"copying takes about {duration_text(payback.found.copy_s)}"
    )
    consumer, epochs = payback.consumer, payback.found.epochs
    text += f". An {consumer.gpu} on {consumer.model} takes {rate_text(consumer.bytes_per_second)}"
    if epochs is None:
        return f"{text}, which the source already delivers: the copy pays off only with more of them"
    return f"{text}: for it the copy pays off after {epochs:.1f} epochs"


def read_rate(source: Source, files: Sequence[SourceFile], seconds: float) -> float | None:
    """Bytes per second of many readers, each file not in this host's memory."""
    root = None if is_url(source.url) else source.url
    order = np.random.default_rng(0).permutation(len(files)).tolist()
    lock, read, ends = threading.Lock(), [0], list[float]()
    began = time.perf_counter()

    def work() -> None:
        while time.perf_counter() - began < seconds:
            with lock:
                if not order:
                    return
                file = files[order.pop()]
            wanted = min(file.size, PART)
            # Local files that stay in the page cache would show the speed of memory, not of the source.
            if not wanted or (root is not None and not drop_from_cache(f"{root}/{file.path}", 0, wanted)):
                continue
            try:
                size = len(source.read(file, 0, wanted).data)
            except (OSError, ReadFailure):
                continue  # copying will report it
            with lock:
                read[0] += size
                ends.append(time.perf_counter())

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(READERS, len(files)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return read[0] / (max(ends) - began) if len(ends) >= min(4, len(files)) and read[0] else None


def _same_disk(one: str, other: str) -> bool:
    try:
        return os.stat(one).st_dev == os.stat(other).st_dev  # noqa: PTH116
    except OSError:
        return False
