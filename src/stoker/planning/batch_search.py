"""Any batch size from two traces: what does not depend on the batch stays, everything else grows in proportion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stoker.planning.tracing import Trace, trace_step
from stoker.training.traceable import TraceableStep

# Nobody trains with more samples in one pass; without a bound a model without activations would never end the search.
LARGEST_SEARCHED = 1 << 16


@dataclass
class Traces:
    """Traces of one step for every batch size, by replay where that is exact."""

    step: TraceableStep
    first: Trace
    second: Trace | None
    """Of another batch size, where the two went through the same events."""

    def at(self, batch: int) -> Trace:
        """The trace for a batch; ops are those of the first, and belong to its batch size only."""
        if batch == self.first.batch:
            return self.first
        if self.second is None:
            return trace_step(self.step, batch)
        span, away = self.second.batch - self.first.batch, batch - self.first.batch
        sizes = tuple(
            one + (other - one) // span * away for one, other in zip(self.first.sizes, self.second.sizes, strict=True)
        )
        return replace(self.first, batch=batch, sizes=sizes)


def trace_batches(step: TraceableStep, batch: int) -> Traces:
    """Traces at this batch and at another one; raises CannotTrace."""
    first = trace_step(step, batch)
    # Not 1: single samples take other paths through broadcasting and batch norm.
    other = batch // 2 if batch >= 4 else batch + 2
    second = trace_step(step, other)
    return Traces(step, first, second if _grow_together(first, second) else None)


def _grow_together(first: Trace, second: Trace) -> bool:
    """Whether each piece of memory of the one has its counterpart in the other, so many bytes a sample apart."""
    if first.events != second.events or first.categories != second.categories:
        return False
    span = second.batch - first.batch
    return all((other - one) % span == 0 for one, other in zip(first.sizes, second.sizes, strict=True))


def largest_that_fits(fits: Callable[[int], bool], start: int) -> int:
    """The largest batch for which `fits` says yes, by doubling and halving; 0 where one sample is too much."""
    low, high = 0, max(1, start)
    while high <= LARGEST_SEARCHED and fits(high):
        low, high = high, high * 2
    high = min(high, LARGEST_SEARCHED + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
