"""What a run can be expected to take and to reach: time, memory and cost by plan, accuracy where it is published."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stoker.errors import StokerError
from stoker.machine.host import HostConfig
from stoker.verify.checks import Subject
from stoker.verify.recipes import nearest_recipe

# Measured by the authors of github.com/cydal/ImageNet-Full-training: ResNet-50 from scratch on 100 classes with 500
# images each, 224 px. A young run can be compared with it long before a final accuracy is known.
HUNDRED_CLASSES = ((0, 3.2), (5, 10.6), (10, 24.0), (20, 41.5), (30, 60.6), (37, 64.3))
HUNDRED_CLASSES_SOURCE = "measured by cydal/ImageNet-Full-training on such a subset; its recipe may differ"
_ITS_SUBSET = {"model": "resnet50", "img_size": 224, "subset_classes": 100, "subset_train_per_class": 500}


@dataclass(frozen=True)
class Expected:
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def expect(subject: Subject) -> Expected:
    """What the plan and the recipe say about this run."""
    milestones, source = milestones_of(subject.config)
    try:
        plan = subject.plan
    except StokerError:
        return Expected(milestones=milestones, milestones_source=source)
    time = plan.time
    return Expected(
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


def milestones_of(config: HostConfig) -> tuple[tuple[tuple[int, float], ...], str | None]:
    """Published accuracies by epoch, and who published them; empty unless the config is the published one."""
    if config.task != "classify":
        return (), None
    recipe, differs = nearest_recipe(config)
    if not differs:
        return ((config.epochs - 1, recipe.accuracy),), f"top-1 of {recipe.name} on ImageNet, {recipe.source}"
    if all(getattr(config, key) == value for key, value in _ITS_SUBSET.items()) and config.weights is None:
        return tuple(point for point in HUNDRED_CLASSES if point[0] < config.epochs), HUNDRED_CLASSES_SOURCE
    return (), None
