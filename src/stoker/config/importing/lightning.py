"""Lightning CLI: `trainer:`, `model:` and `data:` sections, callbacks and loggers by class_path.

Keys are written `trainer.max_epochs`; `init_args` is left out, so that `model.init_args.lr` is `model.lr`. What is in
`model` and `data` is the user's own program, and is read by its usual names.
"""

from __future__ import annotations

from typing import Any

from stoker.config.importing.names import IMPORT_NAMES, optimizer, scheduler
from stoker.config.importing.rules import (
    Became,
    Kind,
    Table,
    Theirs,
    all_renamed,
    changed,
    not_needed,
    only,
    renamed,
    same,
)


def _listed(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each callback or logger."""
    items = value if isinstance(value, list) else [value]
    found = []
    for item in items:
        item = item if isinstance(item, dict) else {"class_path": item}
        arguments = item.get("init_args")
        found.append((str(item.get("class_path")).rpartition(".")[2], arguments if isinstance(arguments, dict) else {}))
    return found


_HARMLESS = ("LearningRateMonitor", "RichProgressBar", "TQDMProgressBar", "RichModelSummary", "ModelSummary")
# What the name of a validation metric contains, and ours.
_METRICS = {"loss": "loss", "acc5": "acc5", "top5": "acc5", "acc": "acc1", "top1": "acc1", "dice": "dice", "iou": "iou"}


def _callbacks(value: Any, _theirs: Theirs) -> Became:
    settings: dict[str, Any] = {}
    remarks: list[str] = []
    # Checkpoints first: the metric that they are chosen by is the only one that we can watch.
    for name, arguments in sorted(_listed(value) if value else [], key=lambda one: one[0] != "ModelCheckpoint"):
        if name not in ("ModelCheckpoint", "EarlyStopping"):
            if name not in _HARMLESS:
                remarks.append(f"{name} has no counterpart")
            continue
        monitored, metric = arguments.get("monitor"), _metric(arguments)
        known = monitored is None or (metric is not None and settings.get("best_by", metric) == metric)
        if metric is not None:
            settings.setdefault("best_by", metric)
        if name == "ModelCheckpoint":
            settings |= _checkpoints(arguments)
            if not known:
                remarks.append(f"the best checkpoints are not those by {monitored}; see best_by")
        elif not known:
            remarks.append(f"EarlyStopping watches {monitored}; early_stopping would watch the metric of best_by")
        else:
            settings["early_stopping"] = arguments.get("patience", 3)
            if arguments.get("min_delta"):
                remarks.append("min_delta of EarlyStopping; early_stopping_min_delta is in percentage points")
    return _partly(remarks, settings, "nothing to set")


def _metric(arguments: dict[str, Any]) -> str | None:
    """Our name of the metric that a callback watches; None for one that we do not have."""
    watched, mode = str(arguments.get("monitor")).lower(), arguments.get("mode")
    found = next((ours for part, ours in _METRICS.items() if part in watched and "train" not in watched), None)
    return None if mode not in (None, "min" if found == "loss" else "max") else found


def _partly(remarks: list[str], settings: dict[str, Any], nothing: str) -> Became:
    """What became of a list: not translated if one of its items was not."""
    if remarks:
        return Became(Kind.NOT_TRANSLATED, "; ".join(remarks), settings)
    return same("" if settings else nothing, **settings)


def _checkpoints(arguments: dict[str, Any]) -> dict[str, Any]:
    ours = {
        "save_top_k": arguments.get("save_top_k", 1),
        "checkpoint_every_steps": arguments.get("every_n_train_steps"),
        "runs_dir": arguments.get("dirpath"),
    }
    return {key: value for key, value in ours.items() if value is not None}


def _loggers(value: Any, _theirs: Theirs) -> Became:
    if value in (None, True, False):
        return Became(Kind.NOT_NEEDED, "stoker always writes metrics.jsonl")
    settings: dict[str, Any] = {}
    remarks: list[str] = []
    for name, arguments in _listed(value):
        if name == "WandbLogger":
            settings["wandb"] = True
            ours = {"wandb_project": arguments.get("project"), "wandb_name": arguments.get("name")}
            settings |= {key: text for key, text in ours.items() if text is not None}
        elif name in ("TensorBoardLogger", "CSVLogger"):
            settings["tensorboard" if name == "TensorBoardLogger" else "csv"] = True
        else:
            remarks.append(f"{name} has no counterpart")
    return _partly(remarks, settings, "stoker always writes metrics.jsonl")


def _one_logger(value: Any, theirs: Theirs) -> Became:
    arguments = {name: theirs.get(f"trainer.logger.{name}") for name in ("project", "name")}
    return _loggers([{"class_path": value, "init_args": arguments}], theirs)


def _scheduler(value: Any, theirs: Theirs) -> Became:
    became = scheduler(value, theirs)
    return same("once an epoch", **became.settings, lr_update="epoch") if became.settings else became


def _cosine_length(value: Any, theirs: Theirs) -> Became:
    if value == theirs.get("trainer.max_epochs"):
        return same("the cosine ends with the run, as here")
    return changed("torch's cosine rises again after this many epochs; here it ends with the run")


_USUAL = (
    "val_check_interval", "check_val_every_n_epoch", "gradient_clip_val", "gradient_clip_algorithm", "deterministic",
    "limit_train_batches", "limit_val_batches", "strategy", "devices", "precision",
)  # fmt: skip
_RENAMED = {
    "trainer.num_nodes": "num_nodes", "trainer.log_every_n_steps": "log_every",
    "trainer.accumulate_grad_batches": "gradient_accumulation", "trainer.sync_batchnorm": "sync_batchnorm",
    "trainer.default_root_dir": "runs_dir", "lr_scheduler.eta_min": "min_lr",
    "lr_scheduler.step_size": "lr_step_epochs", "lr_scheduler.gamma": "lr_step_factor",
}  # fmt: skip
_WITHOUT_EFFECT_ON_TRAINING = (
    "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.inference_mode", "trainer.barebones",
    "trainer.reload_dataloaders_every_n_epochs",
)  # fmt: skip
LIGHTNING: Table = {
    **IMPORT_NAMES,
    **all_renamed(_RENAMED),
    **dict.fromkeys(_WITHOUT_EFFECT_ON_TRAINING, not_needed("does not change the training")),
    **{f"trainer.{name}": IMPORT_NAMES[name] for name in _USUAL},
    "seed_everything": lambda value, _theirs: same("not set") if value in (None, True, False) else same(seed=value),
    "ckpt_path": renamed("weights", off=(None, "last", "best"), why="only the weights; to resume, --resume FILE"),
    "trainer.*": lambda _value, _theirs: Became(Kind.UNKNOWN, "unknown"),
    "trainer.accelerator": IMPORT_NAMES["device"],
    "trainer.logger": _loggers,
    "trainer.logger.class_path": _one_logger,
    **dict.fromkeys(
        ("trainer.logger.project", "trainer.logger.name", "trainer.logger.save_dir"),
        not_needed("see trainer.logger.class_path"),
    ),
    "trainer.callbacks": _callbacks,
    "trainer.fast_dev_run": renamed("fast_dev_run", off=(None, False)),
    "trainer.max_epochs": renamed("epochs", off=(None, -1)),
    "trainer.max_steps": only(None, -1, because="no limit", otherwise="stoker counts in epochs, and has no max_steps"),
    **dict.fromkeys(
        ("trainer.min_epochs", "trainer.min_steps"),
        only(None, because="not set", otherwise="the run has max_epochs epochs"),
    ),
    "trainer.max_time": only(None, because="not set", otherwise="stoker has no time limit; SIGTERM saves and stops"),
    "trainer.limit_test_batches": not_needed("only for testing"),
    "trainer.limit_predict_batches": not_needed("only for prediction"),
    "trainer.overfit_batches": only(None, 0, 0.0, because="off", otherwise="subset_train_per_class makes a small set"),
    "trainer.num_sanity_val_steps": not_needed("stoker has no such check"),
    "trainer.enable_checkpointing": not_needed("stoker always writes checkpoints"),
    "trainer.benchmark": not_needed("stoker decides"),
    "trainer.use_distributed_sampler": not_needed("every rank gets its share"),
    "trainer.profiler": not_needed("see stoker doctor"),
    "trainer.detect_anomaly": not_needed("steps with a NaN are skipped; see max_bad_steps"),
    "trainer.plugins": only(None, because="not set", otherwise="stoker has no plug-ins"),
    "optimizer.class_path": optimizer,
    "optimizer.eps": not_needed("stoker uses the optimizer's usual one"),
    "lr_scheduler.class_path": _scheduler,
    "lr_scheduler.T_max": _cosine_length,
    "lr_scheduler.last_epoch": not_needed("where a resumed schedule continues"),
    "model.class_path": not_needed("your class; model names the network"),
    "data.class_path": not_needed("your class; data_root names the data"),
}
