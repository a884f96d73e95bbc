"""Makes a whole batch in one buffer: order -> bytes -> header -> crop -> the sample's slot in the batch.

The engines know a maker only by what `Maker` says; that of patches is in stoker.tasks.volumes.patches.patch_collate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.io.prefetch import HeldBack, Reader
from stoker.io.stores import ReadFailure
from stoker.loader.batch import BadSample, ImageBatch
from stoker.loader.rng import REPLACEMENT, mix, sample_keys
from stoker.loader.sampler import Order, Steps
from stoker.profile.batch_costs import BatchClock
from stoker.tasks.images.decode.crops import View, draw_flips
from stoker.tasks.images.decode.headers import BadImage
from stoker.tasks.images.layouts.sample_index import SampleSet

Allocate = Callable[[tuple[int, ...]], NDArray[np.uint8]]
# With one sample in a hundred unreadable, sixteen bad draws in a row happen once in 10^32 samples.
MAX_REPLACEMENTS = 16
# Batches held besides those in flight by a consumer that holds one: that one, and the one that it has just released.
IN_HAND = 2


@dataclass(frozen=True)
class LoaderSetup:
    """The limits of a loader of threads. Batches do not depend on them, so they may change at any time."""

    workers: int
    prefetch: int
    """Batches in flight per worker."""
    lookahead_bytes: int
    requests: int
    """Reads in flight, where reading ahead pays off."""


class MadeBatch(Protocol):
    """What an engine needs to know about a batch."""

    images: Any
    """The batch's memory: an array while it is made, then a slot's number or a tensor."""

    @property
    def bad(self) -> tuple[BadSample, ...]: ...

    def __len__(self) -> int: ...


Made = TypeVar("Made", bound=MadeBatch)
Made_co = TypeVar("Made_co", bound=MadeBatch, covariant=True)


class EnginePlan(Protocol):
    """What an engine needs to know about a plan."""

    @property
    def steps(self) -> Steps: ...

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of a whole batch's memory, in bytes; the samples come first."""


class BatchSource(Protocol):
    """What an engine needs to know about the place that a maker reads from."""

    @property
    def mean_bytes(self) -> float: ...

    @property
    def requests(self) -> int:
        """Requests that it may have in flight."""

    @property
    def ready_bytes(self) -> int:
        """Bytes that have arrived and were not taken yet."""

    def allow(self, lookahead_bytes: int, requests: int) -> None:
        """Allows it to read this many bytes ahead from now on, with this many requests at once."""

    def held_back_by(self) -> HeldBack | None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class Maker(Protocol[Made_co]):
    """Makes the batches of a plan; several threads may share it."""

    @property
    def plan(self) -> EnginePlan: ...

    @property
    def reader(self) -> BatchSource: ...

    def announce(self, epoch: int, step: int, start: int) -> None: ...

    def make(self, epoch: int, step: int, start: int, allocate: Allocate) -> Made_co: ...


@dataclass(frozen=True)
class BatchPlan:
    """Everything that determines the content of a batch: the same plan gives the same batches anywhere."""

    samples: SampleSet
    order: Order
    steps: Steps
    view: View
    seed: int
    horizontal_flip: float

    @property
    def batch_shape(self) -> tuple[int, int, int, int]:
        """Shape of the images of a whole batch."""
        return self.steps.batch_size, self.view.size, self.view.size, 3

    def members(self, epoch: int, step: int, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The members of the sample set in a step, and which repeat of a member each is."""
        return self.order.at(epoch, self.steps.positions(step, start))


class BatchMaker:
    """Makes batches for one worker; several threads may share it."""

    def __init__(self, plan: BatchPlan, reader: Reader) -> None:
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
            next_position=min(start + (step + 1) * plan.steps.total_batch, plan.steps.samples),
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
        """Puts another member in place of a bad one, and records every bad one. The choice depends only on the key: it
        is the same in every worker."""
        samples = self.plan.samples
        for attempt in range(MAX_REPLACEMENTS):
            other = int(mix(mix(key, REPLACEMENT), attempt)) % len(samples)
            index, other_index = (int(samples.indices(np.array([m]))[0]) for m in (member, other))
            bad.append(BadSample(index, samples.index.name(index), reason, other_index))
            data = self.reader.take([other_index])[0]
            other_reason = self._fill(data, draws, slot, out)
            if other_reason is None:
                return other
            member, reason = other, other_reason
        named = "\n".join(f"{sample.name}: {sample.reason}" for sample in bad[-MAX_REPLACEMENTS:])
        raise UserError(
            "no-readable-sample",
            f"{MAX_REPLACEMENTS} samples in a row cannot be read\n{named}",
            why="this is not chance: the data no longer matches its index, or the files are not images",
            hint="open one of these files",
        )


class Announcer:
    """Keeps about `budget` bytes of upcoming steps announced to the reader, so that their bytes are fetched early."""

    def __init__(
        self, maker: Maker[Any], epoch: int, start: int, count: int, budget: int, *, stride: int, first: int
    ) -> None:
        self._maker = maker
        self._epoch = epoch
        self._start = start
        self._count = count
        self.budget = budget
        self._stride = stride
        self._next = first

    def before(self, step: int) -> None:
        """Call before a step is made: announces it, and as many later steps as fit the budget."""
        batch_bytes = max(1.0, self._maker.plan.steps.batch_size * self._maker.reader.mean_bytes)
        # At least two, so that the next batch is fetched while this one is decoded.
        ahead = max(2, int(self.budget / batch_bytes))
        last = min(self._count - 1, step + ahead * self._stride)
        while self._next <= last:
            self._maker.announce(self._epoch, self._next, self._start)
            self._next += self._stride


def beyond_flight(held: int) -> int:
    """Batches in memory besides those in flight, for a consumer that holds `held` of them when it asks for the next."""
    return IN_HAND + held - 1


def batches_held(engine: Literal["process", "thread"], workers: int, prefetch: int, held: int = 1) -> int:
    """The most batches that a loader has in memory, if the consumer holds `held` at once: with gradient accumulation,
    those of a whole update. Worker processes fill slots that exist from the start; a thread takes a buffer when it
    begins a batch, by which time the released one is free again."""
    if workers == 0:
        return beyond_flight(held)
    return workers * prefetch + beyond_flight(held) - (1 if engine == "thread" else 0)
