"""What a run can be expected to take and to reach: time, memory and cost by plan, accuracy where it is published."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.core.errors import StokerError
from stoker.core.units import duration_text, size_text
from stoker.tasks.base import task_for
from stoker.tasks.checks import Subject
from stoker.verify.machine import plan_of


@dataclass(frozen=True)
class Forecast:
    """Predictions; None where nothing is known."""

    hours: float | None = None
    images_per_second: float | None = None
    bound_by: str | None = None
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    cost: float | None = None
    milestones: tuple[tuple[int, float], ...] = ()
    """(epoch, val/acc1 in percent), only where a source publishes them for this recipe."""
    milestones_source: str | None = None


def expect(subject: Subject) -> Forecast:
    """What the plan and the recipe say about this run."""
    milestones, source = task_for(subject.config).milestones(subject.config)
    try:
        plan = plan_of(subject)
    except StokerError:
        return Forecast(milestones=milestones, milestones_source=source)
    time = plan.time
    return Forecast(
        hours=None if time.total_s is None else time.total_s / 3600,
        images_per_second=time.images_per_second,
        bound_by=time.bound_by,
        vram_bytes=None if plan.vram is None else plan.vram.peak_bytes,
        ram_bytes=plan.ram.total_bytes,
        disk_bytes=None if plan.disk is None else plan.disk.needed,
        cost=time.cost,
        milestones=milestones,
        milestones_source=source,
    )


def forecast_lines(forecast: Forecast) -> list[str]:
    """How long the run takes, what it needs and costs, and the accuracy that its recipe publishes."""
    lines = []
    if forecast.hours is not None:
        pace = "" if forecast.images_per_second is None else f" at {forecast.images_per_second:,.0f} images/s"
        bound = "" if forecast.bound_by is None else f", bound by the {forecast.bound_by}"
        lines.append(f"time    {duration_text(3600 * forecast.hours)}{pace}{bound} (a plan, not a measurement)")
    sizes = (("VRAM", forecast.vram_bytes), ("RAM", forecast.ram_bytes), ("disk", forecast.disk_bytes))
    memory = [f"{size_text(size)} of {name}" for name, size in sizes if size is not None]
    if memory:
        lines.append(f"memory  {', '.join(memory)}")
    if forecast.cost is not None:
        lines.append(f"cost    {forecast.cost:,.2f}")
    if forecast.milestones:
        points = ", ".join(f"{value:g} % after epoch {epoch}" for epoch, value in forecast.milestones)
        lines.append(f"val     {points} ({forecast.milestones_source})")
    return lines or ["nothing is known: the plan could not be made"]
