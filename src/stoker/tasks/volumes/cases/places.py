"""A folder or URL with a data set: the part of pathlib's Path that the layouts use, over an object store's listings."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urlsplit

from stoker.core.redact import redact_text
from stoker.io.stores import is_url
from stoker.tasks.volumes.formats.byte_source import object_at, store_at
from stoker.tasks.volumes.formats.opening import VolumeRef, local_path

Listing: TypeAlias = tuple[Sequence[str], dict[str, Sequence[Any]]]


@dataclass(frozen=True)
class UrlPath:
    """A folder or object behind a URL. Each folder is listed once."""

    url: str
    """Percent-encoded: unusual characters in names may mean something in a URL."""
    _listings: dict[str, Listing] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return redact_text(self.url)

    def __truediv__(self, name: str | Path) -> UrlPath:
        parts = urlsplit(self.url)
        path = posixpath.normpath(posixpath.join(parts.path or "/", quote(str(name))))
        return UrlPath(f"{parts.scheme}://{parts.netloc}{path}", self._listings)

    @property
    def name(self) -> str:
        return unquote(self.url.rstrip("/").rpartition("/")[2])

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.name)[1]

    @property
    def parent(self) -> UrlPath:
        return self / ".."

    @cached_property
    def version(self) -> str:
        """Size and ETag of the object; empty if it is a folder."""
        found = self.parent._listing[1].get(self.name)
        return "" if found is None else f"{found[0]} {found[1] or ''}"

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return self.name in self.parent._listing[1]

    def is_dir(self) -> bool:
        return any(self._listing)

    def iterdir(self) -> Iterator[UrlPath]:
        """What is directly in it; nothing if there is no such folder."""
        folders, objects = self._listing
        yield from (self / name for name in sorted({*folders, *objects} - {""}))

    def read_bytes(self) -> bytes:
        """Its content; raises ReadFailure."""
        store, path = object_at(self.url)
        return bytes(store.read(path))

    @property
    def _listing(self) -> Listing:
        if self.url not in self._listings:
            self._listings[self.url] = store_at(self.url).entries()
        return self._listings[self.url]


Place: TypeAlias = Path | UrlPath


def place_at(root: str | Path) -> Place:
    """The folder, file or URL; does not connect yet."""
    location = local_path(str(root))
    return UrlPath(location.rstrip("/")) if is_url(location) else Path(location).expanduser().absolute()


def ref_to(path: Place, level: int = 0) -> VolumeRef:
    """The volume at a place."""
    if isinstance(path, UrlPath):
        return VolumeRef(path.url, level, version=path.version)
    return VolumeRef(str(path), level)


def bytes_of(path: Place, most: int) -> bytes | None:
    """The content of a text file, or None if it has more than `most` bytes; raises OSError or ReadFailure."""
    size = path.parent._listing[1].get(path.name, (0,))[0] if isinstance(path, UrlPath) else path.stat().st_size
    return None if size > most else path.read_bytes()
