"""The order in which a local copy is filled: that of training; over all ranks nothing twice, and nothing left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from stoker.io.cache import CopyPlace
from stoker.io.stores import FileVersion
from stoker.loader.filling import Files, Share
from stoker.tasks.images.data import choose_decoding, open_samples, training_plan, validation_plan
from stoker.tasks.images.image_staging import ImageFiles
from stoker.train.ranks import Ranks
from tests.loader.test_loader import SAMPLES, config_for, make_images


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    make_images(root, "train", SAMPLES)
    make_images(root, "val", 10)
    return root


def order_of(data: Path, rank: int, world: int, local_world: int, *overrides: str) -> Files:
    config = config_for(data, "batch_size=6", *overrides)
    train, val = open_samples(config, "train"), open_samples(config, "val")
    decoding, _ = choose_decoding(config, train.index)
    ranks, place = Ranks(rank, world=world), CopyPlace("/copy", str(data))
    parts = [
        ImageFiles(plan(config, samples, decoding, ranks), place)
        for plan, samples in ((training_plan, train), (validation_plan, val))
    ]
    return Files(parts[0], parts[1], [], Share(rank, local_world), fetched_ahead=1)


def test_a_rank_fetches_first_what_it_reads_next_in_its_order(data: Path) -> None:
    order = order_of(data, rank=1, world=2, local_world=2)
    config = config_for(data, "batch_size=6")
    samples = open_samples(config, "train")
    plan = training_plan(config, samples, choose_decoding(config, samples.index)[0], Ranks(1, world=2))
    expected = [f"train/{samples.index.name(i)}" for step in range(2) for i in plan.members(2, step, 16)[0].tolist()]
    needed = list(order.needed(2, 16))
    assert [wanted.path for wanted in needed[: len(expected)]] == expected
    positions = [wanted.position for wanted in needed if wanted.position is not None]
    assert positions == list(range(17, 16 + plan.steps.count(16) * 12, 2))


@pytest.mark.parametrize(("world", "local_world"), [(1, 1), (4, 4), (4, 2)])
@pytest.mark.parametrize("repeats", [1, 3])
def test_the_ranks_of_a_node_fetch_every_file_and_none_twice(
    data: Path, world: int, local_world: int, repeats: int
) -> None:
    for node in range(world // local_world):
        of_node = range(node * local_world, (node + 1) * local_world)
        found: Counter[str] = Counter()
        for rank in of_node:
            order = order_of(data, rank, world, local_world, f"repeated_augmentation={repeats}")
            assert order.files == SAMPLES + 10
            found.update({wanted.path for wanted in order.needed(1, 0)})
        assert set(found) == {wanted.path for wanted in order.all()}
        # A sample that is repeated may be needed by two ranks of the node at once.
        assert repeats > 1 or set(found.values()) == {1}
        shares = [{wanted.path for wanted in order_of(data, r, world, local_world).everything()} for r in of_node]
        assert sum(map(len, shares)) == SAMPLES + 10


def test_the_path_below_the_source_is_that_of_the_object() -> None:
    place = CopyPlace("/copy", "s3://bucket/data/", {"a b.tif": FileVersion(1, "x")})
    assert place.below("s3://bucket/data/train/a%20b.tif") == "train/a b.tif"
    assert place.below("s3://bucket/data") == ""
    assert place.below("s3://bucket/database/x") is None
    assert place.below("s3://other/data/x") is None
    assert CopyPlace("/copy", "/data/x").below("/data/x/../x/train") == "train"
