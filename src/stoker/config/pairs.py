"""Rules over several keys: values that are valid alone but not together.

A rule is one decorated generator, which yields what is wrong with a config whose values are valid one by one. The
decorator names every key it reads: a rule is skipped if one of them is itself invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stoker.config.keys import AugmentationKeys
from stoker.config.schema import Config
from stoker.config.volume_keys import PredictionKeys, VolumeKeys

PairCheck = Callable[[Config], Iterator[str]]


@dataclass(frozen=True)
class PairRule:
    keys: tuple[str, ...]
    problems: PairCheck
    forbids: bool = True
    """False for what works but is probably a mistake: a warning, not an error."""

    def check(self, config: Config) -> str | None:
        return next(self.problems(config), None)


RULES: list[PairRule] = []
"""All rules, in the order in which their problems are listed."""


def pair_rule(*keys: str, forbids: bool = True) -> Callable[[PairCheck], PairCheck]:

    def add(check: PairCheck) -> PairCheck:
        RULES.append(PairRule(keys, check, forbids))
        return check

    return add


@pair_rule("prefetch_factor", "num_workers")
def _prefetch_needs_workers(c: Config) -> Iterator[str]:
    if c.num_workers == 0 and c.prefetch_factor is not None:
        yield f"prefetch_factor: {c.prefetch_factor} needs workers, but num_workers is 0"


@pair_rule("warmup_epochs", "epochs")
def _warmup_shorter_than_run(c: Config) -> Iterator[str]:
    if c.warmup_epochs >= c.epochs:
        yield f"warmup_epochs: {c.warmup_epochs} must be less than epochs: {c.epochs}"


def _mixed_by(c: Config) -> str:
    return f"mixup_alpha: {c.mixup_alpha}" if c.mixup_alpha > 0 else f"cutmix_alpha: {c.cutmix_alpha}"


@pair_rule("mixup_alpha", "cutmix_alpha", "num_classes")
def _mixing_needs_classes(c: Config) -> Iterator[str]:
    if c.num_classes == 1 and (c.mixup_alpha > 0 or c.cutmix_alpha > 0):
        yield f"{_mixed_by(c)} mixes classes, but num_classes is 1"


@pair_rule("mixup_alpha", "cutmix_alpha", "batch_size")
def _mixing_needs_pairs(c: Config) -> Iterator[str]:
    if c.batch_size == 1 and (c.mixup_alpha > 0 or c.cutmix_alpha > 0):
        yield f"{_mixed_by(c)} mixes the samples of a batch, but batch_size is 1"


@pair_rule("mixup_alpha", "cutmix_alpha", "task")
def _mixing_is_for_classes(c: Config) -> Iterator[str]:
    if c.task == "segment3d" and (c.mixup_alpha > 0 or c.cutmix_alpha > 0):
        yield f"{_mixed_by(c)} mixes labels of whole images, so it does not work with task: segment3d"


@pair_rule("repeated_augmentation", "batch_size", "devices", "num_nodes")
def _repeats_divide_batch(c: Config) -> Iterator[str]:
    # Where there are as many ranks as repeats, each repeat goes to another rank and any batch will do
    # (the published recipes: 3 repeats, 8 x 256). With fewer, the repeats of an image share a batch.
    ranks = c.num_nodes * (1 if c.devices == "auto" else c.devices)
    if ranks < c.repeated_augmentation and c.batch_size % c.repeated_augmentation:
        fitting = c.batch_size - c.batch_size % c.repeated_augmentation
        yield (
            f"repeated_augmentation: {c.repeated_augmentation} does not divide batch_size: {c.batch_size}; "
            f"use {fitting or c.repeated_augmentation}, or set devices to at least {c.repeated_augmentation}"
        )


@pair_rule("bce_target_threshold", "loss")
def _threshold_needs_bce(c: Config) -> Iterator[str]:
    if c.bce_target_threshold is not None and c.loss != "bce":
        yield f"bce_target_threshold: {c.bce_target_threshold} has no effect with loss: {c.loss}"


@pair_rule("bce_target_threshold", "label_smoothing", "loss", forbids=False)
def _smoothing_is_cancelled(c: Config) -> Iterator[str]:
    if c.bce_target_threshold is not None and c.label_smoothing > 0 and c.loss == "bce":
        yield f"bce_target_threshold: {c.bce_target_threshold} cancels label_smoothing: {c.label_smoothing}"


@pair_rule("ema_every", "ema_warmup", "ema_decay")
def _average_needs_decay(c: Config) -> Iterator[str]:
    if c.ema_decay is None and c.ema_every != 1:
        yield f"ema_every: {c.ema_every} has no effect without ema_decay"
    if c.ema_decay is None and c.ema_warmup != "ramp":
        yield f"ema_warmup: {c.ema_warmup} has no effect without ema_decay"


@pair_rule("task", "patch_size")
def _patch_for_volumes(c: Config) -> Iterator[str]:
    if c.task == "segment3d" and c.patch_size is None:
        yield "task: segment3d needs a patch_size, for example [72, 136, 136]"
    if c.task == "classify" and c.patch_size is not None:
        yield "patch_size is for task: segment3d; images take img_size"


_FOR_VOLUMES = tuple(name for name in (*VolumeKeys.model_fields, *PredictionKeys.model_fields) if name != "patch_size")
_FOR_IMAGES = (
    "val_fraction", "samples_csv", "train_csv", "val_csv", "subset_classes", "subset_train_per_class",
    "subset_val_per_class", "decoder", "decode_mode", "img_size", "val_img_size", "crop_ratio", "interpolation",
    *(name for name in AugmentationKeys.model_fields if name not in ("mixup_alpha", "cutmix_alpha")), "loss",
    "bce_target_threshold", "drop_path",
)  # fmt: skip
"""Keys of one task, which would do nothing in the other; mixing has a rule of its own."""


@pair_rule("task", *_FOR_VOLUMES, *_FOR_IMAGES)
def _keys_of_the_task(c: Config) -> Iterator[str]:
    task, others = {"classify": ("segment3d", _FOR_VOLUMES), "segment3d": ("classify", _FOR_IMAGES)}.get(
        c.task, ("", ())
    )
    defaults = Config()
    if found := [name for name in others if getattr(c, name) != getattr(defaults, name)]:
        yield f"{', '.join(found)}: only task: {task} uses {'it' if len(found) == 1 else 'them'}, and this is {c.task}"


_MEASURED = {"classify": ("auto", "acc1", "acc5", "loss"), "segment3d": ("auto", "dice", "iou", "surface_dice", "loss")}


@pair_rule("task", "best_by")
def _metric_of_the_task(c: Config) -> Iterator[str]:
    known = _MEASURED.get(c.task, (c.best_by,))
    if c.best_by not in known:
        yield f"best_by: {c.best_by} is not measured by task: {c.task}, but {', '.join(known[1:])}"


def _bounds_in_order(key: str) -> None:
    def check(c: Config) -> Iterator[str]:
        low, high = getattr(c, key)
        if low > high:
            yield f"{key}: {[low, high]} has its bounds in the wrong order"

    pair_rule(key)(check)


_bounds_in_order("volume_scales")


@pair_rule("task", "fold", "folds")
def _fold_exists(c: Config) -> Iterator[str]:
    if c.fold != "all" and c.fold >= c.folds:
        yield f"fold: {c.fold}, but with folds: {c.folds} there are 0 to {c.folds - 1}"


@pair_rule("early_stopping", "fold", "task")
def _early_stopping_needs_a_fold(c: Config) -> Iterator[str]:
    if c.early_stopping is not None and c.task == "segment3d" and c.fold == "all":
        yield f"early_stopping: {c.early_stopping} needs validation, but fold: all has none"


@pair_rule("nesterov", "optimizer", "momentum")
def _nesterov_needs_momentum(c: Config) -> Iterator[str]:
    if c.nesterov and (c.optimizer != "sgd" or c.momentum == 0):
        yield f"nesterov needs optimizer: sgd with momentum above 0, not {c.optimizer} with {c.momentum}"


_bounds_in_order("crop_scale")
_bounds_in_order("crop_aspect")


@pair_rule("start_img_size", "img_size")
def _resizing_grows(c: Config) -> Iterator[str]:
    if c.start_img_size is not None and c.start_img_size > c.img_size:
        yield f"start_img_size: {c.start_img_size} is larger than img_size: {c.img_size}"


@pair_rule("resize_epochs", "start_img_size", "epochs")
def _resizing_ends(c: Config) -> Iterator[str]:
    if c.resize_epochs is not None and c.start_img_size is None:
        yield f"resize_epochs: {c.resize_epochs} has no effect without start_img_size"
    if c.resize_epochs is not None and c.resize_epochs > c.epochs:
        yield f"resize_epochs: {c.resize_epochs} is more than epochs: {c.epochs}"


@pair_rule("cache_size", "cache_dir")
def _cache_size_needs_cache(c: Config) -> Iterator[str]:
    if c.cache_size is not None and c.cache_dir is None:
        yield "cache_size has no effect without cache_dir"


@pair_rule("stage_to", "cache_dir")
def _one_local_copy(c: Config) -> Iterator[str]:
    if c.stage_to is not None and c.cache_dir is not None:
        yield f"stage_to: {c.stage_to} and cache_dir: {c.cache_dir} would both keep the data; use one of them"


@pair_rule("stage_to", "data_root")
def _staged_from_elsewhere(c: Config) -> Iterator[str]:
    if c.stage_to is not None and c.data_root is None:
        yield "stage_to has no effect without data_root"
    if c.stage_to is not None and "://" in c.stage_to:
        yield f"stage_to: {c.stage_to} is a URL; it has to be a local folder"


@pair_rule("samples_csv", "train_csv", "val_csv")
def _one_way_to_list(c: Config) -> Iterator[str]:
    if c.samples_csv is not None and (c.train_csv is not None or c.val_csv is not None):
        yield "samples_csv lists all images, so it excludes train_csv and val_csv"


@pair_rule("val_fraction", "val_csv")
def _one_validation_set(c: Config) -> Iterator[str]:
    if c.val_fraction is not None and c.val_csv is not None:
        yield f"val_fraction: {c.val_fraction} and val_csv: {c.val_csv} are two validation sets; use one of them"


@pair_rule("strategy", "devices", "num_nodes")
def _single_process_is_single(c: Config) -> Iterator[str]:
    if c.strategy == "single" and ((c.devices != "auto" and c.devices > 1) or c.num_nodes > 1):
        yield f"strategy: single uses one device, but devices is {c.devices} and num_nodes {c.num_nodes}"


@pair_rule("min_lr", "lr")
def _min_lr_below_lr(c: Config) -> Iterator[str]:
    if c.min_lr > c.lr:
        yield f"min_lr: {c.min_lr} is above lr: {c.lr}"


@pair_rule("subset_classes", "num_classes")
def _subset_fits_classes(c: Config) -> Iterator[str]:
    if c.subset_classes is not None and c.num_classes is not None and c.subset_classes != c.num_classes:
        yield f"subset_classes: {c.subset_classes} does not match num_classes: {c.num_classes}"


@pair_rule("steps_per_epoch", "limit_train_batches")
def _one_length_of_an_epoch(c: Config) -> Iterator[str]:
    if c.steps_per_epoch is not None and c.limit_train_batches is not None:
        yield (
            f"steps_per_epoch: {c.steps_per_epoch} and limit_train_batches: {c.limit_train_batches} both set the "
            "length of an epoch; use one of them"
        )


@pair_rule("limit_train_batches", "gradient_accumulation")
def _limit_is_an_update(c: Config) -> Iterator[str]:
    if isinstance(c.limit_train_batches, int) and c.limit_train_batches < c.gradient_accumulation:
        yield (
            f"limit_train_batches: {c.limit_train_batches} is less than one update of gradient_accumulation: "
            f"{c.gradient_accumulation} batches"
        )


@pair_rule("early_stopping", "early_stopping_min_delta")
def _delta_needs_early_stopping(c: Config) -> Iterator[str]:
    if c.early_stopping is None and c.early_stopping_min_delta > 0:
        yield f"early_stopping_min_delta: {c.early_stopping_min_delta} has no effect without early_stopping"


@pair_rule("early_stopping", "limit_val_batches")
def _early_stopping_needs_validation(c: Config) -> Iterator[str]:
    if c.early_stopping is not None and c.limit_val_batches == 0:
        yield f"early_stopping: {c.early_stopping} needs validation, but limit_val_batches is 0"
