"""Our loader of patches and our augmentation on the same cores; AUGMENT=no only reads, cuts and normalises."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from bench.peers.serving import Job, serve
from bench.volume_augment import BATCH, patch_of, statistics_of
from stoker.config import load_config
from stoker.loader.loader import LoaderOptions
from stoker.tasks.volumes.augment import build_volume_augment, build_volume_eval, transform_range
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.cases.survey import survey
from stoker.tasks.volumes.data import PatchLoader, PatchRule, plan_training
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.volume import ReadingOptions
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patch_collate import PatchBatch
from stoker.tasks.volumes.patches.patches import UNCHANGED, training_steps

# nnU-Net blurs, or lowers the resolution of, each channel with probability 1/2 once it has decided to; and its two
# gamma corrections are 0.1 and 0.3.
SAME_LAW = ("volume_blur=0.1", "volume_low_resolution=0.125", "volume_gamma=0.4")
STEPS = 1000


def open_stream(job: Job) -> Iterator[int]:
    torch.set_num_threads(1)  # each of our workers has a core
    patch, augmented = patch_of(job.images), os.environ.get("AUGMENT") != "no"
    config = load_config(None, ["task=segment3d", f"patch_size={list(patch)}", *SAME_LAW]).config
    cases, volumes = open_cases(job.images / "cases.yaml").cases, OpenVolumes()
    transforms = transform_range(config) if augmented else UNCHANGED
    rule = PatchRule(patch, foreground=config.foreground_patches, transforms=transforms)
    plan = plan_training(cases, survey(cases, volumes), LabelRules(2, 2), rule, training_steps(STEPS, BATCH))
    loader = PatchLoader(plan, ReadingOptions(), LoaderOptions(workers=job.workers, held=job.workers + 2))
    means, stds = statistics_of(len(cases))
    prepare = (build_volume_augment if augmented else build_volume_eval)(config, means, stds).prepare
    with ThreadPoolExecutor(job.workers) as pool:
        for epoch in itertools.count():
            making: deque[Future[int]] = deque()
            for batch in loader.epoch(epoch):
                making.append(pool.submit(_prepared, prepare, batch))
                if len(making) > job.workers:
                    yield making.popleft().result()
            for last in making:
                yield last.result()


def _prepared(prepare: Any, batch: PatchBatch) -> int:
    inputs, _ = prepare(batch, lambda rows: rows)
    return len(inputs)


if __name__ == "__main__":
    serve(open_stream)
