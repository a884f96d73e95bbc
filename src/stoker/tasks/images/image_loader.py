"""The loader of images. A batch is made in one buffer: sampler -> bytes -> header -> crop -> the sample's slot."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Say
from stoker.io.prefetch import Reader, open_reader
from stoker.io.stores import ReadFailure
from stoker.loader.batch import Allocate, BadSample, LoadedBatch, Quarantine, none_readable, replacements
from stoker.loader.loader import BatchLoader, Follow, LoaderOptions
from stoker.loader.rng import sample_keys
from stoker.loader.sampler import EpochSampler, Steps
from stoker.profile.batch_costs import BatchClock
from stoker.tasks.images.decode.crops import View, draw_flips
from stoker.tasks.images.decode.headers import BadImage
from stoker.tasks.images.layouts.parquet_files import open_sample_store
from stoker.tasks.images.layouts.sample_index import SampleSet


@dataclass
class ImageBatch(LoadedBatch):
    """Images of one size, (samples, height, width, 3): the device converts, flips and mixes them."""

    labels: NDArray[np.int64]
    indices: NDArray[np.int64]
    """The samples' indices in the data set, as the sampler gave them; a bad sample keeps its own."""
    flips: NDArray[np.bool_]
    """Which images the device should mirror."""


@dataclass(frozen=True)
class ImagePlan:
    """Everything that determines the content of a batch: the same plan gives the same batches anywhere."""

    samples: SampleSet
    sampler: EpochSampler
    steps: Steps
    view: View
    seed: int
    horizontal_flip: float

    @property
    def batch_shape(self) -> tuple[int, int, int, int]:
        return self.steps.batch_size, self.view.size, self.view.size, 3

    def members(self, epoch: int, step: int, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The members of the sample set in a step, and which repeat of a member each is."""
        return self.sampler.at(epoch, self.steps.positions(step, start))


class ImageMaker:
    """Makes batches for one worker; several threads may share it."""

    def __init__(self, plan: ImagePlan, reader: Reader) -> None:
        self.plan = plan
        self.reader = reader

    def announce(self, epoch: int, step: int, start: int) -> None:
        """Announces to the reader that a step's batch will be made later, so that its bytes can be fetched."""
        members, _ = self.plan.members(epoch, step, start)
        self.reader.expect(self.plan.samples.indices(members).tolist())

    def make(self, epoch: int, step: int, start: int, allocate: Allocate) -> ImageBatch:
        """The batch of a step, counted from the position `start` of an epoch."""
        plan, clock = self.plan, BatchClock()
        members, repeats = plan.members(epoch, step, start)
        keys = sample_keys(plan.seed, epoch, members, repeats)
        indices = plan.samples.indices(members)
        labels = plan.samples.labels(members)
        draws = plan.view.draw(keys)
        clock.begins("collate")
        images = allocate((len(members), plan.view.size, plan.view.size, 3))
        clock.begins("fetch")
        found: list[Any] = list(self.reader.take(indices.tolist()))
        # Repeats of a sample were read once.
        once = dict(zip(indices.tolist(), found, strict=True)).values()
        clock.cost.bytes_read = sum(len(data) for data in once if not isinstance(data, ReadFailure))
        del once
        clock.begins("decode")
        bad: list[BadSample] = []
        began_s = time.perf_counter()
        for slot, data in enumerate(found):
            reason = self._fill(data, draws, slot, images[slot])
            found[slot] = None  # frees the bytes before the next sample is decoded
            if reason is not None:
                member = self._replace(reason, int(members[slot]), int(keys[slot]), draws, slot, images[slot], bad)
                labels[slot] = plan.samples.labels(np.array([member]))[0]
            done_s = time.perf_counter()
            if done_s - began_s > clock.cost.slowest_s:
                clock.cost.slowest_s, clock.cost.slowest_sample = done_s - began_s, int(indices[slot])
            began_s = done_s
        clock.begins("other")
        clock.cost.samples, clock.cost.batch_bytes = len(members), images.nbytes
        clock.cost.ready_bytes = self.reader.ready_bytes
        return ImageBatch(
            images=images,
            labels=labels,
            indices=indices,
            flips=draw_flips(keys, plan.horizontal_flip),
            keys=keys,
            epoch=epoch,
            step=step,
            next_position=plan.steps.next_position(step, start),
            cost=clock.finish(),
            bad=tuple(bad),
        )

    def _fill(self, data: Any, draws: Any, slot: int, out: NDArray[np.uint8]) -> str | None:
        """Decodes one sample into its slot; returns the reason if that fails."""
        if isinstance(data, ReadFailure):
            return data.reason
        try:
            self.plan.view.decode(data, draws, slot, out)
        except BadImage as error:
            return error.reason
        return None

    def _replace(
        self, reason: str, member: int, key: int, draws: Any, slot: int, out: NDArray[np.uint8], bad: list[BadSample]
    ) -> int:
        """Puts another member in place of a bad one, and records every bad one."""
        samples = self.plan.samples
        for other in replacements(key, len(samples)):
            index, other_index = (int(samples.indices(np.array([m]))[0]) for m in (member, other))
            bad.append(BadSample(index, samples.index.name(index), reason, other_index))
            data = self.reader.take([other_index])[0]
            other_reason = self._fill(data, draws, slot, out)
            if other_reason is None:
                return other
            member, reason = other, other_reason
        raise none_readable(bad, "samples", "the data no longer matches its index, or the files are not images")


class ImageLoader(BatchLoader[ImageBatch]):
    def __init__(
        self, plan: ImagePlan, options: LoaderOptions, say: Say = lambda _line: None, follow: Follow | None = None
    ) -> None:
        self.plan = plan
        quarantine = Quarantine(options.quarantine_file, options.max_bad_fraction, len(plan.samples))
        super().__init__(plan, partial(_open_maker, plan, options), quarantine, options, say, follow)


def _open_maker(plan: ImagePlan, options: LoaderOptions) -> ImageMaker:
    index = plan.samples.index
    store = open_sample_store(index, copy=options.copy, max_object_bytes=options.max_object_bytes)
    return ImageMaker(plan, open_reader(store, index, lookahead_bytes=options.lookahead // options.readers))
