"""Where the time of steps and batches went, as clock.jsonl has it; kept small while it is read.

A run of months writes a hundred megabytes of it: of each line only what a page shows is kept.
"""

from __future__ import annotations

from typing import Any

from stoker.clock.costs import STAGES
from stoker.output.report.intervals import PARTS, StepInterval
from stoker.output.report.json_lines import Record, number
from stoker.output.report.series import rounded

BESIDES = ("validation", "saving", "epoch_starts")
"""Times that are in no step."""
STAGE_PARTS = ("wall_s", "cpu_s", "runq_s", "blocked_s", "read_bytes")
MEMORY = ("process_bytes", "device_bytes", "shm_used_bytes", "available_bytes")
SLOWEST_SAMPLES = 10


class ClockSums:
    """The lines of clock.jsonl so far."""

    def __init__(self) -> None:
        self.intervals: list[StepInterval] = []
        self.besides_s: dict[str, float] = {}
        self.slowest: list[dict[str, Any]] = []
        self._stages: dict[str, dict[str, float]] = {}
        self._samples = 0.0
        self._world = 1.0

    def append(self, record: Record) -> None:
        """Takes one line; what it lacks, or has as something else than a number, is as if it were not measured."""
        if record.get("kind") == "event":
            self._world = number(record, "world") or 1.0
            return
        self._add_besides(record)
        self._add_stages(record)
        self._add_slowest(record)
        steps, step, elapsed_s = number(record, "steps"), number(record, "step"), number(record, "elapsed_s")
        parts = {part: seconds for part in PARTS if (seconds := number(record, f"{part}_s")) is not None}
        if not steps or step is None or "wait" not in parts:
            return
        if elapsed_s is not None and "compute" in parts:
            # A device that computes while the loop waits is counted once: as waiting, which is what can be cured.
            hidden_s = max(0.0, sum(parts.values()) - elapsed_s)
            parts["compute"] = max(0.0, parts["compute"] - hidden_s)
        images, seconds, epoch = number(record, "samples"), sum(parts.values()), number(record, "epoch")
        # A person who looks at images/s over time wants to see the stall at the start of an epoch.
        seconds += _seconds_of(record.get("epoch_starts_s"))
        rate = self._world * images / seconds if images and seconds else None
        longest_s, memory = number(record, "longest_s"), _bytes_of(record.get("memory"))
        self.intervals.append(
            StepInterval(int(step), None if epoch is None else int(epoch), int(steps), parts, rate, longest_s, memory)
        )

    def stages(self) -> list[dict[str, Any]]:
        """What workers do for one image: microseconds by stage, each split into on-CPU, run-queue and blocked."""
        if not self._samples:
            return []
        found = []
        for name in sorted(self._stages, key=lambda name: (*STAGES, name).index(name)):
            stage = self._stages[name]
            if stage.get("wall_s"):
                told: dict[str, Any] = {"name": name}
                for part in ("wall", "cpu", "runq", "blocked"):
                    if f"{part}_s" in stage:
                        told[f"{part}_us"] = rounded(stage[f"{part}_s"] / self._samples * 1e6)
                if "read_bytes" in stage:
                    told["read_bytes"] = rounded(stage["read_bytes"] / self._samples)
                found.append(told)
        return found

    def _add_besides(self, record: Record) -> None:
        for name in BESIDES:
            if record.get(f"{name}_s") is not None:
                self.besides_s[name] = self.besides_s.get(name, 0.0) + _seconds_of(record[f"{name}_s"])

    def _add_stages(self, record: Record) -> None:
        stages = record.get("stages")
        if not isinstance(stages, dict):
            return
        made = number(record, "made_samples")
        self._samples += (number(record, "samples") if made is None else made) or 0.0
        for name, stage in stages.items():
            if isinstance(stage, dict) and (name in self._stages or len(self._stages) < 20):
                into = self._stages.setdefault(str(name)[:40], {})
                for part in STAGE_PARTS:
                    value = number(stage, part)
                    if value is not None:
                        into[part] = into.get(part, 0.0) + value

    def _add_slowest(self, record: Record) -> None:
        told, typical_s = record.get("slowest"), number(record, "typical_sample_s")
        known = {sample["name"]: sample for sample in self.slowest}
        for sample in told if isinstance(told, list) else []:
            seconds = number(sample, "seconds") if isinstance(sample, dict) else None
            if seconds is None:
                continue
            name, ms = str(sample.get("name", "?"))[:1000], rounded(1000 * seconds) or 0.0
            if name not in known or known[name]["ms"] < ms:
                typical_ms = None if typical_s is None else rounded(1000 * typical_s)
                known[name] = {"name": name, "ms": ms, "typical_ms": typical_ms}
        self.slowest = sorted(known.values(), key=lambda sample: -sample["ms"])[:SLOWEST_SAMPLES]


def _seconds_of(value: Any) -> float:
    """The sum of a number or a list of numbers; of anything else nothing."""
    return sum(number({"": one}, "") or 0.0 for one in (value if isinstance(value, list) else [value]))


def _bytes_of(memory: Any) -> dict[str, float]:
    if not isinstance(memory, dict):
        return {}
    return {name: value for name in MEMORY if (value := number(memory, name)) is not None}
