"""The shard format: what other tar readers see, and whether damage is detected."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from stoker.tasks.images.pack.tar_shards import (
    ShardDamaged,
    ShardRecord,
    ShardWriter,
    read_record,
    verify_shard,
    write_record,
)

IMAGES = [b"first image", b"x" * 512, b"y" * 1000, b""]


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, ShardRecord]:
    """Four samples with labels 0, 7, 14 and 21."""
    path = tmp_path / "shard-000000.tar"
    with path.open("wb") as stream:
        writer = ShardWriter(stream, path.name)
        for number, data in enumerate(IMAGES):
            writer.add(100 + number, number, "jpg", data, 7 * number)
        record = writer.finish()
    return path, record


def test_pythons_tarfile_reads_it_and_finds_nothing_that_varies(shard: tuple[Path, ShardRecord]) -> None:
    with tarfile.open(shard[0]) as archive:
        members = archive.getmembers()
        read = [archive.extractfile(member).read() for member in members]  # type: ignore[union-attr]
    assert [member.name for member in members[:3]] == ["000000100.jpg", "000000100.cls", "000000101.jpg"]
    assert read[::2] == IMAGES
    assert read[1::2] == [b"0", b"7", b"14", b"21"]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}


def test_tar_lists_it_without_complaint(shard: tuple[Path, ShardRecord]) -> None:
    listed = subprocess.run(["tar", "tf", shard[0]], capture_output=True, text=True)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.splitlines()[-1] == "000000103.cls"


def test_every_changed_byte_is_detected(shard: tuple[Path, ShardRecord]) -> None:
    path, record = shard
    whole = path.read_bytes()
    for position in range(0, len(whole), 37):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ShardDamaged):
            verify_shard(path, record)


def test_every_truncation_is_detected(shard: tuple[Path, ShardRecord]) -> None:
    path, record = shard
    for length in (3000, 1024, 512, 100, 0):
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(ShardDamaged):
            verify_shard(path, record)


def test_samples_missing_from_the_record_are_detected(shard: tuple[Path, ShardRecord]) -> None:
    path, record = shard
    for column in (record.keys, record.extensions, record.labels, record.offsets, record.sizes, record.hashes):
        column.pop()  # type: ignore[attr-defined]
    with pytest.raises(ShardDamaged, match="more members"):
        verify_shard(path, record)


def test_a_record_survives_its_file(shard: tuple[Path, ShardRecord], tmp_path: Path) -> None:
    shard[1].skipped.append({"sample": 9, "name": "caf\udce9.jpg", "reason": "is empty"})
    write_record(tmp_path / "record.json", shard[1])
    assert read_record(tmp_path / "record.json") == shard[1]


def test_a_record_that_cannot_be_used_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert read_record(path) is None
    for text in ("", "{", "[]", "{}", '{"format": 99, "name": "x"}', '{"format": 1, "colour": 3}'):
        path.write_text(text)
        assert read_record(path) is None
