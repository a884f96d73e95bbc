"""Published speeds of accelerators: figures that somebody measured, with their source."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.probe.datasheets import known_datasheets, load_datasheet


@dataclass(frozen=True)
class PublishedRate:
    """What one accelerator takes in ResNet-50 training at 224 px."""

    name: str
    images_per_second: float
    source: str


def published_rate(name: str) -> PublishedRate:
    """The published figure for an accelerator; raises UsageError where nobody published one that we know."""
    sheet = load_datasheet(name)
    if sheet.resnet50_images_per_second is None:
        known = [other.name for other in known_datasheets().values() if other.resnet50_images_per_second is not None]
        raise UsageError(
            "no-published-rate",
            f"nobody published what {sheet.title} takes in ResNet-50 training, as far as we know",
            why="how much of it this host can feed is only worth saying against a measured figure",
            hint=f"--gpu {' | '.join(known)}; stoker plan computes a rate for any datasheet",
        )
    return PublishedRate(sheet.name, sheet.resnet50_images_per_second, sheet.resnet50_source or sheet.source)
