"""The situations that `bench/tune.py` tunes, as data: what is read, how fast it is consumed, where the search starts,
and the grid that it is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stoker.tasks.volumes.pack.write_volume import LAYOUTS
from stoker.tune.records import Settings, Value, key_of

Limit = Literal["cpu", "storage", "consumer", "memory"]
Axes = dict[str, tuple[Value, ...]]

NEVER_LIMITS = 20.0
"""Pace of a consumer that takes everything at once, relative to what the loader delivers to it."""
MB = 1_000_000

ENGINES = ("thread", "process")
LOADER: Axes = {"num_workers": (0, 1, 2, 4), "loader": ENGINES, "prefetch_factor": (2, 8)}
BATCHES_AHEAD: Axes = {"num_workers": (1, 2, 4), "loader": ENGINES, "prefetch_factor": (1, 8)}
BYTES_AHEAD: Axes = {"num_workers": (1, 4, 8), "loader": ENGINES, "lookahead": (MB, 256 * MB)}
IN_BLOCKS: Axes = {"num_workers": (1, 2), "loader": ENGINES, "data_root": ("as they are", *LAYOUTS)}
"""The places are filled in when the packs are made."""
CHUNKS_KEPT: Axes = {"num_workers": (1, 2, 4), "loader": ENGINES, "volume_cache": (0, 256 * MB)}


@dataclass(frozen=True)
class Link:
    """What lies between the loader and an object store."""

    latency_ms: float
    megabytes_per_second: float | None = None


@dataclass(frozen=True)
class Scenario:
    """One config and one consumer."""

    name: str
    limit: Limit
    """What limits the best settings."""
    data: Literal["photos", "thumbnails", "uneven", "zarr", "tiff"]
    start: Settings
    axes: Axes = field(default_factory=lambda: LOADER)
    keys: Mapping[str, object] = field(default_factory=dict)
    """Keys of the config, besides those that are tuned."""
    pace: float = NEVER_LIMITS
    """Samples per second that the consumer takes, relative to what two threads deliver: absolute paces would limit on
    one machine and not on another."""
    link: Link | None = None
    """None: the data is in a local folder."""
    batches_of_room: int | None = None
    """Memory beyond what the start needs, in batches; None: all of the machine's."""
    packed: bool = False
    """Whether tune may pack the volumes (`--pack`)."""
    budget_s: float = 150.0
    """An eighth of the command's default, and trials that are shorter in proportion: a scenario takes minutes. More
    where a trial lasts for three rounds of requests, up to thirty seconds."""

    @property
    def volumes(self) -> bool:
        return self.data in ("zarr", "tiff")


_PHOTOS = {"batch_size": 32, "img_size": 224}
_PATCHES = {"batch_size": 2, "patch_size": (48, 96, 96)}

SCENARIOS = (
    # The engines differ by a tenth here, which takes longer trials to see.
    Scenario("no workers", "cpu", "photos", {"num_workers": 0}, keys=_PHOTOS, budget_s=300.0),
    Scenario(
        "16 processes", "cpu", "photos", {"num_workers": 16, "loader": "process", "prefetch_factor": 2}, keys=_PHOTOS
    ),
    Scenario(
        "one worker too few", "consumer", "photos",
        {"num_workers": 1, "loader": "thread", "prefetch_factor": 1}, keys=_PHOTOS, pace=0.75,
    ),
    Scenario(
        "large batches", "cpu", "thumbnails", {"num_workers": 1, "loader": "process", "prefetch_factor": 2},
        keys={"batch_size": 128, "img_size": 128},
    ),
    Scenario(
        "small batches", "cpu", "thumbnails", {"num_workers": 8, "loader": "process", "prefetch_factor": 1},
        keys={"batch_size": 4, "img_size": 64},
    ),
    Scenario(
        "a few huge images", "cpu", "uneven", {"num_workers": 1, "loader": "thread", "prefetch_factor": 1},
        axes=BATCHES_AHEAD, keys={"batch_size": 8, "img_size": 128}, pace=0.8,
    ),
    Scenario("slow consumer, no workers", "consumer", "photos", {"num_workers": 0}, keys=_PHOTOS, pace=0.4),
    Scenario(
        "little memory", "memory", "photos", {"num_workers": 1, "loader": "thread", "prefetch_factor": 1},
        keys={"batch_size": 64, "img_size": 448}, batches_of_room=8,
    ),
    Scenario(
        "S3, 100 ms, 1 MB ahead", "storage", "photos",
        {"num_workers": 1, "loader": "thread", "prefetch_factor": 2, "lookahead": MB},
        axes=BYTES_AHEAD, keys=_PHOTOS, link=Link(100), budget_s=300.0,
    ),
    Scenario(
        "S3 at 6 MB/s", "storage", "photos",
        {"num_workers": 4, "loader": "process", "prefetch_factor": 1, "lookahead": MB},
        # Small batches: a trial takes at least twenty, and few images a second come through.
        axes=BYTES_AHEAD, keys=_PHOTOS | {"batch_size": 8}, link=Link(20, 6), budget_s=600.0,
    ),
    Scenario(
        "compressed volumes, nothing kept", "cpu", "zarr",
        {"num_workers": 1, "loader": "thread", "prefetch_factor": 2, "volume_cache": 0},
        axes=CHUNKS_KEPT, keys=_PATCHES,
    ),
    Scenario(
        "compressed volumes, may be packed", "cpu", "zarr",
        {"num_workers": 1, "loader": "thread", "prefetch_factor": 2, "volume_cache": 0},
        axes=IN_BLOCKS, keys=_PATCHES, packed=True,
    ),
    Scenario(
        "volumes, no workers", "cpu", "tiff", {"num_workers": 0}, keys=_PATCHES, pace=0.9,
    ),
    Scenario(
        "volumes from S3, 50 ms", "storage", "tiff",
        {"num_workers": 1, "loader": "thread", "prefetch_factor": 1, "lookahead": MB},
        axes=BYTES_AHEAD | {"num_workers": (1, 2, 4, 8)}, keys=_PATCHES, link=Link(50), budget_s=200.0,
    ),
    Scenario(
        "slow consumer", "consumer", "photos", {"num_workers": 2, "loader": "thread", "prefetch_factor": 2},
        keys=_PHOTOS, pace=0.25,
    ),
)  # fmt: skip

FAULTY = Scenario(
    "faults", "cpu", "photos", {"num_workers": 1, "loader": "process", "prefetch_factor": 1}, keys=_PHOTOS
)
"""What is searched with faults: the engine is always tried, whatever is predicted, so there are trials to hit."""


def points_of(scenario: Scenario, start: Settings) -> list[Settings]:
    """The grid: the start with every combination of the axes, each once (without workers, nothing else matters)."""
    found: dict[object, Settings] = {}
    for values in itertools.product(*scenario.axes.values()):
        settings = start | dict(zip(scenario.axes, values, strict=True))
        found.setdefault(key_of(settings), settings)
    return list(found.values())
