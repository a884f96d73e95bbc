"""Loading from a pack made with --restart-rows: the batches of the same pack read whole, from fewer bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from stoker.data.batch import Batch
from stoker.data.images.row_index import open_row_index
from stoker.data.images.sample_index import META, SampleIndex, load_index
from stoker.data.store.cache import CachedStore
from stoker.data.store.stores import LocalStore
from stoker.errors import UserError
from tests.data.images.test_packing import pack
from tests.data.test_loader import Entry, entries, loader_for
from tests.support.images import encode, noise
from tests.support.s3_server import S3Server

SAMPLES = 23
WITH_ROWS = {"quality": 90, "restart_rows": True}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of two shards; its images have between 6 and 20 rows of units, and no two are alike."""
    root, random = tmp_path_factory.mktemp("rows"), np.random.default_rng(5)
    for number in range(SAMPLES):
        place = root / "source" / f"class{number % 3}" / f"{number:02d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        width, height = random.integers(90, 330, 2).tolist()
        place.write_bytes(encode(noise(width, height, seed=number), "PNG"))
    pack(root / "source", root / "packed" / "train", options_of(200_000))
    return root / "packed"


def options_of(shard_bytes: int) -> object:
    from stoker.data.images.pack.packing import PackOptions

    return PackOptions(shard_bytes, quality=90, restart_rows=True)
