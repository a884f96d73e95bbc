"""Zarr v2 and v3 arrays and OME-Zarr pyramids, local or in S3, read by tensorstore; sharded or not.

Metadata is read through our own stores, which say what is wrong with a bucket or its credentials. All volumes of a
process share one cache of decoded chunks, bounded in bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import tensorstore
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.io import outage
from stoker.io.aws_settings import ENDPOINTS, is_anonymous, profile_settings
from stoker.io.connection import Patience
from stoker.io.stores import ReadFailure, Store, StoreDown, is_url, open_store
from stoker.tasks.volumes.formats.byte_source import object_at
from stoker.tasks.volumes.formats.volume import ReadingOptions, Region, Shape, Voxels, check_extent

MAX_METADATA_BYTES = 16_000_000
PATIENCE = Patience()
# tensorstore reads these at its first request; without them it would wait forever for a stalled connection.
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(int(PATIENCE.stall_s)))
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
# tensorstore reports ABORTED when its own retries have failed.
_PASSING, _REFUSED = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"), ("PERMISSION_DENIED", "UNAUTHENTICATED")
_PROFILE_FILES = {"credentials_file": "AWS_SHARED_CREDENTIALS_FILE", "config_file": "AWS_CONFIG_FILE"}


def open_zarr(location: str, level: int, options: ReadingOptions) -> ZarrVolume:
    """A Zarr array, or one level of an OME-Zarr pyramid."""
    place, name = location, redact_text(location)
    _refuse_after_fork()
    if is_url(place):
        store, inside = object_at(place)
        folder = f"{inside}/"
    else:
        place, folder = str(Path(place).expanduser().absolute()), ""
        if not Path(place).is_dir():
            raise ReadFailure(name, "missing" if not Path(place).exists() else "not a directory")
        store = open_store(place, max_object_bytes=MAX_METADATA_BYTES)
    meta = _metadata(store, folder, "", name)
    axes: list[str] | None = None
    path = ""
    if meta.kind == "group":
        path, axes = _level_of_pyramid(name, meta, level)
        meta = _metadata(store, folder, path, name)
        if meta.kind == "group":
            raise ReadFailure(name, "not a volume", f"its level {path!r} is a group, not an array")
    elif level:
        raise ReadFailure(name, "no such level", f"level {level} of an array that is not an OME-Zarr pyramid")
    spec = {
        "driver": "zarr3" if meta.version == 3 else "zarr",
        "kvstore": _key_value_store(place, path),
        "fill_missing_data_reads": options.missing_chunks == "fill",
        # Chunks are never written while we train; asking whether they changed would be a request for each.
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }
    context = _context(options.cache_bytes)
    array = _patiently(name, place, lambda: tensorstore.open(spec, open=True, read=True, context=context).result())
    array = _in_zyx(name, array, axes or meta.axes)
    dtype = np.dtype(array.dtype.numpy_dtype)
    shape = check_extent(name, array.shape, dtype, options)
    chunk_bytes = int(np.prod(array.chunk_layout.read_chunk.shape, dtype=object)) * dtype.itemsize
    if chunk_bytes > options.max_decoded_bytes:
        raise ReadFailure(
            name, "too large", f"a chunk has {chunk_bytes:,} bytes; the limit is {options.max_decoded_bytes:,}"
        )
    return ZarrVolume(name, shape, dtype.newbyteorder("="), f"{place}/{path} {meta.digest}", place, array)


@dataclass(frozen=True)
class ZarrVolume:
    """An array in chunks; a read fetches and decodes the chunks it touches, several at once."""

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    identity: str
    """From its metadata: replaced chunks cannot be noticed without reading them all."""
    place: str
    """Its folder or URL."""
    array: Any
    affine: NDArray[np.float64] | None = None

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        found: Voxels = _patiently(self.name, self.place, lambda: self.array[region.slices].read().result())
        if out is None:
            return found
        out[...] = found
        return out


@dataclass(frozen=True)
class _Metadata:
    kind: str
    version: int
    attributes: Mapping[str, Any]
    axes: list[str] | None
    digest: str


def _metadata(store: Store, folder: str, path: str, name: str) -> _Metadata:
    """The content of a path in a folder of the store: the first of the files that describe an array or a group."""
    inside = f"{path}/" if path else ""
    base = folder + inside
    for file in ("zarr.json", ".zarray", ".zgroup"):
        try:
            raw = bytes(store.read(base + file))
        except ReadFailure as failure:
            if failure.reason == "missing":
                continue
            raise ReadFailure(name, failure.reason, failure.detail) from None
        document = _parsed(raw, f"{name}/{inside}{file}")
        digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
        if file == "zarr.json":
            axes = document.get("dimension_names")
            are_names = isinstance(axes, list) and all(isinstance(one, str) for one in axes)
            kind = str(document.get("node_type"))
            return _Metadata(kind, 3, document.get("attributes") or {}, axes if are_names else None, digest)
        if file == ".zarray":
            return _Metadata("array", 2, {}, None, digest)
        try:
            attributes = _parsed(bytes(store.read(f"{base}.zattrs")), f"{name}/{inside}.zattrs")
        except ReadFailure:
            attributes = {}
        return _Metadata("group", 2, attributes, None, digest)
    raise ReadFailure(name, "missing", f"no Zarr metadata (zarr.json, .zarray, .zgroup) in {path or 'it'}")


def _parsed(raw: bytes, name: str) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ReadFailure(name, "unreadable", "its metadata is not JSON")
    return document


def _level_of_pyramid(name: str, meta: _Metadata, level: int) -> tuple[str, list[str] | None]:
    """The path of a level, and its axes, by OME-Zarr 0.4 (`multiscales`) or 0.5 (below `ome`)."""
    described = meta.attributes.get("ome", meta.attributes)
    try:
        pyramid = described["multiscales"][0]
        paths = [str(dataset["path"]) for dataset in pyramid["datasets"]]
        # Before 0.4 the axes were plain names.
        axes = [str(one["name"]) if isinstance(one, dict) else str(one) for one in pyramid.get("axes") or []]
    except (KeyError, IndexError, TypeError):
        raise ReadFailure(
            name, "not a volume", "a Zarr group that is not an OME-Zarr pyramid; name its array"
        ) from None
    if not 0 <= level < len(paths):
        raise ReadFailure(name, "no such level", f"level {level}; it has the levels 0 to {len(paths) - 1}")
    if ".." in paths[level].split("/") or paths[level].startswith("/"):
        raise ReadFailure(name, "bad name", f"the level {paths[level]!r} is outside of it")
    return paths[level], axes or None


def _in_zyx(name: str, array: Any, axes: list[str] | None) -> Any:
    """The array with its axes in the order z, y, x, without others of length one."""
    shape = tuple(int(size) for size in array.shape)
    if axes is not None and len(axes) != len(shape):
        raise ReadFailure(name, "wrong axes", f"{len(axes)} names ({', '.join(axes)}) for the shape {shape}")
    names = [axis.lower() for axis in axes] if axes is not None else []
    if {"z", "y", "x"} <= set(names):
        extra = [number for number, axis in enumerate(names) if axis not in ("z", "y", "x")]
    else:
        if axes is not None and len(shape) == 3 and len({*names} & {"z", "y", "x"}) > 0:
            raise ReadFailure(name, "wrong axes", f"they are {', '.join(axes)}; a volume has z, y, x")
        extra = [number for number, size in enumerate(shape[:-3]) if size == 1]
        names = []
    if wide := [number for number in extra if shape[number] != 1]:
        described = ", ".join(f"{(axes or ['?'] * len(shape))[number]} of length {shape[number]}" for number in wide)
        raise ReadFailure(name, "wrong axes", f"besides z, y, x there is {described}; store each one separately")
    for number in reversed(extra):
        array = array[(slice(None),) * number + (0,)]
        if names:
            names.pop(number)
    if names and names != ["z", "y", "x"]:
        array = array.transpose([names.index(axis) for axis in ("z", "y", "x")])
    return array


def _key_value_store(place: str, path: str) -> dict[str, Any]:
    if not is_url(place):
        return {"driver": "file", "path": f"{Path(place) / path}/"}
    parts = urlsplit(place)
    if parts.scheme not in ("s3", "s3a"):
        raise UserError(
            "unknown-store",
            f"'{redact_text(place)}': volumes cannot be read from {parts.scheme}://",
            why="supported are folders and s3://",
            hint="copy the volume to a local folder first",
        )
    prefix = "/".join(part for part in (unquote(parts.path).strip("/"), path) if part)
    return {"driver": "s3", "bucket": parts.netloc, "path": f"{prefix}/", **_s3_settings()}


def _s3_settings() -> dict[str, Any]:
    """Credentials, region and endpoint as the object store resolves them, as options of tensorstore."""
    environment = os.environ
    profile = profile_settings(environment)
    settings: dict[str, Any] = {}
    if is_anonymous(environment):
        settings["aws_credentials"] = {"type": "anonymous"}
    elif "AWS_ACCESS_KEY_ID" in environment:
        settings["aws_credentials"] = {"type": "environment"}
    elif "access_key_id" in profile or "credential_provider" in profile:
        named = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
        files = {key: environment[variable] for key, variable in _PROFILE_FILES.items() if variable in environment}
        settings["aws_credentials"] = {"type": "profile", "profile": named, **files}
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or profile.get("region")
    if region:
        settings["aws_region"] = region
    endpoint = next((environment[name] for name in ENDPOINTS if name in environment), profile.get("endpoint"))
    if endpoint:
        settings["endpoint"] = endpoint
        # Without a region tensorstore would ask the endpoint for it in a way that only AWS answers.
        settings.setdefault("aws_region", "us-east-1")
    return settings


@cache
def _context(cache_bytes: int) -> Any:
    """One cache of chunks for the whole process."""
    return tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": cache_bytes},
            # For one chunk that fails among many; `_patiently` waits for the end of an outage.
            "s3_request_retries": {"max_retries": 4, "initial_delay": "100ms", "max_delay": "1s"},
        }
    )


def _patiently(name: str, place: str, attempt: Callable[[], Any]) -> Any:
    """The result of a call of tensorstore, retried for as long as our object store would: restarts of a gateway and
    'slow down' responses pass. Raises ReadFailure, or StoreDown."""
    began_s, delay_s = time.monotonic(), _FIRST_DELAY_S
    while True:
        try:
            return attempt()
        except (ValueError, NotImplementedError) as error:
            text = redact_text(str(error)).split(" [source locations", 1)[0].strip()
        if text.partition(":")[0] not in _PASSING or time.monotonic() + delay_s > began_s + PATIENCE.retry_s:
            raise _failure(name, place, text)
        with outage.waiting(place, began_s):
            if not outage.pause(delay_s):
                raise _failure(name, place, text)
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)


def _failure(name: str, place: str, text: str) -> Exception:
    """What a failure of tensorstore means: one volume cannot be read, or its store cannot."""
    code, summary = text.partition(":")[0], text[:300]
    if is_url(place) and code in (*_PASSING, *_REFUSED):
        try:
            # Our own client reports what is wrong with a bucket, its region or the credentials.
            object_at(place)[0].connection.check()
        except StoreDown as down:
            return down
        return ReadFailure(name, "permission" if code in _REFUSED else "unreadable", summary)
    if missing := re.search(r"chunk (\{[^}]*\}).* is missing", text):
        detail = f"chunk {missing[1]}; if absent chunks mean the fill value, set missing_chunks=fill"
        return ReadFailure(name, "missing chunk", detail)
    return ReadFailure(name, "missing" if code == "NOT_FOUND" else "unreadable", summary)


# tensorstore has threads, which do not survive a fork: the first read of a forked child would never end.
_process_of_first_use: int | None = None


def _refuse_after_fork() -> None:
    global _process_of_first_use
    process = os.getpid()
    if _process_of_first_use is None:
        _process_of_first_use = process
    elif _process_of_first_use != process:
        raise UserError(
            "zarr-after-fork",
            f"process {process} was forked from {_process_of_first_use}, which had already read Zarr volumes",
            why="the reading threads do not survive a fork, so the first read would hang forever",
            hint="set worker_start=forkserver, or loader=thread",
        )
