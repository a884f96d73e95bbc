"""Images straight from a real S3 server; that the stream is that of the local disk, even in an outage, is proven in
tests/faults/test_outages.py."""

from __future__ import annotations

from pathlib import Path

import obstore

from tests.loader.test_loader import SAMPLES, entries, loader_for, make_images
from tests.support.s3_server import BUCKET, S3Server


def test_a_second_epoch_comes_from_the_cache(tmp_path: Path, s3: S3Server) -> None:
    make_images(tmp_path / "local", "train", SAMPLES)
    url = s3.put_folder(tmp_path / "local", "second-epoch")
    options = ["batch_size=1", f"index_dir={tmp_path / 'index'}", f"cache_dir={tmp_path / 'cache'}"]
    loader = loader_for(url, *options, workers=2)  # type: ignore[arg-type]
    first = [entry for batch in loader.epoch(0) for entry in entries(batch)]
    loader.close()
    assert len(first) == SAMPLES
    store = s3.client()
    for listed in obstore.list(store).collect():
        if listed["path"].startswith(url.removeprefix(f"s3://{BUCKET}/")):
            obstore.delete(store, listed["path"])
    again = loader_for(url, *options, workers=2)  # type: ignore[arg-type]
    assert [entry for batch in again.epoch(0) for entry in entries(batch)] == first
    again.close()
