"""Makes a whole batch in one buffer: order -> bytes -> header -> crop -> the sample's slot of the batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.clock.costs import BatchClock
from stoker.data.batch import BadSample, Batch
from stoker.data.draws import REPLACEMENT, mix, sample_keys
from stoker.data.images.crops import View, draw_flips
from stoker.data.images.headers import BadImage
from stoker.data.images.sample_index import SampleSet
from stoker.data.order import Order, Steps
from stoker.data.store.reader import Reader
from stoker.data.store.stores import ReadFailure
from stoker.errors import UserError

# Makes a whole batch in one buffer: order -> bytes -> header -> crop -> the sample's slot of the batch.

Allocate = Callable[[tuple[int, int, int, int]], NDArray[np.uint8]]
# With one sample in a hundred unreadable, sixteen bad draws in a row happen once in 10^32 samples.
MAX_REPLACEMENTS = 16


@dataclass(frozen=True)
class BatchPlan:
    """Everything that decides what is in a batch; the same plan gives the same batches anywhere."""

    samples: SampleSet
    order: Order
    steps: Steps
    view: View
    seed: int
    horizontal_flip: float

    def members(self, epoch: int, step: int, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The members of the sample set in a step, and the repeats."""
        return self.order.at(epoch, self.steps.positions(step, start))


class BatchMaker:
    """Makes batches for one worker; several threads may use one maker at the same time."""

    def __init__(self, plan: BatchPlan, reader: Reader) -> None:
        self.plan = plan
        self.reader = reader

    def announce(self, epoch: int, step: int, start: int) -> int:
        """Says that a step's batch will be made later, so that its bytes can be fetched; how many samples."""
        members, _ = self.plan.members(epoch, step, start)
        self.reader.expect(self.plan.samples.numbers(members))
        return len(members)

    def make(self, epoch: int, step: int, start: int, allocate: Allocate) -> Batch:
        """The batch of a step counted from the position `start` of an epoch."""
        plan, clock = self.plan, BatchClock()
        members, repeats = plan.members(epoch, step, start)
        keys = sample_keys(plan.seed, epoch, members, repeats)
        numbers = plan.samples.numbers(members)
        labels = plan.samples.labels(members)
        draws = plan.view.draw(keys)
        clock.begins("collate")
        images = allocate((len(members), plan.view.size, plan.view.size, 3))
        clock.begins("fetch")
        found: list[Any] = list(self.reader.take(numbers))
        clock.begins("decode")
        bad: list[BadSample] = []
        began_s = time.perf_counter()
        for slot, data in enumerate(found):
            clock.cost.bytes_read += 0 if isinstance(data, ReadFailure) else len(data)
            reason = self._fill(data, draws, slot, images[slot])
            found[slot] = None  # frees the bytes while the next is decoded
            if reason is not None:
                member = self._replace(reason, int(members[slot]), int(keys[slot]), draws, slot, images[slot], bad)
                labels[slot] = plan.samples.labels(np.array([member]))[0]
            done_s = time.perf_counter()
            if done_s - began_s > clock.cost.slowest_s:
                clock.cost.slowest_s, clock.cost.slowest_sample = done_s - began_s, int(numbers[slot])
            began_s = done_s
        clock.begins("other")
        clock.cost.samples, clock.cost.batch_bytes = len(members), images.nbytes
        return Batch(
            images=images,
            labels=labels,
            samples=numbers,
            flips=draw_flips(keys, plan.horizontal_flip),
            keys=keys,
            epoch=epoch,
            step=step,
            next_position=min(start + (step + 1) * plan.steps.total_batch, plan.steps.samples),
            cost=clock.finish(),
            bad=tuple(bad),
        )

    def _fill(self, data: Any, draws: Any, slot: int, out: NDArray[np.uint8]) -> str | None:
        """Decodes one sample into its slot; the reason, where it cannot be."""
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
        """Puts another member in a bad one's place, the same one whoever does it, and notes every bad one."""
        samples = self.plan.samples
        for attempt in range(MAX_REPLACEMENTS):
            other = int(mix(mix(key, REPLACEMENT), attempt)) % len(samples)
            number, other_number = (int(samples.numbers(np.array([m]))[0]) for m in (member, other))
            bad.append(BadSample(number, samples.index.name(number), reason, other_number))
            data = self.reader.take(np.array([other_number]))[0]
            other_reason = self._fill(data, draws, slot, out)
            if other_reason is None:
                return other
            member, reason = other, other_reason
        named = "\n".join(f"{sample.name}: {sample.reason}" for sample in bad[-MAX_REPLACEMENTS:])
        raise UserError(
            "no-readable-sample",
            f"{MAX_REPLACEMENTS} samples in a row cannot be read\n{named}",
            why="so many in a row are no bad luck: the data is not what the index says, or not images",
            hint="look at one of these files",
        )


# Announces coming batches to the reader: the order is known, so their bytes can be on their way already.


class Announcer:
    """Keeps about `budget` bytes' worth of coming steps announced, ahead of the step that is made now."""

    def __init__(
        self, maker: BatchMaker, epoch: int, start: int, count: int, budget: int, *, stride: int, first: int
    ) -> None:
        self._maker = maker
        self._epoch = epoch
        self._start = start
        self._count = count
        self._budget = budget
        self._stride = stride
        self._next = first

    def before(self, step: int) -> None:
        """To be called before a step is made: announces it, and as many later ones as the budget holds."""
        batch_bytes = max(1.0, self._maker.plan.steps.batch_size * self._maker.reader.mean_bytes)
        # Two at least, so that the next batch is fetched while this one is decoded.
        ahead = max(2, int(self._budget / batch_bytes))
        last = min(self._count - 1, step + ahead * self._stride)
        while self._next <= last:
            self._maker.announce(self._epoch, self._next, self._start)
            self._next += self._stride


# How many batches a loader has in memory: one place for the engines that hold them and the plan that counts them.

# Beside those that are on their way: the one that the consumer has, and the one that it has just let go.
IN_HAND = 2


def batches_held(engine: Literal["process", "thread"], workers: int, prefetch: int) -> int:
    """Batches in memory at the most: worker processes fill slots that are there from the start; threads take a buffer
    when they begin, by which time the one that was let go is free again."""
    if workers == 0:
        return IN_HAND
    return workers * prefetch + (IN_HAND if engine == "process" else 1)
