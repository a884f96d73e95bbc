"""Files that are never seen half-written; reading files that anybody may have damaged; the user's cache of measured
figures."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

LARGEST_JSON_BYTES = 16 << 20
"""Our own documents have kilobytes."""
DEEPEST_JSON = 40
"""Levels of nesting; our own have six. Whoever walks through a deeper document may exhaust Python's stack."""
SEAL = "seal"
"""The key of a JSON file's checksum."""


@contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[Any]:
    """A file that replaces `path` when the block ends without an error; until then the old file stays."""
    assert mode in ("w", "wb")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename is atomic only within one file system.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        encoding = "utf-8" if mode == "w" else None
        with os.fdopen(descriptor, mode, encoding=encoding) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        use_umask(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def use_umask(path: Path) -> None:
    """Gives a file the mode that any new file has: mkstemp, and some libraries, make files that only their owner can
    read, but runs and models are often shared by a team."""
    path.chmod(0o666 & ~_umask())


def write_text(path: Path, text: str) -> None:
    """Replaces the file by this text, or leaves the old one untouched."""
    with atomic_file(path) as stream:
        stream.write(text)


def write_bytes(path: Path, data: bytes) -> None:
    with atomic_file(path, "wb") as stream:
        stream.write(data)


def sync_folder(folder: Path) -> None:
    """Makes a rename in this folder survive a power cut, if the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a JSON file, with a checksum over all of it."""
    return {**content, SEAL: _checksum(content)}


def has_whole_seal(content: Any) -> bool | None:
    """Whether content that was read is what `sealed` returned; None if it never had a seal."""
    if not isinstance(content, dict):
        return False
    if SEAL not in content:
        return None
    return bool(content[SEAL] == _checksum({name: value for name, value in content.items() if name != SEAL}))


def open_regular(path: Path) -> BinaryIO:
    """The open file. Raises OSError for anything else under that name: a pipe would block forever, and a device such as
    /dev/zero never ends."""
    return cast("BinaryIO", os.fdopen(_open_regular(path, os.O_RDONLY), "rb"))


def open_to_append(path: Path) -> int:
    """The descriptor of a file, which is created if there is none. Raises OSError if it is not a regular file."""
    return _open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def _open_regular(path: Path, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe already waits for somebody who writes to it.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file. Raises OSError if it is not a regular file, or larger than that."""
    with open_regular(path) as stream:
        # Its size now; it may be growing.
        data = stream.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return data


def parse_json(text: bytes | str) -> Any:
    """The document of this text. Raises ValueError if it is not JSON, or nested too deep to be walked through."""
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    opening = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    # Few brackets cannot nest deep, which saves most lines the second look.
    if sum(map(text.count, opening)) > DEEPEST_JSON and _is_deep(document):  # type: ignore[arg-type]
        raise ValueError("nested too deep")
    return document


def read_json(path: Path, most_bytes: int = LARGEST_JSON_BYTES) -> Any:
    """The document in a file. Raises OSError if it cannot be read, ValueError if it is damaged."""
    return parse_json(read_regular(path, most_bytes))


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(DEEPEST_JSON + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def cache_folder() -> Path:
    """The user's folder for what can be measured or made again: `stoker` below XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises without a home
    return Path(base).absolute() / "stoker"


def remember(name: str, key: str, measure: Callable[[], Any], usable: Callable[[Any], bool]) -> Any:
    """The figure that the cache file `name` holds under `key`, or a new one, which is stored there if it is usable.

    The key holds everything that the figure depends on. A damaged file counts as absent, and a folder that cannot be
    written to only costs the measurement at every start.
    """
    return remember_all(name, [key], lambda _missing: [measure()], usable)[0]


def remember_all(
    name: str, keys: Sequence[str], measure: Callable[[list[int]], Iterable[Any]], usable: Callable[[Any], bool]
) -> list[Any]:
    """The same for many keys: `measure` gets the places of those that are not known and returns their figures in this
    order; they are stored together."""
    path = cache_folder() / name
    stored = _read_object(path)
    figures = [stored.get(key) for key in keys]
    missing = [place for place, figure in enumerate(figures) if not usable(figure)]
    if not missing:
        return figures
    for place, figure in zip(missing, measure(missing), strict=True):
        figures[place] = figure
    if new := {keys[place]: figures[place] for place in missing if usable(figures[place])}:
        with suppress(OSError):
            write_text(path, json.dumps(sealed(_read_object(path) | new), indent=1) + "\n")
    return figures


def _read_object(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = read_json(path)
        # A changed figure would be believed: files from before there were seals are measured again, too.
        if has_whole_seal(content):
            del content[SEAL]
            return cast(dict[str, Any], content)
    return {}


def _checksum(content: dict[str, Any]) -> str:
    # Imported here: most commands read no such file.
    import xxhash

    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _umask() -> int:
    # The only portable way to read it is to set it; this one is Linux's, and safe beside other threads.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
