"""Which volumes `stoker predict` is given: files, Zarr arrays, URLs, lists, folders and whole data sets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from stoker.core.console import Say, some
from stoker.core.errors import UserError
from stoker.core.units import count
from stoker.io.stores import ReadFailure, is_url
from stoker.tasks.volumes.cases.cases import Case, open_cases
from stoker.tasks.volumes.cases.places import Place, UrlPath, place_at
from stoker.tasks.volumes.formats.opening import SUFFIXES, VolumeRef, suffix_of
from stoker.tasks.volumes.pack.index import INDEX as PACK_INDEX
from stoker.tasks.volumes.pack.index import read_index
from stoker.tasks.volumes.segment import TrainedVolumeModel

# A pack's options that leave voxels as they are.
_NOT_VOXELS = ("layout", "labels")


def cases_to_predict(data: Sequence[str], say: Say = lambda _line: None) -> tuple[Case, ...]:
    """The cases of volume files, Zarr folders and URLs, YAML lists, folders of volumes, and the layouts of data sets
    (their test part)."""
    found: list[Case] = []
    for place in map(place_at, data):
        if _is_volume(place):
            found.append(_single(place))
        elif place.is_dir() and not _has_layout(place):
            files = sorted(one for one in place.iterdir() if suffix_of(one.name) and not one.name.startswith("."))
            if not files:
                raise UserError(
                    "no-volumes",
                    f"{place} has no volumes",
                    why=f"they are recognised by their suffix: {', '.join(SUFFIXES)}",
                    hint=f"ls {place}",
                )
            found += map(_single, files)
        else:
            listed = open_cases(place.url if isinstance(place, UrlPath) else place, "test")
            for note in listed.notes:
                say(f"note: {note}")
            found += listed.cases
    ids = [case.id for case in found]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise UserError(
            "case-twice", f"{count(len(twice), 'name')} more than once: {some(twice)}",
            why="each prediction is stored under the name of its volume", hint="predict them into different folders",
        )  # fmt: skip
    if odd := [name for name in ids if "/" in name or name.startswith(".") or not name.isprintable()]:
        raise UserError("bad-name", f"{some(odd)} cannot be the name of a file", hint="give these cases another id")
    return tuple(found)


def warn_if_unprepared(trained: TrainedVolumeModel, cases: Sequence[Case], say: Say) -> None:
    """Warns if the network has learned from voxels that packing had changed, and these are as they were scanned."""
    root = trained.config.data_root
    with suppress(UserError, OSError, ReadFailure):
        if root is None or is_url(root) or not (place_at(root) / PACK_INDEX).is_file():
            return
        changed = {key: value for key, value in read_index(place_at(root)).options.items() if key not in _NOT_VOXELS}
        if changed and any(ref.packed is None for case in cases for ref in case.images):
            options = ", ".join(f"{key} {value}" for key, value in changed.items())
            say(
                f"warning: the network was trained on {root}, whose voxels were changed when it was packed "
                f"({options}); pack the volumes to predict in the same way"
            )


def _single(place: Place) -> Case:
    suffix = suffix_of(place.name)
    name = place.name[: -len(suffix)] if suffix else place.name
    # Not `ref_to`, which lists the folder around it: a URL may point to a place that cannot be listed.
    return Case(name, name, (VolumeRef(place.url if isinstance(place, UrlPath) else str(place)),), None)


def _is_volume(place: Place) -> bool:
    """By its suffix, or by the files of a Zarr array; a folder may be called anything."""
    suffix = suffix_of(place.name)
    if suffix == ".zarr" or (suffix and (isinstance(place, UrlPath) or not place.is_dir())):
        return True
    return any((place / name).is_file() for name in ("zarr.json", ".zarray", ".zgroup"))


def _has_layout(place: Place) -> bool:
    named = (place / name for name in ("dataset.json", "train.csv", PACK_INDEX))
    return any(one.is_file() for one in named) or (place / "test_images").is_dir()
