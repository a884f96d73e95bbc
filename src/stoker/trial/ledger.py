"""Whether two trials were fed the same training: a hash of samples, draws, labels and everything else it depends on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.config import config_values
from stoker.profile.host import HostConfig

LOADER_KEYS = ("num_workers", "prefetch_factor", "loader", "persistent_workers", "pin_memory", "lookahead")
STEP_KEYS = ("compile_model", "compile_mode", "channels_last", "batch_size", "gradient_accumulation")
HARMLESS = frozenset(
    # If a trial runs a single rank, its number of devices says nothing about the training.
    {*LOADER_KEYS, *STEP_KEYS, "decoder", "volume_cache", "data_root", "devices", "num_nodes", "sync_batchnorm"}
)
"""Keys that cannot change a training; batch_size and gradient_accumulation are compared as their product, and data from
another place by its pixels."""
LEDGER_UPDATES = 2
"""Updates whose samples are compared with the original's."""


class Ledger:
    """Hashes the batches of a trial. The same for any division of an update into batches.

    `pixels`: decoded values count, too.
    """

    _COLUMNS = ("indices", "labels", "keys", "flips", "starts", "shapes", "orders", "matrices", "offsets", "elastic")
    """Fields of a batch of images or patches, as far as it has them."""

    def __init__(self, config: HostConfig, ranks: int, *, pixels: bool = False) -> None:
        self._pixels = pixels
        total = config.batch_size * config.gradient_accumulation
        settings = {name: value for name, value in config_values(config).items() if name not in HARMLESS}
        settings |= {"total_batch": total * ranks}
        if config.mixup_alpha > 0 or config.cutmix_alpha > 0:
            settings["mixed"] = config.batch_size  # samples are mixed with others of their own batch
        self._hash = xxhash.xxh3_128(json.dumps(settings, sort_keys=True).encode())
        self._left = LEDGER_UPDATES * total
        self._last: tuple[int, int] = (-1, -1)
        self._shape: tuple[int, ...] = ()

    @property
    def is_full(self) -> bool:
        return self._left <= 0

    def add(self, batch: Any) -> None:
        """Takes the next batch; one that is prepared a second time counts once."""
        if self.is_full or (batch.epoch, batch.step) <= self._last:
            return
        self._last = (batch.epoch, batch.step)
        taken = min(self._left, len(batch))
        self._left -= taken
        # An image of another size is another training; the length of a patch's row says nothing.
        shape = () if hasattr(batch, "layout") else tuple(batch.images.shape[1:])
        if shape != self._shape:
            self._shape = shape
            self._hash.update(str(shape).encode())
        columns = [getattr(batch, name, None) for name in self._COLUMNS]
        self._hash.update(np.hstack([_row_bytes(column, taken) for column in columns if column is not None]).tobytes())
        if self._pixels:
            for array in _pixels_of(batch, taken):
                self._hash.update(array.contiguous().numpy())

    def end_of_epoch(self, updates: int) -> None:
        """Takes the length of an epoch."""
        self._hash.update(f"{updates} updates".encode())

    def digest(self) -> str:
        return self._hash.hexdigest()


def _pixels_of(batch: Any, samples: int) -> list[Any]:
    if not hasattr(batch, "layout"):
        return [batch.images[:samples]]
    # The rest of a patch's row is left over from another one.
    parts = [part for slot in range(samples) for part in batch.region(slot)]
    return [part for part in parts if part is not None]


def _row_bytes(column: NDArray[Any], rows: int) -> NDArray[np.uint8]:
    flat = np.ascontiguousarray(column[:rows]).reshape(rows, -1)
    return flat.view(np.uint8).reshape(rows, -1)
