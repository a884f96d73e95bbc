"""What the doctor found, for a tired person: a verdict, a bar, needs against has, cures to type."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.clock.observed import Observed
from stoker.doctor.records import Confirmation, Diagnosis, Need, Prediction
from stoker.plan.records import Estimate, Finding

BAR = 48
PARTS = (("wait_s", "waiting for data", "░"), ("transfer_s", "transfer", "▒"), ("compute_s", "computing", "█"),
         ("other_s", "other", "▓"))  # fmt: skip
SMALLEST = 0.005
"""Share below which a part is not worth a line."""
CURES = 4


def doctor_text(diagnosis: Diagnosis) -> str:
    """The whole screen."""
    sections = [
        [f"verdict: {diagnosis.line}"],
        _step_lines(diagnosis.observed),
        _making_lines(diagnosis.observed),
        _need_lines(diagnosis.needs),
        _cure_lines(diagnosis),
        _what_if_lines(diagnosis),
        _confirmation_lines(diagnosis.confirmation),
        [f"not seen: {text}" for text in diagnosis.observed.missing],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def speedup_text(gain: Estimate) -> str:
    """2.1x (1.8-2.3)"""
    return f"{gain.expected:.1f}x ({gain.low:.1f}-{gain.high:.1f})"


def _step_lines(observed: Observed) -> list[str]:
    elapsed = observed.elapsed_s
    if not observed.steps or elapsed <= 0:
        return []
    parts = [(label, sign, getattr(observed, name)) for name, label, sign in PARTS]
    if all(seconds is None for _, _, seconds in parts[1:]):
        parts = [parts[0], ("everything else", "█", elapsed - observed.wait_s)]
    known = [(label, sign, seconds / elapsed) for label, sign, seconds in parts if seconds]
    bar = "".join(sign * width for (_, sign, _), width in zip(known, _widths([s for *_, s in known]), strict=True))
    rate = f", {observed.images_per_second:,.0f} images/s" if observed.samples and observed.images_per_second else ""
    shown = [f"{sign} {label} {share:.0%}" for label, sign, share in known if share >= SMALLEST]
    lines = [f"a step takes {_time(elapsed / observed.steps)}{rate} ({observed.steps} steps seen)", f"  {bar}"]
    lines.append("  " + "   ".join(shown))
    if len(observed.epoch_starts_s) > 1:
        starts = observed.epoch_starts_s[1:]
        lines.append(f"  beside these: {len(starts)} epoch starts of {_time(sum(starts) / len(starts))} each")
    return lines


def _making_lines(observed: Observed) -> list[str]:
    stages = {name: stage for name, stage in observed.stages.items() if stage.wall_s > 0}
    total = sum(stage.wall_s for stage in stages.values())
    if not total:
        return []
    lines = ["making a batch:      of it  on a core  in line  blocked"]
    for name, stage in sorted(stages.items(), key=lambda item: -item[1].wall_s):
        if stage.wall_s / total < SMALLEST:
            continue
        kinds = [stage.cpu_s, stage.runq_s, stage.blocked_s]
        shares = ["      -" if kind is None else f"{kind / stage.wall_s:7.0%}" for kind in kinds]
        label = "not told apart" if name == "other" else name
        lines.append(f"  {label:<18} {stage.wall_s / total:4.0%}    {shares[0]}  {shares[1]}  {shares[2]}")
    return lines


def _need_lines(needs: Sequence[Need]) -> list[str]:
    if not needs:
        return []
    lines = [f"the accelerator wants {_amount(needs[0])}; there is"]
    for need in needs:
        enough = "enough" if need.covered >= 1 else f"{need.covered:.0%} of it"
        wanted = "" if need.unit == needs[0].unit else f" of {_rate(need.wants, need.unit)}"
        lines.append(f"  {need.what:<14} {_rate(need.has, need.unit):>16}{wanted}: {enough}  ({need.how})")
    return lines


def _cure_lines(diagnosis: Diagnosis) -> list[str]:
    lines = []
    for number, finding in enumerate(diagnosis.findings[:CURES], 1):
        lines += _finding_lines(number, finding, first=number == 1)
    return ["what to do, best first:", *lines] if lines else []


def _finding_lines(number: int, finding: Finding, *, first: bool) -> list[str]:
    gain = "" if finding.speedup is None else f"   {speedup_text(finding.speedup)}"
    lines = [f"  {number}. {finding.fix or finding.message}{gain}"]
    # The verdict's message stands on top of the screen already.
    if not first and finding.fix is not None:
        lines.append(f"     {finding.id}: {finding.message}")
    return lines


def _what_if_lines(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.predictions:
        return []
    return ["what if (80 % interval):", *(f"  {_what_if_line(prediction)}" for prediction in diagnosis.predictions)]


def _what_if_line(prediction: Prediction) -> str:
    return f"{prediction.label + ':':<28} {speedup_text(prediction.speedup)}"


def _confirmation_lines(confirmation: Confirmation | None) -> list[str]:
    if confirmation is None:
        return []
    prediction, measured = confirmation.prediction, confirmation.measured_images_per_second
    expected = prediction.images_per_second
    inside = "within" if expected.low <= measured <= expected.high else "outside"
    return [
        f"tried {prediction.label}: {measured:,.0f} images/s measured, {expected.expected:,.0f} predicted "
        f"({confirmation.error:+.0%}, {inside} the interval); {confirmation.measured_speedup:.2f}x"
    ]


def _widths(shares: Sequence[float]) -> list[int]:
    """Columns that add up to the bar, at least one for each."""
    total = sum(shares) or 1.0
    widths = [max(1, int(BAR * share / total)) for share in shares]
    if widths:
        widths[max(range(len(widths)), key=lambda i: widths[i])] += BAR - sum(widths)
    return widths


def _amount(need: Need) -> str:
    return _rate(need.wants, need.unit)


def _rate(value: float, unit: str) -> str:
    if unit == "bytes/s":
        return f"{value / 1e6:,.0f} MB/s" if value >= 1e6 else f"{value / 1e3:,.1f} kB/s"
    return f"{value:,.0f} {unit}"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
