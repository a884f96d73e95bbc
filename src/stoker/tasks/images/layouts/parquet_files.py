"""Parquet files as Hugging Face `datasets` writes them: an `image` column with the files' bytes, and a `label`.

An image in a parquet file cannot be read alone: its whole row group has to be decompressed. The store keeps some of
them, so memory stays bounded; the index says which row group a sample is in, so `stoker pack` reads each only once.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance, shown, some
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.core.units import count, size_text
from stoker.io.cache import CachedStore, CopyPlace
from stoker.io.stores import MAX_OBJECT_BYTES, Buffer, ReadFailure, SourceStore, Store, open_store
from stoker.tasks.images.layouts.sample_index import SampleIndex, sorted_index
from stoker.tasks.images.layouts.sample_lists import LABEL_COLUMNS, LabelFileWrong, numbered
from stoker.tasks.images.layouts.webdataset import open_range

IMAGE_COLUMNS = ("image", "img", "jpg", "png", "bytes")
# Row groups in memory, for each process; a file of `datasets` has 100 images (11 MB) to 1,000 in each.
KEPT_BYTES = 256_000_000
# A location's offset is the number of the row group and of the row in it.
ROW_BITS = 32


def open_sample_store(
    index: SampleIndex, *, copy: CopyPlace | None = None, max_object_bytes: int = MAX_OBJECT_BYTES
) -> Store:
    """The store from which an index's samples are read, with a local copy in front of it if one is given."""
    store: Store = open_store(index.root, max_object_bytes)
    if is_parquet(index):
        store = ParquetStore(open_store(index.root), index.facts["version"], max_object_bytes)
    return store if copy is None else CachedStore(store, copy, max_object_bytes)


def is_parquet(index: SampleIndex) -> bool:
    """Whether its images are in parquet files, where none can be read alone."""
    return index.facts.get("layout") == "parquet"


def row_groups(index: SampleIndex) -> NDArray[np.int64] | None:
    """The number of each sample's row group over all files; None if samples can be read one by one."""
    if not is_parquet(index) or index.shard_of is None or index.offsets is None:
        return None
    pairs = (np.asarray(index.shard_of, np.int64) << ROW_BITS) + (np.asarray(index.offsets) >> ROW_BITS)
    return np.unique(pairs, return_inverse=True)[1].astype(np.int64)


def list_parquet(place: str, files: Sequence[str], progress: Advance | None = None) -> SampleIndex:
    """The index of all rows of these files; progress counts files. Images are not read."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise UserError(
            "package-missing",
            f"{shown(redact_text(place))} has parquet files, and pyarrow is not installed",
            why="it reads them",
            hint="pip install 'stoker[hf]'",
        ) from None
    store = open_store(place)
    names: list[str] = []
    labels: list[str] = []
    shard_of: list[int] = []
    offsets: list[int] = []
    declared: tuple[str, ...] | None = None
    largest = total_bytes = 0
    version = hashlib.blake2b(digest_size=8)
    for number, file in enumerate(files):
        opened = _ParquetFile(store, place, file)
        if number and opened.class_names != declared:
            seen = f"its classes differ from those of {shown(files[0])}"
            raise LabelFileWrong(f"{place}/{file}", None, seen, "all files of a split must have the same schema")
        declared = opened.class_names
        for group in range(opened.groups):
            found, paths, group_bytes = opened.labels_of(group)
            first = sum(opened.rows[:group])
            labels += found
            for row, path in enumerate(paths, first):
                # The file, the row, and the name that the image had.
                names.append(f"{file}/{row:09d}" + (f"/{path.rpartition('/')[2]}" if path else ""))
            shard_of += [number] * len(found)
            offsets += [(group << ROW_BITS) + row for row in range(len(found))]
            largest, total_bytes = max(largest, group_bytes), total_bytes + group_bytes
            version.update(f"{file} {group} {len(found)} {group_bytes}\n".encode())
        if progress is not None:
            progress(number + 1, len(files))
    if not labels:
        raise UserError("no-images", f"{shown(redact_text(place))}: the parquet files have no rows")
    notes = []
    if total_bytes > KEPT_BYTES:
        per_group = len(labels) / max(1, len(set(zip(shard_of, (o >> ROW_BITS for o in offsets), strict=True))))
        notes.append(
            f"to read one image of {shown(redact_text(place))}, a row group of {per_group:,.0f} images "
            f"({size_text(largest)}) has to be decompressed, so training would be slow: "
            "`stoker pack SRC DST` reads each once"
        )
    about = {"version": version.hexdigest(), "mean_bytes": total_bytes / len(labels)}
    return sorted_index(
        place,
        *numbered(labels, declared),
        names,
        {"layout": "parquet", "notes": notes, **about},
        shards=files,
        shard_of=shard_of,
        offsets=offsets,
    )


def sizes_of_images(index: SampleIndex) -> NDArray[np.int64]:
    """Bytes of each image, for which all of them have to be read once."""
    assert index.shard_of is not None
    assert index.offsets is not None
    store, sizes = open_store(index.root), np.zeros(len(index), np.int64)
    for shard, file in enumerate(index.shards):
        opened = _ParquetFile(store, index.root, file)
        mine = np.flatnonzero(np.asarray(index.shard_of) == shard)
        groups = np.asarray(index.offsets)[mine] >> ROW_BITS
        for group in np.unique(groups).tolist():
            members = mine[groups == group]
            lengths = opened.images_of(group)
            rows = np.asarray(index.offsets)[members] & ((1 << ROW_BITS) - 1)
            sizes[members] = [len(lengths[row].as_py() or b"") for row in rows.tolist()]
    return sizes


class ParquetStore:
    """Images in parquet files; a path and an offset name a file and a row."""

    def __init__(self, inner: SourceStore, version: str, max_object_bytes: int) -> None:
        self._inner, self._version, self._most = inner, version, max_object_bytes
        # A cache in front of it must not answer for other files of the same name.
        self.url = f"{inner.url}#{version}"
        self.is_remote = inner.is_remote
        self._files: dict[str, _ParquetFile] = {}
        self._kept: OrderedDict[tuple[str, int], Any] = OrderedDict()
        # One at a time: several threads that decompress at once would multiply the memory.
        self._loading = threading.Lock()

    def __reduce__(self) -> Any:
        return ParquetStore, (self._inner, self._version, self._most)

    def read(self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False) -> Buffer:  # noqa: ARG002
        group, row = offset >> ROW_BITS, offset & ((1 << ROW_BITS) - 1)
        with self._loading:
            images = self._kept.get((path, group))
            if images is None:
                images = self._load(path, group)
            self._kept.move_to_end((path, group))
        data = images[row].as_py()
        if not data:
            raise ReadFailure(path, "missing", f"row {row} of row group {group} has no image bytes")
        if len(data) > self._most:
            raise ReadFailure(path, "too large", f"{len(data)} bytes; the limit is {self._most}")
        return bytes(data)

    @property
    def fetches(self) -> int:
        return getattr(self._inner, "fetches", 0)

    def _load(self, path: str, group: int) -> Any:
        if path not in self._files:
            self._files[path] = _ParquetFile(self._inner, self._inner.url, path)
        try:
            images = self._files[path].images_of(group)
        except (OSError, ValueError) as error:
            raise ReadFailure(path, "unreadable", str(error)) from None
        self._kept[(path, group)] = images
        while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return images


class _ParquetFile:
    """One file: its columns, and row groups of them."""

    def __init__(self, store: SourceStore, place: str, file: str) -> None:
        import pyarrow
        from pyarrow import parquet

        self._path = f"{place}/{file}"
        try:
            self._file = parquet.ParquetFile(open_range(store, file))
        except (pyarrow.ArrowException, OSError, ReadFailure) as error:
            raise UserError(
                "parquet-unreadable",
                f"{shown(redact_text(self._path))}: {error}",
                why="it is damaged or incomplete",
                hint="download it again",
            ) from None
        schema = self._file.schema_arrow
        self._image, self._bytes, self._has_path = self._image_column(schema)
        self._label = next((name for name in (*LABEL_COLUMNS, "labels") if name in schema.names), None)
        if self._label is None:
            raise LabelFileWrong(self._path, None, f"no label column among {some(schema.names)}", "name it label")
        self.class_names = self._declared_classes(schema)
        self.groups = self._file.num_row_groups
        self.rows = [self._file.metadata.row_group(group).num_rows for group in range(self.groups)]

    def images_of(self, group: int) -> Any:
        # In this thread: a pool of pyarrow's would not survive a fork, and workers share the cores already.
        column = self._file.read_row_group(group, columns=[self._bytes], use_threads=False).column(0)
        if self._bytes != self._image:
            column = (
                column.combine_chunks().field("bytes") if column.num_chunks != 1 else column.chunk(0).field("bytes")
            )
        return column

    def labels_of(self, group: int) -> tuple[list[str], list[str | None], int]:
        """The labels of a row group, the names its images had (None where there is none), and its images' bytes."""
        columns = [self._label, *([f"{self._image}.path"] if self._has_path else [])]
        table = self._file.read_row_group(group, columns=columns, use_threads=False)
        values = table.column(self._label).to_pylist()
        paths = [(one or {}).get("path") for one in table.column(self._image).to_pylist()] if self._has_path else None
        labels = []
        for row, value in enumerate(values):
            line = sum(self.rows[:group]) + row + 1
            if value is None or value == -1:
                raise LabelFileWrong(self._path, line, "no label", "leave out the files of an unlabelled split")
            if self.class_names is None:
                labels.append(str(value))
            elif isinstance(value, int) and 0 <= value < len(self.class_names):
                labels.append(self.class_names[value])
            else:
                seen = f"the label {value!r} is not one of the {count(len(self.class_names), 'class', 'classes')}"
                raise LabelFileWrong(self._path, line, seen, "write the file again with its ClassLabel feature")
        about = self._file.metadata.row_group(group)
        stored = [about.column(number) for number in range(about.num_columns)]
        (images,) = [one for one in stored if one.path_in_schema == self._bytes]
        if labels and images.statistics is not None and images.statistics.null_count == len(labels):
            seen = "it has no images, only their paths"
            raise LabelFileWrong(self._path, None, seen, "write it again with datasets.table.embed_table_storage")
        return labels, paths or [None] * len(labels), images.total_uncompressed_size

    def _image_column(self, schema: Any) -> tuple[str, str, bool]:
        import pyarrow

        for name in IMAGE_COLUMNS:
            if name not in schema.names:
                continue
            kind = schema.field(name).type
            if pyarrow.types.is_struct(kind) and "bytes" in [field.name for field in kind]:
                return name, f"{name}.bytes", "path" in [field.name for field in kind]
            if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
                return name, name, False
        seen = f"no column with image bytes among {some(schema.names)}"
        raise LabelFileWrong(self._path, None, seen, "a column `image` with the bytes of the files")

    def _declared_classes(self, schema: Any) -> tuple[str, ...] | None:
        """The names of a ClassLabel, which `datasets` keeps in the schema; None if it is not one."""
        try:
            features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
            return tuple(map(str, features[self._label]["names"]))
        except (KeyError, TypeError, ValueError):
            return None
