"""torch's DataLoader with fewer requests to its workers than it was made for: as many as a limit allows just now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter


@dataclass
class InFlight:
    """How many batches may be on their way; changes while an epoch runs."""

    limit: int


class LimitedLoader(DataLoader[Any]):
    """torch's loader, whose requests can be held back."""

    def __init__(self, *arguments: Any, in_flight: InFlight, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.in_flight = in_flight

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return LimitedIterator(self)


class LimitedIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator puts one request for each batch that is taken; this one as many as the limit leaves room for.

    Requests still go out in order and around the workers, so neither the batches nor who makes which of them change.
    """

    def __init__(self, loader: LimitedLoader) -> None:
        self._in_flight = loader.in_flight
        super().__init__(loader)

    def _try_put_index(self) -> None:
        while self._send_idx - self._rcvd_idx < self._in_flight.limit:
            sent = self._send_idx
            super()._try_put_index()
            if self._send_idx == sent:
                return  # the epoch has no more steps

    def ready(self) -> int:
        """Batches that are made and wait to be taken; those that came before their turn are kept in `_task_info`."""
        return self._worker_result_queue.qsize() + sum(len(task) > 1 for task in self._task_info.values())
