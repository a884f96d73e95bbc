"""A task whose runs are changed before they train: to watch them, or to make them fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.config import Config
from stoker.tasks.base import Task, task_for
from stoker.train.loop import Run


def changing_runs(change: Callable[[Run], Run]) -> Callable[[Config], Task]:
    """Stands in for `task_for`: every run that the task builds is changed."""

    def changed_task(config: Config) -> Task:
        class Changed(type(task_for(config))):  # type: ignore[misc]
            def build_run(self, *arguments: Any, **keys: Any) -> Run:
                return change(super().build_run(*arguments, **keys))

        return Changed()

    return changed_task
