"""The values of `task`, and where the `Task` of each is (stoker.tasks.base)."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

BUILT_IN = {"classify": "stoker.tasks.images.task:Classify", "segment3d": "stoker.tasks.volumes.task:Segment3d"}


def place_of_task(name: str) -> str | None:
    """Module and class of a task, built in or of another package; None for an unknown name."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    return next((entry.value for entry in entry_points(group="stoker.tasks", name=name)), None)


def task_names() -> list[str]:
    """The built-in tasks, and those of other packages."""
    return [*BUILT_IN, *sorted({entry.name for entry in entry_points(group="stoker.tasks")})]


def _check_task(name: str) -> str:
    if place_of_task(name) is None:
        raise ValueError(f"{name!r} is not one of {', '.join(task_names())}")
    return name


TaskName = Annotated[str, AfterValidator(_check_task), WithJsonSchema({"type": "string", "enum": list(BUILT_IN)})]
"""A built-in task, or the name of an entry point in the group `stoker.tasks`."""
