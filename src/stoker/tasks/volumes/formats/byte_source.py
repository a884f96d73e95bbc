"""The bytes of a volume's file: mapped, if it is local or was fetched into the cache folder; else read in parts from
its object store, many at once.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, pairwise
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from stoker.core.redact import redact_text
from stoker.io.cache import CopyPlace
from stoker.io.prefetch import Prefetcher
from stoker.io.stores import Buffer, FileVersion, ReadFailure, is_url, open_store
from stoker.tasks.volumes.formats.volume import ReadingOptions, check_length, failure_of, identity_of, map_file

Range = tuple[int, int]
"""First byte, and the first one after it."""

# Two ranges with at most this between them are one request: a request costs about as much as that many bytes.
MOST_BETWEEN = 128 << 10
# A larger range is several requests at once: a single connection to S3 gives less than 100 MB/s.
PART_BYTES = 2 << 20
REQUESTS_IN_FLIGHT = 64
# Part of a file that is fetched into a cache: in memory at once, and several requests.
CACHED_PART_BYTES = 64 << 20
# Limit of one request: a part, or a table or list of cases.
MOST_AT_ONCE = 64_000_000
# Headers are read in pieces of this size. A file with headers in more pieces than this is fetched as a whole: one
# piece leads to the next, so each costs a round trip.
HEADER_BYTES = 64 << 10
MOST_HEADER_READS = 12


@dataclass(frozen=True)
class MappedSource:
    """Bytes that are mapped or in memory."""

    name: str
    """The file or URL, for messages."""
    identity: str
    """Changes if the file changes."""
    memory: Any

    def __len__(self) -> int:
        return len(self.memory)

    def parts(self, ranges: Sequence[Range]) -> list[Buffer]:
        check_length(self.name, self.memory)
        memory = memoryview(self.memory)
        return [memory[start:stop] for start, stop in ranges]


@dataclass(frozen=True)
class RemoteBytes:
    """An object behind a URL; only the requested ranges are fetched."""

    name: str
    identity: str
    size: int
    version: str
    store: Any
    path: str
    memory: None = None

    def __len__(self) -> int:
        return self.size

    def parts(self, ranges: Sequence[Range]) -> list[Buffer]:
        """These ranges, each inside the file; raises ReadFailure, or StoreDown."""
        if outside := next((one for one in ranges if one[1] > self.size), None):
            raise ReadFailure(self.name, "short", f"byte {outside[1]:,} is needed; it has {self.size:,}")
        wanted = [_pieces(one) for one in ranges]
        if len(ranges) == 1 and len(wanted[0]) == 1:
            return [self._part(ranges[0])]
        found = _requests(os.getpid()).take([(self, piece) for pieces in wanted for piece in pieces])
        parts: list[Buffer] = []
        for part in found:
            if isinstance(part, ReadFailure):
                raise part
            parts.append(part)
        each = iter(parts)
        together = (list(islice(each, len(pieces))) for pieces in wanted)
        return [own[0] if len(own) == 1 else memoryview(b"".join(own)) for own in together]

    def fetched(self) -> MappedSource:
        """The same with all bytes in memory."""
        return MappedSource(self.name, self.identity, memoryview(self.parts([(0, self.size)])[0]))

    def _part(self, one: Range) -> Buffer:
        start, stop = one
        try:
            return memoryview(self.store.read(self.path, start, stop - start, version=self.version))
        except ReadFailure as failure:
            raise ReadFailure(self.name, failure.reason, failure.detail) from None


ByteSource: TypeAlias = MappedSource | RemoteBytes


class Scattered(Exception):
    """A file's headers are in too many places to be fetched one after the other."""


@dataclass(frozen=True)
class HeaderSource(RemoteBytes):
    """An object for reading its headers: small reads from pieces that are kept; raises Scattered if there are many."""

    _kept: dict[int, Buffer] = field(default_factory=dict)

    def parts(self, ranges: Sequence[Range]) -> list[Buffer]:
        return [b"".join(self._from_pieces(start, min(stop, self.size))) for start, stop in ranges]

    def _from_pieces(self, start: int, stop: int) -> Iterator[Buffer]:
        for number in range(start // HEADER_BYTES, -(-stop // HEADER_BYTES)):
            begin = number * HEADER_BYTES
            if number not in self._kept:
                if len(self._kept) >= MOST_HEADER_READS:
                    raise Scattered
                self._kept[number] = super().parts([(begin, min(begin + HEADER_BYTES, self.size))])[0]
            yield self._kept[number][max(0, start - begin) : stop - begin]


class SourceStream(io.RawIOBase):
    """A source as a file that libraries can read."""

    def __init__(self, source: ByteSource) -> None:
        self.name = source.name
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._source)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, target: Any) -> int:
        stop = min(self._at + len(target), len(self._source))
        if stop <= self._at:
            return 0
        data = self._source.parts([(self._at, stop)])[0]
        target[: len(data)] = data
        self._at = stop
        return len(data)


def open_source(location: str, version: str, options: ReadingOptions) -> ByteSource:
    """The bytes at a location; `version` is an object's version from a listing, and may be empty. Raises ReadFailure,
    or StoreDown if the store cannot be read."""
    local = staged_file(location, options)
    if not is_url(location):
        memory, identity = map_file(local or location)
        if local is not None:
            try:
                identity = identity_of(location)
            except OSError as error:
                raise failure_of(location, error) from None
        return MappedSource(location, identity, memory)
    store, path = object_at(location)
    name = redact_text(location)
    try:
        size, tag = store.about(path) if not version else (int(version.partition(" ")[0]), version.partition(" ")[2])
    except ReadFailure as failure:
        raise ReadFailure(name, failure.reason, failure.detail) from None
    if size == 0:
        raise ReadFailure(name, "short", "it is empty")
    source = RemoteBytes(name, f"{name} {size} {tag}", size, tag, store, path)
    if options.copy is not None and options.copy.is_cache:
        local = _cached_file(location, source, options.copy)
    return source if local is None else MappedSource(name, source.identity, map_file(local)[0])


def _cached_file(location: str, source: RemoteBytes, cache: CopyPlace) -> str | None:
    """Where a whole file is in the cache, fetched now if it is not there; None if the cache has no room for it."""
    path, expected = cache.below(location) or "", FileVersion(source.size, source.version)
    if (local := cache.local(path, expected)) is not None:
        return local
    starts = range(0, source.size, CACHED_PART_BYTES)
    parts = (source.parts([(start, min(start + CACHED_PART_BYTES, source.size))])[0] for start in starts)
    return cache.local(path, expected) if cache.open().keep_parts(path, expected, parts) else None


def staged_file(location: str, options: ReadingOptions) -> str | None:
    """Where a file is in the local copy that is being filled; None if it is not there, or there is no such copy."""
    copy = options.copy
    if copy is None or copy.is_cache or (path := copy.below(location)) is None:
        return None
    return copy.local(path)


def coalesced(ranges: Sequence[Range]) -> tuple[list[Range], list[int]]:
    """Fewer ranges that contain these, which are in order, and for each the range that contains it."""
    groups: list[Range] = []
    owners: list[int] = []
    for start, stop in ranges:
        if groups and start - groups[-1][1] <= MOST_BETWEEN:
            groups[-1] = (groups[-1][0], max(groups[-1][1], stop))
        else:
            groups.append((start, stop))
        owners.append(len(groups) - 1)
    return groups, owners


def parts_of(source: ByteSource, ranges: Sequence[Range]) -> list[Buffer]:
    """These ranges, in any order; short gaps between them are fetched with them."""
    if source.memory is not None:
        return source.parts(ranges)
    order = sorted(range(len(ranges)), key=lambda number: ranges[number])
    groups, owners = coalesced([ranges[number] for number in order])
    fetched = source.parts(groups)
    found: list[Buffer] = [b""] * len(ranges)
    for number, owner in zip(order, owners, strict=True):
        start, stop = ranges[number]
        begin = groups[owner][0]
        found[number] = memoryview(fetched[owner])[start - begin : stop - begin]
    return found


def object_at(location: str) -> tuple[Any, str]:
    """The store of the folder that an object is in, one for all of them, and the object's path there."""
    parts = urlsplit(location)
    folder, _, path = unquote(parts.path).rstrip("/").rpartition("/")
    return store_at(f"{parts.scheme}://{parts.netloc}{folder}"), path


def store_at(url: str) -> Any:
    """The object store of a URL: one connection pool for all volumes below it."""
    # Credentials may be set after the first try, and a store that could not be reached would report that forever.
    store = _store(url.rstrip("/"), tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))))
    if store.connection.fault is not None:
        _store.cache_clear()
        return store_at(url)
    return store


@cache
def _store(url: str, environment: tuple[tuple[str, str], ...]) -> Any:  # noqa: ARG001 - part of the key
    return open_store(url, max_object_bytes=MOST_AT_ONCE)


@cache
def _requests(process: int) -> Prefetcher[tuple[RemoteBytes, Range], Buffer]:  # noqa: ARG001 - threads do not survive a fork
    """Threads for the requests of all volumes of a process."""

    def read(wanted: Sequence[tuple[RemoteBytes, Range]]) -> Iterator[Buffer]:
        return (source._part(one) for source, one in wanted)

    return Prefetcher(read, lambda _wanted: None, lookahead_bytes=0, requests=REQUESTS_IN_FLIGHT)


def _pieces(one: Range) -> list[Range]:
    start, stop = one
    count = max(1, -(-(stop - start) // PART_BYTES))
    ends = [start + (stop - start) * number // count for number in range(count + 1)]
    return list(pairwise(ends))
