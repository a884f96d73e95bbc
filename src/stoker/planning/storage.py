"""How many images a second storage gives: measured, named, or stated as bytes a second."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from stoker.config.units import parse_bytes
from stoker.errors import UsageError, did_you_mean
from stoker.facts.plan import Rate

# Requests that our reader has under way at once for each rank (data/store/reader.py).
REQUESTS_IN_FLIGHT = 64
_BYTES_PER_SECOND = re.compile(r"(.+?)\s*(?:/\s*s|ps)", re.IGNORECASE)


@dataclass(frozen=True)
class Storage:
    """What one kind of storage gives."""

    name: str
    source: str
    bytes_per_second: float | None = None
    """For all readers together; None where only their number limits it."""
    latency_s: float | None = None
    connection_bytes_per_second: float | None = None

    def rate(self, sample_bytes: float, ranks: int) -> Rate:
        """Images a second for a job of so many ranks, each with its own reader."""
        limits = []
        if self.bytes_per_second is not None:
            limits.append(self.bytes_per_second / sample_bytes)
        if self.latency_s is not None:
            transfer_s = sample_bytes / self.connection_bytes_per_second if self.connection_bytes_per_second else 0.0
            limits.append(ranks * REQUESTS_IN_FLIGHT / (self.latency_s + transfer_s))
        return Rate(min(limits), f"{self.name}: {self.source}")


def read_storage(word: str) -> Storage:
    """The storage that a user names (`fsx`, `s3`) or states (`500MB/s`); raises UsageError for anything else."""
    stated = _BYTES_PER_SECOND.fullmatch(word.strip())
    if stated is not None:
        try:
            return Storage(word, "as you stated", bytes_per_second=float(parse_bytes(stated[1])))
        except ValueError as error:
            raise UsageError("storage-rate", f"--storage {word}: {error}", hint="--storage 500MB/s") from None
    text = resources.files("stoker.planning").joinpath("storage_rates.yaml").read_text()
    known: dict[str, dict[str, Any]] = yaml.safe_load(text)
    name = word.lower()
    if name not in known:
        meant = did_you_mean(name, known)
        raise UsageError(
            "unknown-storage",
            f"--storage {word} is no storage that we know" + (f"; {meant}" if meant else ""),
            hint=f"one of {', '.join(known)}, or a rate such as 500MB/s",
        )
    fields = known[name]
    numbers = {key: float(value) for key, value in fields.items() if key != "source"}
    return Storage(name, fields["source"], **numbers)
