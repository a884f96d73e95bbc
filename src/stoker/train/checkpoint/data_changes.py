"""Whether a run that resumes gets the data that it was trained on: its samples by name and class, and in which order.

Which sample comes when is a function of the seed, the epoch and the position among N samples, so a file that was added,
removed or renamed moves the others. A file that was overwritten keeps its name, and is not noticed.
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

from stoker.console import count, some
from stoker.errors import UserError
from stoker.files import atomic_file
from stoker.train.checkpoint.changes import from_hint

PARTS = ("train", "val")
# Names of files repeat each other: the fastest level leaves a tenth of them.
COMPRESSION = 1


@dataclass(frozen=True)
class Listing:
    """The samples of one part of the data, in the order that positions count."""

    name_bytes: NDArray[np.uint8]
    """All names, one after the other."""
    name_ends: NDArray[np.int64]
    marks: NDArray[np.int64]
    """What else must be the same of each sample: the class of an image; channels, box and labels of a volume."""

    def __len__(self) -> int:
        return len(self.name_ends)

    @property
    def digest(self) -> str:
        found = xxhash.xxh3_128()
        for array in (self.name_bytes, self.name_ends, self.marks):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

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

    def __str__(self) -> str:
        named = [
            f"{count(len(names), 'sample')} {what}: {some(list(names))}"
            for names, what in ((self.removed, "removed"), (self.added, "added"), (self.marked, "with other labels"))
            if names
        ]
        if not self.known:
            named = ["the names of the earlier samples were not kept"]
        elif not named:
            named = ["the same samples in another order"]
        sizes = count(self.before, "sample") + (f" before, {self.after:,} now" if self.before != self.after else "")
        return f"{self.part} ({sizes}): " + "; ".join(named)

    def as_event(self) -> dict[str, Any]:
        """For metrics.jsonl; names are a few of them."""
        kinds = {"added": self.added, "removed": self.removed, "marked": self.marked}
        return {"before": self.before, "after": self.after} | {
            name: {"samples": len(names), "some": list(names[:10])} for name, names in kinds.items()
        }


def differences_since(state: Mapping[str, Any], now: Listings, kept: Path) -> list[Difference]:
    """What differs from the data of a checkpoint; `kept` is the run's file of names. Earlier versions recorded nothing:
    then nothing differs."""
    saved = (state.get("data") or {}).get("samples")
    if saved is None:
        return []
    ours, found = fingerprint(now), []
    earlier: Listings | None = None
    for part in PARTS:
        before, after = saved.get(part), ours[part]
        # A run may be resumed with validation or without it.
        if before == after or before is None or after is None:
            continue
        earlier = load_listings(kept) if earlier is None else earlier
        then, listing = earlier.get(part), now[part]
        assert listing is not None
        if then is None or then.digest != before["digest"]:
            found.append(Difference(part, before["samples"], after["samples"], known=False))
        else:
            found.append(_compared(part, then, listing))
    return found


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
        f"the data is not that which {path} was trained on\n{listed}",
        why=meaning(found),
        hint=f"--accept-changed-data continues with the data as it is now; {from_hint(path)} begins a new run",
    )


def meaning(found: Sequence[Difference]) -> str:
    """What other data means for a run."""
    parts = {one.part for one in found}
    words = []
    if "train" in parts:
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
            for name in ("name_bytes", "name_ends", "marks") if one is not None else ():
                # A fixed time: the same data gives the same file.
                with file.open(
                    zipfile.ZipInfo(f"{part}.{name}.npy", (1980, 1, 1, 0, 0, 0)), "w", force_zip64=True
                ) as to:
                    np.lib.format.write_array(to, np.ascontiguousarray(getattr(one, name)), allow_pickle=False)


def load_listings(path: Path) -> dict[str, Listing]:
    """What `save_listings` kept; without the parts that are missing or damaged."""
    found: dict[str, Listing] = {}
    with (
        suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
        np.load(path, allow_pickle=False) as file,
    ):
        for part in PARTS:
            if f"{part}.marks" in file.files:
                found[part] = Listing(*(file[f"{part}.{name}"] for name in ("name_bytes", "name_ends", "marks")))
    return found
