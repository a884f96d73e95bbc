"""`task: segment3d`: the `Task` of volumes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from stoker.config import Config
from stoker.tasks.base import Task, at

if TYPE_CHECKING:
    from stoker.profile.host import HostConfig

_HERE = "stoker.tasks.volumes"


class Segment3d(Task):
    unit = "patches"
    metric = "dice"
    scores = ("train/loss", "train/lr", "val/loss", "val/dice", "val/iou", "val/surface_dice")
    scores_of_eval = "scores of whole volumes and pictures of the worst"
    size_key = "patch_size"
    tuned_keys = ("volume_cache",)
    releases_gil = True
    convolves_3d = True
    items = "volumes"
    usual_keys = {"patch_size": "[128, 128, 128]"}  # noqa: RUF012 - ClassVar in Task
    flags = {  # noqa: RUF012 - ClassVar in Task
        "eval": frozenset({"score", "spacing", "more", "out", "pictures"}),
        "pack": frozenset({"clip", "median", "scale", "spacing", "dtype", "layout", "verify"}),
        "predict": frozenset({"out", "more", "format_", "probabilities", "submission", "force"}),
    }

    def recognises(self, source: str) -> bool:
        """Whether a folder has a layout of volumes, or a YAML file lists them; any other YAML file is a config."""
        place = Path(source).expanduser()
        if place.suffix.lower() in (".yaml", ".yml") and place.is_file():
            try:
                document = yaml.safe_load(place.read_text("utf-8-sig"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError):
                return False
            return isinstance(document, list) or (isinstance(document, dict) and "cases" in document)
        if any((place / name).is_file() for name in ("volumes.json", "dataset.json")):
            return True
        return (place / "train.csv").is_file() and (place / "train_images").is_dir()

    open_data = at(f"{_HERE}.data:open_data")
    listings = at(f"{_HERE}.data:listings")
    open_staging = at(f"{_HERE}.volume_staging:stage_volumes")
    needed_files = at(f"{_HERE}.volume_staging:needed_files")
    root_in_copy = at(f"{_HERE}.volume_staging:root_in_copy")

    build_run = at(f"{_HERE}.segment:build_run")
    describe_run = at(f"{_HERE}.segment:describe_run")

    open_training_loader = at(f"{_HERE}.data:open_training_loader")
    measure_speed = at(f"{_HERE}.data:measure_speed")

    def kept_bytes(self, config: Config) -> int:
        """Decoded chunks of compressed volumes."""
        return config.volume_cache

    def decoded_bytes(self, config: HostConfig) -> int | None:
        from stoker.tasks.volumes.planning import volume_facts

        return volume_facts(config).decoded_bytes

    pack_variants = at(f"{_HERE}.pack.cases_packing:VolumeVariants")

    evaluate = at(f"{_HERE}.volume_evaluation:evaluate")
    score_masks = at(f"{_HERE}.volume_evaluation:score_masks")
    predict = at(f"{_HERE}.predict.predict_folder:predict")
    export = at(f"{_HERE}.volume_export:export")
    pack = at(f"{_HERE}.pack.cases_packing:pack")
    preview = at(f"{_HERE}.volume_preview:preview")

    plan_facts = at(f"{_HERE}.planning:volume_facts")
    traceable_step = at(f"{_HERE}.planning:traceable_step")
    updates_per_epoch = at(f"{_HERE}.data:updates_per_epoch")
    plan_part = at(f"{_HERE}.planning:volume_part")

    step_input = at(f"{_HERE}.volume_checks:step_input")
    checks = at(f"{_HERE}.volume_checks:checks")
    epoch_length = at(f"{_HERE}.data:epoch_length")
