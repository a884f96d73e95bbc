"""A dataset as torch's fetcher sees it, with a clock on each sample."""

from __future__ import annotations

from typing import Any

from stoker.attach.inside.fetch_totals import FetchTotals


class _TimedItems:
    """A map-style dataset whose samples are asked for one by one."""

    def __init__(self, dataset: Any, totals: FetchTotals) -> None:
        self._dataset = dataset
        self._totals = totals

    def __getitem__(self, index: Any) -> Any:
        began = self._totals.sample_begins()
        item = self._dataset[index]
        self._totals.sample_ends(began, index)
        return item


class _TimedLists(_TimedItems):
    """One that takes a whole batch of indices at once (`__getitems__`): its single samples cannot be told apart."""

    def __getitems__(self, indices: Any) -> Any:
        return self._dataset.__getitems__(indices)


def timed_dataset(dataset: Any, totals: FetchTotals) -> Any:
    """The dataset with a clock on; it has `__getitems__` only where the dataset has."""
    return (_TimedLists if getattr(dataset, "__getitems__", None) else _TimedItems)(dataset, totals)


class TimedIterator:
    """The iterator of an iterable dataset; its samples are named by their place in the stream."""

    def __init__(self, iterator: Any, totals: FetchTotals) -> None:
        self._iterator = iterator
        self._totals = totals
        self._place = 0

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Any:
        began = self._totals.sample_begins()
        item = next(self._iterator)
        self._totals.sample_ends(began, self._place)
        self._place += 1
        return item
