"""A plan as text, and as a plot: a bar by part for each resource, with its limit."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.core.console import finding_lines, format_table
from stoker.core.units import duration_text, number_text, size_text
from stoker.plan.records import Plan, ScalingRow, TimeBudget, VramBudget
from stoker.plan.timing import FED

BAR = 32


def plan_text(plan: Plan, name: str) -> str:
    """The verdict, each budget with a bar, time and cost, then what to change."""
    refused = plan.refused
    if refused:
        verdict = f"does not fit: {refused[0].seen}"
    else:
        verdict = "fits" + (f"; {_duration_line(plan.time)}" if plan.time.total_s is not None else "")
    lines = [f"{name}: {verdict}", f"for {plan.hardware}", "", *_budgets(plan), "", *_time_lines(plan)]
    if plan.vram is not None:
        lines += ["", *_vram_lines(plan.vram)]
    if plan.part is not None:
        lines += ["", *plan.part.lines]
    lines += ["", "RAM by part:", *_parts(plan.ram.parts, plan.ram.total_bytes)]
    if plan.ram.torch_loader_bytes is not None:
        verdict = "" if plan.ram.torch_loader_verdict is None else f": {plan.ram.torch_loader_verdict}"
        size = size_text(plan.ram.torch_loader_bytes)
        lines.append(f"  (torch's own loader would hold {size} of float batches in flight{verdict})")
    if plan.scaling:
        lines += ["", "with more accelerators:", _scaling_table(plan.scaling, plan.unit)]
    if plan.findings:
        lines += ["", "findings:"]
        for finding in plan.findings:
            lines += finding_lines(finding, "  ! " if finding.status == "failed" else "  - ")
    if plan.assumptions:
        lines += ["", "assumed, not measured:", *(f"  - {line}" for line in plan.assumptions)]
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
        show = size_text if is_bytes else (lambda count: f"{count:,}")
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
    steps = "" if plan.steps_per_epoch is None else f"{plan.steps_per_epoch:,} steps per epoch, "
    lines = [f"total batch {plan.total_batch}, {steps}{plan.epochs} epochs, learning rate {plan.lr:g}"]
    if time.images_per_second is None:
        return [*lines, "time: unknown, as no rate of the accelerator, the loader or the storage is known"]
    # The CPU accelerates nothing: there it is the model that takes the time.
    rates = {"model" if plan.on_cpu and name == "accelerator" else name: rate for name, rate in time.rates.items()}
    slowest = "model" if plan.on_cpu and time.bound_by == "accelerator" else time.bound_by
    fed = "loader" in rates or slowest not in ("accelerator", "model")
    lines.append(
        f"{number_text(time.images_per_second)} {plan.unit}/s, "
        + (f"bound by the {slowest}" if fed else "if reading keeps up, which is not known")
    )
    width = max(len(name) for name in rates)
    for name, rate in sorted(rates.items(), key=lambda item: item[1].images_per_second):
        lines.append(f"  {name:<{width}}  {number_text(rate.images_per_second):>9} {plan.unit}/s  {rate.source}")
    if (theirs := time.torch_loader) is not None:
        text = f"{number_text(theirs.images_per_second)} {plan.unit}/s, {theirs.source}"
        device = next((name for name in ("accelerator", "model") if name in rates), None)
        share = 1.0 if device is None else theirs.images_per_second / rates[device].images_per_second
        slower = "" if share >= FED else f"; that is {share:.0%} of what the {device} can take"
        lines.append(f"  torch's DataLoader with PIL on the same cores: {text}{slower}")
    if time.step_s is not None:
        lines.append("  " + ", ".join(filter(None, [f"{time.step_s * 1e3:,.0f} ms per step", _duration_line(time)])))
    return lines


def _duration_line(time: TimeBudget) -> str:
    parts = []
    if time.epoch_s is not None:
        parts.append(f"{duration_text(time.epoch_s)} per epoch")
    if time.total_s is not None:
        parts.append(f"{duration_text(time.total_s)} in total")
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
        f"  {name:<{width}}  {size_text(size):>9}  {'#' * round(BAR * size / total) if total else ''}".rstrip()
        for name, size in shown
    ]


def _scaling_table(rows: tuple[ScalingRow, ...], unit: str) -> str:
    table = [
        [
            str(row.gpus), f"{row.total_batch:,}", str(row.workers), size_text(row.ram_bytes), f"{row.lr:g}",
            "?" if row.images_per_second is None else number_text(row.images_per_second),
            "?" if row.days is None else f"{row.days:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    text = format_table(table, ["GPUs", "total batch", "workers", "RAM", "LR", f"{unit}/s", "days"])
    return textwrap.indent(text, "  ")


# The budget of a plan as a plot: a bar by part for each resource, with its limit.

_COLOURS = (
    "#3b6ea5", "#c05621", "#2f855a", "#805ad5", "#b7791f", "#2c7a7b", "#97266d", "#4a5568", "#9b2c2c", "#5a67d8",
)  # fmt: skip


def plot_plan(plan: Plan, name: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    budgets = _drawn_budgets(plan)
    figure, rows = pyplot.subplots(
        len(budgets) + 1, 1, figsize=(9, 1.5 * len(budgets) + 2.0), dpi=120, squeeze=False, layout="constrained"
    )
    for (label, parts, limit), row in zip(budgets, rows[:, 0], strict=False):
        _draw_budget(row, label, parts, limit)
    _draw_rates(rows[-1, 0], plan)
    state = "does not fit" if plan.refused else "fits"
    figure.suptitle(f"{name}: {state}\n{plan.hardware}", fontsize=11)
    figure.savefig(path)
    pyplot.close(figure)


def _drawn_budgets(plan: Plan) -> list[tuple[str, dict[str, int], int | None]]:
    found: list[tuple[str, dict[str, int], int | None]] = []
    if plan.vram is not None:
        found.append(("VRAM of one GPU", plan.vram.parts, plan.vram.limit_bytes))
    found.append(("RAM of a node", plan.ram.parts, plan.ram.limit_bytes))
    if plan.shm.needed:
        found.append(("/dev/shm", plan.shm.parts or {"batches": plan.shm.needed}, plan.shm.limit))  # noqa: S108 - a label
    if plan.disk is not None:
        found.append(("disk", plan.disk.parts or {"needed": plan.disk.needed}, plan.disk.limit))
    return found


def _draw_budget(axes: Any, label: str, parts: dict[str, int], limit: int | None) -> None:
    left, total = 0.0, sum(parts.values())
    for number, (name, size) in enumerate(sorted(parts.items(), key=lambda part: -part[1])):
        if size > 0:
            width = size / 1e9
            axes.barh([0], [width], left=left, color=_COLOURS[number % len(_COLOURS)], label=f"{name} {width:.2f}")
            left += width
    if limit is not None:
        fits = total <= limit
        axes.axvline(limit / 1e9, color="#2f855a" if fits else "#c53030", linewidth=2)
        axes.set_xlim(0, max(total, limit) / 1e9 * 1.05)
    of = "" if limit is None else f" of {limit / 1e9:.1f}"
    axes.set_title(f"{label}: {total / 1e9:.1f}{of} GB", loc="left", fontsize=9)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.2), fontsize=6, frameon=False)


def _draw_rates(axes: Any, plan: Plan) -> None:
    rates = plan.time.rates
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{plan.unit}/s: the slowest part sets the pace", loc="left", fontsize=9)
    if not rates:
        axes.set_axis_off()
        return
    names = list(rates)
    colours = ["#c53030" if name == plan.time.bound_by else "#3b6ea5" for name in names]
    bars = axes.barh(names, [rates[name].images_per_second for name in names], color=colours)
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=7)
    axes.tick_params(labelsize=7)
