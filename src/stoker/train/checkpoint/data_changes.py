"""Whether a run that resumes gets the data that it was trained on: its samples by name and class, and in which order.

Which sample comes when is a function of the seed, the epoch and the position among N samples, so a file that was added,
removed or renamed moves the others. A file that was overwritten keeps its name, so the contents of a few samples are
compared too: that shows whether the whole data set was made again, but not whether a single file was.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.core.console import some
from stoker.core.errors import UserError
from stoker.core.files import atomic_file
from stoker.core.units import count
from stoker.train.checkpoint.changes import from_hint

PARTS = ("train", "val")
LOOKED_AT = 64
"""Samples of a part whose contents are compared. If one file in twenty was replaced, they include one of these with a
probability of 96 %. Times and versions would not do: those of a copy differ."""
# File names repeat each other: for ImageNet, the fastest level leaves 3.5 of 56 MB, in 0.3 s.
COMPRESSION = 1


@dataclass(frozen=True)
class Listing:
    """The samples of one part of the data, in the order that positions count."""

    name_bytes: NDArray[np.uint8]
    """All names, one after the other."""
    name_ends: NDArray[np.int64]
    marks: NDArray[np.int64]
    """What else must match for each sample: the class of an image; channels, box and labels of a volume."""

    def __len__(self) -> int:
        return len(self.name_ends)

    @property
    def digest(self) -> str:
        found = xxhash.xxh3_128()
        for array in (self.name_bytes, self.name_ends, self.marks):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def names(self, numbers: Sequence[int]) -> list[str]:
        """The names of a few samples."""
        ends = self.name_ends
        return [
            bytes(self.name_bytes[int(ends[at - 1]) if at else 0 : int(ends[at])]).decode("utf-8", "surrogateescape")
            for at in numbers
        ]

    def by_name(self) -> dict[str, int]:
        """The mark of each sample by its name."""
        text, ends = self.name_bytes.tobytes(), self.name_ends.tolist()
        names = [
            text[start:end].decode("utf-8", "surrogateescape") for start, end in zip([0, *ends], ends, strict=False)
        ]
        return dict(zip(names, self.marks.tolist(), strict=True))


def listing_of(names: Sequence[str], marks: Sequence[int]) -> Listing:
    """The listing of a few samples."""
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    return Listing(np.frombuffer(b"".join(encoded), np.uint8), ends, np.array(marks, np.int64))


Listings = Mapping[str, Listing | None]
"""By part: train, and val if there is one."""


Contents = Mapping[str, dict[str, Any] | None]
"""By part, `hashes` of the samples that are compared, "" where one could not be read, and whether they were `packed`:
packing may re-encode images, and a user who resumes with the pack wants that. None if nothing was hashed."""


def looked_at(samples: int) -> list[int]:
    """The samples whose contents are compared, spread over the whole part."""
    return sorted({number * samples // LOOKED_AT for number in range(LOOKED_AT)}) if samples else []


def fingerprint(listings: Listings) -> dict[str, Any]:
    """What a checkpoint says about the data."""
    found = {part: listings.get(part) for part in PARTS}
    return {part: None if one is None else {"samples": len(one), "digest": one.digest} for part, one in found.items()}


@dataclass(frozen=True)
class Difference:
    """How the samples of one part differ from those of the checkpoint."""

    part: str
    before: int
    after: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()
    """With other labels."""
    known: bool = True
    """Whether the names of the earlier samples are known."""
    rewritten: tuple[str, ...] = ()
    """With other contents, among the samples that were compared; everything else is the same."""
    looked_at: int = 0

    def __str__(self) -> str:
        named = [
            f"{count(len(names), 'sample')} {what}: {some(list(names))}"
            for names, what in ((self.removed, "removed"), (self.added, "added"), (self.marked, "with other labels"))
            if names
        ]
        if self.rewritten:
            named = [f"{len(self.rewritten)} of {self.looked_at} that were read have other contents: "]
            named[0] += some(list(self.rewritten))
        elif not self.known:
            named = ["the names of the earlier samples were not kept"]
        elif not named:
            named = ["the same samples in another order"]
        sizes = count(self.before, "sample") + (f" before, {self.after:,} now" if self.before != self.after else "")
        return f"{self.part} ({sizes}): " + "; ".join(named)

    def as_event(self) -> dict[str, Any]:
        """For metrics.jsonl; names are a few of them."""
        kinds = {"added": self.added, "removed": self.removed, "marked": self.marked}
        kinds |= {"rewritten": self.rewritten} if self.rewritten else {}
        return {"before": self.before, "after": self.after} | {
            name: {"samples": len(names), "some": list(names[:10])} for name, names in kinds.items()
        }


def differences_since(
    state: Mapping[str, Any], now: Listings, kept: Path, contents: Contents | None = None
) -> list[Difference]:
    """The differences from a checkpoint's data; `kept` is the run's file of names. Earlier versions recorded nothing:
    then no difference is found."""
    saved = (state.get("data") or {}).get("samples")
    if saved is None:
        return []
    ours, found = fingerprint(now), []
    earlier: Listings | None = None
    for part in PARTS:
        before, after = saved.get(part), ours[part]
        # A run may be resumed with validation or without it.
        if before is None or after is None:
            continue
        if before == after:
            found += _rewritten(part, now[part], (state["data"].get("contents") or {}).get(part), contents)
            continue
        earlier = load_listings(kept) if earlier is None else earlier
        then, listing = earlier.get(part), now[part]
        assert listing is not None
        if then is None or then.digest != before["digest"]:
            found.append(Difference(part, before["samples"], after["samples"], known=False))
        else:
            found.append(_compared(part, then, listing))
    return found


def _rewritten(part: str, listing: Listing | None, then: Any, contents: Contents | None) -> list[Difference]:
    """Samples with other contents; none if their contents were not hashed, then or now."""
    now = None if contents is None else contents.get(part)
    if listing is None or not isinstance(then, dict) or now is None or then.get("packed") != now["packed"]:
        return []
    hashes = then.get("hashes")
    if not isinstance(hashes, list) or len(hashes) != len(now["hashes"]):
        return []  # written by a version that compares other samples
    numbers = [
        number
        for number, old, new in zip(looked_at(len(listing)), hashes, now["hashes"], strict=True)
        if old and new and old != new  # both could be read
    ]
    if not numbers:
        return []
    names = tuple(listing.names(numbers))
    return [Difference(part, len(listing), len(listing), rewritten=names, looked_at=len(now["hashes"]))]


def _compared(part: str, then: Listing, now: Listing) -> Difference:
    old, new = then.by_name(), now.by_name()
    return Difference(
        part, len(then), len(now),
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        marked=tuple(name for name, mark in new.items() if old.get(name, mark) != mark),
    )  # fmt: skip


def data_changed(path: Path, found: Sequence[Difference]) -> UserError:
    """The refusal to resume with other data."""
    listed = "\n".join(f"  - {one}" for one in found)
    return UserError(
        "data-changed",
        f"the data is not what {path} was trained on\n{listed}",
        why=meaning(found),
        hint=f"--accept-changed-data continues with the data as it is now; {from_hint(path)} begins a new run",
    )


def meaning(found: Sequence[Difference]) -> str:
    """What other data means for a run."""
    parts = {one.part for one in found}
    words = []
    if any(one.part == "train" and one.rewritten for one in found):
        words.append("the steps so far were trained on other images")
    elif "train" in parts:
        words.append(
            "which sample comes when follows from the seed, the epoch and the number of samples: the rest of this "
            "epoch takes others, some twice and some not at all"
        )
    if "val" in parts:
        words.append("validation is not comparable with that of earlier epochs")
    return "; ".join(words)


def save_listings(path: Path, listings: Listings) -> None:
    """Keeps the names for the next resume, in a file that numpy opens."""
    with (
        atomic_file(path, "wb") as stream,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=COMPRESSION) as file,
    ):
        for part, one in listings.items():
            if one is None:
                continue
            # Lengths compress well because they repeat; end offsets do not.
            lengths = np.diff(one.name_ends, prepend=0).astype(np.int32)
            for name, array in (("name_bytes", one.name_bytes), ("lengths", lengths), ("marks", one.marks)):
                with file.open(f"{part}.{name}.npy", "w", force_zip64=True) as to:
                    np.lib.format.write_array(to, np.ascontiguousarray(array), allow_pickle=False)


def load_listings(path: Path) -> dict[str, Listing]:
    """What `save_listings` kept; without the parts that are missing or damaged."""
    found: dict[str, Listing] = {}
    # A damaged file makes zlib and numpy raise nearly anything.
    with suppress(Exception), np.load(path, allow_pickle=False) as file:
        for part in PARTS:
            if f"{part}.marks" in file.files:
                ends = np.cumsum(file[f"{part}.lengths"], dtype=np.int64)
                found[part] = Listing(file[f"{part}.name_bytes"], ends, file[f"{part}.marks"])
    return found
