"""timm's train.py: the args.yaml that it writes into its output folder (timm 1.0)."""

from __future__ import annotations

import math
from typing import Any

from stoker.config.importing.names import IMPORT_NAMES, optimizer
from stoker.config.importing.rules import (
    Became,
    Kind,
    Rule,
    Table,
    Theirs,
    absolute_lr,
    all_renamed,
    changed,
    explained_by,
    if_read,
    lost,
    not_needed,
    number,
    only,
    renamed,
    same,
    timm_policy,
    without_effect,
)

TIMM_MARKS = frozenset({
    "aa", "reprob", "remode", "bce_loss", "opt", "sched", "warmup_lr", "lr_base", "crop_pct", "model_ema",
    "smoothing", "log_interval", "pin_mem", "drop_path", "aug_repeats", "train_interpolation", "checkpoint_hist",
    "opt_betas", "dist_bn",
})  # fmt: skip
_DEFAULT_BASE_SIZE = 256


def _scaling(theirs: Theirs) -> str:
    """How timm gets lr from lr_base; empty if lr was given."""
    if theirs.get("lr"):
        return ""
    adaptive = any(part in str(theirs.get("opt", default="sgd")).lower() for part in ("ada", "lamb"))
    return str(theirs.get("lr_base_scale") or ("sqrt" if adaptive else "linear"))


def _peak(theirs: Theirs) -> float:
    """The learning rate; for one GPU, unless their number was given."""
    lr, base = number(theirs.get("lr")), number(theirs.get("lr_base")) or 0.1
    if lr:
        return lr
    ratio = _total_batch(theirs) / (number(theirs.get("lr_base_size")) or _DEFAULT_BASE_SIZE)
    return base * (math.sqrt(ratio) if _scaling(theirs) == "sqrt" else ratio)


def _total_batch(theirs: Theirs) -> float:
    defaults = {"batch_size": 128, "grad_accum_steps": 1, "devices": 1, "num_nodes": 1}
    return math.prod(number(theirs.get(name)) or default for name, default in defaults.items())


def _lr_base(value: Any, theirs: Theirs) -> Became:
    how = _scaling(theirs)
    if not how:
        return without_effect("lr is set, and used as it is")
    size = theirs.get("lr_base_size", default=_DEFAULT_BASE_SIZE)
    if how == "linear":
        return same("scaled with the total batch", lr=value, scale_lr=True, lr_reference_batch=size)
    return changed(
        f"for a total batch of {_total_batch(theirs):g}: timm uses {value} x sqrt(total batch / {size}), stoker only "
        "scales in proportion; import with devices=N for N GPUs",
        lr=_peak(theirs),
        scale_lr=False,
    )


def _optimizer(value: Any, theirs: Theirs) -> Became:
    name = str(value).lower()
    if name in ("sgd", "nesterov"):
        return same("timm's sgd uses Nesterov momentum", optimizer="sgd", nesterov=True)
    if name == "momentum":
        return same(optimizer="sgd", nesterov=False)
    if name == "lamb" and theirs.get("clip_grad") is None:
        return same("timm's LAMB clips the gradient norm to 1", optimizer="lamb", clip_grad_norm=1.0)
    return optimizer(value, theirs)


def _clip(value: Any, theirs: Theirs) -> Became:
    if value is None:
        return same("not set")
    if theirs.get("clip_mode", default="norm") != "norm":
        return lost("stoker clips the norm of the gradient only")
    return same(clip_grad_norm=value)


def _scheduler(value: Any, theirs: Theirs) -> Became:
    how = "step" if theirs.get("sched_on_updates") else "epoch"
    if value == "cosine":
        if theirs.get("warmup_epochs") and not theirs.get("warmup_prefix"):
            why = "nearest: timm's cosine begins with the warmup, ours after it"
            return changed(why, lr_scheduler="cosine", lr_update=how)
        return same(lr_scheduler="cosine", lr_update=how)
    if value == "step":
        return same(lr_scheduler="step", lr_update=how)
    if value in ("none", "", None):
        return same(lr_scheduler="constant")
    return lost("stoker has cosine, step and constant")


def _if_step(rule: Rule) -> Rule:
    return if_read(lambda theirs: theirs.get("sched") == "step", "only the step schedule reads it", rule)


def _warmup_start(value: Any, theirs: Theirs) -> Became:
    peak, start = _peak(theirs), number(value)
    if not start or start > peak:
        return lost("the warmup begins at a share of lr: warmup_start")
    return changed("as a share of lr", warmup_start=start / peak)


def _amp(value: Any, theirs: Theirs) -> Became:
    if not value:
        return same(precision="32")
    return same(precision="bf16-mixed" if theirs.get("amp_dtype") == "bfloat16" else "16-mixed")


def _jitter(value: Any, theirs: Theirs) -> Became:
    if not value:
        return same("off")
    if theirs.get("aa"):
        return without_effect("timm's policy (aa) replaces it")
    return lost("stoker has no colour jitter")


def _erasing_mode(value: Any, theirs: Theirs) -> Became:
    if value == "const" or not theirs.get("reprob"):
        return same("filled with the mean")
    return changed(f"{value} there; stoker fills with the mean")


def _mixing_only(key: str) -> Rule:
    def rule(value: Any, theirs: Theirs) -> Became:
        if not theirs.get("mixup") and not theirs.get("cutmix"):
            return same("nothing is mixed")
        return same(**{key: value})

    return rule


def _average(value: Any, theirs: Theirs) -> Became:
    if not value:
        return same("no average")
    decay = theirs.get("model_ema_decay", default=0.9998)
    if theirs.get("model_ema_warmup"):
        return changed("nearest: its decay rises more slowly", ema_decay=decay, ema_warmup="ramp")
    return same(ema_decay=decay, ema_warmup="none")


def _size(value: Any, _theirs: Theirs) -> Became:
    if value is None:
        return same("the model's default there; 224 here")
    if isinstance(value, list):
        return same(img_size=value[-1]) if len(value) == 3 else lost("must be channels, height and width")
    return same(img_size=value)


def _threshold(value: Any, theirs: Theirs) -> Became:
    return same(bce_target_threshold=value) if value is not None and theirs.get("bce_loss") else same("not used")


def _interpolation(value: Any, theirs: Theirs) -> Became:
    if value in ("bilinear", "bicubic") and theirs.get("train_interpolation") == value:
        return same(interpolation=value)
    if value == "bilinear":
        return lost("stoker validates in bicubic, unless interpolation says one for training and validation")
    return Became(Kind.NOT_NEEDED, "stoker validates in bicubic")


def _train_interpolation(value: Any, theirs: Theirs) -> Became:
    if value == "bilinear" or (value == "bicubic" and theirs.get("interpolation") == value):
        return Became(Kind.NOT_NEEDED, "stoker trains in bilinear, or what interpolation says")
    theirs_is = "bicubic" if value == "bicubic" else "bilinear or bicubic, drawn for each image"
    return lost(f"{theirs_is}; stoker trains in bilinear")


def _off(otherwise: str, *accepted: Any) -> Rule:
    return only(None, False, "", 0, 0.0, [], {}, *accepted, because="off", otherwise=otherwise)


_RENAMED = {
    "data": "data_root", "data_dir": "data_root", "crop_pct": "crop_ratio",
    "validation_batch_size": "val_batch_size", "grad_accum_steps": "gradient_accumulation",
    "grad_checkpointing": "gradient_checkpointing", "torchcompile_mode": "compile_mode", "opt_betas": "betas",
    "scale": "crop_scale", "ratio": "crop_aspect", "hflip": "horizontal_flip", "reprob": "random_erasing",
    "mixup": "mixup_alpha", "cutmix": "cutmix_alpha", "smoothing": "label_smoothing", "drop": "dropout",
    "drop_path": "drop_path", "log_interval": "log_every", "checkpoint_hist": "save_top_k", "log_wandb": "wandb",
}  # fmt: skip
_EXPLAINED = {
    "amp_dtype": "precision", "amp_impl": "precision",
    "clip_mode": "clip_grad_norm", "sched_on_updates": "lr_update", "lr_base_size": "lr_base",
    "lr_base_scale": "lr_base", "warmup_prefix": "lr_scheduler", "model_ema_decay": "ema_decay",
    "model_ema_warmup": "ema_warmup",
}  # fmt: skip
_WITHOUT_EFFECT_ON_TRAINING = (
    "no_resume_opt", "model_ema_force_cpu", "worker_seeding", "save_images", "no_prefetcher",
    "use_multi_epochs_loader", "local_rank", "no_ddp_bb", "synchronize_step",
)  # fmt: skip
TIMM: Table = {
    **all_renamed(_RENAMED),
    **explained_by(_EXPLAINED),
    **{name: IMPORT_NAMES[name] for name in ("pretrained", "mean", "std", "device", "val_interval")},
    **dict.fromkeys(_WITHOUT_EFFECT_ON_TRAINING, not_needed("does not change the training")),
    "dataset": _off("stoker reads class folders and shards", "imagenet", "folder", "imagefolder"),
    "train_split": only(None, "train", because="train/", otherwise="training data is in train/"),
    "val_split": only(None, "val", "validation", because="val/", otherwise="validation data is in val/"),
    "class_map": _off("classes are the folders in alphabetical order"),
    "initial_checkpoint": renamed("weights", off=(None, "")),
    "resume": _off("stoker resumes by itself; --resume FILE for another checkpoint"),
    "start_epoch": _off("a run starts at 0 or resumes"),
    "gp": _off("the model's own pooling is used"),
    "in_chans": only(None, 3, because="RGB", otherwise="images are RGB"),
    "img_size": _size,
    "input_size": lambda value, theirs: same("see img_size") if theirs.get("img_size") else _size(value, theirs),
    "interpolation": _interpolation,
    "train_interpolation": _train_interpolation,
    "torchcompile": lambda value, _theirs: same(compile_model=bool(value)),
    **dict.fromkeys(("torchscript", "fuser"), _off("see compile_model")),
    "model_kwargs": _off("stoker passes drop_path and dropout only"),
    **dict.fromkeys(("head_init_scale", "head_init_bias"), _off("the model's own initial weights are used")),
    "amp": _amp,
    **dict.fromkeys(("fast_norm", "model_dtype"), _off("see precision")),
    "opt": _optimizer,
    "opt_eps": _off("stoker uses the optimizer's usual one"),
    "opt_kwargs": _off("stoker's optimizers have no further options"),
    "clip_grad": _clip,
    "layer_decay": _off("one learning rate for all layers"),
    "sched": _scheduler,
    "lr": lambda value, theirs: absolute_lr(value, theirs) if value else same("not set; see lr_base"),
    "lr_base": _lr_base,
    "lr_noise": _off("the schedule has no noise"),
    **dict.fromkeys(("lr_noise_pct", "lr_noise_std"), not_needed("for lr_noise")),
    "lr_cycle_mul": _off("one cycle", 1.0),
    "lr_cycle_decay": not_needed("one cycle"),
    "lr_cycle_limit": only(None, 1, because="one cycle", otherwise="one cycle"),
    "lr_k_decay": only(None, 1.0, because="a plain cosine", otherwise="a plain cosine"),
    "warmup_lr": if_read(lambda theirs: theirs.get("warmup_epochs"), "there is no warmup", _warmup_start),
    "epoch_repeats": _off("see steps_per_epoch"),
    "decay_milestones": not_needed("only for multistep"),
    "decay_epochs": _if_step(lambda value, _theirs: same(lr_step_epochs=int(value))),
    "decay_rate": _if_step(renamed("lr_step_factor", off=())),
    "cooldown_epochs": _off("the run ends with the cosine"),
    "patience_epochs": not_needed("only for plateau"),
    "no_aug": _off("horizontal_flip: 0 and auto_augment: none turn off what can be turned off"),
    "train_crop_mode": _off("random resized crops", "rrc"),
    "vflip": _off("stoker does not flip vertically"),
    "color_jitter": _jitter,
    "color_jitter_prob": _off("stoker has no colour jitter"),
    "grayscale_prob": _off("stoker does not draw grey images"),
    "gaussian_blur_prob": _off("stoker does not blur"),
    "aa": lambda value, _theirs: same(auto_augment="none") if value in (None, "") else timm_policy(value),
    "aug_repeats": lambda value, _theirs: same(repeated_augmentation=int(value) if number(value) else 1),
    "aug_splits": _off("stoker has no augmentation splits"),
    "jsd_loss": _off("stoker has cross_entropy and bce"),
    "bce_loss": lambda value, _theirs: same(loss="bce" if value else "cross_entropy"),
    "bce_sum": _off("the mean over the classes is used"),
    "bce_target_thresh": _threshold,
    "bce_pos_weight": _off("all classes weigh the same"),
    "remode": _erasing_mode,
    "recount": only(None, 1, because="one rectangle", otherwise="one rectangle per image"),
    "resplit": _off("no splits"),
    "cutmix_minmax": _off("stoker draws areas from the Beta distribution"),
    "mixup_prob": _mixing_only("mix_probability"),
    "mixup_switch_prob": _mixing_only("mix_switch_probability"),
    "mixup_mode": only(None, "batch", because="what stoker does", otherwise="one weight per batch"),
    "mixup_off_epoch": _off("mixing is on for the whole run"),
    "drop_connect": _off("see drop_path"),
    "drop_block": _off("stoker has drop_path and dropout"),
    **dict.fromkeys(("bn_momentum", "bn_eps"), _off("the model's own")),
    "sync_bn": renamed("sync_batchnorm", off=(None, "")),
    "dist_bn": not_needed("the first rank's batch norm statistics are evaluated; see sync_batchnorm"),
    "split_bn": _off("stoker has no split batch norm"),
    "model_ema": _average,
    "recovery_interval": renamed("checkpoint_every_steps", off=(None, 0)),
    "pin_mem": not_needed("does not change the training; stoker uses page-locked memory where it helps"),
    "output": renamed("runs_dir", off=(None, "")),
    "experiment": renamed("run_name", off=(None, "")),
    "eval_metric": only(None, "top1", because="what stoker does", otherwise="the best are those by val/acc1"),
    "tta": _off("stoker evaluates the centre crop"),
    "wandb_tags": _off("stoker sets no tags"),
    "wandb_resume_id": _off("stoker remembers the run's own"),
    "dataset_download": _off("stoker does not download data"),
    "naflex_loader": _off("all images have one size"),
}


def timm_facts(theirs: Theirs) -> list[Became]:
    facts = [same("no weight decay on biases and norms there", decay_bias_and_norm=False)]
    if theirs.get("lr") is None and "lr_base" not in theirs.values:
        facts.append(_lr_base(0.1, theirs))
    return facts
