"""One trace, many questions: the budget of any batch, and the largest batch under any limit."""

from __future__ import annotations

from contextlib import suppress

from stoker.facts.plan import VramBudget
from stoker.planning.batch_search import Traces, largest_that_fits, trace_batches
from stoker.planning.tracing import CannotTrace
from stoker.planning.vram import outside_bytes, parts_at_peak, usage_under, vram_budget
from stoker.training.traceable import TraceableStep


class VramSearch:
    """The memory of a step at other batch sizes; a model that cannot be traced is bounded each time."""

    def __init__(self, step: TraceableStep, batch: int, *, compiled: bool, gpus: int) -> None:
        self._step, self._compiled, self._gpus = step, compiled, gpus
        self._start = batch
        self._traces: Traces | None = None
        self._outside: dict[str, int] = {}
        with suppress(CannotTrace):
            self._traces = trace_batches(step, batch)
            self._outside = outside_bytes(self._traces.first, compiled=compiled, gpus=gpus)

    def budget(self, batch: int, limit_bytes: int | None) -> VramBudget:
        """Of a step with this batch; nothing is searched for."""
        if self._traces is None:
            return vram_budget(self._step, batch, limit_bytes, compiled=self._compiled, gpus=self._gpus, search=False)
        trace = self._traces.at(batch)
        parts = parts_at_peak(trace, usage_under(trace, limit_bytes, self._outside), self._outside)
        return VramBudget(sum(parts.values()), parts, limit_bytes)

    def largest(self, limit_bytes: int) -> int | None:
        """The largest batch that stays below a limit by itself; None where the model cannot be traced.

        On a device that is full the allocator gives back what it keeps, and more would fit; a share of it is not full.
        """
        if self._traces is None:
            return None
        return largest_that_fits(lambda batch: self.budget(batch, None).peak_bytes <= limit_bytes, self._start)
