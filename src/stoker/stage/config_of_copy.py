"""The config that trains from a copy: the original one as its base, and the copy as its data_root."""

from __future__ import annotations

import json
import os
from pathlib import Path

from stoker.config import Config
from stoker.files import write_text


def write_config_of_copy(file: Path, config: Config, overrides: list[str], folder: str, output: Path | None) -> Path:
    """Writes the config and returns its path; overrides of the command line are in it, too."""
    target = (output or Path(folder) / file.name).absolute()
    base = os.path.relpath(file.resolve(), target.parent.resolve())
    root = folder
    if config.task != "classify" and config.data_root is not None and config.data_root.endswith((".yaml", ".yml")):
        root = f"{folder}/{config.data_root.rpartition('/')[2]}"
    keys = dict(override.split("=", 1) for override in overrides)
    keys.pop("data_root", None)
    lines = [f"base: {json.dumps(base)}", f"data_root: {json.dumps(root)}"]
    lines += [f"{key}: {value}" for key, value in keys.items()]
    write_text(target, "\n".join(lines) + "\n")
    return target
