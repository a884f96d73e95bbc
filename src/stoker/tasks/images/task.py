"""`task: classify`: the `Task` of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stoker.tasks.base import Task, at

if TYPE_CHECKING:
    from stoker.tasks.checks import Check

_HERE = "stoker.tasks.images"


class Classify(Task):
    metric = "acc1"
    scores = ("train/loss", "train/acc1", "train/acc5", "train/lr", "val/loss", "val/acc1", "val/acc5")
    size_key = "img_size"
    tuned_keys = ("decoder",)
    unit = items = "images"
    flags = {  # noqa: RUF012 - ClassVar in Task
        "eval": frozenset({"per_class", "real_labels", "plot"}),
        "pack": frozenset({"split", "shard_size", "longest", "shortest", "quality"}),
        "predict": frozenset({"top"}),
    }
    classifies = True

    open_data = at(f"{_HERE}.data:open_data")
    prepare_data = at(f"{_HERE}.data:prepare_data")
    listings = at(f"{_HERE}.data:listings")
    contents = at(f"{_HERE}.data:contents")
    record_choice = at(f"{_HERE}.data:record_choice")
    as_it_began = at(f"{_HERE}.classify:with_decoder_of")
    open_staging = at(f"{_HERE}.image_staging:stage_images")
    needed_files = at(f"{_HERE}.image_staging:needed_files")

    build_run = at(f"{_HERE}.classify:build_run")
    describe_run = at(f"{_HERE}.classify:describe_run")

    open_training_loader = at(f"{_HERE}.data:open_training_loader")
    measure_speed = at(f"{_HERE}.data:measure_speed")
    pack_variants = at(f"{_HERE}.pack.split_packing:ImageVariants")
    measure_storage = at(f"{_HERE}.data:storage_trial")
    utilisation_of = at("stoker.train.compute:utilisation_of")

    evaluate = at(f"{_HERE}.image_evaluation:evaluate")
    predict = at(f"{_HERE}.image_prediction:predict")
    export = at(f"{_HERE}.image_prediction:export")
    pack = at(f"{_HERE}.pack.split_packing:pack")
    preview = at(f"{_HERE}.image_preview:preview")

    plan_facts = at(f"{_HERE}.plan_facts:image_facts")
    traceable_step = at(f"{_HERE}.plan_facts:step_for")

    step_input = at(f"{_HERE}.plan_facts:step_input")
    epoch_length = at(f"{_HERE}.plan_facts:epoch_length")
    random_data = at(f"{_HERE}.plan_facts:random_data")
    milestones = at(f"{_HERE}.recipe_checks:milestones")

    def checks(self) -> Sequence[Check]:
        from stoker.tasks.images.data_checks import DATA_CHECKS
        from stoker.tasks.images.label_checks import LABEL_CHECKS
        from stoker.tasks.images.recipe_checks import RECIPE_CHECKS

        return (*RECIPE_CHECKS, *DATA_CHECKS, *LABEL_CHECKS)
