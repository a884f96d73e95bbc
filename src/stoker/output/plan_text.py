"""A plan as text: what fits, how long it takes, what it costs, what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from stoker.facts.finding import Finding
from stoker.facts.plan import Plan, ScalingRow, TimeBudget, VramBudget
from stoker.output.text import format_table

BAR = 32


def plan_text(plan: Plan, name: str) -> str:
    """One verdict, the budgets with a bar each, time and cost, then what to change."""
    refused = plan.refused
    if refused:
        verdict = f"does not fit: {refused[0].message}"
    else:
        verdict = "fits" + (f"; {_duration_line(plan.time)}" if plan.time.total_s is not None else "")
    lines = [f"{name}: {verdict}", f"for {plan.hardware}", "", *_budgets(plan), "", *_time_lines(plan)]
    if plan.vram is not None:
        lines += ["", *_vram_lines(plan.vram)]
    lines += ["", "RAM by part:", *_parts(plan.ram.parts, plan.ram.total_bytes)]
    if plan.ram.torch_loader_bytes is not None:
        verdict = "" if plan.ram.torch_loader_verdict is None else f": {plan.ram.torch_loader_verdict}"
        size = _size(plan.ram.torch_loader_bytes)
        lines.append(f"  (torch's own loader would hold {size} of float batches in flight{verdict})")
    if plan.scaling:
        lines += ["", "the same on more accelerators:", _scaling_table(plan.scaling)]
    if plan.findings:
        lines += ["", "what to know:", *_finding_lines(plan.findings)]
    if plan.assumptions:
        lines += ["", "stated, not measured:", *(f"  - {line}" for line in plan.assumptions)]
    return "\n".join(lines)


def _budgets(plan: Plan) -> list[str]:
    rows = []
    if plan.vram is not None:
        rows.append(("VRAM", plan.vram.peak_bytes, plan.vram.limit_bytes, True))
    rows.append(("RAM", plan.ram.total_bytes, plan.ram.limit_bytes, True))
    rows.append(("/dev/shm", plan.shm.needed, plan.shm.limit, True))  # noqa: S108 - a label
    if plan.disk is not None:
        rows.append(("disk", plan.disk.needed, plan.disk.limit, True))
    rows.append(("open files", plan.open_files.needed, plan.open_files.limit, False))
    lines = []
    for label, needed, limit, is_bytes in rows:
        show = _size if is_bytes else (lambda count: f"{count:,}")
        if limit is None:
            lines.append(f"  {label:<11} {show(needed):>9}  (no limit known)")
            continue
        share = needed / limit if limit else float("inf")
        bar = "#" * min(BAR, round(BAR * share))
        word = "" if needed <= limit else "  TOO MUCH"
        lines.append(f"  {label:<11} {show(needed):>9} of {show(limit):>9}  [{bar:<{BAR}}] {share:4.0%}{word}")
    return lines


def _time_lines(plan: Plan) -> list[str]:
    time = plan.time
    steps = "" if plan.steps_per_epoch is None else f"{plan.steps_per_epoch:,} steps an epoch, "
    lines = [f"total batch {plan.total_batch}, {steps}{plan.epochs} epochs, learning rate {plan.lr:g}"]
    if time.images_per_second is None:
        return [*lines, "time: nothing is known of the accelerator, the loader or the storage"]
    lines.append(f"{time.images_per_second:,.0f} images/s, bound by the {time.bound_by}")
    width = max(len(name) for name in time.rates)
    for name, rate in sorted(time.rates.items(), key=lambda item: item[1].images_per_second):
        lines.append(f"  {name:<{width}}  {rate.images_per_second:>9,.0f} images/s  {rate.source}")
    if time.step_s is not None:
        lines.append(f"  a step {time.step_s * 1e3:,.0f} ms, {_duration_line(time)}")
    return lines


def _duration_line(time: TimeBudget) -> str:
    parts = []
    if time.epoch_s is not None:
        parts.append(f"an epoch {duration(time.epoch_s)}")
    if time.total_s is not None:
        parts.append(f"all of it {duration(time.total_s)}")
    if time.cost is not None:
        parts.append(f"cost {time.cost:,.2f}")
    return ", ".join(parts)


def _vram_lines(vram: VramBudget) -> list[str]:
    lines = ["VRAM at the peak of a step:", *_parts(vram.parts, vram.peak_bytes)]
    if vram.largest_batch is not None:
        line = f"largest batch that fits: {vram.largest_batch}"
        if vram.largest_batch_checkpointed is not None:
            line += f"; with gradient_checkpointing=true: {vram.largest_batch_checkpointed}"
        lines.append(line)
    if vram.note:
        lines.append(vram.note)
    return lines


def _parts(parts: Mapping[str, int], total: int) -> list[str]:
    shown = sorted(((name, size) for name, size in parts.items() if size), key=lambda part: -part[1])
    width = max((len(name) for name, _ in shown), default=0)
    return [
        f"  {name:<{width}}  {_size(size):>9}  {'#' * round(BAR * size / total) if total else ''}".rstrip()
        for name, size in shown
    ]


def _scaling_table(rows: tuple[ScalingRow, ...]) -> str:
    table = [
        [
            str(row.gpus), f"{row.total_batch:,}", str(row.workers), _size(row.ram_bytes), f"{row.lr:g}",
            "?" if row.images_per_second is None else f"{row.images_per_second:,.0f}",
            "?" if row.days is None else f"{row.days:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    text = format_table(table, ["GPUs", "total batch", "workers", "RAM", "LR", "images/s", "days"])
    return textwrap.indent(text, "  ")


def _finding_lines(findings: tuple[Finding, ...]) -> list[str]:
    lines = []
    for finding in findings:
        gain = "" if finding.speedup is None else f"  [up to {finding.speedup.high:.1f}x]"
        lines.append(f"  {'!' if finding.refuses else '-'} {finding.message}{gain}")
        if finding.fix:
            lines.append(f"      {finding.fix}")
    return lines


def _size(size: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.0f} KB"


def duration(seconds: float) -> str:
    """About how long, in the unit that people would use."""
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.1f} s"
