"""The step of a script that was recorded operator by operator, and what it would take on a card."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.core.files import open_regular
from stoker.doctor.script.recording import read_about
from stoker.plan.records import TracedOp
from stoker.plan.roofline import step_seconds
from stoker.profile.datasheets import Datasheet

STEP_FILES = "step-*.json"
MOST_BYTES = 100_000_000
HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class TracedStep:
    """What the training process computed for one update."""

    ops: tuple[TracedOp, ...]
    batches: int
    """Batches that the update was made from."""
    channels_last: bool
    tf32: bool
    wanted_dtype: str | None
    """The dtype that its autocast asks for on a GPU: without one, torch computes in float32."""

    def seconds_on(self, sheet: Datasheet) -> float:
        """For one batch, by the roofline of each operator."""
        ops = [self._on_a_gpu(op) for op in self.ops]
        return step_seconds(ops, sheet, channels_last=self.channels_last, tf32=self.tf32).total_s / self.batches

    @property
    def precision(self) -> str:
        """The precision of most of its products, on a card."""
        flops: dict[str, int] = {}
        for op in map(self._on_a_gpu, self.ops):
            flops[op.dtype] = flops.get(op.dtype, 0) + op.flops
        most = max(flops, key=flops.__getitem__)
        return "TF32" if most == "float32" and self.tf32 else most

    def _on_a_gpu(self, op: TracedOp) -> TracedOp:
        """As autocast would run it there, except that losses and a few other operators stay in float32. ResNet-50 at
        batch 32 is then within 5 % of the plan's own trace."""
        if self.wanted_dtype not in HALF or op.dtype != "float32" or op.phase == "update":
            return op
        return replace(op, dtype=self.wanted_dtype, read_bytes=op.read_bytes // 2, written_bytes=op.written_bytes // 2)


def read_traced_step(folder: Path) -> TracedStep | str:
    """What a script has recorded, or why there is nothing."""
    for path in sorted(folder.glob(STEP_FILES)):
        try:
            with open_regular(path) as stream:
                document = json.loads(stream.read(MOST_BYTES))
            ops = tuple(TracedOp(**op) for op in document["ops"])
            # A file of a damaged disk, or of a script that writes there: what is added up must be numbers.
            assert all(isinstance(value, int) for op in ops for value in (op.flops, op.read_bytes, op.written_bytes))
            return TracedStep(
                ops, max(1, int(document["batches"])), bool(document["channels_last"]), bool(document["tf32"]),
                None if document["wanted_dtype"] is None else str(document["wanted_dtype"]),
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            return f"its record cannot be read: {error}"
    said = (about.facts.get("untraced") for about in read_about(folder).values())
    return next((str(why) for why in said if why), "it ended before its fourth update; the third is traced")
