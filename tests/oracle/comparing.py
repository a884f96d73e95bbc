"""Compares what stoker does today with what was recorded. What may differ is taken from the recording; what is left is
shown as a diff."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.oracle.parts import EXPECTED, FAILED, PARTS, Bench, Found

ROUNDING, ROUNDED_STEPS = 0.05, 12
"""How far losses may be apart on another kind of processor, relative to their size, and in how many steps. Without
AVX the runs were 0.3 % apart in 12 steps, the demo 1.8 %, and then 18 %: rounding grows from step to step."""
MOST_LINES = 60
"""Lines of a diff that are shown."""
_VOXELS = re.compile(r" (labels|pixels)=\w+")
_LOSS, _RATE = re.compile(r"(\S+/(?:loss|lr))=(\S+)"), re.compile(r"(\S+/lr)=(\S+)")


@dataclass
class Comparison:
    """What was compared, and the differences."""

    compared: int = 0
    exact: int = 0
    """Texts with losses that had to agree bit for bit."""
    rounded: int = 0
    """Those recorded on another kind of machine."""
    differences: list[str] = field(default_factory=list)

    def check(self, part: str, bench: Bench) -> None:
        """Compares a part with its recording."""
        names = set()
        try:
            for found in PARTS[part](bench):
                names.add(found.name)
                self._compare(part, found)
        except AssertionError as error:  # what other commands need could not be made
            self.differences.append(f"{part}: {error}")
        if not bench.quick:
            gone = {file.stem for file in (EXPECTED / part).glob("*.txt")} - names
            self.differences += [f"{part}/{name}: recorded, but there is none now" for name in sorted(gone)]

    def _compare(self, part: str, found: Found) -> None:
        file = _file(part, found.name)
        expected = file.read_text() if file.exists() else ""
        came = allowed(part, expected, found.text)
        self.compared += 1
        if "machine: " in found.text:
            self.exact += same_machine(expected, found.text)
            self.rounded += not same_machine(expected, found.text)
        if came != expected:
            label = f"{part}/{found.name}" + f" ({found.variant})" * bool(found.variant)
            texts = expected.splitlines(), came.splitlines()
            diff = list(difflib.unified_diff(*texts, f"{label}: recorded", f"{label}: now", n=1, lineterm=""))
            more = [f"... and {len(diff) - MOST_LINES} lines more"] if len(diff) > MOST_LINES else []
            self.differences.append("\n".join(diff[:MOST_LINES] + more))

    def text(self) -> str:
        """Every difference, and how much was compared."""
        how = f"losses: {self.exact} bit for bit"
        if self.rounded:
            how += f", {self.rounded} within {ROUNDING:.0%} for {ROUNDED_STEPS} steps: recorded on another machine"
        end = f"{self.compared} texts compared, {len(self.differences)} differ; {how}"
        return "\n\n".join([*self.differences, end])


def record(part: str, bench: Bench) -> None:
    """Writes down what a part does today. What may differ stays as it was recorded, except on another machine."""
    names = set()
    for found in PARTS[part](bench):
        file = _file(part, found.name)
        assert not found.text.startswith(FAILED), f"{part}/{found.name} {found.text}"
        old = file.read_text() if file.exists() else ""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found.text if "machine: " in found.text else allowed(part, old, found.text))
        names.add(found.name)
    for file in (EXPECTED / part).glob("*.txt"):
        if file.stem not in names:
            file.unlink()


def _file(part: str, name: str) -> Path:
    return EXPECTED / part / f"{name}.txt"


def allowed(part: str, expected: str, came: str) -> str:
    """What came, with the recorded text wherever the two may differ."""
    if part in ("json", "files", "measured"):
        return _as_measured(expected, came)
    return came if same_machine(expected, came) else _as_rounded(expected, came)


def same_machine(expected: str, came: str) -> bool:
    """Whether losses can be compared bit for bit."""
    machines = [re.search(r"^machine: .*", text, re.MULTILINE) for text in (expected, came)]
    return None in machines or machines[0][0] == machines[1][0]  # type: ignore[index]


def _as_rounded(expected: str, came: str) -> str:
    """On another machine only learning rates and the first losses are compared, within a tolerance; batches as ever,
    except voxels: the volumes are made with sines, whose last bits differ between processors."""
    old, new = expected.splitlines(), came.splitlines()
    if len(old) != len(new):
        return came
    for at, (before, now) in enumerate(zip(old, new, strict=True)):
        step = re.search(r" step=(\d+)", before)
        late = step is not None and int(step[1]) > ROUNDED_STEPS
        values = [dict((_RATE if late else _LOSS).findall(line)) for line in (before, now)]
        close = values[0].keys() == values[1].keys() and all(
            math.isclose(float(values[0][name]), float(values[1][name]), rel_tol=ROUNDING, abs_tol=ROUNDING / 10)
            for name in values[0]
        )
        voxels = " crops=" in before and _VOXELS.sub("", before) == _VOXELS.sub("", now)
        if now.startswith("machine: ") or voxels or (close and not now.startswith("batch ")):
            new[at] = before
    return "\n".join(new) + "\n"


def _as_measured(expected: str, came: str) -> str:
    """What this machine did not measure or find is null or empty, which is no difference from any value."""
    old, new = (dict(line.split(": ", 1) for line in text.splitlines()) for text in (expected, came))
    result = dict(new)
    for path in [path for path, kinds in old.items() if not _known(kinds)]:
        theirs = _below(new, path)
        if theirs and len(_below(old, path)) == 1:  # else some elements of a list have it
            result = {other: kinds for other, kinds in result.items() if other not in theirs}
        result |= {path: old[path]} if theirs else {}
    for path in [path for path, kinds in new.items() if not _known(kinds)]:
        ours = _below(old, path)
        if ours:
            result.pop(path, None)
            result |= {other: kinds for other, kinds in ours.items() if other == path or len(_below(new, path)) == 1}
    for path in [path for path in result if path in old and _known(result[path]) == _known(old[path])]:
        result[path] = old[path]
    return "".join(f"{path}: {kinds}\n" for path, kinds in sorted(result.items()))


def _known(kinds: str) -> set[str]:
    return set(kinds.split(" | ")) - {"null", "empty list", "empty object"}


def _below(tree: dict[str, str], path: str) -> dict[str, str]:
    return {at: kinds for at, kinds in tree.items() if at == path or at.startswith((f"{path}.", f"{path}["))}
