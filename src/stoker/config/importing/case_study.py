"""github.com/cydal/ImageNet-Full-training: what each key did in its code (train.py, data/datamodule.py,
models/resnet50.py at commit be370a7), which is not always what its name says: unknown keys vanished in **kwargs.
"""

from __future__ import annotations

from typing import Any

from stoker.config.importing.names import IMPORT_NAMES
from stoker.config.importing.rules import (
    Became,
    Kind,
    Rule,
    Table,
    Theirs,
    absolute_lr,
    changed,
    lost,
    number,
    renamed,
    same,
    torchvision_randaugment,
    without_effect,
)

# The defaults of its ResNet50Module, trainer and callbacks.
_SCHEDULE_EPOCHS = 90
_ETA_MIN = 1e-6
_EMA_DECAY = 0.9999
_VAL_PER_CLASS = 10
# RandAugment() of torchvision: two operations at 9 of 30.
_RANDAUGMENT_MAGNITUDE = 9.0


def _mixes(theirs: Theirs) -> bool:
    return any((number(theirs.get(name)) or 0) > 0 for name in ("mixup_alpha", "cutmix_alpha"))


def _is_cosine(theirs: Theirs) -> bool:
    return str(theirs.get("lr_scheduler", default="cosine")).lower() == "cosine"


def _swallowed(what: str, *, default: Any) -> Rule:
    def rule(value: Any, _theirs: Theirs) -> Became:
        if value in (None, default):
            return same("the default")
        return without_effect(what)

    return rule


def _epochs(value: Any, theirs: Theirs) -> Became:
    schedule = theirs.get("max_epochs", default=_SCHEDULE_EPOCHS)
    if schedule == value or not _is_cosine(theirs):
        return same(epochs=value)
    return changed(f"its schedule was made for {schedule} epochs (max_epochs); here it ends with the run", epochs=value)


def _schedule_epochs(_value: Any, theirs: Theirs) -> Became:
    # The trainer reads epochs only; 90 without it.
    if theirs.get("epochs") is None:
        return changed("the run there has 90 epochs without the key epochs", epochs=_SCHEDULE_EPOCHS)
    return Became(Kind.NOT_NEEDED, "the schedule ends with the run")


def _cosine_length(value: Any, theirs: Theirs) -> Became:
    if not _is_cosine(theirs):
        return same("not set") if value is None else without_effect("only its cosine reads it")
    epochs = theirs.get("epochs", default=_SCHEDULE_EPOCHS)
    warmup = theirs.get("warmup_epochs", default=5)
    if value is None or value + warmup == epochs:
        return same("the cosine ends with the run, as here")
    end = value + warmup
    if end > epochs:
        return changed(f"its cosine would have ended after {end} epochs; here it ends with the run")
    return changed(
        f"its cosine ended after {end} epochs and rose again until {epochs}; here it ends with the run. "
        f"epochs: {end} ends where its cosine did"
    )


def _min_lr(value: Any, theirs: Theirs) -> Became:
    if not _is_cosine(theirs):
        return same("not set") if value is None else without_effect("only its cosine reads it")
    return renamed("min_lr")(value, theirs)


def _scheduler(value: Any, _theirs: Theirs) -> Became:
    name = str(value).lower()
    if name == "cosine":
        return same(lr_scheduler="cosine")
    if name == "step":
        return changed(
            "nearest: a tenth after epochs 30, 60 and 80 there, every 30 epochs here",
            lr_scheduler="step",
            lr_step_epochs=30,
            lr_step_factor=0.1,
        )
    return same("any other name is constant there", lr_scheduler="constant")


def _optimizer(value: Any, _theirs: Theirs) -> Became:
    name = str(value).lower()
    if name == "lamb":
        return changed("its LAMB (pytorch_lamb) has no bias correction; this one has, like timm's", optimizer="lamb")
    if name == "adamw":
        return same(optimizer="adamw")
    if name == "adam":
        return lost("stoker has sgd, adamw and lamb")
    return same(optimizer=name)


def _policy(value: Any, _theirs: Theirs) -> Became:
    if value is None:
        return same(auto_augment="none")
    if value == "randaugment":
        return torchvision_randaugment(_RANDAUGMENT_MAGNITUDE)
    if value == "imagenet":
        return lost("torchvision's AutoAugment policy; stoker has randaugment and trivialaugment")
    return without_effect(
        "its code knows only imagenet and randaugment, so no policy was used; stoker would understand the name"
    )


def _smoothing(value: Any, theirs: Theirs) -> Became:
    if value and _mixes(theirs):
        return without_effect("with mixup or CutMix, its loss ignores it")
    return same(label_smoothing=value)


def _average(value: Any, theirs: Theirs) -> Became:
    if not value:
        return same("no average")
    decay = theirs.get("ema_decay", default=_EMA_DECAY)
    return same("its average has the full decay from the start", ema_decay=decay, ema_warmup="none")


def _average_decay(_value: Any, theirs: Theirs) -> Became:
    return Became(Kind.NOT_NEEDED, "see use_ema") if theirs.get("use_ema") else without_effect("use_ema is not true")


def _model(value: Any, _theirs: Theirs) -> Became:
    if value == "resnet50":
        return same(model="resnet50")
    return changed(f"{value} there, but its code always built a ResNet-50", model="resnet50")


def _compile(value: Any, _theirs: Theirs) -> Became:
    if not value:
        return same(compile_model=False)
    return same("its code compiles with max-autotune", compile_model=True, compile_mode="max-autotune")


def _samples_per_class(value: Any, _theirs: Theirs) -> Became:
    if not value:
        return same("not set")
    return same(
        f"and {_VAL_PER_CLASS} for validation, whatever the number",
        subset_train_per_class=value,
        subset_val_per_class=_VAL_PER_CLASS,
    )


def _clip_by(value: Any, _theirs: Theirs) -> Became:
    if value in (None, "norm"):
        return same("stoker clips the norm")
    return without_effect("the trainer is built without it, and clips the norm")


CASE_STUDY: Table = {
    **IMPORT_NAMES,
    "lr": absolute_lr,
    "epochs": _epochs,
    "max_epochs": _schedule_epochs,
    "lr_scheduler": _scheduler,
    "cosine_t_max": _cosine_length,
    "eta_min": _min_lr,
    "optimizer": _optimizer,
    "nesterov": _swallowed("its SGD is built without it", default=False),
    "accumulate_grad_batches": _swallowed("its trainer is built without it", default=1),
    "gradient_clip_algorithm": _clip_by,
    "auto_augment": _policy,
    "label_smoothing": _smoothing,
    "use_ema": _average,
    "ema_decay": _average_decay,
    "model_name": _model,
    "compile_model": _compile,
    "max_samples_per_class": _samples_per_class,
    "num_classes": lambda _value, _theirs: Became(Kind.NOT_NEEDED, "counted in the data, there and here"),
}

CASE_STUDY_KEYS = frozenset({
    "accelerator", "accumulate_grad_batches", "auto_augment", "batch_size", "checkpoint_dir", "compile_model",
    "cosine_t_max", "cutmix_alpha", "data_root", "deterministic", "devices", "ema_decay", "epochs", "eta_min",
    "gradient_clip_algorithm", "gradient_clip_val", "img_size", "label_smoothing", "log_every_n_steps", "lr",
    "lr_scheduler", "max_classes", "max_epochs", "max_samples_per_class", "mean", "mixup_alpha", "mode",
    "model_name", "momentum", "monitor", "nesterov", "num_classes", "num_nodes", "num_workers", "optimizer",
    "persistent_workers", "pin_memory", "precision", "prefetch_factor", "pretrained", "random_crop",
    "random_erasing", "random_horizontal_flip", "save_top_k", "seed", "std", "strategy", "subset_seed",
    "sync_batchnorm", "use_ema", "val_check_interval", "warmup_epochs", "weight_decay",
})  # fmt: skip
"""Every key of its 22 configs."""

CASE_STUDY_MARKS = frozenset({"random_horizontal_flip", "max_samples_per_class", "cosine_t_max", "use_ema"})


def case_study_facts(theirs: Theirs) -> list[Became]:
    facts = [
        same("lr is used as it is there; stoker would scale it with the total batch", scale_lr=False),
        same("its schedule moves once an epoch; the warmup differs by one epoch", lr_update="epoch"),
        same("no weight decay on biases and norms there", decay_bias_and_norm=False),
        same("set in its code", matmul_precision="medium"),
        same("set in its code, for training and validation", interpolation="bilinear"),
        same("the default there", warmup_epochs=5),
    ]
    if _is_cosine(theirs):
        facts.append(same("the default there", min_lr=_ETA_MIN))
    return facts
