"""What a process does again and again while it prepares samples: files that it reopens, caches that it keeps in its
data set, shapes that change from batch to batch, memory that it takes.

The data set is only looked at, now and then, and never changed.
"""

from __future__ import annotations

import math
import os
import sys
from collections import OrderedDict, defaultdict, deque
from types import ModuleType
from typing import Any

from stoker.attach import ring
from stoker.attach.ring import Habits

DEEPEST = 3
"""How far we look for arrays inside a batch or an entry of a cache: {"images": [a, b]} has them at two."""
MOST_FILES = 200_000
SMALLEST_CACHE_BYTES = 100_000
"""Less than this is a table of labels, not a cache of samples."""
MOST_ENTRIES = 4096
WEIGHED_ENTRIES = 32
MOST_ATTRIBUTES = 200
COUNTED = (list, dict, set, deque, OrderedDict, defaultdict)
GREW = 8
"""Entries that a container must have got to be named."""


class FileOpens:
    """Which files are opened for samples, and whether they have been opened before."""

    def __init__(self) -> None:
        self.opens = self.samples = self.that_read = self.that_read_again = 0
        self._known: set[int] = set()
        self._of_sample = self._new_of_sample = 0

    @property
    def known(self) -> int:
        return len(self._known)

    def opened(self, path: Any) -> None:
        self.opens += 1
        self._of_sample += 1
        # A hash: paths of a million files would be memory that the script does not expect.
        mark = hash(path)
        if mark not in self._known and len(self._known) < MOST_FILES:
            self._known.add(mark)
            self._new_of_sample += 1

    def sample_ends(self) -> None:
        self.samples += 1
        if self._of_sample:
            self.that_read += 1
            self.that_read_again += not self._new_of_sample
            self._of_sample = self._new_of_sample = 0


class Shapes:
    """The shapes of the batches' largest array, without the number of samples in it."""

    def __init__(self) -> None:
        self.seen = self.changes = self.elements = self.smallest = self.largest = self.dimensions = 0
        self.examples: tuple[str, str] = "", ""
        self._last: tuple[int, ...] | None = None

    def look(self, data: Any, samples: int) -> None:
        # Arrays that have a row for each sample; a list of images of different sizes has none.
        parts = list(data.values()) if isinstance(data, dict) else data if isinstance(data, (list, tuple)) else [data]
        shapes = [tuple(part.shape) for part in parts if getattr(part, "nbytes", 0) and hasattr(part, "shape")]
        shapes = [shape for shape in shapes if len(shape) > 1 and shape[0] == samples]
        if not shapes:
            return
        shape = max(shapes, key=lambda shape: (len(shape), math.prod(shape)))
        one = shape[1:]
        count = math.prod(one)
        self.seen += 1
        self.elements += count
        self.smallest = count if self.smallest == 0 else min(self.smallest, count)
        self.largest = max(self.largest, count)
        self.dimensions = len(shape)
        if self._last is not None and one != self._last:
            self.changes += 1
            self.examples = "x".join(map(str, self._last)), "x".join(map(str, one))
        self._last = one


class Caches:
    """Containers of arrays in a data set, and functions behind lru_cache: how much they hold, and whether entries
    vanish."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int, int]] = {}
        """By name: entries, bytes (-1 if unknown), and entries that have vanished."""
        self.lengths: dict[str, tuple[int, int, bool]] = {}
        """For every container: entries at first, entries now, and whether it is a dict."""
        self._keys: dict[str, set[Any]] = {}

    def look(self, dataset: Any) -> None:
        """Looks through the data set's attributes, those of its own objects, and the variables of its module."""
        left = [MOST_ATTRIBUTES]
        self._look_into(dataset, "self", 2, left, set())
        self._look_at_memoized(dataset)
        module = sys.modules.get(type(dataset).__module__)
        for name, value in list(vars(module).items())[:MOST_ATTRIBUTES] if module is not None else ():
            if not name.startswith("__"):
                self._count(name, value)

    def _count(self, name: str, value: Any) -> None:
        if type(value) in COUNTED:
            first = self.lengths.get(name, (len(value), 0, False))[0]
            self.lengths[name] = first, len(value), isinstance(value, dict)

    def _look_into(self, holder: Any, name: str, deep: int, left: list[int], seen: set[int]) -> None:
        for attribute, value in list(getattr(holder, "__dict__", {}).items()):
            if left[0] <= 0 or id(value) in seen:
                continue
            left[0] -= 1
            seen.add(id(value))
            path = f"{name}.{attribute}"
            self._count(path, value)
            if isinstance(value, dict):
                self._weigh(path, value)
            elif deep and hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
                self._look_into(value, path, deep - 1, left, seen)

    def _weigh(self, name: str, container: dict[Any, Any]) -> None:
        entries = len(container)
        if entries > MOST_ENTRIES:
            return
        some = list(container.values())[:WEIGHED_ENTRIES]
        size = sum(array_bytes(value, DEEPEST, mapped=False) for value in some) * entries // max(1, len(some))
        if size < SMALLEST_CACHE_BYTES and name not in self.found:
            return
        now = set(container)
        vanished = len(self._keys.get(name, now) - now) + self.found.get(name, (0, 0, 0))[2]
        self._keys[name] = now
        self.found[name] = entries, size, vanished

    def _look_at_memoized(self, dataset: Any) -> None:
        kind = type(dataset)
        module = sys.modules.get(kind.__module__)
        places = [(f"{kind.__name__}.", vars(base)) for base in kind.__mro__] + [("", vars(module) if module else {})]
        for prefix, names in places:
            for name, value in list(names.items()):
                info = getattr(value, "cache_info", None)
                if info is None or not callable(info) or isinstance(value, type):
                    continue
                about = info()
                if about.misses:
                    first = self.lengths.get(f"{prefix}{name}", (about.currsize, 0, True))[0]
                    self.lengths[f"{prefix}{name}"] = first, about.currsize, True
                    self.found[f"{prefix}{name}"] = about.currsize, -1, max(0, about.misses - about.currsize)


def array_bytes(data: Any, deep: int, *, mapped: bool = True) -> int:
    """Bytes of the arrays in nested lists, tuples and dicts; mapped files are not in memory, and may count or not."""
    size = getattr(data, "nbytes", None)
    if size is not None:
        return int(size) if mapped or type(data).__name__ != "memmap" else 0
    if deep == 0:
        return 0
    if isinstance(data, dict):
        return sum(array_bytes(part, deep - 1, mapped=mapped) for part in data.values())
    if isinstance(data, (list, tuple)):
        return sum(array_bytes(part, deep - 1, mapped=mapped) for part in data)
    return 0


class Memory:
    """The most memory that this process has had for itself alone; what it shares with its parent does not count."""

    def __init__(self, is_forked: bool) -> None:
        before = self._read() if is_forked else None
        self._shared = before["RssAnon"] if before is not None else 0

    def private_bytes(self) -> int:
        """-1 if the kernel does not provide it."""
        now = self._read()
        if now is None:
            return -1
        return max(0, now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._shared)

    @staticmethod
    def _read() -> dict[str, int] | None:
        try:
            descriptor = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
            try:
                lines = os.read(descriptor, 4096).decode(errors="replace").splitlines()
            finally:
                os.close(descriptor)
            found = dict(line.split(":", 1) for line in lines if ":" in line)
            return {name: int(found[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")}
        except (OSError, KeyError, ValueError, IndexError):
            return None


class Watched:
    """Everything above, for one loader in one process; written into the header of its file."""

    def __init__(self, memory: Any, is_worker: bool, is_forked: bool) -> None:
        self.files = FileOpens()
        self.shapes = Shapes()
        self._caches = Caches()
        self._header = memory
        self._memory = Memory(is_forked) if is_worker else None
        self._private = -1
        self._looks_at_caches = True

    def batch_made(self, dataset: Any, data: Any, samples: int) -> None:
        """Called for some of the batches."""
        self.shapes.look(data, samples)
        if self._memory is not None:
            self._private = self._memory.private_bytes()
        if self._looks_at_caches:
            try:
                self._caches.look(dataset)
            except Exception:  # a property that raises, a dict that another thread changes: then it stays unknown
                self._looks_at_caches = False

    def write(self, sampled_ns: int, looks: int, worked: dict[str, list[int]]) -> None:
        files, shapes = self.files, self.shapes
        about = Habits(
            sampled_ns, looks, files.samples, files.that_read, files.that_read_again, files.opens, files.known,
            shapes.seen, shapes.changes, shapes.elements, shapes.smallest, shapes.largest, shapes.dimensions,
            self._private,
        )  # fmt: skip
        ring.HABITS.pack_into(self._header, ring.HABITS_AT, *about)
        ring.SHAPES.write(self._header, ((text.encode(),) for text in shapes.examples))
        largest = sorted(worked.items(), key=lambda item: -item[1][1])
        ring.WORKED.write(self._header, ((calls, elements, name.encode()) for name, (calls, elements) in largest))
        heaviest = sorted(self._caches.found.items(), key=lambda item: (-item[1][2], -item[1][1]))
        ring.CACHES.write(self._header, ((*counts, name.encode(errors="replace")) for name, counts in heaviest))
        grown = [(name, counts) for name, counts in self._caches.lengths.items() if counts[1] >= counts[0] + GREW]
        grown.sort(key=lambda each: each[1][0] - each[1][1])
        ring.GROWN.write(self._header, ((*counts, name.encode(errors="replace")) for name, counts in grown))
