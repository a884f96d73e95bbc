"""A connection to S3 with its buffer, and the requests that it works on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from stoker.data.store.local_copy import PartialFile
from stoker.stage.records import SourceFile
from stoker.stage.s3_requests import Head

BUFFER_BYTES = 256 << 10


@dataclass(eq=False)
class Large:
    """An object that is written in parts."""

    file: SourceFile
    partial: PartialFile
    left: int
    """Requests that have not ended."""
    headers: dict[str, str] = field(default_factory=dict)
    failed: bool = False


@dataclass(eq=False)
class Task:
    """One request."""

    file: SourceFile
    method: str = "GET"
    start: int = 0
    end: int | None = None
    """None: the whole object."""
    large: Large | None = None
    tries: int = 0
    first_fault: float | None = None

    @property
    def size(self) -> int:
        return 0 if self.method == "HEAD" else (self.file.size if self.end is None else self.end) - self.start


class Fault(Exception):
    """This request failed and can be made again."""


class Connection:
    """A socket with its buffer and the request it works on."""

    def __init__(self, opened: Any, tls: bool) -> None:
        self.socket, self.tls = opened, tls
        self.buffer = bytearray(BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self.connected = False
        self.shaken = not tls
        self.used = False
        """Whether it has answered a request: one that a server closed while it was idle is no fault."""
        self.task: Task | None = None
        self.head: Head | None = None
        self.begin(None)

    def begin(self, task: Task | None) -> None:
        """Starts with a request, or is idle."""
        self.task, self.head, self.have, self.body_at, self.written = task, None, 0, 0, 0
        self.heard = time.monotonic()

    def room_for(self, size: int) -> None:
        """Makes the buffer large enough for a whole response."""
        if len(self.buffer) < size:
            grown = bytearray(size)
            grown[: self.have] = self.view[: self.have]
            self.buffer, self.view = grown, memoryview(grown)
