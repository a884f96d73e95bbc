"""Our loader of patches on a pack; LAW=nnunet draws rotations and scalings with nnU-Net's probabilities."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

from bench.peers.volume_serving import VolumeJob, serve_volumes
from stoker.loader.loader import LoaderOptions
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.cases.survey import survey
from stoker.tasks.volumes.data import PatchLoader, PatchRule, plan_training
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.volume import ReadingOptions
from stoker.tasks.volumes.patches.patches import UNCHANGED, TransformRange, training_steps

STEPS = 1000
NNUNET = TransformRange(flips=(0.5, 0.5, 0.5), rotation=0.2, scaling=0.2)


def open_stream(job: VolumeJob) -> Iterator[int]:
    listed, reading = open_cases(job.data), ReadingOptions()
    assert listed.rules is not None
    rule = PatchRule(job.patch, transforms=NNUNET if os.environ["LAW"] == "nnunet" else UNCHANGED)
    steps = training_steps(STEPS, job.batch)
    plan = plan_training(listed.cases, survey(listed.cases, OpenVolumes(reading)), listed.rules, rule, steps)
    loader = PatchLoader(plan, reading, LoaderOptions(workers=job.workers))
    return (len(batch) for epoch in itertools.count() for batch in loader.epoch(epoch))


if __name__ == "__main__":
    serve_volumes(open_stream)
