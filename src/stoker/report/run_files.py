"""What a page shows of a run's other files: config, environment, checkpoints, quarantine, predictions."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.config import Config, config_values
from stoker.config.schema import SECTION_NAMES, key_names
from stoker.config.yaml_file import read_yaml_file
from stoker.core.errors import ConfigError
from stoker.core.files import open_regular, read_json, read_regular
from stoker.core.redact import redact_text
from stoker.core.units import size_text
from stoker.report.figures import rounded
from stoker.run.json_lines import Record, finite, number
from stoker.run.metrics import read_checkpoint_name

LONGEST_TEXT = 400
"""Characters of a name or a message: a path may have 4,096, and a page full of those is unreadable."""
SHOWN_SAMPLES = 200
SHOWN_PREDICTIONS = 100
SHOWN_CHECKPOINTS = 100
SHOWN_VOLUMES = 12
LARGEST_ENVIRONMENT_BYTES = 4 << 20
LARGEST_PREVIEW_BYTES = 1 << 20
JPEG = b"\xff\xd8\xff"


def clip(value: Any, longest: int = LONGEST_TEXT) -> str:
    """Text as a page may hold it: shortened, without secrets and lone surrogates."""
    text = redact_text(str(value)[: 4 * longest]).encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a run's config.yaml with their values, including unknown keys; empty if it cannot be read."""
    try:
        open_regular(path).close()  # a pipe may be a config that somebody names, but never a run's
        found = read_yaml_file(path, frozenset(key_names()), SECTION_NAMES)
    except (ConfigError, OSError, ValueError):
        return {}
    return {entry.key: _plain(entry.value) for entry in found.entries}


def changed_from_defaults(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The keys whose value differs from the default, and those that this version does not know."""
    defaults = {key: _plain(value) for key, value in config_values(Config()).items()}
    return [
        {"key": clip(key), "value": value, "default": defaults.get(key), "known": key in defaults}
        for key, value in values.items()
        if key not in defaults or defaults[key] != value
    ]


def read_environment(path: Path) -> dict[str, Any]:
    """The facts about machine and versions that a reader wants first, and all packages; empty if unreadable."""
    try:
        record = read_json(path, LARGEST_ENVIRONMENT_BYTES)
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict):
        return {}
    host, git = mapping(record.get("host")), mapping(record.get("git"))
    packages = {clip(name, 80): clip(version, 80) for name, version in mapping(record.get("packages")).items()}
    command, ram = record.get("command"), finite(host.get("ram_bytes"))
    facts = {
        "started": record.get("time"),
        "host": host.get("name"),
        "system": host.get("system"),
        "processor": host.get("cpu"),
        "cores": host.get("cpus"),
        "memory": None if ram is None else size_text(ram),
        "python": record.get("python"),
        "torch": packages.get("torch"),
        "stoker": record.get("stoker"),
        "revision": git.get("revision"),
        "command": " ".join(map(str, command)) if isinstance(command, list) else command,
        "folder": record.get("folder"),
    }
    if git.get("changed"):
        facts["revision"] = f"{facts['revision']}, with uncommitted changes"
    return {
        "facts": {name: clip(value) for name, value in facts.items() if value is not None},
        "variables": {clip(k, 80): clip(v) for k, v in mapping(record.get("variables")).items()},
        "packages": dict(list(packages.items())[:1000]),
    }


def preview_of(path: Path) -> dict[str, Any] | None:
    """Where the run's picture of its samples is, and its size; None without one that a page can hold."""
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            is_jpeg = stream.read(len(JPEG)) == JPEG
        file = str(path).encode().decode()  # JSON is UTF-8; a folder's name need not be
    except (OSError, ValueError):
        return None
    return {"file": file, "bytes": size} if is_jpeg and size <= LARGEST_PREVIEW_BYTES else None


def read_evaluation(file: Path, picture: Path) -> dict[str, Any] | None:
    """The scores of a run's validation volumes, the worst first, with their picture; None if none were made."""
    try:
        record = read_json(file)
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("volumes"), list):
        return None
    volumes = [one for one in record["volumes"] if isinstance(one, dict)]
    return {
        "checkpoint": clip(Path(str(record.get("checkpoint"))).name),
        "count": len(volumes),
        "mean": _scores_of(mapping(record.get("mean"))),
        "volumes": [{"id": clip(one.get("id")), **_scores_of(one)} for one in volumes[:SHOWN_VOLUMES]],
        "picture": preview_of(picture),
    }


def _scores_of(record: dict[str, Any]) -> dict[str, float | None]:
    competition = mapping(record.get("competition"))
    scores = {name: rounded(number(record, name)) for name in ("dice", "iou", "surface_dice")}
    score = number(competition or record, "score")
    return scores if score is None else scores | {"score": rounded(score)}


def picture_url(preview: dict[str, Any] | None) -> str | None:
    """The picture itself, as text that a page can hold; None if it is gone."""
    try:
        data = b"" if preview is None else read_regular(Path(preview["file"]), LARGEST_PREVIEW_BYTES)
    except OSError:
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}" if data.startswith(JPEG) else None


def list_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Names, sizes and scores, the best first."""
    found: list[tuple[float, dict[str, Any]]] = []
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".ckpt")
    except OSError:
        return []
    for file in files:
        said = read_checkpoint_name(file.name)
        try:
            size = file.stat().st_size
        except OSError:
            continue  # a running run deletes old ones
        row: dict[str, Any] = {"name": clip(file.name), "bytes": size, "epoch": None, "score": None}
        if said is not None:
            text = f"{said.metric.key} {said.metric.text(said.value)}"
            row |= {"epoch": said.epoch, "score": said.value, "score_text": text}
        found.append((-math.inf if said is None else said.metric.rank(said.value), row))
    return [row for _, row in sorted(found, key=lambda pair: pair[0], reverse=True)[:SHOWN_CHECKPOINTS]]


def describe_quarantine(records: Sequence[Record]) -> dict[str, Any]:
    """How many samples could not be read, and the first few."""
    bad = {str(record.get("name", record.get("sample", "?"))): record.get("reason") for record in records}
    shown = list(bad.items())[:SHOWN_SAMPLES]
    return {
        "count": len(bad),
        "samples": [
            {"name": clip(name), "reason": clip("no reason recorded" if reason is None else reason)}
            for name, reason in shown
        ],
    }


def describe_predictions(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What was predicted, what a trial measured, and how far off the prediction was; the newest last.

    A record is `Confirmation.as_dict()`, or `Prediction.as_dict()` of one that was not tried; a prediction that was
    repeated or tried later is shown once.
    """
    untried: dict[Any, int] = {}
    last: dict[int, Record] = {}
    for at, record in enumerate(records):
        last.pop(untried.pop(str(record.get("label")), -1), None)
        last[at] = record
        if "measured_speedup" not in record:
            untried[str(record.get("label"))] = at
    found = []
    for record in list(last.values())[-SHOWN_PREDICTIONS:]:
        speedup = mapping(record.get("speedup"))
        found.append(
            {
                "label": clip(record.get("label") or record.get("id") or "?"),
                **{name: rounded(number(speedup, name)) for name in ("low", "expected", "high")},
                "measured": rounded(number(record, "measured_speedup")),
                "measured_images_per_second": rounded(number(record, "measured_images_per_second")),
                "error": rounded(number(record, "error")),
            }
        )
    return found


def _plain(value: Any) -> Any:
    """A config value as JSON, short enough for a table."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value[:20]]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    return clip(value)


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, or an empty one: nothing in a file is trusted."""
    return value if isinstance(value, dict) else {}
