"""Keys that many training programs have, by their usual names (most of them are Lightning's).

A config of ours may use those that mean exactly the same; the loader refuses the others, and names the import. A name
with dots is a key in its sections: `ema.decay` is `decay` in any section `ema`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.config.importing.rules import (
    Became,
    Kind,
    Rule,
    Table,
    Theirs,
    absolute_lr,
    all_renamed,
    changed,
    chosen,
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
from stoker.config.schema import FOREIGN_ALIASES
from stoker.core.redact import redact_text

IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]


def colours(imagenet: list[float]) -> Rule:
    """Stoker takes mean and std from the model; nearly all have ImageNet's."""
    return only(
        None,
        imagenet,
        because="normalised as the model expects, for most with this",
        otherwise="stoker normalises as the model expects, and has no key for it",
    )


def _flip(value: Any, _theirs: Theirs) -> Became:
    if isinstance(value, bool):
        return same(horizontal_flip=0.5 if value else 0.0)
    return same("not set") if value is None else same(horizontal_flip=value)


def _average(value: Any, theirs: Theirs) -> Became:
    if value is True:
        if theirs.get("ema_decay", "ema.decay") is None:
            return lost("needs ema_decay")
        return same("ema_decay turns it on")
    return same(ema_decay=None) if value in (False, None) else lost("must be true or false")


def _average_decay(value: Any, theirs: Theirs) -> Became:
    switch = theirs.get("use_ema", "ema.enabled")
    return without_effect("the average is turned off") if switch is False else same(ema_decay=value)


def _clip_by(value: Any, _theirs: Theirs) -> Became:
    if value in (None, "norm"):
        return same("clip_grad_norm clips the norm")
    return lost("stoker clips the norm of the gradient, never single values: clip_grad_norm")


def _cosine_length(value: Any, theirs: Theirs) -> Became:
    if _one_cycle(theirs):
        return without_effect("only a cosine reads it")
    epochs, warmup = theirs.get("epochs", "max_epochs"), theirs.get("warmup_epochs", default=0)
    if value is None or (number(epochs) is not None and number(warmup) is not None and value == epochs - warmup):
        return same("where stoker's cosine ends: with the run")
    return lost(
        "stoker's cosine ends with the run, while torch's falls for this many epochs and then rises again; "
        "set epochs to warmup_epochs plus this for a run that ends at the minimum"
    )


def _folder(value: Any, _theirs: Theirs) -> Became:
    if value is None:
        return same("not set")
    return changed("checkpoints are in RUNS_DIR/RUN_NAME/checkpoints", runs_dir=value)


def samples_per_epoch(value: Any, theirs: Theirs) -> Became:
    """An epoch's length in samples, as a loader of random patches counts it."""
    batch = number(theirs.get("train_batch_size", "batch_size", default=1)) or 1
    accumulated = number(theirs.get("accumulate_steps", default=1)) or 1
    update = max(1, int(batch * accumulated))
    if update == 1:
        return same("patches there, updates here; one patch makes one update", steps_per_epoch=value)
    return changed(
        f"it counts patches, and {update} of them make an update; steps_per_epoch counts updates",
        steps_per_epoch=max(1, int(value) // update),
    )


# As Lightning spells them, with its short forms.
PRECISIONS = {
    "32": "32", "32-true": "32", "16": "16-mixed", "16-mixed": "16-mixed", "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed", "amp": "16-mixed",
}  # fmt: skip
SCHEDULERS = {
    "cosine": "cosine", "cosineannealinglr": "cosine", "step": "step", "steplr": "step", "constant": "constant",
    "none": "constant",
}  # fmt: skip


def precision(value: Any, _theirs: Theirs) -> Became:
    if value is None:
        return same("not set")
    ours = PRECISIONS.get(str(value))
    return same(precision=ours) if ours else lost("stoker has 32, 16-mixed and bf16-mixed")


def devices(value: Any, _theirs: Theirs) -> Became:
    if value in ("auto", -1, "-1", None):
        return same(devices="auto")
    if isinstance(value, list):
        return changed("choose the GPUs with CUDA_VISIBLE_DEVICES", devices=len(value))
    return same(devices=value)


def strategy(value: Any, _theirs: Theirs) -> Became:
    if value in ("auto", "ddp", "single"):
        return same(strategy=value)
    if isinstance(value, str) and value.startswith("ddp"):
        return changed(f"{value} there", strategy="ddp")
    return lost("stoker has single and ddp")


optimizer = chosen("optimizer", {name: name for name in ("sgd", "adamw", "lamb")}, "stoker has sgd, adamw and lamb")
_named_scheduler = chosen("lr_scheduler", SCHEDULERS, "stoker has cosine, step and constant")


_SCHEDULER_NAMES = ("lr_scheduler", "scheduler", "sched", "lr_scheduler.name", "scheduler.name", "scheduler.type")


def _one_cycle(theirs: Theirs) -> bool:
    return str(theirs.get(*_SCHEDULER_NAMES)).rpartition(".")[2].lower() in ("one_cycle", "onecycle", "onecyclelr")


def scheduler(value: Any, theirs: Theirs) -> Became:
    """By name or class, as in `torch.optim.lr_scheduler.CosineAnnealingLR`."""
    if _one_cycle(theirs):
        settings = {"lr_scheduler": "cosine", "warmup_start": 1 / (number(theirs.get("div_factor")) or 25.0)}
        if epochs := number(theirs.get("epochs", "max_epochs")):
            settings["warmup_epochs"] = round((number(theirs.get("pct_start")) or 0.3) * epochs)
        return changed("one cycle: a rise (a cosine there, a line here) and a cosine to the end", **settings)
    return _named_scheduler(value, theirs)


def _lr(value: Any, theirs: Theirs) -> Became:
    if _one_cycle(theirs) and theirs.get("max_lr") is not None:
        return without_effect("one cycle begins and ends below max_lr, whatever lr is")
    return absolute_lr(value, theirs)


def _in_one_cycle(rule: Rule) -> Rule:
    return if_read(_one_cycle, "only one cycle reads it", rule)


MODELS = {
    "vit_b_16": "vit_base_patch16_224", "vit_b_32": "vit_base_patch32_224", "vit_l_16": "vit_large_patch16_224",
    "swin_t": "swin_tiny_patch4_window7_224", "swin_s": "swin_small_patch4_window7_224",
    "swin_b": "swin_base_patch4_window7_224", "mobilenet_v2": "mobilenetv2_100",
    "mobilenet_v3_small": "mobilenetv3_small_100", "mobilenet_v3_large": "mobilenetv3_large_100",
    "regnet_y_400mf": "regnety_004", "regnet_y_8gf": "regnety_080", "regnet_y_16gf": "regnety_160",
}  # fmt: skip
"""torchvision's names of networks that timm has under another; most others have the same name in both."""
VOLUME_MODELS = {"unet3d_residual": "residual_unet", "swin_unetr": "swinunetr"}


def model(value: Any, _theirs: Theirs) -> Became:
    if value in VOLUME_MODELS:
        return changed(
            "nearest; its widths and depths are its own: stoker config keys model", model=VOLUME_MODELS[value]
        )
    return changed("timm's name for it", model=MODELS[value]) if value in MODELS else same(model=value)


def _policy_value(value: Any, _theirs: Theirs) -> Became | None:
    if value is None:
        return same(auto_augment="none")
    named = isinstance(value, str) and value.startswith("rand-")
    return timm_policy(value, "timm's name for it") if named else None


def _accelerator_value(value: Any, _theirs: Theirs) -> Became | None:
    if value not in ("auto", "cpu", "gpu", "cuda", "mps", "tpu"):
        return None
    if value == "auto":
        return same("what stoker does")
    return Became(Kind.NOT_NEEDED, "stoker uses the GPUs that it finds; here, accelerator names a datasheet")


NAMES: Table = {
    **all_renamed(FOREIGN_ALIASES),
    "gradient_clip_val": renamed("clip_grad_norm", off=(None, 0, 0.0)),
    "max_classes": renamed("subset_classes", why="chosen by subset_seed, but not the same classes as there"),
    "gradient_clip_algorithm": _clip_by,
    "random_horizontal_flip": _flip,
    "random_crop": only(
        None,
        True,
        because="crop_scale and crop_aspect say how",
        otherwise="training images are always cropped at random; crop_scale: [0.9, 1] keeps most of an image",
    ),
    "use_ema": _average,
    "pretrained": only(
        None, False, because="random weights", otherwise="stoker starts from a file of yours: weights: FILE"
    ),
    "mean": colours(IMAGENET_MEAN),
    "std": colours(IMAGENET_STD),
    "deterministic": only(
        None,
        False,
        because="what stoker does",
        otherwise="stoker has no such switch; sample order, crops and mixing always follow from seed",
    ),
    "monitor": only(
        None, "val/acc1", because="what stoker does", otherwise="the best checkpoints are those by val/acc1"
    ),
    "mode": only(None, "max", because="what stoker does", otherwise="the best checkpoints are those by val/acc1"),
    "val_check_interval": only(
        None, 1.0, because="what stoker does", otherwise="stoker validates once, at the end of each epoch"
    ),
    "check_val_every_n_epoch": only(
        None, 1, because="what stoker does", otherwise="stoker validates at the end of each epoch"
    ),
    "cosine_t_max": _cosine_length,
    "checkpoint_dir": _folder,
    "train_iterations_per_epoch": samples_per_epoch,
    "_base_": not_needed("its base file has another program's keys too; ours is called base"),
}
"""Names that a config of ours may use, or that the loader can explain."""

VALUES: dict[str, Callable[[Any, Theirs], Became | None]] = {
    "lr_scheduler": lambda value, _theirs: same(lr_scheduler="constant") if value == "none" else None,
    "auto_augment": _policy_value,
    "accelerator": _accelerator_value,
}
"""Other programs' values of keys that have our name; None from a rule: the value is not one of those."""


# Volumes.


def _patch(value: Any, _theirs: Theirs) -> Became:
    if isinstance(value, list) and len(value) == 3:
        return same("patches of volumes", patch_size=value, task="segment3d")
    return lost("patch_size is the depth, height and width of a patch of a volume")


def _rotation(value: Any, _theirs: Theirs) -> Became:
    most = max(abs(float(edge)) for edge in value)
    return changed("every patch, about all three axes", volume_rotation=1.0, volume_degrees=[most] * 3)


def _scaling(value: Any, _theirs: Theirs) -> Became:
    low, high = (float(edge) for edge in value)
    scales = [round(1 / high, 4), round(1 / low, 4)]
    return changed("every patch; here as voxels that become one", volume_scaling=1.0, volume_scales=scales)


def _every_patch(key: str) -> Rule:
    return lambda _value, _theirs: changed("every patch, with stoker's strengths", **{key: 1.0})


_LOSSES = {
    "bce": "ce", "ce": "ce", "weighted_bce": "ce", "dice": "dice", "soft_dice": "dice", "focal": "focal",
    "tversky": "tversky", "cldice": "cldice", "morph_skeleton": "skeleton_recall",
}  # fmt: skip


def _loss_terms(value: Any, _theirs: Theirs) -> Became:
    """A weighted sum, as a list of names, weights and options."""
    terms, left_out = [], []
    for part in value:
        name, weight = str(part["name"]), float(part.get("weight", 1.0))
        if name in _LOSSES and weight:
            terms.append(f"{weight:g} {_LOSSES[name]}")
            left_out += [f"{option} of {name}" for option in part if option not in ("name", "weight")]
        elif weight:
            left_out.append(name)
    remark = f"not kept: {', '.join(left_out)}" if left_out else "nearest"
    return changed(remark, volume_loss=" + ".join(terms)) if terms else lost(remark)


def _outputs(value: Any, _theirs: Theirs) -> Became:
    return same("a sigmoid there, two classes here", num_classes=2) if value == 1 else same(num_classes=value)


_PREDICTION = not_needed("not about training: see stoker predict --help and stoker eval --help")

VOLUMES: Table = {
    "patch_size": _patch,
    "mask_unlabeled_value": renamed("ignore_label"),
    "normalize": lambda value, _theirs: same(normalize="volume" if value == "zscore" else value),
    "denoise.enabled": only(None, False, because="off", otherwise="stoker pack --median 3 filters volumes once"),
    "rotate_deg": _rotation,
    "spatial.scale": _scaling,
    "flip_axes": lambda value, _theirs: same(volume_flips=[0.5 if axis in value else 0.0 for axis in range(3)]),
    "patch_dropout.probability": lambda value, _theirs: changed("the labels stay", volume_cutout=value),
    "intensity.gamma": _every_patch("volume_gamma"),
    "gaussian_noise_std": _every_patch("volume_noise"),
    "gaussian_blur_sigma": _every_patch("volume_blur"),
    "in_channels": not_needed("counted in the data"),
    "out_channels": _outputs,
    "activation_checkpointing.enabled": renamed("gradient_checkpointing"),
    "loss.components": _loss_terms,
    "surface_dice_tolerance_mm": lambda value, _theirs: changed("in voxels here", surface_tolerance=value),
    "inference.*": _PREDICTION,
    "postprocess.*": _PREDICTION,
}


_RENAMED = {
    "wd": "weight_decay", "n_epochs": "epochs", "num_epochs": "epochs", "total_epochs": "epochs", "bs": "batch_size",
    "per_device_train_batch_size": "batch_size", "per_device_eval_batch_size": "val_batch_size",
    "eval_batch_size": "val_batch_size", "gradient_accumulation_steps": "gradient_accumulation",
    "accum_iter": "gradient_accumulation", "grad_clip": "clip_grad_norm", "clip_grad": "clip_grad_norm",
    "max_grad_norm": "clip_grad_norm", "gradient_clip": "clip_grad_norm", "image_size": "img_size",
    "input_size": "img_size", "n_classes": "num_classes", "data_dir": "data_root", "data_path": "data_root",
    "dataset_path": "data_root", "root": "data_root", "n_workers": "num_workers",
    "dataloader_num_workers": "num_workers", "mixup": "mixup_alpha", "cutmix": "cutmix_alpha",
    "smoothing": "label_smoothing", "drop_rate": "dropout", "drop_path_rate": "drop_path", "nodes": "num_nodes",
    "sync_bn": "sync_batchnorm", "log_interval": "log_every", "print_freq": "log_every", "project": "wandb_project",
    "wandb.enabled": "wandb", "experiment.name": "run_name",
}  # fmt: skip
"""Names that only the import translates, because they could mean several things."""

IMPORT_NAMES: Table = {
    **all_renamed(_RENAMED),
    **NAMES,
    **VOLUMES,
    **dict.fromkeys(("lr", "learning_rate", "base_lr"), _lr),
    "max_lr": _in_one_cycle(absolute_lr),
    **dict.fromkeys(("pct_start", "div_factor", "anneal_strategy"), _in_one_cycle(not_needed("see lr_scheduler"))),
    "precision": precision,
    **dict.fromkeys(("devices", "gpus", "num_gpus"), devices),
    "strategy": strategy,
    **dict.fromkeys(("optimizer", "optim", "opt", "optimizer.name", "optimizer.type"), optimizer),
    **dict.fromkeys(_SCHEDULER_NAMES, scheduler),
    **dict.fromkeys(("model", "model_name", "model.name", "model.type", "arch", "architecture", "backbone"), model),
    **dict.fromkeys(("data.root", "data.path", "data.dir", "dataset.root", "dataset.path"), renamed("data_root")),
    **dict.fromkeys(("ema_decay", "ema.decay"), _average_decay),
    "ema.enabled": _average,
    "t_max": _cosine_length,
    "val_interval": NAMES["check_val_every_n_epoch"],
    "early_stopping_patience": renamed("early_stopping"),
    "fast_dev_run": renamed("fast_dev_run"),
    "limit_train_batches": renamed("limit_train_batches", off=(None, 1.0)),
    "limit_val_batches": renamed("limit_val_batches", off=(None, 1.0)),
    **dict.fromkeys(("output_dir", "save_dir"), _folder),
    "device": not_needed("stoker uses the GPUs that it finds"),
}
"""The same for `stoker config import`, which says in a comment how it read each."""

_CALLED = {
    "bf16": "precision: bf16-mixed", "crop_size": "img_size", "dropout_rate": "dropout", "drop_rate": "dropout",
    "drop_path_rate": "drop_path", "ema": "ema_decay: 0.9999", "model_ema": "ema_decay: 0.9999",
    "exp_name": "run_name", "experiment": "run_name", "experiment_name": "run_name",
    "label_smoothing_factor": "label_smoothing", "n_gpus": "devices",
    "network": "model", "nproc_per_node": "devices", "num_threads": "num_workers", "patience": "early_stopping",
    "pretrained_weights": "weights: FILE", "randaugment": "auto_augment: randaugment", "random_seed": "seed",
    "save_steps": "checkpoint_every_steps", "seed_everything": "seed", "train_data_dir": "data_root",
    "train_dir": "data_root", "warmup": "warmup_epochs", "weight_decay_rate": "weight_decay",
    "eval_batch_size": "val_batch_size", "per_device_eval_batch_size": "val_batch_size",
    **dict.fromkeys(("fp16", "amp", "use_amp", "mixed_precision"), "precision: 16-mixed or bf16-mixed"),
    **dict.fromkeys(("checkpoint", "resume", "resume_from", "resume_from_checkpoint"), "the option --resume FILE"),
    **dict.fromkeys(("log_dir", "logdir", "logging_dir"), "runs_dir"),
}  # fmt: skip
"""What others call a key, where that is all that is known about it."""


def ours_for(name: str, value: Any) -> str | None:
    """What another program's name is here, for somebody who types it into a config of ours."""
    from stoker.config.reference import write_scalar

    if name in _CALLED:
        return f"here it is {_CALLED[name]}"
    try:
        became = IMPORT_NAMES[name](value, Theirs({name: value}))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None
    settings = ", ".join(f"{key}: {write_scalar(item)}" for key, item in became.settings.items())
    return f"here it is {redact_text(settings)}" if settings else became.why or None
