"""From the calls of `__next__` in one training process to steps: pure arithmetic over its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.doctor.attach.inside.ring import FIRST, LAST, StepRecord

# Loaders that are read side by side (a zip of two) feed every optimizer step; a validation loader feeds, by this
# count, only the first one after it.
SHARE_OF_STEPS_FED = 0.5


@dataclass
class SteadySteps:
    """Steady steps of the training loader: the first of each epoch and validation stand apart."""

    loader: int
    waits_s: list[float] = field(default_factory=list)
    works_s: list[float] = field(default_factory=list)
    """The rest of the same steps."""
    ready: list[int] = field(default_factory=list)
    samples: int = 0
    unknown_samples: int = 0
    """Steps whose number of samples is not known."""
    compute_s: float | None = None
    """From a batch's arrival to the end of the optimizer step; None where none was seen."""
    cpu_s: float = 0.0
    """CPU time of the process in these steps, that of waiting included."""
    epoch_starts_s: list[float] = field(default_factory=list)
    validation_s: float | None = None
    device_waited: bool = False
    """Waits are those of the device, not of the Python loop."""

    @property
    def elapsed_s(self) -> float:
        return sum(self.waits_s) + sum(self.works_s)


def training_loaders(records: Sequence[StepRecord]) -> list[int]:
    """Loaders that feed the optimizer, the one that is waited for longest first; by their batches where no
    optimizer step was seen."""
    votes: Counter[int] = Counter()
    since: set[int] = set()
    batches: Counter[int] = Counter()
    waits: Counter[int] = Counter()
    for record in records:
        if record.optimizer_steps:
            votes.update(since)
            since.clear()
        if not record.flags & LAST:
            since.add(record.loader)
            batches[record.loader] += 1
            waits[record.loader] += record.exit_ns - record.enter_ns
    if not batches:
        return []
    if not votes:
        return [batches.most_common(1)[0][0]]
    most = max(votes.values())
    feeding = [loader for loader, count in votes.items() if count >= SHARE_OF_STEPS_FED * most]
    # Of two that feed as often, a validation loader of a few batches after each short epoch has more batches for
    # each step that it fed.
    best = min(batches[loader] / votes[loader] for loader in feeding)
    feeding = [loader for loader in feeding if batches[loader] / votes[loader] <= best / SHARE_OF_STEPS_FED]
    return sorted(feeding, key=lambda loader: -waits[loader])


def saw_optimizer(records: Sequence[StepRecord]) -> bool:
    return any(record.optimizer_steps for record in records)


def steady_steps(records: Sequence[StepRecord], feeding: Sequence[int]) -> SteadySteps:
    """The steps of the first of the feeding loaders; time in the others' `__next__` counts as waiting too."""
    steps = SteadySteps(loader=feeding[0])
    computed_ns = 0
    seen_optimizer = saw_optimizer(records)
    for place, record in enumerate(records):
        if record.loader != steps.loader or record.flags & LAST:
            continue
        wait_ns = record.exit_ns - record.enter_ns
        if record.flags & FIRST:
            steps.epoch_starts_s.append((wait_ns + record.iterator_us * 1000) / 1e9)
            continue
        end = _end_of_step(records, place, feeding)
        if end is None:
            continue  # the script ended, or was stopped, within it
        following, waited_elsewhere_ns = end
        if 0 <= record.device_idle_ns < wait_ns:
            # The device still had work while the loop waited: only what it noticed was lost.
            steps.device_waited = True
            wait_ns = record.device_idle_ns
        whole_ns = _begins_ns(following) - record.enter_ns
        wait_ns += waited_elsewhere_ns
        steps.waits_s.append(wait_ns / 1e9)
        steps.works_s.append(max(0, whole_ns - wait_ns) / 1e9)
        steps.ready.append(record.ready)
        steps.cpu_s += max(0, following.enter_cpu_ns - record.enter_cpu_ns) / 1e9
        if record.samples < 0:
            steps.unknown_samples += 1
        else:
            steps.samples += record.samples
        optimizer_end = following.optimizer_end_ns
        computed_end = optimizer_end if optimizer_end > record.exit_ns else _begins_ns(following)
        computed_ns += max(0, computed_end - record.exit_ns - waited_elsewhere_ns)
    if seen_optimizer and steps.waits_s:
        steps.compute_s = min(computed_ns / 1e9, sum(steps.works_s))
    steps.validation_s = _validation_s(records, set(feeding))
    return steps


def _begins_ns(record: StepRecord) -> int:
    """When the loop turned to the loader: before it made the iterator, if it did."""
    return record.enter_ns - record.iterator_us * 1000


def _end_of_step(records: Sequence[StepRecord], place: int, feeding: Sequence[int]) -> tuple[StepRecord, int] | None:
    """The record with which the step at `place` ends, and the waiting for other feeding loaders before it."""
    waited_ns = 0
    for number in range(place + 1, len(records)):  # no slice: a copy of 65,000 records for each step
        record = records[number]
        if record.loader == records[place].loader or record.loader not in feeding:
            return record, waited_ns
        waited_ns += record.exit_ns - record.enter_ns
    return None


def _validation_s(records: Sequence[StepRecord], feeding: set[int]) -> float | None:
    """From the first turn to a loader that does not feed the optimizer to the next one to one that does."""
    total_ns = 0
    began: int | None = None
    last_exit = 0
    for record in records:
        if record.loader in feeding:
            if began is not None:
                total_ns += _begins_ns(record) - began
            began = None
        else:
            began = _begins_ns(record) if began is None else began
            last_exit = record.exit_ns
    if began is not None:
        total_ns += last_exit - began
    return total_ns / 1e9 if last_exit else None
