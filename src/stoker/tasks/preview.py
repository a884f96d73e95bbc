"""The preview of a run: the samples of its first steps on a sheet, for `stoker preview` and in the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from stoker.core.console import Say
from stoker.core.files import write_bytes
from stoker.tasks.contact_sheet import Sheet, SheetSection, draw_sheet

if TYPE_CHECKING:
    from stoker.profile.host import HostConfig
    from stoker.tasks.base import Task

RUN_PATIENCE_S = 1.0
RUN_LARGEST_SIDE = 160
RUN_MOST_BYTES = 250_000
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Preview:
    """What the network gets, in pictures and as data."""

    sheet: Sheet
    describe: Callable[[Sequence[Box]], dict[str, Any]]
    """The document for `--json`, from the places of the pictures on the sheet."""


@dataclass(frozen=True)
class InputRange:
    """The values that the network gets: a wrong normalisation cannot be seen once it is undone."""

    mean: float
    deviation: float
    lowest: float
    highest: float


def range_of(inputs: Tensor) -> InputRange:
    """The range of some inputs."""
    numbers = inputs.double()
    return InputRange(float(numbers.mean()), float(numbers.std()), float(numbers.min()), float(numbers.max()))


def range_text(ranges: Sequence[InputRange]) -> str:
    """The range of all inputs of a section, in words."""
    if not ranges:
        return "no sample could be read"
    mean, deviation = (float(np.mean([getattr(one, name) for one in ranges])) for name in ("mean", "deviation"))
    lowest, highest = min(one.lowest for one in ranges), max(one.highest for one in ranges)
    return f"values of these inputs: mean {mean:.2f}, deviation {deviation:.2f}, from {lowest:.2f} to {highest:.2f}"


def not_shown(unit: str) -> SheetSection:
    """The section of validation samples that there was no time to read."""
    return SheetSection("Validation", (f"Not shown: reading the training {unit} took too long already.",))


def keep_with_run(task: Task, file: Path, config: HostConfig, data: Any, world: int, say: Say) -> None:
    """Writes the preview of a run that begins into its folder, where `stoker report` finds it.

    Before the first step and by the code of `stoker preview`, not from a batch of the loop: nothing is added to the
    loop, and nothing there changes. The training samples are those that the first steps read anyway, a moment later
    and then from the page cache. It takes a few tenths of a second, and if storage is slow, stops after the first
    samples. A picture is not worth a run: any error is reported, and the run begins without it.
    """
    try:
        seen = task.preview(
            config, data, file.absolute().parent.name, world=world, patience_s=RUN_PATIENCE_S, largest=RUN_LARGEST_SIDE
        )
        write_bytes(file, draw_sheet(seen.sheet, RUN_LARGEST_SIDE).as_jpeg(RUN_MOST_BYTES))
    except Exception as error:
        say(f"note: no {file.name}: {str(error) or type(error).__name__}")
