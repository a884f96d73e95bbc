"""The shard format: plain tar files for any tar or WebDataset reader, bit-identical each time.

A sample is two members with the same key: `000000123.jpg`, the image, and `000000123.cls`, its label in digits. The key
is a number because WebDataset splits names at the first dot. Our own reader never looks at the headers: the index says
where each image's bytes begin.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, NamedTuple

import xxhash

from stoker.core.files import write_text

BLOCK = 512
END = bytes(2 * BLOCK)
KEY_DIGITS = 9
RECORD_FORMAT = 1


class ShardDamaged(Exception):
    """A shard does not match its record."""


@dataclass
class ShardRecord:
    """The content of a finished shard, also saved as a file. Lists have one entry per sample, in the shard's order."""

    name: str
    bytes: int = 0
    xxh3: str = ""
    """Hash of the whole file."""
    samples: list[int] = field(default_factory=list)
    """Indices of the samples in the source."""
    keys: list[int] = field(default_factory=list)
    extensions: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where the image's own bytes begin in the shard."""
    sizes: list[int] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    """xxh3 of the image's bytes."""
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """Samples of this shard that are not images: sample, name, reason."""


class ShardWriter:
    """Writes samples one after the other, and records them."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self.record = ShardRecord(name)
        self._stream = stream
        self._hash = xxhash.xxh3_128()

    def add(self, key: int, sample: int, extension: str, data: bytes, label: int) -> None:
        record = self.record
        record.samples.append(sample)
        record.keys.append(key)
        record.extensions.append(extension)
        record.labels.append(label)
        record.offsets.append(record.bytes + BLOCK)
        record.sizes.append(len(data))
        record.hashes.append(xxhash.xxh3_64_hexdigest(data))
        self._member(member_name(key, extension), data)
        self._member(member_name(key, "cls"), b"%d" % label)

    def finish(self) -> ShardRecord:
        self._write(END)
        self.record.xxh3 = self._hash.hexdigest()
        return self.record

    def _member(self, name: str, data: bytes) -> None:
        self._write(header(name, len(data)))
        self._write(data)
        self._write(bytes(-len(data) % BLOCK))

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._hash.update(data)
        self.record.bytes += len(data)


def member_name(key: int, extension: str) -> str:
    assert key < 10**KEY_DIGITS
    return f"{key:0{KEY_DIGITS}d}.{extension}"


def sample_footprint(image_bytes: Any) -> Any:
    """Bytes that a sample takes up in a shard, for a number or an array: two headers, the image and the label, each
    padded to whole blocks."""
    return 3 * BLOCK + -(-image_bytes // BLOCK) * BLOCK


def header(name: str, size: int) -> bytes:
    """A ustar header without anything that could differ from run to run: no time, no owner."""
    encoded = name.encode("ascii")
    assert len(encoded) <= 100
    assert size < 8**11
    block = bytearray(BLOCK)
    block[0 : len(encoded)] = encoded
    block[100:108] = b"0000644\0"
    block[108:116] = block[116:124] = b"0000000\0"
    block[124:136] = b"%011o\0" % size
    block[136:148] = b"00000000000\0"
    block[148:156] = b" " * 8  # the checksum field counts as spaces
    block[156:157] = b"0"
    block[257:265] = b"ustar\x0000"
    block[329:337] = block[337:345] = b"0000000\0"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


class Member(NamedTuple):
    name: str
    offset: int
    data: bytes


def read_members(stream: IO[bytes]) -> Iterator[Member]:
    """Every member in the stream, parsed from its headers, not from a record; raises ShardDamaged."""
    offset = 0
    while True:
        block = stream.read(BLOCK)
        if block == bytes(BLOCK):
            if stream.read(BLOCK) != bytes(BLOCK) or stream.read(1):
                raise ShardDamaged(f"the archive does not end with two empty blocks at byte {offset}")
            return
        name = block[:100].rstrip(b"\0").decode("ascii", "replace")
        size = int(block[124:135], 8) if block[124:135].isdigit() else -1
        if len(block) != BLOCK or size < 0 or block != header(name, size):
            raise ShardDamaged(f"the header at byte {offset} is not one of ours")
        padded = -(-size // BLOCK) * BLOCK
        data = stream.read(padded)
        if len(data) != padded or any(data[size:]):
            raise ShardDamaged(f"{name} is truncated or badly padded")
        yield Member(name, offset + BLOCK, data[:size])
        offset += BLOCK + padded


def verify_shard(path: Path, record: ShardRecord) -> None:
    """Reads the shard back and compares everything with its record; raises ShardDamaged."""
    whole = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as raw:
        # The shard is still in the page cache: ask the kernel to drop it, so that the disk is read.
        os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = read_members(io.BufferedReader(_HashingReader(raw, whole), 1 << 20))
        for row in zip(
            record.keys, record.extensions, record.labels, record.offsets, record.sizes, record.hashes, strict=True
        ):
            key, extension, label, offset, size, digest = row
            image, cls = next(found, None), next(found, None)
            if image is None or cls is None:
                raise ShardDamaged(f"sample {key} is missing")
            if (image.name, image.offset, len(image.data)) != (member_name(key, extension), offset, size):
                raise ShardDamaged(f"found {image.name} instead of {member_name(key, extension)}")
            if xxhash.xxh3_64_hexdigest(image.data) != digest:
                raise ShardDamaged(f"the bytes of {image.name} differ from what was written")
            if cls.name != member_name(key, "cls") or cls.data != b"%d" % label:
                raise ShardDamaged(f"{cls.name} is not the label of {image.name}")
        if next(found, None) is not None:
            raise ShardDamaged("there are more members than were written")
        if raw.tell() != record.bytes or whole.hexdigest() != record.xxh3:
            raise ShardDamaged("the file differs from what was written")


def write_record(path: Path, record: ShardRecord) -> None:
    """Writes the record; it comes after its shard, so a shard without one is unfinished."""
    write_text(path, json.dumps({"format": RECORD_FORMAT} | asdict(record), ensure_ascii=True) + "\n")


def read_record(path: Path) -> ShardRecord | None:
    """The record in a file; None if there is none, or it cannot be used."""
    try:
        content = json.loads(path.read_text())
        if content.pop("format") != RECORD_FORMAT:
            return None
        # Records of earlier versions have fields that no longer exist.
        return ShardRecord(**{part.name: content[part.name] for part in fields(ShardRecord)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class _HashingReader(io.RawIOBase):
    """Hashes everything that is read through it."""

    def __init__(self, raw: io.FileIO, whole: Any) -> None:
        self._raw, self._whole = raw, whole

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0
        self._whole.update(memoryview(buffer)[:count])
        return count
