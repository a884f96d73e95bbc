"""torchvision's references/classification/train.py: the names of its arguments, with `_` or `-`."""

from __future__ import annotations

from typing import Any

from stoker.config.importing.names import IMPORT_NAMES
from stoker.config.importing.rules import (
    Became,
    Rule,
    Table,
    Theirs,
    absolute_lr,
    all_renamed,
    changed,
    chosen,
    explained_by,
    if_read,
    lost,
    not_needed,
    number,
    only,
    renamed,
    same,
)

TORCHVISION_MARKS = frozenset({
    "data_path", "lr_warmup_epochs", "lr_warmup_method", "lr_warmup_decay", "lr_step_size", "lr_gamma", "lr_min",
    "norm_weight_decay", "train_crop_size", "val_crop_size", "val_resize_size", "model_ema_steps", "random_erase",
    "ra_sampler", "ra_reps", "ra_magnitude", "cache_dataset", "test_only",
})  # fmt: skip
# The defaults of its parser, where a rule needs one.
_EPOCHS, _BATCH, _EMA_STEPS, _EMA_DECAY = 90, 32, 32, 0.99998
_VAL_RESIZE, _VAL_CROP = 256, 224


def _optimizer(value: Any, _theirs: Theirs) -> Became:
    name = str(value).lower()
    if name.startswith("sgd"):
        return same(optimizer="sgd", nesterov="nesterov" in name)
    return same(optimizer="adamw") if name == "adamw" else lost("stoker has sgd, adamw and lamb")


def _if_step(key: str) -> Rule:
    is_step = lambda theirs: str(theirs.get("lr_scheduler", default="steplr")).lower() == "steplr"  # noqa: E731
    return if_read(is_step, "only its steplr reads it", renamed(key, off=()))


def _norm_decay(value: Any, _theirs: Theirs) -> Became:
    if value is None:
        return same("all weights decay", decay_bias_and_norm=True)
    if number(value) == 0:
        return same("biases of other layers decay there, and do not here", decay_bias_and_norm=False)
    return lost("norms decay like other weights, or not at all: decay_bias_and_norm")


def _policy(value: Any, theirs: Theirs) -> Became:
    if value is None:
        return same(auto_augment="none")
    if value == "ta_wide":
        return same(auto_augment="trivialaugment")
    if value == "ra":
        # It always applies its two operations, and has magnitudes of 0 to 30.
        magnitude = number(theirs.get("ra_magnitude")) or 9.0
        return changed(
            f"nearest: torchvision always applies 2 operations, at {magnitude:g} of 30; here each is applied half of "
            "the time, and magnitudes go to 10",
            auto_augment="randaugment",
            randaugment_magnitude=magnitude / 3,
            randaugment_magnitude_std=0.0,
            randaugment_ops=4,
        )
    return lost("stoker has randaugment and trivialaugment")


def _average(value: Any, theirs: Theirs) -> Became:
    if not value:
        return same("no average")
    every = theirs.get("model_ema_steps", default=_EMA_STEPS)
    decay = theirs.get("model_ema_decay", default=_EMA_DECAY)
    epochs, batch = theirs.get("epochs", default=_EPOCHS), theirs.get("batch_size", default=_BATCH)
    ranks = theirs.get("world_size", default=1)
    # Its decay follows from the share of the run that one update stands for.
    alpha = min(1.0, (1 - decay) * ranks * batch * every / epochs)
    settings = {"ema_decay": 1 - alpha, "ema_every": every, "ema_warmup": "copy"}
    if alpha >= 1:
        return lost("its average would be a copy of the weights")
    return changed(
        f"{decay} there, adjusted to {ranks} x {batch} images and {epochs} epochs as its code does", **settings
    )


def _val_size(value: Any, theirs: Theirs) -> Became:
    resize = theirs.get("val_resize_size", default=_VAL_RESIZE)
    return same(f"after resizing to {resize}", val_img_size=value, crop_ratio=min(1.0, value / resize))


def _val_resize(value: Any, theirs: Theirs) -> Became:
    if "val_crop_size" in theirs.values:
        return same("see crop_ratio")
    return same(val_img_size=_VAL_CROP, crop_ratio=min(1.0, _VAL_CROP / value))


_RENAMED = {
    "data_path": "data_root", "lr_warmup_epochs": "warmup_epochs", "lr_min": "min_lr", "print_freq": "log_every",
    "sync_bn": "sync_batchnorm", "random_erase": "random_erasing", "train_crop_size": "img_size",
}  # fmt: skip
_EXPLAINED = {
    "ra_magnitude": "auto_augment", "model_ema_steps": "ema_every", "model_ema_decay": "ema_decay",
    "ra_reps": "repeated_augmentation", "distributed": "devices", "gpu": "devices", "rank": "devices",
}  # fmt: skip
TORCHVISION: Table = {
    **all_renamed(_RENAMED),
    **explained_by(_EXPLAINED),
    **{name: IMPORT_NAMES[name] for name in ("pretrained", "model", "device")},
    "lr": absolute_lr,
    "opt": _optimizer,
    "lr_scheduler": chosen(
        "lr_scheduler", {"steplr": "step", "cosineannealinglr": "cosine"}, "stoker has cosine, step and constant"
    ),
    "lr_warmup_method": only(None, "linear", because="what stoker does", otherwise="the warmup is linear"),
    "lr_warmup_decay": if_read(
        lambda theirs: theirs.get("lr_warmup_epochs"), "there is no warmup", renamed("warmup_start", off=())
    ),
    "lr_step_size": _if_step("lr_step_epochs"),
    "lr_gamma": _if_step("lr_step_factor"),
    "norm_weight_decay": _norm_decay,
    "bias_weight_decay": only(None, because="not set", otherwise="biases decay like other weights, or not at all"),
    "transformer_embedding_decay": only(None, because="not set", otherwise="embeddings decay like other weights"),
    "output_dir": renamed("runs_dir", off=(None, "", ".")),
    "resume": only(None, "", because="not set", otherwise="--resume FILE"),
    "start_epoch": only(None, 0, because="not set", otherwise="a run starts at 0 or resumes"),
    "cache_dataset": not_needed("the index of the data is always kept"),
    "test_only": only(None, False, because="not set", otherwise="stoker eval CKPT"),
    "auto_augment": _policy,
    "augmix_severity": not_needed("only for augmix"),
    "amp": lambda value, _theirs: same(precision="16-mixed" if value else "32"),
    "world_size": not_needed("devices and num_nodes"),
    "dist_url": not_needed("MASTER_ADDR and MASTER_PORT"),
    "model_ema": _average,
    "use_deterministic_algorithms": IMPORT_NAMES["deterministic"],
    "val_crop_size": _val_size,
    "val_resize_size": _val_resize,
    "ra_sampler": lambda value, theirs: same(repeated_augmentation=theirs.get("ra_reps", default=3) if value else 1),
    "weights": only(None, because="random weights", otherwise="stoker starts from a file of yours: weights: FILE"),
    "backend": only(None, "pil", "PIL", "tensor", because="pixels are torchvision's", otherwise="see decoder"),
    "use_v2": not_needed("the same transforms"),
    "dist_backend": not_needed("stoker decides"),
}


def torchvision_facts(_theirs: Theirs) -> list[Became]:
    return [
        same("lr is used as it is there; stoker would scale it with the total batch", scale_lr=False),
        same("the schedule moves once an epoch; the warmup differs by one epoch", lr_update="epoch"),
    ]
