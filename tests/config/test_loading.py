"""A config comes from defaults, files and overrides; all problems are reported at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.config import load_config
from stoker.config.importing.names import NAMES
from stoker.config.schema import ALIASES, Config, key_names
from stoker.core.errors import ConfigError
from tests.conftest import PROJECT

Write = Callable[..., Path]


def problems_of(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [f"{problem.seen}; {problem.fix}" for problem in caught.value.problems] or [caught.value.seen]


def test_later_sources_win(yaml_file: Write) -> None:
    yaml_file("lr: 0.1\nepochs: 5\nbatch_size: 8\n", "base.yaml")
    path = yaml_file("base: base.yaml\nepochs: 6\nbatch_size: 16\n")
    resolved = load_config(path, ["batch_size=32"])
    assert (resolved.config.lr, resolved.config.epochs, resolved.config.batch_size) == (0.1, 6, 32)
    assert resolved.origins["lr"].endswith("base.yaml:1")
    assert resolved.origins["epochs"].endswith("config.yaml:2")
    assert resolved.origins["batch_size"].startswith("command line")
    assert "momentum" not in resolved.origins


def test_the_documented_sections_and_aliases_load_as_printed(yaml_file: Write) -> None:
    text = "training:\n  train_batch_size: 4\n  workers: 6\n  accumulate_steps: 2\n  max_epochs: 32\n"
    config = load_config(yaml_file(text)).config
    assert (config.batch_size, config.num_workers, config.gradient_accumulation, config.epochs) == (4, 6, 2, 32)


@pytest.mark.parametrize(
    "text",
    [
        "lr: 1\nlr: 1\n",
        "training:\n  lr: 1\nmodel:\n  model: resnet18\nlr: 2\n",
        "training:\n  lr: 1\noptim:\n  lr: 1\n",
        "batch_size: 4\ntrain_batch_size: 8\n",
        "training: {workers: 1}\nnum_workers: 2\n",
    ],
)
def test_a_key_given_twice_is_refused(yaml_file: Write, text: str) -> None:
    (problem,) = problems_of(yaml_file(text))
    assert "set twice" in problem
    assert "set twice" in problems_of(None, "lr=0.1", "lr=0.2")[0]


def test_an_alias_that_says_the_same_is_a_warning(yaml_file: Write) -> None:
    resolved = load_config(yaml_file("epochs: 600\nmax_epochs: 600\n"))
    assert resolved.config.epochs == 600
    assert "max_epochs is an alias of epochs" in resolved.warnings[0]


def test_all_problems_come_at_once_with_their_lines(yaml_file: Write) -> None:
    path = yaml_file("num_worker: 3\nlr: fast\nepochs: 5\nwarmup_epochs: 5\nmomentum: 1.5\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["precision=64", "nonsense"])
    found = {problem.where: problem.seen for problem in caught.value.problems}
    assert len(found) == 6
    assert found[f"{path}:1"] == "'num_worker' is not a key"
    assert found[f"{path}:2"] == "lr: 'fast' is not a number"
    assert "warmup_epochs: 5 must be less than epochs: 5" in found[f"{path}:4 and {path}:3"]
    assert "must be below 1" in found[f"{path}:5"]


def test_a_rule_is_not_applied_to_an_invalid_value(yaml_file: Write) -> None:
    (problem,) = problems_of(yaml_file("epochs: many\nwarmup_epochs: 100\n"))
    assert "epochs: 'many' is not a whole number" in problem


@pytest.mark.parametrize(
    ("overrides", "both_keys"),
    [
        (["num_workers=0", "prefetch_factor=2"], ("num_workers", "prefetch_factor")),
        (["warmup_epochs=9", "epochs=9"], ("warmup_epochs", "epochs")),
        (["mixup_alpha=0.2", "num_classes=1"], ("mixup_alpha", "num_classes")),
        (["cutmix_alpha=1.0", "batch_size=1"], ("cutmix_alpha", "batch_size")),
        (["task=segment3d", "patch_size=[8,8,8]", "mixup_alpha=1"], ("mixup_alpha", "task")),
        (["repeated_augmentation=3", "batch_size=256"], ("repeated_augmentation", "batch_size")),
        (["bce_target_threshold=0.2"], ("bce_target_threshold", "loss")),
        (["ema_every=32"], ("ema_every", "ema_decay")),
        (["ema_warmup=copy"], ("ema_warmup", "ema_decay")),
        (["task=segment3d"], ("task", "patch_size")),
        (["patch_size=[8,8,8]"], ("patch_size", "task")),
        (["nesterov=true", "optimizer=lamb"], ("nesterov", "optimizer")),
        (["nesterov=true", "momentum=0"], ("nesterov", "momentum")),
        (["crop_scale=[0.9,0.1]"], ("crop_scale",)),
        (["crop_aspect=[2,1]"], ("crop_aspect",)),
        (["start_img_size=300"], ("start_img_size", "img_size")),
        (["resize_epochs=3"], ("resize_epochs", "start_img_size")),
        (["start_img_size=64", "resize_epochs=30", "epochs=20"], ("resize_epochs", "epochs")),
        (["cache_size=1GB"], ("cache_size", "cache_dir")),
        (["stage_to=/a", "cache_dir=/b", "data_root=/c"], ("stage_to", "cache_dir")),
        (["stage_to=/a"], ("stage_to", "data_root")),
        (["stage_to=s3://bucket", "data_root=/c"], ("stage_to", "local folder")),
        (["strategy=single", "devices=2"], ("strategy", "devices")),
        (["min_lr=1", "lr=0.1"], ("min_lr", "lr")),
        (["subset_classes=10", "num_classes=20"], ("subset_classes", "num_classes")),
    ],
)
def test_impossible_pairs_name_both_keys(overrides: list[str], both_keys: tuple[str, ...]) -> None:
    (problem,) = problems_of(None, *overrides)
    assert all(key in problem for key in both_keys)


def test_possible_pairs_load() -> None:
    assert load_config(None).config == Config()
    # Each repeat goes to another rank, so no batch has to be divisible.
    assert load_config(None, ["repeated_augmentation=3", "batch_size=256", "devices=8"]).config.devices == 8


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0), (2, 1), (5, 2), (6, 5)])
def test_fewer_epochs_on_the_command_line_shorten_the_files_warmup_with_a_note(
    yaml_file: Write, epochs: int, warmup: int
) -> None:
    path = yaml_file("epochs: 100\nwarmup_epochs: 5\n")
    resolved = load_config(path, [f"epochs={epochs}"])
    assert (resolved.config.epochs, resolved.config.warmup_epochs) == (epochs, warmup)
    assert resolved.warnings == ()
    if warmup == 5:
        assert resolved.notes == ()
    else:
        assert resolved.notes == (f"warmup_epochs: 5 does not fit into epochs={epochs}: using {warmup}",)
        assert "shortened from 5" in resolved.origins["warmup_epochs"]


def test_a_file_or_a_command_line_whose_warmup_outlasts_its_epochs_is_refused(yaml_file: Write) -> None:
    assert "must be less than epochs: 3" in problems_of(yaml_file("epochs: 3\nwarmup_epochs: 3\n"))[0]
    path = yaml_file("epochs: 9\nwarmup_epochs: 5\n")
    assert "must be less than epochs: 2" in problems_of(path, "epochs=2", "warmup_epochs=3")[0]
    assert "must be at least 1" in problems_of(path, "epochs=0")[0]


def test_the_recipes_of_the_paper_use_a_threshold_only_where_nothing_is_smoothed() -> None:
    recipes = {name: load_config(PROJECT / f"configs/rsb_{name}.yaml", []) for name in ("a1", "a2", "a3")}
    assert {name: found.config.bce_target_threshold for name, found in recipes.items()} == {
        "a1": None, "a2": 0.2, "a3": 0.2,
    }  # fmt: skip
    assert not any("label_smoothing" in warning for found in recipes.values() for warning in found.warnings)
    both = load_config(None, ["loss=bce", "bce_target_threshold=0.2", "label_smoothing=0.1"])
    assert any("cancels label_smoothing" in warning for warning in both.warnings)


def _mutations(name: str) -> set[str]:
    changed = {name[:i] + letter + name[i + 1 :] for i in range(len(name)) for letter in "q7"}
    dropped = {name[:i] + name[i + 1 :] for i in range(len(name))}
    doubled = {name[:i] + name[i] + name[i:] for i in range(len(name))}
    swapped = {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(len(name) - 1)}
    return (changed | dropped | doubled | swapped) - {name, ""}


def test_every_key_with_one_typo_is_refused_and_the_right_key_suggested() -> None:
    known = {*key_names(), *ALIASES}
    tried = 0
    for name in sorted(known):
        # Every third of them: all would take ten seconds.
        slips = sorted(_mutations(name) - known - NAMES.keys())[::3]
        tried += len(slips)
        # All at once, because each loading takes a few milliseconds; the problems are in the order of the words.
        for slip, problem in zip(slips, problems_of(None, *(f"{slip}=1" for slip in slips)), strict=True):
            assert slip in problem
            # 'l' or 'r' alone could be any short key; any suggestion or none will do.
            assert len(slip) == 1 or re.search(rf"did you mean .*\b{name}\b.*\?", problem), f"{slip} -> {problem}"
    assert tried > 3000


def test_look_alike_letters_are_named() -> None:
    (problem,) = problems_of(None, "b\N{CYRILLIC SMALL LETTER A}tch_size=3")
    assert "CYRILLIC SMALL LETTER A" in problem
    assert "did you mean batch_size?" in problem
    (full_width,) = problems_of(None, "\N{FULLWIDTH LATIN SMALL LETTER L}r=3")
    assert "did you mean lr?" in full_width


@pytest.mark.parametrize("value", [".nan", "-.inf", "nan", "Infinity"])
@pytest.mark.parametrize("key", ["lr", "mixup_alpha"])
def test_a_value_that_is_not_a_number_is_refused(key: str, value: str) -> None:
    assert len(problems_of(None, f"{key}={value}")) == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch_size=true", "booleans are not accepted"),
        ("batch_size=0", "must be at least 1"),
        ("batch_size=2.5", "is not a whole number"),
        ("num_workers=-1", "must be at least 0"),
        ("num_workers=lots", "is not one of a whole number, auto"),
        ("optimizer=sdg", "did you mean sgd?"),
        ("pin_memory=maybe", "is not one of true, false"),
        ("patch_size=[1,2]", "must be [int, int, int]"),
        ("patch_size=72", "is not a list like [int, int, int]"),
        ("rank_timeout=10", "has no unit"),
        ("rank_timeout=10 parsecs", "is not a unit of time"),
        ("run_name=../x", "starting with a letter or digit"),
        ("seed=99999999999999999999999", "must be below"),
        ("model={a: 1}", "is not text"),
        ("training.lr=0.1", "did you mean lr?"),
    ],
)
def test_errors_for_wrong_values_say_what_is_allowed(override: str, expected: str) -> None:
    assert expected in problems_of(None, override)[0]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("lr=5e-3", "lr", 0.005),
        ("precision=32", "precision", "32"),
        ("pin_memory=no", "pin_memory", False),
        ("pin_memory=on", "pin_memory", True),
        ("epochs=010", "epochs", 10),
        ("patch_size=[72, 136, 136]", "patch_size", (72, 136, 136)),
        ("cache_dir=/tmp/x=y", "cache_dir", "/tmp/x=y"),
        ("lookahead=1.5GiB", "lookahead", 3 * 2**29),
        ("rank_timeout=18 h", "rank_timeout", 64800.0),
        ("data_root=", "data_root", None),
        ("ema_decay=null", "ema_decay", None),
    ],
)
def test_values_are_read_as_people_write_them(override: str, key: str, value: object) -> None:
    extra = ["task=segment3d"] if key == "patch_size" else []
    assert getattr(load_config(None, [override, *extra]).config, key) == value


def test_a_base_that_is_missing_or_circular_is_refused(yaml_file: Write) -> None:
    assert "nowhere.yaml does not exist" in problems_of(yaml_file("base: nowhere.yaml\n"))[0]
    yaml_file("base: b.yaml\n", "a.yaml")
    path = yaml_file("base: a.yaml\n", "b.yaml")
    assert "is circular" in problems_of(path)[0]


def test_problems_come_in_the_order_of_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("epochs: 0\nspeed: 3\nlr: fast\nwarmth: 3\nval_fraction: 0.1\nval_csv: a.csv\nwd: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["colour=red"])
    wheres = [str(problem.where).removeprefix(f"{file}:").split(" ")[0] for problem in caught.value.problems]
    assert wheres[:4] == ["1", "2", "3", "4"]
    assert wheres[-2] == "7"
    assert wheres[-1].startswith("command")
