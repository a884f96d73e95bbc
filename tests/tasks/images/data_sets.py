"""Subjects of the checks: a config over small folders of images, or over an index without any files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stoker.config import load_config
from stoker.profile.host import Machine, fit_to_machine
from stoker.tasks.checks import Subject
from stoker.tasks.images.layouts.class_folders import ClassListing, Seen, index_of_classes
from stoker.tasks.images.layouts.sample_index import SampleSet, all_samples, encode_name, pack_names

HERE = Machine(cpus=1, accelerators=0)


def subject_of(data: Path | str, *, weights: Path | None = None, deep: bool = False, **keys: Any) -> Subject:
    """A config for tiny images in this folder."""
    values = {"data_root": data, "model": "test_resnet", "img_size": 32, "decoder": "pillow", "num_workers": 0} | keys
    overrides = [f"{key}={value}" for key, value in values.items()]
    config, _ = fit_to_machine(load_config(None, overrides).config, HERE)
    return Subject(config, Path("tiny.yaml"), overrides, HERE, weights=weights, deep=deep)


def listed(names: Mapping[str, Sequence[str]], root: str = "/nowhere") -> SampleSet:
    """Samples that exist only by name: file names by folder."""
    parts = []
    for folder in sorted(names):
        packed = pack_names([encode_name(f"{folder}/{name}") for name in sorted(names[folder])])
        parts.append(ClassListing(folder, *packed, None, Seen()))
    return all_samples(index_of_classes(root, parts))


def subject_with(train: SampleSet, val: SampleSet | None, **keys: Any) -> Subject:
    """A subject whose samples are these, whatever the config says."""
    return subject_of("/nowhere", **keys).with_made("data", SimpleNamespace(train=train, val=val))


def outcome(checks: Sequence[Any], name: str, subject: Subject) -> Any:
    """What the check of that name finds."""
    (check,) = (check for check in checks if check.name == name)
    return check.run(subject)
