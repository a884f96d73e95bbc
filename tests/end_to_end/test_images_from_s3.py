"""Images straight from a real S3 server: the same stream as from the local disk, with any engine and cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loader.test_loader import SAMPLES, entries, ledger, loader_for, make_images
from tests.support.s3_server import BUCKET, S3Server


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("local")
    make_images(root, "train", SAMPLES)
    return root


@pytest.fixture
def url(s3: S3Server, local: Path, request: pytest.FixtureRequest) -> str:
    prefix = f"images-{abs(hash(request.node.name))}"
    for path in sorted((local / "train").rglob("*.jpg")):
        s3.put(f"{prefix}/{path.relative_to(local)}", path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_the_stream_equals_that_of_the_local_files(url: str, local: Path, tmp_path: Path, engine: str) -> None:
    expected = ledger(loader_for(local, "batch_size=8"))
    options = ["batch_size=8", f"index_dir={tmp_path}", f"loader={engine}", "lookahead=2MB"]
    assert ledger(loader_for(url, *options, workers=2)) == expected  # type: ignore[arg-type]


def test_a_second_epoch_comes_from_the_cache(url: str, local: Path, tmp_path: Path, s3: S3Server) -> None:
    options = ["batch_size=1", f"index_dir={tmp_path / 'index'}", f"cache_dir={tmp_path / 'cache'}"]
    loader = loader_for(url, *options, workers=2)  # type: ignore[arg-type]
    first = [entry for batch in loader.epoch(0) for entry in entries(batch)]
    loader.close()
    assert len(first) == SAMPLES
    store = s3.client()
    import obstore

    for listed in obstore.list(store).collect():
        if listed["path"].startswith(url.removeprefix(f"s3://{BUCKET}/")):
            obstore.delete(store, listed["path"])
    again = loader_for(url, *options, workers=2)  # type: ignore[arg-type]
    assert [entry for batch in again.epoch(0) for entry in entries(batch)] == first
    again.close()
