"""Memory of the loader's process tree: predicted from one calibration, compared with the peak in fresh processes."""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.rounds import keep
from stoker.plan.host_memory import LoaderSettings, loader_parts
from stoker.tasks.images.memory_trial import SIZE, Engine, measure_parts, start_trial, trial_of

WORKERS, PREFETCH, BATCHES = (1, 2, 4), (2, 4), (32, 128)
ENGINES: tuple[Engine, ...] = ("thread", "process")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path, help="folder of class folders")
    arguments = parser.parse_args()
    memory = measure_parts(arguments.images)
    sys.stderr.write(f"calibration: {memory}\n")
    rows: list[dict[str, Any]] = []
    for engine in ENGINES:
        for workers in WORKERS:
            for prefetch in PREFETCH:
                for batch in BATCHES:
                    cell = (workers, prefetch, batch)
                    predicted = sum(
                        loader_parts(LoaderSettings(engine, *cell, 3 * SIZE**2, whole_files=True), memory).values()
                    )
                    with start_trial(engine, [cell], arguments.images) as child:
                        trial = trial_of(child)
                    peak = trial.peaks[0]
                    error = predicted / peak.total_bytes - 1
                    rows.append(
                        {
                            "engine": engine, "workers": workers, "prefetch": prefetch, "batch": batch,
                            "predicted_bytes": predicted, "measured_bytes": peak.total_bytes,
                            "error": round(error, 4), "plain_pss_bytes": peak.pss_bytes,
                            "open_files": trial.open_files[0],
                            "of_it": {"anonymous": peak.anonymous_bytes, "shared": peak.shared_bytes,
                                      "files": peak.file_bytes},
                        }
                    )  # fmt: skip
                    print(
                        f"{engine:<8} {workers} x {prefetch} x {batch:<4} predicted {predicted / 1e6:7.0f} MB   "
                        f"measured {peak.total_bytes / 1e6:7.0f} MB   {100 * error:+.1f} %   "
                        f"(plain PSS {peak.pss_bytes / 1e6:.0f})",
                        flush=True,
                    )
    errors = [abs(row["error"]) for row in rows]
    summary = {"median_error": statistics.median(errors), "worst_error": max(errors)}
    path = keep("loader_memory", {**summary, "calibration": asdict(memory), "size": SIZE, "cells": rows})
    print(f"median error {100 * summary['median_error']:.1f} %, worst {100 * summary['worst_error']:.1f} %")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
