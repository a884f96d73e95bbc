"""The whole config: one flat namespace, put together from the groups in `keys` and `volume_keys`.

Every key is unique and none takes a mapping, so a key on the command line needs no path, and a section in a file is
only a heading.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from stoker.config.fields import KeyGroup
from stoker.config.keys import AugmentationKeys, DataKeys, LoaderKeys, ModelKeys, OptimizationKeys, RunKeys
from stoker.config.volume_keys import PredictionKeys, VolumeKeys

GROUPS: tuple[type[KeyGroup], ...] = (
    DataKeys,
    LoaderKeys,
    ModelKeys,
    AugmentationKeys,
    VolumeKeys,
    OptimizationKeys,
    PredictionKeys,
    RunKeys,
)
"""The groups, in display order."""

FOREIGN_ALIASES = {
    "accumulate_grad_batches": "gradient_accumulation",
    "gradient_clip_val": "clip_grad_norm",
    "eta_min": "min_lr",
    "model_name": "model",
    "log_every_n_steps": "log_every",
    "max_classes": "subset_classes",
    "max_samples_per_class": "subset_train_per_class",
}
"""Aliases that show that a file was written for another program (`stoker.config.importing`)."""

ALIASES = {
    "train_batch_size": "batch_size",
    "workers": "num_workers",
    "accumulate_steps": "gradient_accumulation",
    "max_epochs": "epochs",
    **FOREIGN_ALIASES,
}
"""Names that other tools use for a key."""

SECTION_NAMES = frozenset(
    {group.__name__.removesuffix("Keys").lower() for group in GROUPS}
    | {"training", "train", "validation", "val", "optimizer", "scheduler", "system", "hardware", "logging"}
)
"""Common section names; such a section may be empty, and may have the same name as a key."""


class Config(DataKeys, LoaderKeys, ModelKeys, AugmentationKeys, VolumeKeys, OptimizationKeys, PredictionKeys, RunKeys):
    """Every key."""


def key_names() -> list[str]:
    """Every key, in display order."""
    return [name for group in GROUPS for name in group.model_fields]


def describe_type(name: str) -> str:
    """The type of a key, short enough for a table: `int`, `auto | process | thread`, `size`."""
    return _type_words(_json_schema()["properties"][name])


@cache
def _json_schema() -> dict[str, Any]:
    return Config.model_json_schema()


def _type_words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " | ".join(_type_words(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"[{', '.join(_type_words(item) for item in schema['prefixItems'])}]"
    if isinstance(schema.get("type"), list):  # sizes and times are strings with a unit
        return "time" if "18h" in str(schema.get("examples")) else "size"
    return {"integer": "int", "number": "float", "string": "text", "boolean": "true | false", "null": "none"}[
        str(schema["type"])
    ]
