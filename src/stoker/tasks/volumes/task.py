"""`task: segment3d`: the `Task` of volumes."""

from __future__ import annotations

from stoker.tasks.base import Task, at

_HERE = "stoker.tasks.volumes"


class Segment3d(Task):
    unit = "patches"

    open_data = at(f"{_HERE}.data:open_data")
    listings = at(f"{_HERE}.data:listings")
    open_staging = at(f"{_HERE}.segment:open_staging")

    build_run = at(f"{_HERE}.segment:build_run")
    describe_run = at(f"{_HERE}.segment:describe_run")
    keep_preview = at(f"{_HERE}.preview_sheet:keep_with_run")

    open_training_loader = at(f"{_HERE}.data:open_training_loader")
    measure_speed = at(f"{_HERE}.data:measure_speed")
