"""Settings that are fine alone and impossible together.

Each rule looks at a config whose single values are valid and returns what is wrong, or None.
`KEYS` beside a rule names every key it reads: a rule is skipped where one of them is invalid itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.config.schema import Config


@dataclass(frozen=True)
class PairRule:
    """A rule over several keys."""

    keys: tuple[str, ...]
    check: Callable[[Config], str | None]
    forbids: bool = True
    """False for what works but is hardly meant: it is said, not refused."""


def _prefetch_needs_workers(c: Config) -> str | None:
    if c.num_workers == 0 and c.prefetch_factor is not None:
        return f"prefetch_factor: {c.prefetch_factor} needs workers, but num_workers is 0"
    return None


def _warmup_shorter_than_run(c: Config) -> str | None:
    if c.warmup_epochs >= c.epochs:
        return f"warmup_epochs: {c.warmup_epochs} leaves nothing of epochs: {c.epochs}"
    return None


def _mixing_needs_classes(c: Config) -> str | None:
    if c.num_classes == 1 and (c.mixup_alpha > 0 or c.cutmix_alpha > 0):
        mixed_by = "mixup_alpha" if c.mixup_alpha > 0 else "cutmix_alpha"
        return f"{mixed_by}: {getattr(c, mixed_by)} mixes classes, but num_classes is 1"
    return None


def _mixing_needs_pairs(c: Config) -> str | None:
    if c.batch_size == 1 and (c.mixup_alpha > 0 or c.cutmix_alpha > 0):
        mixed_by = "mixup_alpha" if c.mixup_alpha > 0 else "cutmix_alpha"
        return f"{mixed_by}: {getattr(c, mixed_by)} mixes the samples of a batch, but batch_size is 1"
    return None


def _mixing_is_for_classes(c: Config) -> str | None:
    if c.task == "segment3d" and (c.mixup_alpha > 0 or c.cutmix_alpha > 0):
        mixed_by = "mixup_alpha" if c.mixup_alpha > 0 else "cutmix_alpha"
        return f"{mixed_by}: {getattr(c, mixed_by)} mixes labels of whole images, but task is segment3d"
    return None


def _repeats_divide_batch(c: Config) -> str | None:
    # Where there are as many ranks as repeats, each repeat goes to another rank and any batch will do
    # (the published recipes: 3 repeats, 8 x 256). With fewer, the repeats of an image share a batch.
    ranks = c.num_nodes * (1 if c.devices == "auto" else c.devices)
    if ranks < c.repeated_augmentation and c.batch_size % c.repeated_augmentation:
        fitting = c.batch_size - c.batch_size % c.repeated_augmentation
        return (
            f"repeated_augmentation: {c.repeated_augmentation} does not divide batch_size: {c.batch_size}; "
            f"take {fitting or c.repeated_augmentation}, or name at least {c.repeated_augmentation} devices"
        )
    return None


def _threshold_needs_bce(c: Config) -> str | None:
    if c.bce_target_threshold is not None and c.loss != "bce":
        return f"bce_target_threshold: {c.bce_target_threshold} has no meaning with loss: {c.loss}"
    return None


def _smoothing_is_cancelled(c: Config) -> str | None:
    if c.bce_target_threshold is not None and c.label_smoothing > 0 and c.loss == "bce":
        return f"bce_target_threshold: {c.bce_target_threshold} cancels label_smoothing: {c.label_smoothing}"
    return None


def _patch_for_volumes(c: Config) -> str | None:
    if c.task == "segment3d" and c.patch_size is None:
        return "task: segment3d needs a patch_size, for example [72, 136, 136]"
    if c.task == "classify" and c.patch_size is not None:
        return "patch_size is for task: segment3d; images take img_size"
    return None


def _nesterov_needs_momentum(c: Config) -> str | None:
    if c.nesterov and (c.optimizer != "sgd" or c.momentum == 0):
        return f"nesterov needs optimizer: sgd with momentum, but they are {c.optimizer} and {c.momentum}"
    return None


def _crop_bounds_in_order(c: Config) -> str | None:
    if c.crop_scale[0] > c.crop_scale[1]:
        return f"crop_scale: {list(c.crop_scale)} has its smaller bound last"
    return None


def _aspect_bounds_in_order(c: Config) -> str | None:
    if c.crop_aspect[0] > c.crop_aspect[1]:
        return f"crop_aspect: {list(c.crop_aspect)} has its smaller bound last"
    return None


def _resizing_grows(c: Config) -> str | None:
    if c.start_img_size is not None and c.start_img_size > c.img_size:
        return f"start_img_size: {c.start_img_size} is larger than img_size: {c.img_size}"
    return None


def _resizing_ends(c: Config) -> str | None:
    if c.resize_epochs is None:
        return None
    if c.start_img_size is None:
        return f"resize_epochs: {c.resize_epochs} has no meaning without start_img_size"
    if c.resize_epochs > c.epochs:
        return f"resize_epochs: {c.resize_epochs} is longer than epochs: {c.epochs}"
    return None


def _cache_size_needs_cache(c: Config) -> str | None:
    if c.cache_size is not None and c.cache_dir is None:
        return "cache_size has no meaning without cache_dir"
    return None


def _single_process_is_single(c: Config) -> str | None:
    if c.strategy == "single" and ((c.devices != "auto" and c.devices > 1) or c.num_nodes > 1):
        return f"strategy: single uses one device, but devices is {c.devices} and num_nodes {c.num_nodes}"
    return None


def _min_lr_below_lr(c: Config) -> str | None:
    if c.min_lr > c.lr:
        return f"min_lr: {c.min_lr} is above lr: {c.lr}"
    return None


def _subset_fits_classes(c: Config) -> str | None:
    if c.subset_classes is not None and c.num_classes is not None and c.subset_classes != c.num_classes:
        return f"subset_classes: {c.subset_classes} gives as many classes, but num_classes is {c.num_classes}"
    return None


RULES: tuple[PairRule, ...] = (
    PairRule(("prefetch_factor", "num_workers"), _prefetch_needs_workers),
    PairRule(("warmup_epochs", "epochs"), _warmup_shorter_than_run),
    PairRule(("mixup_alpha", "cutmix_alpha", "num_classes"), _mixing_needs_classes),
    PairRule(("mixup_alpha", "cutmix_alpha", "batch_size"), _mixing_needs_pairs),
    PairRule(("mixup_alpha", "cutmix_alpha", "task"), _mixing_is_for_classes),
    PairRule(("repeated_augmentation", "batch_size", "devices", "num_nodes"), _repeats_divide_batch),
    PairRule(("bce_target_threshold", "loss"), _threshold_needs_bce),
    PairRule(("bce_target_threshold", "label_smoothing", "loss"), _smoothing_is_cancelled, forbids=False),
    PairRule(("task", "patch_size"), _patch_for_volumes),
    PairRule(("nesterov", "optimizer", "momentum"), _nesterov_needs_momentum),
    PairRule(("crop_scale",), _crop_bounds_in_order),
    PairRule(("crop_aspect",), _aspect_bounds_in_order),
    PairRule(("start_img_size", "img_size"), _resizing_grows),
    PairRule(("resize_epochs", "start_img_size", "epochs"), _resizing_ends),
    PairRule(("cache_size", "cache_dir"), _cache_size_needs_cache),
    PairRule(("strategy", "devices", "num_nodes"), _single_process_is_single),
    PairRule(("min_lr", "lr"), _min_lr_below_lr),
    PairRule(("subset_classes", "num_classes"), _subset_fits_classes),
)
