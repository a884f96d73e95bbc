"""The metric of a run: its best checkpoints are chosen by it, and early stopping watches it (`best_by`)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

SMALLER_IS_BETTER = frozenset({"loss"})
_NAME = re.compile(r"epoch=(\d+)-val_([a-z]\w*)=(-?\d+\.\d{4})\.ckpt")


@dataclass(frozen=True)
class Metric:
    """One of the figures of a validation; all but the loss are percentages, of which more is better."""

    name: str = "acc1"

    @property
    def key(self) -> str:
        """As metrics.jsonl has it."""
        return f"val/{self.name}"

    @property
    def more_is_better(self) -> bool:
        return self.name not in SMALLER_IS_BETTER

    def rank(self, value: float) -> float:
        """A number that is larger for a better value."""
        return value if self.more_is_better else -value

    def improves(self, value: float, on: float | None, by: float = 0.0) -> bool:
        """Whether a value is better than another by more than that; NaN is never better."""
        if on is None:
            return not math.isnan(value)
        return self.rank(value) > self.rank(on) + by

    def text(self, value: float) -> str:
        """A value in words."""
        return f"{value:.2f}%" if self.more_is_better else f"{value:.4f}"


ACC1 = Metric("acc1")


class BestCheckpoint(NamedTuple):
    """What the name of one of the best checkpoints says."""

    epoch: int
    metric: Metric
    value: float


def checkpoint_name(epoch: int, metric: Metric, value: float) -> str:
    """The file name of one of the best checkpoints."""
    assert math.isfinite(value), f"{metric.key} of epoch {epoch} is {value}"
    return f"epoch={epoch}-val_{metric.name}={value:.4f}.ckpt"


def read_checkpoint_name(name: str) -> BestCheckpoint | None:
    """What such a name says; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else BestCheckpoint(int(match[1]), Metric(match[2]), float(match[3]))
