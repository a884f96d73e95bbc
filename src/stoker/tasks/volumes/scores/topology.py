"""TopoScore: which components, tunnels and cavities of a prediction are also the label's (Betti matching).

Stucki et al. 2023, 2024: two features match if they become one and the same in the union of both masks. Which of
several candidates that is depends on the order in which Betti-Matching-3D adds voxels, so a score that is to equal the
competition's has to come from that code. The package `topolosses` ships it compiled; it also ships Qt, and asks for
the OpenCV with windows, which would overwrite the headless one that we use. So it is not a dependency: this module
loads the one compiled file out of it, which needs nothing else (pip install --no-deps topolosses).

Octants of a volume are matched in separate processes: the code holds the GIL for as long as it runs, and takes over a
kilobyte of memory per voxel, which is freed when its process ends.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.child import ChildDied, Parent, share_out
from stoker.core.console import Advance
from stoker.core.errors import UserError
from stoker.core.units import size_text

WEIGHTS = (0.34, 0.33, 0.33)
"""The weights of components, tunnels and cavities."""
BYTES_PER_VOXEL = 1300
"""Memory while an octant is matched: 4.9 GB were measured for 160³ voxels of sheets in noise."""
_MODULE = "betti_matching"
_WITHOUT_LABEL = 0.5
"""The competition's pseudocount: features of a dimension in which the label has none give 0.5 / (features + 0.5)."""


@dataclass(frozen=True)
class Topology:
    """Features by dimension: components, tunnels, cavities."""

    matched: tuple[int, int, int]
    predicted: tuple[int, int, int]
    labelled: tuple[int, int, int]

    @property
    def f1(self) -> tuple[float | None, ...]:
        """F1 score by dimension; None where neither mask has a feature."""
        return tuple(map(_f1, self.matched, self.predicted, self.labelled))

    @property
    def score(self) -> float:
        """The weighted mean of the F1 scores that there are; 1 if there are none."""
        found = [(weight, value) for weight, value in zip(WEIGHTS, self.f1, strict=True) if value is not None]
        total = sum(weight for weight, _ in found)
        return sum(weight * value for weight, value in found) / total if found else 1.0


def _f1(matched: int, predicted: int, labelled: int) -> float | None:
    every = predicted + labelled
    if not every:
        return None
    return 2 * matched / every if labelled else _WITHOUT_LABEL / (every + _WITHOUT_LABEL)


def compare_topology(
    prediction: NDArray[np.bool_], label: NDArray[np.bool_], processes: int = 1, progress: Advance | None = None
) -> Topology:
    """Matches the features of two masks octant by octant, as the competition does, in that many processes at once."""
    load_matcher()  # here, where an error can be read
    tasks = []
    for octant in octants(prediction.shape):
        ours, theirs = prediction[octant], label[octant]
        if ours.any() or theirs.any():
            tasks.append({"shape": list(ours.shape), "prediction": _packed(ours), "label": _packed(theirs)})
    total, done = np.zeros((3, 3), np.int64), itertools.count(1)

    def add(counts: list[list[int]]) -> None:
        total[...] += np.array(counts)
        if progress is not None:
            progress(next(done), len(tasks))

    try:
        share_out(match_octants, None, tasks, workers=processes, on_message=lambda _message: None, on_answer=add)
    except ChildDied as death:
        voxels = max(math.prod(task["shape"]) for task in tasks)
        raise UserError(
            "topology-failed",
            f"matching the topology of an octant ended early: its process {death.how}",
            why=f"most often memory ran out; it needs about {size_text(voxels * BYTES_PER_VOXEL)} at once",
            hint="end other programs, or score without topology: --score segmentation",
        ) from None
    matched, predicted, labelled = ((int(a), int(b), int(c)) for a, b, c in total.tolist())
    return Topology(matched, predicted, labelled)


def octants(shape: Sequence[int]) -> list[tuple[slice, ...]]:
    """A volume cut in two along each axis; the first half has the odd voxel."""
    halves = []
    for size in shape:
        middle = (size + 1) // 2
        halves.append([part for part in (slice(0, middle), slice(middle, size)) if part.stop > part.start])
    return list(itertools.product(*halves))


def match_octants(_argument: Any, parent: Parent) -> None:
    """In a child process: for each octant that the parent sends, its features that are matched, predicted and labelled,
    by dimension."""
    for task in parent.messages():
        shape = tuple(task["shape"])
        masks = [
            np.unpackbits(np.frombuffer(task[name], np.uint8), count=math.prod(shape)).reshape(shape).view(bool)
            for name in ("prediction", "label")
        ]
        # Inverted: the filtration adds zeros first, so its features are the foreground's.
        found = load_matcher().compute_matching(*((~mask).astype(np.uint8) for mask in masks))
        matched = np.asarray(found.num_matched, np.int64)
        counts = matched, matched + found.num_unmatched_input1, matched + found.num_unmatched_input2
        parent.answer(np.stack(counts).tolist())


def _packed(mask: NDArray[np.bool_]) -> bytes:
    return np.packbits(mask).tobytes()


@cache
def load_matcher() -> Any:
    """The compiled module of Betti-Matching-3D; raises UserError if it is not installed."""
    try:
        files = distribution("topolosses").files or []
    except PackageNotFoundError:
        files = []
    # Not `import topolosses`, which imports OpenCV, GUDHI and all its losses.
    for file in files:
        if file.name.startswith(f"{_MODULE}.") and file.suffix in (".so", ".pyd"):
            spec = importlib.util.spec_from_file_location(_MODULE, str(file.locate()))
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    raise UserError(
        "library-missing",
        "Betti-Matching-3D is not installed",
        why="TopoScore is defined by its matching, and the package topolosses has it compiled",
        hint="pip install --no-deps topolosses",
    )
