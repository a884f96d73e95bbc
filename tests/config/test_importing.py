"""Configs of other programs: what means the same loads, what differs is refused, and the import explains each key."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.config import load_config
from stoker.config.importing.names import MODELS, NAMES
from stoker.config.importing.rules import Kind, Theirs
from stoker.config.importing.translate import PROGRAMS, Imported, import_config, imported_as_yaml, summary
from stoker.config.schema import FOREIGN_ALIASES, Config
from stoker.core.errors import ConfigError, UserError
from tests.conftest import PROJECT

Write = Callable[..., Path]


def as_yaml(values: dict[str, Any]) -> str:
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items())


# The loader: what means the same.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accumulate_grad_batches: 2", {"gradient_accumulation": 2}),
        ("gradient_clip_val: 1.0\ngradient_clip_algorithm: norm", {"clip_grad_norm": 1.0}),
        ("gradient_clip_val: null", {"clip_grad_norm": None}),
        ("eta_min: 1.0e-6", {"min_lr": 1e-6}),
        ("eta_min: null", {"min_lr": 0.0}),
        ("max_classes: 5\nmax_samples_per_class: 50", {"subset_classes": 5, "subset_train_per_class": 50}),
        ("random_horizontal_flip: true\nrandom_crop: true", {"horizontal_flip": 0.5}),
        ("random_horizontal_flip: false", {"horizontal_flip": 0.0}),
        ("use_ema: false", {"ema_decay": None}),
        ("use_ema: true\nema_decay: 0.99", {"ema_decay": 0.99}),
        ("pretrained: false\ndeterministic: false\nmonitor: val/acc1\nmode: max\nval_check_interval: 1.0", {}),
        ("mean: [0.485, 0.456, 0.406]\nstd: [0.229, 0.224, 0.225]", {}),
        ("epochs: 300\nwarmup_epochs: 5\ncosine_t_max: 295", {"epochs": 300}),
        ("lr_scheduler: none", {"lr_scheduler": "constant"}),
        ("auto_augment: null", {"auto_augment": "none"}),
        (
            "auto_augment: rand-m9-mstd0.5-inc1",
            {"auto_augment": "randaugment", "randaugment_magnitude": 9, "randaugment_magnitude_std": 0.5,
             "randaugment_ops": 2},
        ),
        ("accelerator: auto", {"accelerator": None}),
        ("train_iterations_per_epoch: 4000\ntrain_batch_size: 1\naccumulate_steps: 1", {"steps_per_epoch": 4000}),
    ],
)  # fmt: skip
def test_a_name_or_value_of_others_that_means_the_same_loads(
    yaml_file: Write, text: str, expected: dict[str, Any]
) -> None:
    config = load_config(yaml_file(text + "\n")).config
    assert {key: getattr(config, key) for key in expected} == expected
    on_command_line = load_config(None, [line.replace(": ", "=") for line in text.splitlines()]).config
    assert on_command_line == config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gradient_clip_algorithm: value", "never single values"),
        ("pretrained: true", "weights: FILE"),
        ("mean: [0.5, 0.5, 0.5]", "as the model expects"),
        ("random_crop: false", "always cropped"),
        ("deterministic: true", "no such switch"),
        ("monitor: val/loss", "by val/acc1"),
        ("val_check_interval: 0.5", "once, at the end of each epoch"),
        ("val_check_interval: 1", "once, at the end of each epoch"),  # in Lightning: after every batch
        ("epochs: 600\ncosine_t_max: 290", "rises again"),
        ("checkpoint_dir: /mnt/checkpoints", "RUNS_DIR/RUN_NAME/checkpoints"),
        ("accelerator: gpu", "names a datasheet"),
        ("auto_augment: rand-m9", "of timm's policies"),
        ("use_ema: true", "needs ema_decay"),
        ("_base_: other.yaml", "ours is called base"),
        ("train_iterations_per_epoch: 4000\ntrain_batch_size: 2", "2 of them make an update"),
        ("gradient_clip_val: 1.0\nlr: 0.005", "use lr as it is"),
    ],
)
def test_what_differs_is_refused_with_the_reason_and_the_import(yaml_file: Write, text: str, reason: str) -> None:
    path = yaml_file(text + "\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert reason in problem.seen
    assert caught.value.hint == f"stoker config import {path} -o ours.yaml"


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("learning_rate: 0.1", "lr: 0.1, scale_lr: false"), ("mixup: 0.2", "mixup_alpha: 0.2"),
        ("fp16: true", "precision: 16-mixed"), ("resume: a.ckpt", "--resume"),
        ("logdir: out", "runs_dir"), ("arch: resnet18", "model: resnet18"), ("patience: 3", "early_stopping"),
        ("data_path: https://me:secret@host/data", 'data_root: "https://'), ("fp16: [1, {}]", "precision"),
    ],
)  # fmt: skip
def test_a_name_of_others_that_is_no_key_is_told_ours(yaml_file: Write, text: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(yaml_file(text + "\n"))
    (problem,) = caught.value.problems
    assert problem.fix is not None
    assert problem.fix.startswith(f"here it is {ours}") or f"option {ours}" in problem.fix
    assert "secret" not in str(problem)


def test_a_name_of_others_with_a_wrong_value_is_refused_under_our_key(yaml_file: Write) -> None:
    text = "log_every_n_steps: often\nrandom_horizontal_flip: 7\ncosine_t_max: [1]\n"
    with pytest.raises(ConfigError) as caught:
        load_config(yaml_file(f"{text}gradient_clip_val: 1.0\nclip_grad_norm: 2.0\n"))
    messages = " ".join(problem.seen for problem in caught.value.problems)
    assert "log_every: 'often' is not a whole number" in messages
    assert "horizontal_flip: 7 must be at most 1" in messages
    assert "cosine_t_max: [1]" in messages
    assert "gradient_clip_val and clip_grad_norm: set twice" in messages


@pytest.mark.parametrize("where", ["file", "command line", "base"])
def test_an_lr_beside_others_names_loads_once_it_is_said_whether_to_scale_it(yaml_file: Write, where: str) -> None:
    yaml_file("scale_lr: false\n" if where == "base" else "", "base.yaml")
    said = "scale_lr: true\n" if where == "file" else ""
    path = yaml_file(f"base: base.yaml\nlog_every_n_steps: 5\nlr: 0.1\n{said}")
    config = load_config(path, ["scale_lr=true"] if where == "command line" else []).config
    assert config.scale_lr is (where != "base")
    assert load_config(path, ["lr=0.2", "scale_lr=true"] if where != "file" else ["lr=0.2"]).config.lr == 0.2


def test_the_reference_lists_the_other_names_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "keys", "gradient_clip_val"]) == 0
    assert "accumulate_grad_batches" not in capsys.readouterr().out
    assert main(["config", "keys", *FOREIGN_ALIASES]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in [*FOREIGN_ALIASES, *FOREIGN_ALIASES.values()])


# The tables.


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_rule_of_a_table_gives_keys_of_ours_or_a_reason(program: Any) -> None:
    values: list[Any] = [None, True, False, 0, 1, 0.5, 1.0, 32, "", "x", "norm", "val", "cosine", "sgd", [1, 2], {}]
    for name, rule in program.table.items():
        for value in values:
            try:
                became = rule(value, Theirs({name: value}))
            except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError):
                continue  # the import says 'unexpected value'
            assert became.settings.keys() <= Config.model_fields.keys(), name
            assert became.settings or became.why, name
    assert program.name != "names" or NAMES.keys() <= program.table.keys()
    for fact in program.facts(Theirs({})):
        assert Config.model_validate(fact.settings)
        assert fact.why


def assert_explained(imported: Imported, folder: Path) -> Config:
    """Our file loads, sets what the import says, and has a comment for each key of theirs."""
    text = imported_as_yaml(imported)
    ours = folder / "ours.yaml"
    ours.write_text(text)
    resolved = load_config(ours)
    assert resolved.origins.keys() == imported.settings.keys()
    assert resolved.config == Config.model_validate(imported.settings)
    for key in imported.keys:
        assert key.name in text
    assert all("#" in line for line in text.splitlines() if not line.startswith(tuple(resolved.origins)) and line)
    return resolved.config


# The first case study: every key and value of its 22 files, in files written anew.

CASE_STUDY_VALUES: dict[str, list[Any]] = {
    "data_root": ["/data/imagenet"], "num_workers": [8], "pin_memory": [True], "persistent_workers": [True],
    "model_name": ["resnet50"], "pretrained": [False, True], "num_classes": [1000], "img_size": [224],
    "mean": [[0.485, 0.456, 0.406]], "std": [[0.229, 0.224, 0.225]], "batch_size": [256], "epochs": [90, 10, 600, 300],
    "optimizer": ["sgd", "lamb"], "lr": [0.1, 0.0001, 0.357], "momentum": [0.9], "weight_decay": [1e-4, 0.02],
    "lr_scheduler": ["cosine", "none", "constant"], "warmup_epochs": [5, 0], "precision": ["16-mixed", 32],
    "log_every_n_steps": [50], "val_check_interval": [1.0, 0.5], "save_top_k": [3, 0], "monitor": ["val/acc1"],
    "mode": ["max"], "strategy": ["ddp", "auto"], "sync_batchnorm": [True, False], "random_crop": [True],
    "random_horizontal_flip": [True], "auto_augment": [None, "imagenet", "rand-m9-mstd0.5-inc1", "randaugment"],
    "mixup_alpha": [0.0, 0.2], "cutmix_alpha": [0.0, 1.0], "label_smoothing": [0.0, 0.1], "seed": [42],
    "deterministic": [False], "use_ema": [True, False], "ema_decay": [0.9999], "gradient_clip_val": [None, 1.0],
    "prefetch_factor": [2], "compile_model": [False, True], "max_epochs": [1, 600, 300, 10], "devices": [1, 8],
    "max_classes": [100], "max_samples_per_class": [500], "subset_seed": [42], "cosine_t_max": [290, None, 95, 295],
    "eta_min": [1e-6, None, 0.0], "random_erasing": [0.35], "gradient_clip_algorithm": ["norm"],
    "accumulate_grad_batches": [2, 1], "checkpoint_dir": ["/mnt/checkpoints"], "num_nodes": [1], "nesterov": [True],
    "accelerator": ["cpu", "gpu"],
}  # fmt: skip


def test_every_key_and_value_of_the_case_study_imports_and_the_result_loads(tmp_path: Path, yaml_file: Write) -> None:
    for values in zip_longest(*CASE_STUDY_VALUES.values()):
        first = {key: known[0] for key, known in CASE_STUDY_VALUES.items()}
        given = zip(CASE_STUDY_VALUES.items(), values, strict=True)
        mixed = first | {key: value for (key, known), value in given if value is not None or None in known}
        imported = import_config(yaml_file(as_yaml(mixed), "theirs.yaml"))
        assert imported.program.name == "names"
        assert imported.named(Kind.UNKNOWN) == []
        config = assert_explained(imported, tmp_path)
        assert (config.lr, config.scale_lr) == (mixed["lr"], False)


def test_keys_of_a_base_file_count_where_the_import_is_told_and_the_file_beside_it_is_named_otherwise(
    tmp_path: Path, yaml_file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    base = yaml_file(as_yaml({"lr": 0.1, "num_workers": 8, "lr_scheduler": "cosine"}), "base.yaml")
    theirs = yaml_file(as_yaml({"lr": 5e-3, "model_name": "resnet50", "epochs": 600, "max_epochs": 600}), "theirs.yaml")
    imported = import_config(theirs, base=base)
    config = assert_explained(imported, tmp_path)
    assert (config.lr, config.num_workers, config.epochs) == (5e-3, 8, 600)
    assert imported.named(Kind.NOT_TRANSLATED) == []
    assert main(["config", "import", str(theirs)]) == 0
    assert f"{base} was not read; if its keys count too: --base {base}" in capsys.readouterr().err


# Other programs.

TIMM_A2 = {
    "aa": "rand-m7-mstd0.5-inc1", "amp": True, "amp_dtype": "float16", "aug_repeats": 3.0, "aug_splits": 0,
    "batch_size": 256, "bce_loss": True, "bce_target_thresh": 0.2, "bn_eps": None, "bn_momentum": None,
    "channels_last": True, "checkpoint_hist": 5, "clip_grad": None, "clip_mode": "norm", "color_jitter": 0.4,
    "cooldown_epochs": 0, "crop_pct": 0.95, "cutmix": 1.0, "cutmix_minmax": None, "data_dir": "/fsx/imagenet",
    "dataset": "", "decay_epochs": 90, "decay_rate": 0.1, "dist_bn": "reduce", "drop": 0.0, "drop_path": 0.05,
    "epochs": 300, "experiment": "", "grad_accum_steps": 1, "hflip": 0.5, "img_size": 224, "initial_checkpoint": "",
    "input_size": None, "interpolation": "bicubic", "jsd_loss": False, "log_interval": 50, "lr": 0.005,
    "lr_base": 0.1, "lr_base_scale": "", "lr_base_size": 256, "mean": None, "min_lr": 0.0, "mixup": 0.1,
    "mixup_mode": "batch", "mixup_off_epoch": 0, "mixup_prob": 1.0, "mixup_switch_prob": 0.5, "model": "resnet50",
    "model_ema": False, "model_ema_decay": 0.9998, "momentum": 0.9, "num_classes": None, "opt": "lamb",
    "opt_betas": None, "opt_eps": None, "output": "", "pin_mem": True, "pretrained": False, "ratio": [0.75, 4 / 3],
    "recount": 1, "remode": "const", "reprob": 0.0, "resume": "", "scale": [0.08, 1.0], "sched": "cosine", "seed": 0,
    "smoothing": 0.0, "std": None, "sync_bn": False, "torchcompile": None, "train_interpolation": "bicubic",
    "tta": 0, "vflip": 0.0, "warmup_epochs": 5, "warmup_lr": 0.00005, "weight_decay": 0.02, "workers": 8,
}  # fmt: skip


def test_timms_arguments_for_a2_become_the_a2_that_we_ship(tmp_path: Path, yaml_file: Write) -> None:
    # The number of GPUs is not in the file; three repeats need three of them.
    assert import_config(yaml_file(as_yaml(TIMM_A2), "args.yaml")).named(Kind.NOT_TRANSLATED) == ["aug_repeats"]
    imported = import_config(yaml_file(as_yaml(TIMM_A2), "args.yaml"), given={"devices": 8})
    assert imported.program.name == "timm"
    assert imported.named(Kind.UNKNOWN, Kind.NOT_TRANSLATED) == []
    config = assert_explained(imported, tmp_path)
    ours = load_config(PROJECT / "configs/rsb_a2.yaml").config
    # How its lr and epochs are written, and what has to do with the machine.
    different = {"scale_lr", "lr_reference_batch", "lr_update", "num_workers", "val_img_size"}
    for key in Config.model_fields.keys() - different:
        assert getattr(config, key) == pytest.approx(getattr(ours, key)), key
    assert (config.lr, config.scale_lr, config.lr_update) == (ours.lr, False, "epoch")
    assert imported.named(Kind.NO_EFFECT) == ["color_jitter", "decay_epochs", "decay_rate", "lr_base"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lr": None, "lr_base": 0.2, "lr_base_size": 512, "opt": "sgd"},
         {"lr": 0.2, "lr_reference_batch": 512, "scale_lr": True, "optimizer": "sgd", "nesterov": True}),
        ({"lr": None, "lr_base": 0.001, "lr_base_size": 1024, "opt": "adamw"},
         {"lr": 0.0014142135623730952, "scale_lr": False, "optimizer": "adamw"}),  # x sqrt(8 x 256 / 1024)
        ({"opt": "momentum"}, {"optimizer": "sgd", "nesterov": False}),
        ({"amp_dtype": "bfloat16", "model_ema": True}, {"precision": "bf16-mixed", "ema_decay": 0.9998}),
        ({"sched": "step", "decay_epochs": 30}, {"lr_scheduler": "step", "lr_step_epochs": 30}),
        ({"input_size": [3, 160, 160], "img_size": None}, {"img_size": 160}),
        ({"clip_grad": 2.0}, {"clip_grad_norm": 2.0}),
    ],
)  # fmt: skip
def test_timms_ways_to_say_things(yaml_file: Write, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = import_config(yaml_file(as_yaml(TIMM_A2 | keys), "args.yaml"), given={"devices": 8}).settings
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize(
    "keys", [{"opt": "adafactor"}, {"aa": "original"}, {"clip_grad": 1.0, "clip_mode": "agc"}, {"jsd_loss": True}]
)
def test_what_timm_has_and_we_do_not_is_listed(tmp_path: Path, yaml_file: Write, keys: dict[str, Any]) -> None:
    imported = import_config(yaml_file(as_yaml(TIMM_A2 | keys), "args.yaml"), given={"devices": 8})
    assert imported.named(Kind.NOT_TRANSLATED) == [next(iter(keys))]
    assert_explained(imported, tmp_path)


def test_torchvisions_arguments_become_the_recipe_that_we_ship(tmp_path: Path, yaml_file: Write) -> None:
    theirs = {
        "data-path": "/fsx/imagenet", "model": "resnet50", "batch-size": 128, "lr": 0.5,
        "lr-scheduler": "cosineannealinglr", "lr-warmup-epochs": 5,
        "lr-warmup-method": "linear", "lr-warmup-decay": 0.01, "epochs": 600, "opt": "sgd",
        "random-erase": 0.1, "label-smoothing": 0.1, "mixup-alpha": 0.2, "cutmix-alpha": 1.0, "weight-decay": 0.00002,
        "norm-weight-decay": 0.0, "auto-augment": "ta_wide", "train-crop-size": 176, "val-resize-size": 232,
        "val-crop-size": 224, "model-ema": True, "model-ema-steps": 32, "model-ema-decay": 0.99998, "world-size": 8,
        "ra-sampler": True, "ra-reps": 4, "amp": True, "interpolation": "bilinear", "workers": 8, "print-freq": 50,
        "momentum": 0.9,
    }  # fmt: skip
    imported = import_config(yaml_file(as_yaml(theirs), "args.yaml"), given={"devices": 8})
    assert imported.program.name == "torchvision"
    assert imported.named(Kind.UNKNOWN, Kind.NOT_TRANSLATED) == []
    config = assert_explained(imported, tmp_path)
    ours = load_config(PROJECT / "configs/torchvision_v2.yaml").config
    different = {"scale_lr", "lr_reference_batch", "num_workers", "lr_update"}
    for key in Config.model_fields.keys() - different:
        assert getattr(config, key) == pytest.approx(getattr(ours, key)), key
    assert (config.lr, config.scale_lr, config.lr_update) == (0.5, False, "epoch")


def test_torchvisions_names_of_networks_become_names_that_timm_knows(yaml_file: Write) -> None:
    import timm

    assert set(MODELS.values()) <= set(timm.list_models())
    theirs = {"model": "vit_b_16", "data_path": "/data", "lr_warmup_epochs": 1, "val_crop_size": 224}
    assert import_config(yaml_file(as_yaml(theirs), "args.yaml")).settings["model"] == "vit_base_patch16_224"


LIGHTNING = """
seed_everything: 7
trainer:
  accelerator: gpu
  strategy: ddp_find_unused_parameters_true
  devices: [0, 1]
  precision: bf16
  max_epochs: 20
  max_steps: -1
  val_check_interval: 1.0
  accumulate_grad_batches: 4
  gradient_clip_val: 0.5
  limit_train_batches: 1.0
  callbacks:
  - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    init_args: {monitor: val/acc1, save_top_k: 2, dirpath: /ckpt}
  - class_path: lightning.pytorch.callbacks.LearningRateMonitor
  logger:
    - class_path: lightning.pytorch.loggers.WandbLogger
      init_args: {project: birds}
model:
  class_path: birds.Classifier
  init_args: {model_name: resnet18, learning_rate: 0.2, head_width: 64}
data:
  class_path: birds.Data
  init_args: {data_dir: /birds, batch_size: 32, num_workers: 4}
optimizer:
  class_path: torch.optim.SGD
  init_args: {lr: 0.2, momentum: 0.8, weight_decay: 5e-5, nesterov: true}
lr_scheduler:
  class_path: torch.optim.lr_scheduler.CosineAnnealingLR
  init_args: {T_max: 20, eta_min: 0.001}
ckpt_path: null
"""


def test_sections_of_lightnings_cli_are_read_with_callbacks_loggers_and_optimizer(
    tmp_path: Path, yaml_file: Write
) -> None:
    imported = import_config(yaml_file(LIGHTNING, "theirs.yaml"))
    assert imported.program.name == "lightning"
    assert imported.named(Kind.UNKNOWN) == ["model.head_width"]
    assert imported.named(Kind.NOT_TRANSLATED) == []
    config = assert_explained(imported, tmp_path)
    expected = {
        "seed": 7, "strategy": "ddp", "devices": 2, "precision": "bf16-mixed", "epochs": 20, "lr": 0.2,
        "scale_lr": False, "gradient_accumulation": 4, "clip_grad_norm": 0.5, "save_top_k": 2, "runs_dir": "/ckpt",
        "wandb_project": "birds", "model": "resnet18", "data_root": "/birds", "batch_size": 32, "num_workers": 4,
        "optimizer": "sgd", "momentum": 0.8, "weight_decay": 5e-5, "nesterov": True, "lr_scheduler": "cosine",
        "lr_update": "epoch", "min_lr": 0.001,
    }  # fmt: skip
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("callbacks", "kept", "lost"),
    [
        ("EarlyStopping: {monitor: val_loss, mode: min, patience: 4}", {"best_by": "loss", "early_stopping": 4}, ""),
        ("EarlyStopping: {monitor: val/acc, mode: max}", {"best_by": "acc1", "early_stopping": 3}, ""),
        # Whatever their order: the best checkpoints are chosen by the metric that is watched.
        ("EarlyStopping: {monitor: val_loss}\nModelCheckpoint: {monitor: val_acc, save_top_k: 2}",
         {"best_by": "acc1", "save_top_k": 2}, "EarlyStopping watches val_loss"),
        ("EarlyStopping: {monitor: train_loss}", {}, "EarlyStopping watches train_loss"),
        ("EarlyStopping: {monitor: val_acc, mode: min}", {}, "EarlyStopping watches val_acc"),
        ("ModelCheckpoint: {monitor: val_f1}", {"save_top_k": 1}, "the best checkpoints are not those by val_f1"),
        ("EarlyStopping: {monitor: val_loss, min_delta: 0.1}", {"best_by": "loss", "early_stopping": 3}, "min_delta"),
    ],
)  # fmt: skip
def test_lightnings_callbacks_keep_the_metric_that_they_watch_or_it_is_said(
    yaml_file: Write, callbacks: str, kept: dict[str, Any], lost: str
) -> None:
    items = [line.partition(": ") for line in callbacks.splitlines()]
    listed = "".join(f"\n  - {{class_path: callbacks.{name}, init_args: {rest}}}" for name, _, rest in items)
    imported = import_config(yaml_file(f"trainer:\n  max_epochs: 9\n  callbacks:{listed}\n", "theirs.yaml"))
    assert imported.settings == {"epochs": 9, "scale_lr": False, **kept}
    assert lost in "".join(key.became.why for key in imported.lost)
    assert bool(lost) == bool(imported.lost)


def test_the_arguments_of_lightnings_optimizer_and_of_a_single_logger_count(yaml_file: Write) -> None:
    text = (
        "trainer:\n  logger: {class_path: loggers.WandbLogger, init_args: {project: birds, save_dir: logs}}\n"
        "model: {class_path: birds.Classifier, init_args: {lr: 0.2, momentum: 0.8}}\n"
        "optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}\n"
    )
    imported = import_config(yaml_file(text, "theirs.yaml"))
    expected = {"wandb": True, "wandb_project": "birds", "optimizer": "sgd", "lr": 0.1, "momentum": 0.8}
    assert imported.settings == {**expected, "scale_lr": False}
    assert [(key.name, key.became.why) for key in imported.lost] == [("model.lr", "lr is set by optimizer.lr")]


@pytest.mark.parametrize(
    ("train", "val", "interpolation", "lost"),
    [
        ("random", "", None, ["train_interpolation"]),
        ("bilinear", "bicubic", None, []),
        ("bicubic", "bicubic", "bicubic", []),
        ("bicubic", "", None, ["train_interpolation"]),
        ("bilinear", "bilinear", "bilinear", []),
        ("random", "bilinear", None, ["interpolation", "train_interpolation"]),
    ],
)
def test_timms_interpolation_is_kept_or_named(
    yaml_file: Write, train: str, val: str, interpolation: str | None, lost: list[str]
) -> None:
    keys = TIMM_A2 | {"train_interpolation": train, "interpolation": val}
    imported = import_config(yaml_file(as_yaml(keys), "args.yaml"), given={"devices": 8})
    assert imported.settings.get("interpolation") == interpolation
    assert [key.name for key in imported.lost if "interpolation" in key.name] == lost


# The command.


def test_the_command_writes_a_file_and_names_what_it_does_not_know(
    tmp_path: Path, yaml_file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = yaml_file("learning_rate: 0.1\nquirk: 3\nuse_amp: yes\nmodel_name: resnet18\n", "theirs.yaml")
    ours = tmp_path / "new" / "ours.yaml"
    assert main(["config", "import", str(theirs), "-o", str(ours)]) == 1
    listed = capsys.readouterr()
    assert "2 keys of" in listed.err
    assert "quirk: 3    # unknown" in listed.err
    assert "--accept" in listed.err
    assert not listed.out
    assert not ours.exists()
    assert main(["config", "import", str(theirs), "-o", str(ours), "--json", "--accept"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["unknown"] == ["quirk", "use_amp"]
    assert document["config"] == {"lr": 0.1, "scale_lr": False, "model": "resnet18"}
    assert document["keys"]["use_amp"]["value"] is True
    assert document["text"] == ours.read_text()
    assert "note: unknown: quirk, use_amp" in printed.err
    assert "# quirk: 3" in ours.read_text()
    # Printed without -o; never overwritten unless asked to.
    assert main(["config", "import", str(theirs), "--accept"]) == 0
    assert capsys.readouterr().out == ours.read_text()
    ours.write_text("mine")
    assert main(["config", "import", str(theirs), "-o", str(ours)]) == 1
    assert ours.read_text() == "mine"
    assert main(["config", "import", str(theirs), "-o", str(theirs), "--force"]) == 1
    assert main(["config", "import", str(theirs), "-o", str(tmp_path)]) == 1
    assert main(["config", "import", str(theirs), "--from", "tim"]) == 2
    assert "hint: --from timm" in capsys.readouterr().err
    assert main(["config", "import", str(theirs), "-o", str(ours), "--force", "--accept"]) == 0
    assert load_config(ours).config.model == "resnet18"


def test_a_config_of_ours_is_not_imported_by_mistake(yaml_file: Write) -> None:
    with pytest.raises(UserError, match="only keys of stoker"):
        import_config(yaml_file("lr: 0.1\nmax_epochs: 3\n"))
    assert import_config(yaml_file("lr: 0.1\nmax_epochs: 3\n"), program_name="names").settings["scale_lr"] is False


def test_values_of_a_stranger_stay_in_their_comments_without_secrets(tmp_path: Path, yaml_file: Write) -> None:
    text = (
        'note: "a\\nlr: 9\\u2028lr: 8"\nwandb_api_key: abcdef0123456789\n"bad\\nlr: 7": 1\n'
        "object: !!python/object:os.system {}\nbomb: [&a [1, 1, 1], &b [*a, *a, *a], &c [*b, *b, *b], [*c, *c]]\n"
        "loop: &l [*l]\nmodel_name: resnet18\nclasses: {a: [1], b: {c: 2}}\n"
    )
    imported = import_config(yaml_file(text, "theirs.yaml"))
    written = imported_as_yaml(imported)
    (tmp_path / "ours.yaml").write_text(written)
    config = load_config(tmp_path / "ours.yaml").config
    assert config == Config.model_validate(imported.settings)
    assert (config.lr, config.model) == (Config().lr, "resnet18")
    assert "abcdef0123456789" not in written
    assert "abcdef0123456789" not in json.dumps(summary(imported))
    assert len(written) < 5000


def test_sections_of_a_program_that_we_do_not_know_are_headings_except_for_names(
    tmp_path: Path, yaml_file: Write
) -> None:
    text = (
        "model: {name: resnet18, dropout: 0.1}\noptimizer: {name: torch.optim.AdamW, lr: 0.001}\n"
        "scheduler: {name: CosineAnnealingLR}\ndata: {root: /birds, batch_size: 8}\nval: {batch_size: 16, name: x}\n"
        "trainer_options: {gpus: [0, 1], precision: 16, strategy: ddp_spawn}\nlimit: .nan\n"
    )
    imported = import_config(yaml_file(text, "theirs.yaml"))
    assert imported.program.name == "names"
    assert imported.named(Kind.UNKNOWN) == ["val.name", "limit"]
    config = assert_explained(imported, tmp_path)
    expected = {
        "model": "resnet18", "dropout": 0.1, "optimizer": "adamw", "lr": 0.001, "scale_lr": False,
        "data_root": "/birds", "lr_scheduler": "cosine", "batch_size": 8, "devices": 2, "precision": "16-mixed",
        "strategy": "ddp",
    }  # fmt: skip
    assert {key: getattr(config, key) for key in expected} == expected
    assert "# val.batch_size: 16" in imported_as_yaml(imported)
    assert summary(imported)["keys"]["limit"]["value"] == "nan"


def test_what_does_not_fit_together_is_left_out_with_the_reason(tmp_path: Path, yaml_file: Write) -> None:
    theirs = {"model_name": "resnet18", "num_workers": 0, "prefetch_factor": 2, "epochs": 3, "warmup_epochs": 3}
    imported = import_config(yaml_file(as_yaml(theirs), "theirs.yaml"))
    assert set(imported.named(Kind.NOT_TRANSLATED)) == {"prefetch_factor", "warmup_epochs"}
    assert_explained(imported, tmp_path)


# Volumes: the second case study, whose configs build on each other.


@pytest.fixture
def scrolls(tmp_path: Path) -> Path:
    """In the keys of vesuvius_challenge: an experiment, its base in the same folder, and that one's above it."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "baseline.yaml").write_text(
        "experiment: {name: baseline, seed: 1337, precision: amp, output_dir: out}\n"
        "paths: {data_root: /data/scrolls, train_csv: /data/scrolls/train.csv, fold_csv: folds.csv}\n"
        "data:\n  train_folds: [0, 1, 2]\n  val_folds: [3]\n  mask_unlabeled_value: 2\n  normalize: zscore\n"
        "  intensity_clip: [-1200, 800]\n  denoise: {enabled: true, method: median3d, kernel_size: 3}\n"
        "  sampler: {foreground_ratio: 0.55, max_retries: 6}\n"
        "augmentation:\n  spatial: {rotate_deg: [-15, 15], flip_axes: [0, 1, 2], scale: [0.8, 1.25],"
        " elastic: {enabled: true, sigma: 8.0, magnitude: 0.08}}\n"
        "  intensity: {gamma: [0.7, 1.5], cutout: {holes: 2, size: [16, 48]}}\n"
        "model: {type: unet3d_residual, base_channels: 40, channel_multipliers: [1, 2, 2, 4, 4], blocks_per_stage: 3,"
        " norm: instance, activation: mish, deep_supervision: true, dropout: 0.1}\n"
        "loss:\n  components:\n    - {name: weighted_bce, weight: 0.5, pos_weight: 2.4}\n"
        "    - {name: soft_dice, weight: 0.45, smooth: 1.0}\n    - {name: toploss_simple, weight: 0.05}\n"
        "optimizer: {type: adamw, lr: 0.0002, weight_decay: 0.01, betas: [0.9, 0.999]}\n"
        "scheduler: {type: cosine, warmup_epochs: 3, t_max: 120, min_lr: 0.000002}\n"
        "training:\n  max_epochs: 120\n  train_batch_size: 2\n  accumulate_steps: 1\n  gradient_clip: 1.0\n"
        "  workers: 8\n  val_interval: 1\n  save_top_k: 3\n  ema: {enabled: true, decay: 0.999}\n"
        "inference: {patch_size: [64, 128, 128], tta: flips}\n"
    )
    (tmp_path / "experiments" / "topology.yaml").write_text(
        "_base_: ../baseline.yaml\nexperiment: {seed: 2025}\ndata: {patch_size: [80, 144, 144]}\n"
        "scheduler: {type: one_cycle, max_lr: 0.0006, pct_start: 0.25, div_factor: 10.0, anneal_strategy: cos}\n"
    )
    full = tmp_path / "experiments" / "full.yaml"
    full.write_text(
        "_base_: topology.yaml\nexperiment: {name: full}\ndata: {patch_size: [72, 136, 136]}\n"
        "model: {activation_checkpointing: {enabled: true, segments: {decoder: 2}}}\n"
        "training: {train_iterations_per_epoch: 4000, max_epochs: 32}\n"
    )
    return full


def test_the_scrolls_config_becomes_ours_with_its_bases(scrolls: Path, tmp_path: Path) -> None:
    imported = import_config(scrolls)
    assert imported.program.name == "names"
    expected = {
        "task": "segment3d", "model": "residual_unet", "patch_size": [72, 136, 136], "seed": 2025, "run_name": "full",
        "data_root": "/data/scrolls", "precision": "16-mixed", "ignore_label": 2, "normalize": "volume",
        "volume_loss": "0.5 ce + 0.45 dice", "steps_per_epoch": 2000, "epochs": 32, "batch_size": 2,
        "lr": 0.0006, "scale_lr": False, "lr_scheduler": "cosine", "warmup_epochs": 8, "warmup_start": 0.1,
        "ema_decay": 0.999, "clip_grad_norm": 1.0, "gradient_checkpointing": True, "deep_supervision": True,
        "volume_rotation": 1.0, "volume_degrees": [15.0] * 3, "volume_scales": [0.8, 1.25],
    }  # fmt: skip
    assert {key: imported.settings[key] for key in expected} == expected
    origins = {key.name: key.origin for key in imported.keys}
    assert origins["data.patch_size"].startswith("full.yaml:")
    assert origins["scheduler.max_lr"].startswith("topology.yaml:")
    assert origins["training.gradient_clip"].startswith("baseline.yaml:")
    assert_explained(imported, tmp_path)
    assert imported.named(Kind.NO_EFFECT) == ["optimizer.lr", "scheduler.t_max"]  # its schedule is one cycle
    assert set(imported.named(Kind.NOT_TRANSLATED, Kind.UNKNOWN)) == {
        "paths.train_csv", "paths.fold_csv", "data.train_folds", "data.val_folds", "data.intensity_clip",
        "data.denoise.enabled", "data.denoise.method", "data.denoise.kernel_size", "data.sampler.foreground_ratio",
        "data.sampler.max_retries", "augmentation.spatial.elastic.enabled", "augmentation.spatial.elastic.sigma",
        "augmentation.spatial.elastic.magnitude", "augmentation.intensity.cutout.holes",
        "augmentation.intensity.cutout.size", "model.base_channels", "model.channel_multipliers",
        "model.blocks_per_stage", "model.norm", "model.activation", "scheduler.warmup_epochs",
        "model.activation_checkpointing.segments.decoder",
    }  # fmt: skip
    text = imported_as_yaml(imported).replace("\n# ", " ")
    assert "not kept: pos_weight of weighted_bce, smooth of soft_dice, toploss_simple" in text
    (scrolls.parent / "topology.yaml").write_text("_base_: full.yaml\n")
    with pytest.raises(UserError, match="circular"):
        import_config(scrolls)
