"""The budget of a plan as a picture: a bar for each thing that can run out, by part, beside its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.facts.plan import Plan

_COLOURS = (
    "#3b6ea5",
    "#c05621",
    "#2f855a",
    "#805ad5",
    "#b7791f",
    "#2c7a7b",
    "#97266d",
    "#4a5568",
    "#9b2c2c",
    "#5a67d8",
)


def plot_plan(plan: Plan, name: str, path: Path) -> None:
    """Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    budgets = _budgets(plan)
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


def _budgets(plan: Plan) -> list[tuple[str, dict[str, int], int | None]]:
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
    axes.set_title("images/s: the slowest sets the pace", loc="left", fontsize=9)
    if not rates:
        axes.set_axis_off()
        return
    names = list(rates)
    colours = ["#c53030" if name == plan.time.bound_by else "#3b6ea5" for name in names]
    bars = axes.barh(names, [rates[name].images_per_second for name in names], color=colours)
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=7)
    axes.tick_params(labelsize=7)
