"""Whether a checkpoint belongs to this model and config, and in words what differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stoker.errors import UserError

MOST_SHOWN = 8
LONGEST_VALUE = 60


class CheckpointOther(UserError):
    """A whole checkpoint that was made by another model or config: names what differs."""

    def __init__(self, path: Path, differences: list[str]) -> None:
        assert differences, "a checkpoint without differences is ours"
        shown = differences[:MOST_SHOWN]
        if len(differences) > MOST_SHOWN:
            shown.append(f"and {len(differences) - MOST_SHOWN} more")
        super().__init__(
            "checkpoint-other",
            f"{path} was made by another model or config\n" + "\n".join(f"  - {line}" for line in shown),
            why="training would go on with weights or a schedule that do not belong to it",
            hint="the config that it was made with, another run_name, or --fresh to start anew",
        )
        self.path = path
        self.differences = tuple(differences)


def differences(saved: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> list[str]:
    """What differs, one line each, in the order of the checkpoint; tensors are compared by shape and type."""
    ours, theirs = _leaves(wanted), _leaves(saved)
    lines = []
    for key, value in theirs.items():
        if key not in ours:
            lines.append(f"{key}: only in the checkpoint")
        elif not _same(value, ours[key]):
            lines.append(f"{key}: {_shown(value)} in the checkpoint, {_shown(ours[key])} in this run")
    return lines + [f"{key}: only in this run" for key in ours if key not in theirs]


def _leaves(tree: Mapping[Any, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = value
    return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _shown(a) == _shown(b)
    # A tuple in a config is a list in a file; nan is as it was.
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or repr(a) == repr(b)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = "×".join(map(str, value.shape)) or "a single value"
        return f"{shape} {str(value.dtype).removeprefix('torch.')}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
