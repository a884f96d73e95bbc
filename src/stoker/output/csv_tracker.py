"""metrics.csv: one row for each epoch, for spreadsheets; made from metrics.jsonl, so that it survives a resume."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.files import atomic_file
from stoker.output.metrics_file import metrics_of, read_metrics

COLUMNS = (
    "epoch", "step", "train/loss", "train/acc1", "train/acc5", "train/lr", "val/loss", "val/acc1", "val/acc5",
    "seconds", "images_per_second", "wait_share",
)  # fmt: skip
"""Always there and in this order, whatever was measured; others follow as they appear."""


class CsvTracker:
    """Writes the whole table anew after each epoch: a reader never sees half of it."""

    name = "CSV"

    def __init__(self, csv_file: Path, metrics_file: Path) -> None:
        self._csv_file = csv_file
        self._metrics_file = metrics_file
        self._rows: dict[int, dict[str, Any]] = {}

    def open(self) -> None:
        for record in read_metrics(self._metrics_file, "epoch"):
            self._keep(record)
        if self._rows:
            self._write()

    def log(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "epoch":
            self._keep(record)
            self._write()

    def close(self) -> None:
        pass

    def abandon(self) -> str | None:
        return None

    def _keep(self, record: Mapping[str, Any]) -> None:
        self._rows[record["epoch"]] = {"epoch": record["epoch"], "step": record["step"], **metrics_of(record)}

    def _write(self) -> None:
        rows = [self._rows[epoch] for epoch in sorted(self._rows)]
        columns = list(dict.fromkeys([*COLUMNS, *(name for row in rows for name in row)]))
        with atomic_file(self._csv_file) as stream:
            writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
