"""Whether a folder or a YAML file lists volumes; light, since every `stoker pack` asks."""

from __future__ import annotations

from pathlib import Path

import yaml


def has_volumes(source: str) -> bool:
    """Whether a folder has a layout of volumes, or a YAML file is a list of them; any other YAML file is a config."""
    place = Path(source).expanduser()
    if place.suffix.lower() in (".yaml", ".yml") and place.is_file():
        try:
            document = yaml.safe_load(place.read_text("utf-8-sig"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return False
        return isinstance(document, list) or (isinstance(document, dict) and "cases" in document)
    if any((place / name).is_file() for name in ("volumes.json", "dataset.json")):
        return True
    return (place / "train.csv").is_file() and (place / "train_images").is_dir()
