"""Our own loader; the STOKER_OVERRIDES environment variable holds KEY=VALUE settings."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

from bench.peers.serving import BATCH, SIZE, Job, endless, serve
from stoker.config import load_config
from stoker.tasks.images.data import choose_decoding, open_loader, open_samples, training_plan


def open_stream(job: Job) -> Iterator[int]:
    overrides = [
        f"data_root={job.images}",
        f"batch_size={BATCH}",
        f"img_size={SIZE}",
        f"num_workers={job.workers}",
        "pin_memory=false",
        f"index_dir={job.work / 'stoker-index'}",
        *os.environ.get("STOKER_OVERRIDES", "").split(),
    ]
    config = load_config(None, overrides).config
    samples = open_samples(config, "")
    decoding, _ = choose_decoding(config, samples.index)
    plan = training_plan(config, samples, decoding)
    loader = open_loader(config, plan, workers=job.workers)
    epochs = itertools.count()
    return endless(lambda: (len(batch) for batch in loader.epoch(next(epochs))))


if __name__ == "__main__":
    serve(open_stream)
