"""The cost of an index of a million images: bytes per entry, startup from the saved index, of that the check that it is
what was saved, and listing a real tree.

Compared with the Python list of (path, label) that torchvision's ImageFolder builds at every start.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.rounds import interleave, keep, ratio
from stoker.tasks.images.layouts.class_folders import ClassListing, index_of_classes
from stoker.tasks.images.layouts.kept_index import KeptIndex, Seen, building, keeping_folder, write_kept
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.images.layouts.sample_index import SampleIndex, checksum, pack_names, present_arrays

MOST_BYTES_AN_ENTRY = 100
MOST_START_S = 1.0
# As in ImageNet: 1,000 classes, names of 30 bytes.
CLASSES = 1000


def class_name(label: int) -> str:
    return f"n{label:08d}"


def file_name(label: int, number: int) -> str:
    return f"n{label:08d}_{number:05d}.JPEG"


def keep_made_up_index(root: Path, index_dir: Path, entries: int) -> SampleIndex:
    """Saves an index like ImageNet's over empty class folders: startup looks at the folders, not at the files."""
    listings = []
    for label in range(CLASSES):
        name = class_name(label)
        folder = root / "train" / name
        folder.mkdir(parents=True)
        os.utime(folder, (0, 0))
        names = [f"{name}/{file_name(label, number)}".encode() for number in range(entries // CLASSES)]
        listings.append(ClassListing(name, *pack_names(names), None, Seen(folders={name: 0})))
    place = str(root / "train")
    kept = keeping_folder(place, index_dir)
    with building(kept):
        made = KeptIndex(index_of_classes(place, listings), {one.name: one.seen for one in listings})
        return write_kept(kept, made).index


def python_list(entries: int) -> list[tuple[str, int]]:
    """The same entries as ImageFolder stores them."""
    return [
        (f"/data/train/{class_name(label)}/{file_name(label, number)}", label)
        for label in range(CLASSES)
        for number in range(entries // CLASSES)
    ]


def bytes_held(make: Callable[[], Any]) -> int:
    """Bytes of memory held by the object that `make` returns."""
    gc.collect()
    tracemalloc.start()
    made = make()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return held


def seconds(work: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def make_tree(root: Path, files: int) -> None:
    """A real tree of empty files, in folders old enough for their modification time to be trusted."""
    for label in range(CLASSES):
        folder = root / "train" / class_name(label)
        folder.mkdir(parents=True)
        for number in range(files // CLASSES):
            (folder / file_name(label, number)).touch()
        os.utime(folder, (0, 0))


def image_folder(root: Path) -> Any:
    from torchvision.datasets import ImageFolder

    return ImageFolder(str(root / "train"))


def open_kept(which: str, folder: Path, entries: int, kept: str = "kept") -> None:
    """Startup: finds the saved index, checks every class folder for changes, reads all labels and one name."""
    index = open_index(str(folder / which), "train", index_dir=folder / kept)
    assert len(index) == entries
    assert index.name(entries - 1).endswith(file_name(CLASSES - 1, entries // CLASSES - 1))


def list_anew(folder: Path, entries: int) -> None:
    """The first start."""
    shutil.rmtree(folder / "anew", ignore_errors=True)
    open_kept("tree", folder, entries, "anew")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--entries", type=int, default=1_000_000, help="entries of the made-up index")
    parser.add_argument("--files", type=int, default=50_000, help="files in the real tree")
    arguments = parser.parse_args()
    entries, files = (number // CLASSES * CLASSES for number in (arguments.entries, arguments.files))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        index = keep_made_up_index(folder / "million", folder / "kept", entries)
        assert index.folder is not None
        # Mapped files are not allocations; counted as if every page were in memory.
        of_index = sum(file.stat().st_size for file in index.folder.iterdir())
        of_list = bytes_held(lambda: python_list(entries))
        make_tree(folder / "tree", files)
        image_folder(folder / "tree")  # warms the kernel's cache for both
        open_kept("million", folder, entries)
        times = interleave(
            {
                "million: checksums": lambda: seconds(lambda: [*map(checksum, present_arrays(index).values())]),
                "million: start": lambda: seconds(lambda: open_kept("million", folder, entries)),
                "tree: first listing": lambda: seconds(lambda: list_anew(folder, files)),
                "tree: start": lambda: seconds(lambda: open_kept("tree", folder, files)),
                "tree: ImageFolder": lambda: seconds(lambda: image_folder(folder / "tree")),
            },
            arguments.rounds,
        )
    ratios = {
        "tree: ImageFolder / start": ratio(times["tree: ImageFolder"], times["tree: start"]),
        "tree: ImageFolder / first listing": ratio(times["tree: ImageFolder"], times["tree: first listing"]),
    }
    bytes_an_entry = {"index": of_index / entries, "python list": of_list / entries}
    start_s = times["million: start"]
    path = keep(
        "index",
        {
            "entries": entries,
            "files": files,
            "bytes_an_entry": {n: round(value, 1) for n, value in bytes_an_entry.items()},
            "seconds": {n: s.as_dict() for n, s in times.items()},
            "ratios": {n: s.as_dict() for n, s in ratios.items()},
            "limits": {"bytes_an_entry": MOST_BYTES_AN_ENTRY, "start_s": MOST_START_S},
        },
    )
    for held, value in bytes_an_entry.items():
        print(f"{held:<36} {value:7.1f} bytes per entry")
    print(f"{'startup, entries: ' + format(entries, ','):<36} {start_s.median:7.4f} s")
    print(f"{'of that, checking all of them':<36} {times['million: checksums'].median:7.4f} s")
    for compared, spread in ratios.items():
        print(f"{compared:<36} {spread.median:7.1f}x ({min(spread.values):.1f}-{max(spread.values):.1f})")
    print(f"wrote {path}")
    is_small, is_quick = bytes_an_entry["index"] <= MOST_BYTES_AN_ENTRY, start_s.median < MOST_START_S
    return 0 if is_small and is_quick else 1


if __name__ == "__main__":
    sys.exit(main())
