"""Batches of patches: a loader for a split, on the same engines as that of images."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from stoker.console import Say
from stoker.data.batch import Quarantine
from stoker.data.engines.buffers import PageLock
from stoker.data.engines.processes import ProcessEngine
from stoker.data.engines.threads import ThreadEngine
from stoker.data.loader import DEFAULT_PREFETCH, LoaderOptions, choose_engine
from stoker.data.volumes.making import PatchBatch, PatchMaker, PatchPlan, PatchReader
from stoker.data.volumes.opening import OpenVolumes
from stoker.data.volumes.volume import ReadingOptions


class PatchLoader:
    """Yields the batches of any epoch, from any position."""

    def __init__(
        self, plan: PatchPlan, reading: ReadingOptions, options: LoaderOptions, say: Say = lambda _line: None
    ) -> None:
        self.plan = plan
        self.engine = choose_engine(options.engine, options.workers)
        # One bad volume may always be set aside: of fifty, it would already be more than the usual hundredth.
        allowed = max(options.max_bad_fraction, 1 / len(plan.cases))
        self.quarantine = Quarantine(options.quarantine_file, allowed, len(plan.cases))
        prefetch = options.prefetch or DEFAULT_PREFETCH
        open_maker = partial(_open_maker, plan, reading)
        self._engine: ThreadEngine[PatchBatch] | ProcessEngine[PatchBatch]
        if self.engine == "thread":
            self._engine = ThreadEngine(
                open_maker(),
                workers=options.workers,
                prefetch=prefetch,
                pin_memory=options.pin_memory,
                lookahead=options.lookahead,
                held=options.held,
                say=say,
            )
        else:
            self._engine = ProcessEngine(
                plan,
                open_maker,
                workers=options.workers,
                prefetch=prefetch,
                persistent=options.persistent_workers,
                # tensorstore's threads do not survive a fork.
                start_method="forkserver" if options.worker_start == "auto" else options.worker_start,
                lookahead=options.lookahead,
                held=options.held,
                page_lock=PageLock(say) if options.pin_memory else None,
            )

    def steps(self, start: int = 0) -> int:
        """Batches of an epoch, starting at a position."""
        return self.plan.steps.count(start)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[PatchBatch]:
        """The batches of an epoch in order, starting at a position; raises TooManyBad if too many cases are bad."""
        for batch in self._engine.batches(epoch, start):
            self.quarantine.admit(batch.bad, len(batch))
            yield batch

    def ready(self) -> int:
        """Batches that are made and wait for the consumer."""
        return self._engine.ready()

    def limit_prefetch(self, batches: int) -> None:
        """Limits the batches in flight from now on; their order and content stay the same."""
        self._engine.limit(batches)

    def close(self) -> None:
        """Ends the workers; the loader cannot be used afterwards."""
        self._engine.close()


def _open_maker(plan: PatchPlan, reading: ReadingOptions) -> PatchMaker:
    return PatchMaker(plan, PatchReader(OpenVolumes(reading), plan.layout.row_bytes))
