"""A finished run: where its best checkpoint is, and what to do with it.

Without torch, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from stoker.config import Config
from stoker.core.files import open_regular, parse_json
from stoker.run.folder import RunFolder, config_text
from stoker.run.metrics import Metric, read_checkpoint_name, read_metrics

LARGEST_HEADER_BYTES = 64 << 20
AT_ONCE = 1 << 22
_HASHES = ("header_xxh3_128", "tensors_xxh3_128")


def finished_progress(folder: RunFolder, config: Config) -> dict[str, Any] | None:
    """The progress of a run that is finished with exactly this config, and whose last checkpoint is whole; None
    otherwise: then the run is resumed, which says what is wrong."""
    try:
        if folder.config_file.read_text("utf-8") != config_text(folder, config):
            return None
        progress = _progress_of(folder.checkpoints / "last.ckpt")
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    best = progress.get("best")
    plain = all(type(progress.get(name)) is int for name in ("epoch", "step")) and (best is None or type(best) is float)
    return progress if plain and progress.get("finished") is True else None


def finished_lines(folder: RunFolder, metric: Metric, progress: dict[str, Any]) -> list[str]:
    """Says that the run is finished, with its best checkpoint and the next command."""
    best = "none" if progress["best"] is None else metric.text(progress["best"])
    stops = [one for one in read_metrics(folder.metrics_file, "event") if one.get("event") == "stopped_early"]
    early = [one["why"] for one in stops if isinstance(one.get("why"), str)]
    why = f"; {early[-1]}" if early else ""
    first = f"{folder.root} is finished: {progress['step']:,} steps, best {metric.key} {best}{why}"
    return [first, *next_lines(folder, metric)]


def finished_summary(folder: RunFolder, metric: Metric, progress: dict[str, Any]) -> dict[str, Any]:
    """The same for `--json`."""
    best = best_checkpoint(folder, metric)
    return {
        "run_folder": str(folder.root),
        "finished": True,
        "epochs": progress["epoch"],
        "steps": progress["step"],
        "best_by": metric.name,
        f"best_val_{metric.name}": progress["best"],
        "best_checkpoint": None if best is None else str(best),
        "checkpoints": str(folder.checkpoints),
    }


def next_lines(folder: RunFolder, metric: Metric) -> list[str]:
    """The best checkpoint, and what to type next."""
    best = best_checkpoint(folder, metric)
    if best is None:
        return []
    return [f"best checkpoint: {best}", f"next: stoker eval {best}    # or stoker report {folder.root}"]


def best_checkpoint(folder: RunFolder, metric: Metric) -> Path | None:
    """The best checkpoint by its name, of equal ones the newer; the last one of a run without validation."""
    try:
        files = sorted(folder.checkpoints.iterdir())
    except OSError:
        return None
    named = [(said, file) for file in files if (said := read_checkpoint_name(file.name)) is not None]
    ranked = [(metric.rank(said.value), said.epoch, file) for said, file in named if said.metric == metric]
    last = folder.checkpoints / "last.ckpt"
    return max(ranked)[2] if ranked else last if last in files else None


def _progress_of(path: Path) -> dict[str, Any]:
    """The progress in a checkpoint. Raises ValueError or KeyError if the file is not what was written."""
    with open_regular(path) as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if length > LARGEST_HEADER_BYTES:
            raise ValueError("not a header of ours")
        header = stream.read(length)
        digest = xxhash.xxh3_128()
        while data := stream.read(AT_ONCE):
            digest.update(data)
    metadata = parse_json(header)["__metadata__"]
    own, tensors = (metadata[name] for name in _HASHES)
    unsigned = start + header.replace(own.encode(), b"0" * len(own), 1)
    if xxhash.xxh3_128(unsigned).hexdigest() != own or digest.hexdigest() != tensors:
        raise ValueError("the file is damaged")
    progress = parse_json(metadata["state"])["progress"]
    if not isinstance(progress, dict):
        raise ValueError("no progress")
    return progress
