"""What a config promises by its settings: the published recipe that it resembles, its learning rate and accuracy.

The recipes are for ResNet-50 on ImageNet. Sources: 'ResNet Strikes Back' (arXiv 2110.00476, table 2 and its text),
torchvision's issue 3995.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.core.finding import Finding
from stoker.profile.host import HostConfig
from stoker.run.folder import run_name_for
from stoker.tasks.checks import Check, Subject, failed, passed
from stoker.tasks.images.layouts import imagenet
from stoker.train.schedule import PUBLISHED_SGD_BATCH, lr_warning, scaled_lr

MOST_NAMED = 6
# A config with fewer of a recipe's settings does not count as a variation of it.
RESEMBLES_SHARE = 0.5

# Measured by the authors of github.com/cydal/ImageNet-Full-training: ResNet-50 from scratch on 100 classes with 500
# images each, 224 px. A young run can be compared with it long before a final accuracy is known.
HUNDRED_CLASSES = ((0, 3.2), (5, 10.6), (10, 24.0), (20, 41.5), (30, 60.6), (37, 64.3))
HUNDRED_CLASSES_SOURCE = "measured by cydal/ImageNet-Full-training on such a subset; its recipe may differ"
_ITS_SUBSET = {"model": "resnet50", "img_size": 224, "subset_classes": 100, "subset_train_per_class": 500}


@dataclass(frozen=True)
class PublishedRecipe:
    """A published way to train, and what it reached."""

    name: str
    """As people call it."""
    source: str
    accuracy: float
    """Top-1 on ImageNet's validation images, in percent."""
    settings: Mapping[str, Any]
    """In the terms of `settings_of`."""
    claimed_by: re.Pattern[str]
    """Names of configs or runs that claim to be it."""


@dataclass(frozen=True)
class Deviation:
    """One setting of a config that is not the recipe's."""

    text: str
    """'CE instead of BCE'."""
    fix: str | None
    """As KEY=VALUE; None if no key sets it."""


_A1 = {
    "model": "resnet50", "classes": imagenet.CLASSES, "whole_data": True, "epochs": 600, "img_size": 224,
    "val_img_size": 224, "crop_ratio": 0.95, "total_batch": 2048, "optimizer": "lamb", "lr": 5e-3, "weight_decay": 0.01,
    "decay_bias_and_norm": False, "lr_scheduler": "cosine", "warmup_epochs": 5, "loss": "bce", "label_smoothing": 0.1,
    "mixup_alpha": 0.2, "cutmix_alpha": 1.0, "mix_probability": 1.0, "repeated_augmentation": 3,
    "auto_augment": "RandAugment 7/0.5", "random_erasing": 0.0, "drop_path": 0.05, "ema": False,
}  # fmt: skip
_A2 = _A1 | {"epochs": 300, "weight_decay": 0.02, "label_smoothing": 0.0, "mixup_alpha": 0.1}
_A3 = _A2 | {
    "epochs": 100, "img_size": 160, "lr": 8e-3, "repeated_augmentation": 1, "auto_augment": "RandAugment 6/0.5",
    "drop_path": 0.0,
}  # fmt: skip
_TORCHVISION = _A1 | {
    "img_size": 176, "crop_ratio": 224 / 232, "total_batch": 1024, "optimizer": "sgd", "lr": 0.5, "momentum": 0.9,
    "weight_decay": 2e-5, "loss": "cross_entropy", "repeated_augmentation": 4, "auto_augment": "TrivialAugment",
    "random_erasing": 0.1, "drop_path": 0.0, "ema": True,
}  # fmt: skip


def _procedure(name: str) -> re.Pattern[str]:
    # Not `a100`, and not Google Cloud's machines, whose names begin with a2-highgpu.
    return re.compile(rf"(?<![a-z0-9]){name}(?![a-z0-9]|-(?:high|mega|ultra)gpu)")


_PAPER = "'ResNet Strikes Back', arXiv 2110.00476"
RECIPES = (
    PublishedRecipe("A1", _PAPER, 80.4, _A1, _procedure("a1")),
    PublishedRecipe("A2", _PAPER, 79.8, _A2, _procedure("a2")),
    PublishedRecipe("A3", _PAPER, 78.1, _A3, _procedure("a3")),
    PublishedRecipe(
        "torchvision V2", "torchvision issue 3995", 80.86, _TORCHVISION, re.compile(r"(torchvision|tv)[-_. ]?v2")
    ),
)
# Says 'one of the paper's' without saying which.
_ANY_OF_PAPER = re.compile(r"strikes[-_. ]?back|(?<![a-z])rsb(?![a-z])")


def claimed_recipes(name: str) -> tuple[PublishedRecipe, ...]:
    """The recipes that a config's name claims; empty if it claims none."""
    name = name.lower()
    named = tuple(recipe for recipe in RECIPES if recipe.claimed_by.search(name))
    if not named and _ANY_OF_PAPER.search(name):
        return tuple(recipe for recipe in RECIPES if recipe.source == _PAPER)
    return named


def nearest_recipe(
    config: HostConfig, among: tuple[PublishedRecipe, ...] = RECIPES
) -> tuple[PublishedRecipe, list[Deviation]]:
    """The recipe with the fewest differences, and these."""
    compared = [(recipe, differences(config, recipe)) for recipe in among]
    return min(compared, key=lambda pair: len(pair[1]))


def settings_of(config: HostConfig, recipe: PublishedRecipe) -> dict[str, Any]:
    """The config in the recipe's terms. Its learning rate is the one for the recipe's total batch: a config that scales
    it with another total batch differs in the batch only."""
    policy = {"none": None, "trivialaugment": "TrivialAugment"}.get(
        config.auto_augment, f"RandAugment {config.randaugment_magnitude:g}/{config.randaugment_magnitude_std:g}"
    )
    values = {key: getattr(config, key) for key in recipe.settings if hasattr(config, key)}
    return values | {
        "classes": config.num_classes or config.subset_classes or imagenet.CLASSES,
        "whole_data": config.subset_train_per_class is None and config.steps_per_epoch is None,
        "val_img_size": config.val_img_size or config.img_size,
        "total_batch": config.batch_size * config.devices * config.num_nodes * config.gradient_accumulation,
        "lr": scaled_lr(config.lr, recipe.settings["total_batch"], config.lr_reference_batch, config.scale_lr),
        # A threshold is applied after smoothing, and cancels it.
        "label_smoothing": 0.0 if config.bce_target_threshold is not None else config.label_smoothing,
        "auto_augment": policy,
        "ema": config.ema_decay is not None,
    }


def differences(config: HostConfig, recipe: PublishedRecipe) -> list[Deviation]:
    """What makes the config another recipe, in the order of the recipe's table."""
    ours = settings_of(config, recipe)
    found = []
    for setting, wanted in recipe.settings.items():
        seen = ours[setting]
        if not _same(seen, wanted):
            found.append(Deviation(_difference_text(setting, seen, wanted), _fix(setting, wanted, config, recipe)))
    return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return math.isclose(a, b, rel_tol=2e-3, abs_tol=1e-9)
    return bool(a == b)


_WORDS: dict[str, Callable[[Any], str]] = {
    "classes": lambda value: f"{value:,} classes",
    "whole_data": lambda value: "all images" if value else "a part of the images in an epoch",
    "epochs": lambda value: f"{value} epochs",
    "img_size": lambda value: f"{value} px in training",
    "val_img_size": lambda value: f"{value} px in validation",
    "crop_ratio": lambda value: f"a crop ratio of {value:.4g}",
    "total_batch": lambda value: f"a total batch of {value:,}",
    "optimizer": lambda value: {"adamw": "AdamW"}.get(value, value.upper()),
    "lr": lambda value: f"learning rate {value:g}",
    "momentum": lambda value: f"momentum {value:g}",
    "weight_decay": lambda value: f"weight decay {value:g}",
    "decay_bias_and_norm": lambda value: f"{'' if value else 'no '}weight decay on bias and norm",
    "lr_scheduler": lambda value: f"a {value} schedule",
    "warmup_epochs": lambda value: f"{value} epochs of warmup" if value else "no warmup",
    "loss": lambda value: {"bce": "BCE", "cross_entropy": "CE"}.get(value, value),
    "label_smoothing": lambda value: f"label smoothing {value:g}" if value else "no label smoothing",
    "mixup_alpha": lambda value: f"mixup {value:g}" if value else "no mixup",
    "cutmix_alpha": lambda value: f"CutMix {value:g}" if value else "no CutMix",
    "mix_probability": lambda value: f"{value:.0%} of the batches mixed",
    "repeated_augmentation": lambda value: f"{value} repeats of an image" if value > 1 else "no repeated augmentation",
    "auto_augment": lambda value: value or "no augmentation policy",
    "random_erasing": lambda value: f"random erasing {value:g}" if value else "no random erasing",
    "drop_path": lambda value: f"stochastic depth {value:g}" if value else "no stochastic depth",
    "ema": lambda value: "EMA" if value else "no EMA",
}


def _difference_text(setting: str, seen: Any, wanted: Any) -> str:
    word = _WORDS.get(setting, str)
    ours, theirs = word(seen), word(wanted)
    if ours.startswith("no "):
        return ours
    return f"{ours} instead of {'none' if theirs.startswith('no ') else _without_shared_words(theirs, ours)}"


def _without_shared_words(theirs: str, ours: str) -> str:
    """'mixup 0.1' beside 'mixup 0.2' is '0.1'."""
    kept, others = theirs.split(), ours.split()
    for end in (0, -1):
        while len(kept) > 1 and len(others) > 1 and kept[end] == others[end]:
            del kept[end], others[end]
    return " ".join(kept)


def _fix(setting: str, wanted: Any, config: HostConfig, recipe: PublishedRecipe) -> str | None:
    """The KEY=VALUE that removes a difference."""
    if setting == "total_batch":
        ranks = config.devices * config.num_nodes * config.gradient_accumulation
        return f"batch_size={wanted // ranks}" if wanted % ranks == 0 else None
    if setting == "lr":
        return f"lr={wanted:g} lr_reference_batch={recipe.settings['total_batch']}"
    if setting == "auto_augment":
        if wanted == "TrivialAugment":
            return "auto_augment=trivialaugment"
        magnitude, deviation = wanted.removeprefix("RandAugment ").split("/")
        return f"auto_augment=randaugment randaugment_magnitude={magnitude} randaugment_magnitude_std={deviation}"
    if setting == "ema":
        # torchvision's average over 600 epochs: see configs/torchvision_v2.yaml.
        return "ema_decay=0.99890773 ema_every=32 ema_warmup=copy" if wanted else "ema_decay=null"
    if setting == "whole_data":
        return "subset_train_per_class=null steps_per_epoch=null"
    if setting == "classes":
        return "num_classes=null subset_classes=null"
    shown = (
        str(wanted).lower() if isinstance(wanted, bool) else f"{wanted:.6g}" if isinstance(wanted, float) else wanted
    )
    return f"{setting}={shown}"


def check_recipe(subject: Subject) -> Finding:
    """Names the published recipe that the config resembles, and what differs; fails if its name claims more."""
    config = subject.config
    names = {subject.path.stem, run_name_for(config, subject.path)}
    claimed = claimed_recipes(" ".join(sorted(names)))
    recipe, differs = nearest_recipe(config, claimed) if claimed else nearest_recipe(config)
    facts = {"recipe": recipe.name, "differences": [one.text for one in differs]}
    if not differs:
        return passed(
            f"{recipe.name} ({recipe.source}), which reached {recipe.accuracy:g} % top-1 on ImageNet",
            accuracy=recipe.accuracy,
            **facts,
        )
    texts = [one.text for one in differs]
    more = f", and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    except_ = f"except: {', '.join(texts[:MOST_NAMED])}{more}"
    if claimed:
        called = " and ".join(sorted(names))
        settings = [word for one in differs if one.fix is not None for word in one.fix.split()]
        return failed(
            f"called {called}, but it is {recipe.name} ({recipe.source}) {except_}",
            f"stoker train {subject.arguments_with(settings)}; or another file name and run_name=",
            *(texts[MOST_NAMED:] if more else ()),
            **facts,
        )
    if len(differs) > (1 - RESEMBLES_SHARE) * len(recipe.settings):
        return passed(
            f"no published recipe is close (the nearest, {recipe.name}, differs in {len(differs)} of "
            f"{len(recipe.settings)} settings)",
            **facts,
        )
    return passed(f"{recipe.name} ({recipe.source}), {except_}", *(texts[MOST_NAMED:] if more else ()), **facts)


def check_learning_rate(subject: Subject) -> Finding:
    """Fails if SGD's peak learning rate is far above the published one for this total batch."""
    config = subject.config
    total, peak = subject.total_batch, subject.peak_lr
    facts = {"peak_lr": peak, "total_batch": total}
    warning = lr_warning(config.optimizer, peak, total)
    if warning is not None:
        return failed(
            warning.partition("; if")[0], f"lr_reference_batch={PUBLISHED_SGD_BATCH}, or a lower lr=", **facts
        )
    scaled = f" = {config.lr:g} x {total} / {config.lr_reference_batch}" if config.scale_lr else ", not scaled"
    return passed(f"{peak:g} for a total batch of {total:,}{scaled}", **facts)


def check_train_accuracy(subject: Subject) -> Finding:
    """Says what `train/acc1` will mean: only batches that are not mixed count."""
    config = subject.config
    mixing = config.mixup_alpha > 0 or config.cutmix_alpha > 0
    share = 1 - config.mix_probability if mixing else 1.0
    if share == 1.0:
        seen = "train/acc1 is over all training batches: nothing is mixed"
    elif share == 0.0:
        seen = "train/acc1 is left out: every batch is mixed, and a mixed image has no single correct class"
    else:
        seen = f"train/acc1 is over the {share:.0%} of the batches that are not mixed"
    return passed(seen, unmixed_share=share)


def milestones(config: HostConfig) -> tuple[tuple[tuple[int, float], ...], str | None]:
    """Published accuracies by epoch, and who published them; empty unless the config is the published one."""
    recipe, differs = nearest_recipe(config)
    if not differs:
        return ((config.epochs - 1, recipe.accuracy),), f"top-1 of {recipe.name} on ImageNet, {recipe.source}"
    if all(getattr(config, key) == value for key, value in _ITS_SUBSET.items()) and config.weights is None:
        return tuple(point for point in HUNDRED_CLASSES if point[0] < config.epochs), HUNDRED_CLASSES_SOURCE
    return (), None


RECIPE_CHECKS = (
    Check("recipe", "config", "the published recipe that it resembles, and what differs", check_recipe, cheap=True),
    Check("learning-rate", "config", "the peak learning rate for this total batch", check_learning_rate),
    Check(
        "train-accuracy", "model", "what train/acc1 means with this mixing", check_train_accuracy, after="checkpoint"
    ),
)
