"""The doctor's screen: a verdict, where the time of a step goes, what is missing, and fixes to type."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.core.units import count, duration_text, rate_text, size_text, speedup_text
from stoker.doctor.diagnosis import Confirmation, Diagnosis, Need
from stoker.doctor.preparing import WORTH_NAMING
from stoker.profile.observed import Observed

BAR = 48
PARTS = (("wait_s", "waiting for data", "░"), ("transfer_s", "transfer", "▒"), ("compute_s", "computing", "█"),
         ("other_s", "other", "▓"))  # fmt: skip
SMALLEST = 0.005
"""Share below which a part is not shown."""
MOST_FIXES = 6
MOST_SPOTS = 3


def doctor_text(diagnosis: Diagnosis) -> str:
    predicted = [f"  {each.label + ':':<28} {speedup_text(each.speedup)}" for each in diagnosis.predictions]
    sections = [
        _verdict_lines(diagnosis),
        _step_lines(diagnosis.observed),
        _making_lines(diagnosis.observed),
        _spot_lines(diagnosis.observed),
        _need_lines(diagnosis.needs),
        _fix_lines(diagnosis),
        ["predicted speed-ups, with 80 % intervals:", *predicted] if predicted else [],
        _confirmation_lines(diagnosis.confirmation, diagnosis.observed.unit),
        [f"not measured: {text}" for text in diagnosis.observed.missing],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _verdict_lines(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.verdict == "unknown":
        return [f"verdict: {diagnosis.line}"]
    message = diagnosis.findings[0].seen
    return [f"verdict: {diagnosis.line.removesuffix(f': {message}')}", f"  {message}"]


def _step_lines(observed: Observed) -> list[str]:
    elapsed = observed.times.elapsed_s
    if not observed.steps or elapsed <= 0:
        return []
    parts = [(label, sign, getattr(observed.times, name)) for name, label, sign in PARTS]
    if all(seconds is None for _, _, seconds in parts[1:]):
        parts = [parts[0], ("everything else", "█", elapsed - observed.times.wait_s)]
    known = [(label, sign, seconds / elapsed) for label, sign, seconds in parts if seconds]
    bar = "".join(sign * width for (_, sign, _), width in zip(known, _widths([s for *_, s in known]), strict=True))
    per_second = observed.images_per_second if observed.samples else None
    rate = f", {rate_text(per_second, observed.unit)}" if per_second else ""
    lines = [
        f"a step takes {duration_text(elapsed / observed.steps)}{rate} ({observed.steps} steps measured)",
        f"  {bar}",
        "  " + "   ".join(f"{sign} {label} {share:.0%}" for label, sign, share in known if share >= SMALLEST),
    ]
    if starts := observed.times.epoch_starts_s[1:]:
        mean_s = sum(starts) / len(starts)
        lines.append(f"  not included above: {count(len(starts), 'epoch start')} of {duration_text(mean_s)}")
    return lines


def _making_lines(observed: Observed) -> list[str]:
    stages = {name: stage for name, stage in observed.stages.items() if stage.wall_s > 0}
    total = sum(stage.wall_s for stage in stages.values())
    if not total:
        return []
    lines = ["preparing a batch       share   on a core   waiting for a core   blocked"]
    for name, stage in sorted(stages.items(), key=lambda item: -item[1].wall_s):
        if stage.wall_s / total < SMALLEST:
            continue
        kinds = [stage.cpu_s, stage.runq_s, stage.blocked_s]
        core, runnable, blocked = ("-" if kind is None else f"{kind / stage.wall_s:.0%}" for kind in kinds)
        label = "not attributed" if name == "other" else name
        lines.append(f"  {label:<20} {stage.wall_s / total:6.0%} {core:>11} {runnable:>20} {blocked:>9}")
    return lines


def _spot_lines(observed: Observed) -> list[str]:
    """Only where it says more than the stages: a line that takes a good part of the time."""
    spots = observed.preparation.spots if observed.preparation is not None else ()
    shown = [spot for spot in spots[:MOST_SPOTS] if spot.share >= WORTH_NAMING / 5]
    if not shown or shown[0].share < WORTH_NAMING:
        return []
    places = [f"{spot.file}:{spot.line} ({spot.function})" for spot in shown]
    width = max(map(len, places))
    return ["lines that take the time"] + [
        f"  {spot.share:4.0%}  {place:<{width}}  {spot.calls or ''}".rstrip()
        for spot, place in zip(shown, places, strict=True)
    ]


def _need_lines(needs: Sequence[Need]) -> list[str]:
    if not needs:
        return []
    lines = [f"to never wait for data, the loop needs {_rate(needs[0].wants, needs[0].unit)}; available:"]
    for need in needs:
        enough = "enough" if need.covered >= 1 else f"{need.covered:.0%} of {_rate(need.wants, need.unit)}"
        lines.append(f"  {need.what:<14} {_rate(need.has, need.unit):>16}   {enough:<20} ({need.how})")
    return lines


def _fix_lines(diagnosis: Diagnosis) -> list[str]:
    lines = []
    for number, finding in enumerate(diagnosis.findings[:MOST_FIXES], 1):
        gain = "" if finding.speedup is None else f"   {speedup_text(finding.speedup)}"
        lines.append(f"  {number}. {finding.fix or finding.seen}{gain}")
        # What the verdict saw is already on top of the screen.
        if number > 1 and finding.fix is not None:
            lines.append(f"     {finding.name}: {finding.seen}")
    return ["fixes, best first, with the expected speed-up:", *lines] if lines else []


def _confirmation_lines(confirmation: Confirmation | None, unit: str) -> list[str]:
    if confirmation is None:
        return []
    prediction, measured = confirmation.prediction, confirmation.measured_images_per_second
    expected = prediction.images_per_second
    inside = "within" if expected.low <= measured <= expected.high else "outside"
    return [
        f"tried {prediction.label}: {confirmation.measured_speedup:.2f}x, {rate_text(measured, unit)} "
        f"({rate_text(expected.expected, unit)} predicted: {confirmation.error:+.0%}, {inside} the 80 % interval)"
    ]


def _widths(shares: Sequence[float]) -> list[int]:
    """Columns that add up to the width of the bar, at least one each."""
    widths = [max(1, int(BAR * share / sum(shares))) for share in shares]
    if widths:
        widths[widths.index(max(widths))] += BAR - sum(widths)
    return widths


def _rate(value: float, unit: str) -> str:
    return f"{size_text(value)}/s" if unit == "bytes/s" else rate_text(value, unit.removesuffix("/s"))
