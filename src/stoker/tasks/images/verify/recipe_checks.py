"""What a config promises by its settings: the published recipe that it resembles, its learning rate and accuracy."""

from __future__ import annotations

from stoker.core.finding import Finding
from stoker.profile.host import HostConfig
from stoker.run.folder import run_name_for
from stoker.tasks.checks import Check, Subject, failed, passed
from stoker.tasks.images.verify.recipes import claimed_recipes, nearest_recipe
from stoker.train.schedule import PUBLISHED_SGD_BATCH, lr_warning

MOST_NAMED = 6
# A config with fewer of a recipe's settings does not count as a variation of it.
RESEMBLES_SHARE = 0.5

# Measured by the authors of github.com/cydal/ImageNet-Full-training: ResNet-50 from scratch on 100 classes with 500
# images each, 224 px. A young run can be compared with it long before a final accuracy is known.
HUNDRED_CLASSES = ((0, 3.2), (5, 10.6), (10, 24.0), (20, 41.5), (30, 60.6), (37, 64.3))
HUNDRED_CLASSES_SOURCE = "measured by cydal/ImageNet-Full-training on such a subset; its recipe may differ"
_ITS_SUBSET = {"model": "resnet50", "img_size": 224, "subset_classes": 100, "subset_train_per_class": 500}


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
