"""The manifest of a local copy: a line for each file that is whole, and a table that finds the line of a path."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import xxhash

READ_BYTES = 8 << 20
"""How much of a manifest is read at once."""
FORGOTTEN = -1
"""The size in the line of a file that must no longer be trusted."""
# Lines that were added since the table was sorted; looking one up takes a dictionary, which needs more memory.
_MOST_RECENT = 50_000
_LINE_START, _SIZE_FIELD = b'{"path":', b',"size":'


class CopiedFile(NamedTuple):
    """One line of the manifest: a file that is whole and on disk."""

    path: str
    size: int
    version: str
    """What distinguishes it from a later state of the source: the ETag, or the time of a file's last change."""
    xxh3: str
    """xxh3-128 of the content, in hexadecimal digits."""
    verified: str
    """The kind of store checksum that agreed (md5, crc32, crc64nvme …), or "" if only the length was checked."""

    def line(self) -> bytes:
        return json.dumps(self._asdict(), separators=(",", ":")).encode() + b"\n"


class _Lines(NamedTuple):
    """Hashes of paths in ascending order, where the line of each begins, and the size in it; arrays of numpy."""

    keys: Any
    starts: Any
    sizes: Any


class ManifestTable:
    """Finds the line of a path in the manifest, with 24 bytes of memory a line, because ImageNet has 1.28 million.

    Paths are found by a hash; the line itself then says whether it is the right one. numpy is imported only when
    there are many lines, so that a short command starts sooner."""

    def __init__(self) -> None:
        self._sorted: _Lines | None = None
        self._recent: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._recent) + (0 if self._sorted is None else len(self._sorted.keys))

    def add(self, text: bytes, at: int) -> None:
        """Adds whole lines that begin at this offset of the manifest."""
        recent = dict(self._recent) if len(text) > READ_BYTES // 8 else self._recent
        start = 0
        while start < len(text):
            end = text.index(b"\n", start)
            if text.startswith(_LINE_START, start) and (field := text.find(_SIZE_FIELD, start, end)) > 0:
                digits = text[field + len(_SIZE_FIELD) : text.find(b",", field + 1, end)]
                with suppress(ValueError):  # a line that was written to
                    key = xxhash.xxh3_64_intdigest(text[start + len(_LINE_START) : field])
                    recent[key] = at + start, int(digits)
            start = end + 1
        if len(recent) > _MOST_RECENT:
            # Replaced at once, and before the recent ones: threads look lines up without a lock.
            self._sorted, recent = self._merged(recent), {}
        self._recent = recent

    def _merged(self, recent: dict[int, tuple[int, int]]) -> _Lines:
        import numpy as np

        keys, lines = np.fromiter(recent.keys(), np.uint64), np.array(list(recent.values()), np.int64)
        starts, sizes = lines[:, 0], lines[:, 1]
        if self._sorted is not None:
            keys = np.concatenate([self._sorted.keys, keys])
            starts = np.concatenate([self._sorted.starts, starts])
            sizes = np.concatenate([self._sorted.sizes, sizes])
        order = np.lexsort((starts, keys))
        last = order[np.flatnonzero(np.append(keys[order][1:] != keys[order][:-1], True))]
        return _Lines(keys[last], starts[last], sizes[last])

    def totals(self) -> tuple[int, int]:
        recent, lines = self._recent, self._sorted
        sizes = [size for _, size in recent.values() if size != FORGOTTEN]
        files, total = len(sizes), sum(sizes)
        if lines is not None:
            import numpy as np

            keys = np.fromiter(recent.keys(), np.uint64)
            places = np.minimum(lines.keys.searchsorted(keys), len(lines.keys) - 1)
            counted = lines.sizes != FORGOTTEN
            counted[places[lines.keys[places] == keys]] = False  # the recent line counts
            files, total = files + int(counted.sum()), total + int(lines.sizes[counted].sum())
        return files, total

    def find(self, path: str, manifest: int) -> CopiedFile | None:
        key = xxhash.xxh3_64_intdigest(json.dumps(path).encode())
        recent = self._recent.get(key)
        if recent is not None:
            start = recent[0]
        else:
            lines = self._sorted
            if lines is None:
                return None
            place = int(lines.keys.searchsorted(lines.keys.dtype.type(key)))
            if place == len(lines.keys) or lines.keys[place] != key:
                return None
            start = int(lines.starts[place])
        record = _parse(_read_line(manifest, start))
        return record if record is not None and record.path == path and record.size != FORGOTTEN else None

    def records(self, manifest: int) -> Iterator[CopiedFile]:
        """Every file once, in the order of the lines."""
        known = [] if self._sorted is None else self._sorted.starts.tolist()
        for start in sorted([*known, *(start for start, _ in self._recent.values())]):
            record = _parse(_read_line(manifest, start))
            if record is not None and record.size != FORGOTTEN:
                yield record


def _parse(line: bytes) -> CopiedFile | None:
    try:
        found: Any = json.loads(line.partition(b"\n")[0])
        record = CopiedFile(**found)
    except (ValueError, TypeError):
        return None
    kinds = (str, int, str, str, str)
    return record if all(isinstance(value, kind) for value, kind in zip(record, kinds, strict=True)) else None


def _read_line(manifest: int, start: int) -> bytes:
    line = os.pread(manifest, 512, start)
    while b"\n" not in line and (more := os.pread(manifest, 1 << 15, start + len(line))):
        line += more
    return line
