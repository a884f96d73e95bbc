"""Keys that many training programs have, by their usual names (most of them are Lightning's).

A config of ours may use those that mean exactly the same; the loader refuses the others, and names the import.
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
    changed,
    lost,
    not_needed,
    number,
    only,
    renamed,
    same,
    timm_policy,
)
from stoker.config.schema import FOREIGN_ALIASES

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
        if theirs.get("ema_decay") is None:
            return lost("needs ema_decay")
        return same("ema_decay turns it on")
    return same(ema_decay=None) if value in (False, None) else lost("must be true or false")


def _average_decay(value: Any, theirs: Theirs) -> Became:
    if theirs.values.get("use_ema") is False:
        return Became(Kind.NO_EFFECT, "use_ema is false")
    return same(ema_decay=value)


def _clip_by(value: Any, _theirs: Theirs) -> Became:
    if value in (None, "norm"):
        return same("clip_grad_norm clips the norm")
    return lost("stoker clips the norm of the gradient, never single values: clip_grad_norm")


def _cosine_length(value: Any, theirs: Theirs) -> Became:
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
    batch = number(theirs.get("train_batch_size", "training.train_batch_size", "batch_size", default=1)) or 1
    accumulated = number(theirs.get("accumulate_steps", "training.accumulate_steps", default=1)) or 1
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
    "bf16-mixed": "bf16-mixed",
}  # fmt: skip
OPTIMIZERS = ("sgd", "adamw", "lamb")
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


def optimizer(value: Any, _theirs: Theirs) -> Became:
    """By name or class, as in `torch.optim.SGD`."""
    name = str(value).rpartition(".")[2].lower()
    return same(optimizer=name) if name in OPTIMIZERS else lost("stoker has sgd, adamw and lamb")


def scheduler(value: Any, _theirs: Theirs) -> Became:
    """By name or class, as in `torch.optim.lr_scheduler.CosineAnnealingLR`."""
    name = str(value).rpartition(".")[2].lower()
    return same(lr_scheduler=SCHEDULERS[name]) if name in SCHEDULERS else lost("stoker has cosine, step and constant")


def _early_stopping(value: Any, _theirs: Theirs) -> Became:
    return same("not set") if value is None else same(early_stopping=value)


def _scheduler_value(value: Any, _theirs: Theirs) -> Became | None:
    return same(lr_scheduler="constant") if value == "none" else None


def _policy_value(value: Any, _theirs: Theirs) -> Became | None:
    if value is None:
        return same(auto_augment="none")
    if not isinstance(value, str) or not value.startswith("rand-"):
        return None
    settings = timm_policy(value)
    if settings is None:
        return lost("only rand-mM-nN-mstdS-inc1 of timm's policies can be translated")
    return same("timm's name for it", **settings)


def _accelerator_value(value: Any, _theirs: Theirs) -> Became | None:
    if value not in ("auto", "cpu", "gpu", "cuda", "mps", "tpu"):
        return None
    if value == "auto":
        return same("what stoker does")
    return Became(Kind.NOT_NEEDED, "stoker uses the GPUs that it finds; here, accelerator names a datasheet")


NAMES: Table = {
    **{theirs: renamed(ours) for theirs, ours in FOREIGN_ALIASES.items()},
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
        None,
        False,
        because="random weights",
        otherwise="stoker starts from a file of yours: weights: FILE",
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
    "lr_scheduler": _scheduler_value,
    "auto_augment": _policy_value,
    "accelerator": _accelerator_value,
}
"""Other programs' values of keys that have our name; None from a rule: the value is not one of those."""


def _renamed_everywhere() -> dict[str, Rule]:
    """Names that only the import translates, because they could mean several things."""
    pairs = {
        "learning_rate": "lr", "base_lr": "lr", "wd": "weight_decay", "n_epochs": "epochs", "num_epochs": "epochs",
        "total_epochs": "epochs", "bs": "batch_size", "per_device_train_batch_size": "batch_size",
        "per_device_eval_batch_size": "val_batch_size", "eval_batch_size": "val_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation", "accum_iter": "gradient_accumulation",
        "grad_clip": "clip_grad_norm", "clip_grad": "clip_grad_norm", "max_grad_norm": "clip_grad_norm",
        "image_size": "img_size", "input_size": "img_size", "arch": "model", "architecture": "model",
        "backbone": "model", "n_classes": "num_classes", "data_dir": "data_root", "data_path": "data_root",
        "dataset_path": "data_root", "root": "data_root", "n_workers": "num_workers",
        "dataloader_num_workers": "num_workers", "mixup": "mixup_alpha", "cutmix": "cutmix_alpha",
        "smoothing": "label_smoothing", "drop_rate": "dropout", "drop_path_rate": "drop_path", "nodes": "num_nodes",
        "sync_bn": "sync_batchnorm", "log_interval": "log_every", "print_freq": "log_every",
        "project": "wandb_project",
    }  # fmt: skip
    return {theirs: renamed(ours) if ours != "lr" else absolute_lr for theirs, ours in pairs.items()}


IMPORT_NAMES: Table = {
    **_renamed_everywhere(),
    **NAMES,
    "lr": absolute_lr,
    "precision": precision,
    "devices": devices,
    "gpus": devices,
    "num_gpus": devices,
    "strategy": strategy,
    **dict.fromkeys(("optimizer", "optim", "opt", "optimizer.name", "optimizer.type"), optimizer),
    **dict.fromkeys(("lr_scheduler", "scheduler", "sched", "lr_scheduler.name", "scheduler.name"), scheduler),
    **dict.fromkeys(("model.name", "model.type"), renamed("model")),
    **dict.fromkeys(("data.root", "data.path", "data.dir", "dataset.root", "dataset.path"), renamed("data_root")),
    "ema_decay": _average_decay,
    "early_stopping_patience": _early_stopping,
    "fast_dev_run": renamed("fast_dev_run"),
    "limit_train_batches": renamed("limit_train_batches", off=(None, 1.0)),
    "limit_val_batches": renamed("limit_val_batches", off=(None, 1.0)),
    "output_dir": _folder,
    "save_dir": _folder,
    "device": not_needed("stoker uses the GPUs that it finds"),
}
"""The same for `stoker config import`, which says in a comment how it read each."""
