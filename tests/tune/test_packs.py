"""Packs that a search makes: each is the same training, and only the one that the result uses is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.config import load_config
from stoker.profile.host import HostConfig, fit_to_machine, read_machine
from stoker.tasks.volumes.pack.write_volume import LAYOUTS
from stoker.trial.fork_server import ForkServer
from stoker.tune.config_search import FAR_SLOWER, ConfigTrier, Packs
from stoker.tune.journal import Journal
from stoker.tune.space import settings_of
from tests.support.tiny_volumes import write_volume_config, write_volumes


@pytest.fixture
def volumes(tmp_path: Path) -> HostConfig:
    (tmp_path / "v").mkdir()
    path = write_volume_config(tmp_path / "v", write_volumes(tmp_path / "scrolls"), num_workers=1)
    return fit_to_machine(load_config(path).config, read_machine())[0]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    found = Journal(tmp_path / "tune.jsonl")
    found.begin({"same": {}})
    yield found
    found.close()


def resumed(journal: Journal) -> Journal:
    journal.close()
    again = Journal(journal.path)
    again.begin({"same": {}})
    return again


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} if folder.exists() else set()


def test_layouts_that_are_close_to_the_fastest_are_tried_in_the_order_of_their_trial(
    volumes: HostConfig, journal: Journal, tmp_path: Path
) -> None:
    folder = tmp_path / "packs"
    places = Packs(folder, volumes, journal).places
    names = [Path(place).name for place in places]
    assert names
    assert set(names) <= LAYOUTS.keys()
    assert not folder.exists(), "the trial leaves nothing"
    again = resumed(journal)
    noted = again.noted("layouts")
    assert noted is not None
    times = noted["seconds"]
    assert names == sorted(names, key=times.__getitem__)
    assert set(names) == {name for name in times if times[name] <= FAR_SLOWER * min(times.values())}
    (tmp_path / "scrolls" / "train_images").rename(tmp_path / "elsewhere")
    assert Packs(folder, volumes, Journal()).places == (), "a trial that fails does not end the search"
    # Resumed, it takes the order from the journal: another one would lead elsewhere.
    assert Packs(folder, volumes, again).places == places
    again.close()


def test_every_layout_is_the_same_training_and_only_the_one_in_use_is_left(
    volumes: HostConfig, journal: Journal, tmp_path: Path, server: ForkServer
) -> None:
    journal.note("layouts", names=list(LAYOUTS))
    journal = resumed(journal)
    folder = tmp_path / "packs"
    packs = Packs(folder, volumes, journal)
    assert {Path(place).name for place in packs.mapped} == LAYOUTS.keys() - {"zarr"}
    start = settings_of(volumes) | {"data_root": volumes.data_root}
    assert packs.ready(start) is None
    assert not folder.exists(), "the original needs no pack"
    trier = ConfigTrier(volumes, pace_s=0.002, compare_pixels=True, server=server)
    ledgers = {trier.run(start, 0.2).ledger}
    # Rows of a batch are used again, and hold what is left of another patch: that must not count.
    ledgers.add(trier.run(start | {"num_workers": 0}, 0.2).ledger)
    for number, place in enumerate(packs.places):
        assert packs.ready(start | {"data_root": place}) is None
        engine = "process" if number == 0 else "thread"
        measured = trier.run(start | {"data_root": place, "loader": engine}, 0.2)
        assert measured.result == "measured", measured.detail
        ledgers.add(measured.ledger)
    assert len(ledgers) == 1
    # Killed and resumed, it still knows which packs are its own.
    packs = Packs(folder, volumes, resumed(journal))
    packs.keep_only(start | {"data_root": str(folder / "raw")})
    assert {path.name for path in folder.iterdir()} == {"raw"}
    assert (folder / "raw" / "volumes.json").exists()


def test_what_was_there_before_stays_and_what_cannot_be_packed_is_said(
    volumes: HostConfig, journal: Journal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal.note("layouts", names=["raw", "blocks32"])
    journal = resumed(journal)
    folder = tmp_path / "packs"
    theirs = ["pack", str(volumes.data_root), str(folder / "raw"), "--layout", "raw"]
    assert main(theirs) == 0
    capsys.readouterr()
    before, index = below(folder), folder / "raw" / "volumes.json"
    written = index.stat().st_mtime_ns
    packs = Packs(folder, volumes, journal)
    start = settings_of(volumes) | {"data_root": volumes.data_root}
    assert packs.ready(start | {"data_root": str(folder / "raw")}) is None
    assert index.stat().st_mtime_ns == written, "it is used as it is"
    # A damaged volume cannot be left out: it would be another training.
    next(Path(str(volumes.data_root)).glob("train_images/*.tif")).write_bytes(b"not a volume")
    why = packs.ready(start | {"data_root": str(folder / "blocks32")})
    assert why == "1 volume cannot be packed, and without it this is another training"
    packs.keep_only(start)
    assert below(folder) == before
    journal.close()
