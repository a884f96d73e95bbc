"""The limit: as many threads as there are workers copy the bytes of a patch, in one piece, from one place in memory to
another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from bench.peers.volume_serving import VolumeJob, serve_volumes

SOURCE_BYTES = 1 << 30


def open_stream(job: VolumeJob) -> Iterator[int]:
    size = 2 * int(np.prod(job.patch)) * job.batch
    source = np.ones(SOURCE_BYTES, np.uint8)
    random = np.random.default_rng(0)
    targets = [np.zeros(size, np.uint8) for _ in range(2 * job.workers + 1)]

    def copy(target: np.ndarray, at: int) -> int:
        target[...] = source[at : at + size]
        return job.batch

    pending: deque[Future[int]] = deque()
    with ThreadPoolExecutor(job.workers) as pool:
        number = 0
        while True:
            while len(pending) < 2 * job.workers:
                at = int(random.integers(SOURCE_BYTES - size))
                pending.append(pool.submit(copy, targets[number % len(targets)], at))
                number += 1
            yield pending.popleft().result()


if __name__ == "__main__":
    serve_volumes(open_stream)
