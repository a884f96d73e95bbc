"""Objects behind a URL (S3, Google Cloud Storage, Azure, plain HTTP), read through obstore.

A body is never trusted: one of unexpected length is a failure, not a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError

from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.io.connection import Connection, Patience
from stoker.io.stores import MAX_OBJECT_BYTES, Buffer, FileVersion, ReadFailure


class ObjectStore:
    """A bucket or a part of one; connects on first use, in the process that uses it."""

    is_remote = True

    def __init__(self, url: str, *, max_object_bytes: int = MAX_OBJECT_BYTES, patience: Patience = Patience()) -> None:  # noqa: B008
        parts = urlsplit(url)
        if "@" in parts.netloc and not parts.scheme.startswith("abfs"):
            raise UserError(
                "secret-in-url",
                f"{redact_text(url)} contains a user name or a key",
                why="URLs end up in logs and run folders",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment instead",
            )
        if not parts.netloc:
            raise UserError("bad-store-url", f"'{url}' does not name a bucket", hint="write s3://bucket/folder")
        self.url = url.rstrip("/")
        self.max_object_bytes = max_object_bytes
        self.connection = Connection(self.url, patience)
        """Which also knows whether the store as a whole responds."""
        self.fetches = 0
        """Requests so far; approximate, because threads count without a lock."""
        self._tags: dict[str, str] = {}

    def __reduce__(self) -> Any:
        # Only the URL: each process takes its credentials from its own environment.
        patience = self.connection.patience
        return partial(ObjectStore, max_object_bytes=self.max_object_bytes, patience=patience), (self.url,)

    def read(
        self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False, version: str | None = None
    ) -> Buffer:
        """The bytes, of this version if one is given; blocks the calling thread without holding the GIL."""
        return self._get(path, offset, size, whole, version)[0]

    def fetch(self, path: str, size: int | None = None) -> tuple[Buffer, str]:
        """A whole object, of this size if one is given, and its version (ETag); the version is empty if it has none."""
        return self._get(path, 0, size, True, None)

    def _get(self, path: str, offset: int, size: int | None, whole: bool, version: str | None) -> tuple[Buffer, str]:
        if size is not None and size > self.max_object_bytes:
            raise ReadFailure(path, "too large", f"{size} bytes; the limit is {self.max_object_bytes}")
        if size == 0 and not whole:
            return b"", ""
        return self.connection.patiently(path, lambda: self._read(path, offset, size, whole, version))

    def _read(self, path: str, offset: int, size: int | None, whole: bool, version: str | None) -> tuple[Buffer, str]:
        client, meta = self.connection.client(path), None
        self.fetches += 1
        try:
            part = not whole and (offset > 0 or size is not None)
            if part:
                wanted_range: Any = {"offset": offset} if size is None else (offset, offset + size)
                answer = obstore.get(client, path, options={"range": wanted_range})
            else:
                answer = obstore.get(client, path)
            meta = answer.meta
            first, last = answer.range
            if last - first > self.max_object_bytes:
                raise ReadFailure(path, "too large", f"{last - first} bytes; the limit is {self.max_object_bytes}")
            self._check_unchanged(path, meta, size if whole else None, part, version)
            data = memoryview(answer.bytes())
        except (BaseError, OSError, ValueError) as error:
            failure = self.connection.failure(path, error)
            unclear = isinstance(failure, ReadFailure) and failure.reason == "unreadable"
            if unclear and meta is not None and _was_replaced(client, path, meta):
                failure = ReadFailure(path, "changed", "it was replaced while it was being read")
            raise failure from None
        wanted = last - first if size is None else size
        if len(data) != wanted:
            raise ReadFailure(path, "short", f"{len(data)} of {wanted} bytes")
        self.connection.allowed = True
        return data, meta["e_tag"] or ""

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Every object below the prefix, in the server's order: its path relative to the URL, and its size."""
        return ((path, size) for path, size, _ in self.versions(prefix))

    def versions(self, prefix: str = "", *, directly: bool = False) -> Iterator[tuple[str, int, str]]:
        """The same with each object's version (its ETag, or ""); with `directly`, without the folders below."""
        with self.connection.listing() as client:
            if directly:
                chunks: Any = [obstore.list_with_delimiter(client, prefix or None)["objects"]]
            else:
                chunks = obstore.list(client, prefix or None, chunk_size=1000)
            for chunk in chunks:
                for entry in chunk:
                    yield str(entry["path"]), int(entry["size"]), entry["e_tag"] or ""

    def entries(self) -> tuple[Sequence[str], dict[str, Sequence[Any]]]:
        """What is directly below the URL: names of folders, and of objects with their size and version; both sorted and
        without hidden ones."""
        with self.connection.listing() as client:
            found = obstore.list_with_delimiter(client)
        folders = sorted(str(prefix).strip("/").rpartition("/")[2] for prefix in found["common_prefixes"])
        objects = sorted((str(entry["path"]), (entry["size"], entry["e_tag"])) for entry in found["objects"])
        return (
            [name for name in folders if not name.startswith(".")],
            {name: facts for name, facts in objects if not name.startswith(".")},
        )

    def about(self, path: str) -> FileVersion:
        def ask() -> FileVersion:
            client = self.connection.client(path)
            try:
                found = obstore.head(client, path)
            except (BaseError, OSError, ValueError) as error:
                raise self.connection.failure(path, error) from None
            return FileVersion(int(found["size"]), found["e_tag"] or "")

        return self.connection.patiently(path, ask)

    def _check_unchanged(self, path: str, meta: Any, size: int | None, part: bool, version: str | None) -> None:
        if size is not None and meta["size"] != size:
            raise ReadFailure(path, "changed", f"{meta['size']} bytes; the index says {size}")
        tag = meta["e_tag"]
        if version and tag is not None and tag != version:
            raise ReadFailure(path, "changed", "it was replaced after it was listed or opened")
        # A shard is read in many parts, which must all come from the same version.
        if part and tag is not None and self._tags.setdefault(path, tag) != tag:
            raise ReadFailure(path, "changed", "it was replaced after its first part was read")


def _was_replaced(client: Any, path: str, meta: Any) -> bool:
    try:
        now = obstore.head(client, path)
    except (BaseError, OSError):
        return False
    return (now["e_tag"], now["size"]) != (meta["e_tag"], meta["size"])
