"""What `stoker verify` checks about images: the recipe, the files and their classes, and whether labels are right."""

from __future__ import annotations

from stoker.tasks.checks import Check


def checks() -> tuple[Check, ...]:
    from stoker.tasks.images.verify.data_checks import DATA_CHECKS
    from stoker.tasks.images.verify.label_checks import LABEL_CHECKS
    from stoker.tasks.images.verify.recipe_checks import RECIPE_CHECKS

    return (*RECIPE_CHECKS, *DATA_CHECKS, *LABEL_CHECKS)
