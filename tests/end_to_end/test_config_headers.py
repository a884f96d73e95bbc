"""The commands in the comments of our configs, and those of the documents that these configs come from, are right.

Commands on a line of their own are run, on small data and with a small network; what they set stays theirs otherwise.
Commands in running text, and those for several GPUs or nodes, are checked by the real parser.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.end_to_end.test_docs import SMALL
from tests.support.documents import BadPage, check_command
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import metrics, write_images

sys.path.insert(0, str(PROJECT))
from train import arguments_for_stoker

CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))
_OWN_LINE = re.compile(r"^#\s+((?:stoker|python train\.py) .*)$", re.MULTILINE)
_QUOTED = re.compile(r"`((?:stoker|python train\.py) [^`]+)`")
# 'On 4 GPUs: devices=4 batch_size=512, or …'
_SETTINGS = re.compile(r"^#.*?((?:\b[a-z_]+=[\w.\[\]-]+[ ,.]*)+)", re.MULTILINE)
DOCUMENTED = [
    "python train.py --config configs/optimized_test.yaml --no_wandb --epochs 2",
    "python train.py --config configs/resnet_strikes_back.yaml --no_wandb --epochs 1",
]
"""As their readers type them; the second with an end in sight."""
DOCUMENTED_FOR_CLUSTERS = [
    "python train.py --config configs/resnet_strikes_back.yaml --wandb_project imagenet-resnet50 --wandb_name one-gpu",
    "python train.py --config configs/resnet_strikes_back.yaml --devices 4 --wandb_project p --wandb_name n",
    "python train.py --config configs/resnet_strikes_back.yaml --devices 4 --num_nodes 2 --wandb_project p",
    "python train.py --config configs/resnet_strikes_back.yaml --resume checkpoints/last.ckpt",
]
# What makes a training small, but not how long it and its warmup are: the commands say that.
SHRUNK = {key: value for key, value in SMALL.items() if key not in ("epochs", "warmup_epochs")} | {
    "prefetch_factor": 1, "subset_classes": 3, "subset_train_per_class": 12, "subset_val_per_class": 4,
}  # fmt: skip


def commands(config: Path) -> list[str]:
    return [match[1] for match in _OWN_LINE.finditer(config.read_text())]


RUN = [(config.stem, command) for config in CONFIGS for command in commands(config)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_every_command_and_setting_in_a_configs_comments_exists(config: Path) -> None:
    text = config.read_text()
    quoted = [match[1] for line in text.splitlines() for match in _QUOTED.finditer(line.partition("#")[2])]
    for command in [*commands(config), *quoted]:
        check_command(command, set())
    for settings in _SETTINGS.finditer(text):
        words = re.findall(r"[a-z_]+=[\w.\[\]-]+", settings[1].rstrip(" ,."))
        check_command(
            shlex.join(["stoker", "train", f"configs/{config.name}", *(word.rstrip(".,") for word in words)]), set()
        )


@pytest.mark.parametrize("command", DOCUMENTED + DOCUMENTED_FOR_CLUSTERS)
def test_the_documents_commands_are_understood(command: str) -> None:
    check_command(command, set())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("imagenet"), train=12, val=4, classes=4)


@pytest.mark.parametrize(
    "command", [command for _, command in RUN] + DOCUMENTED, ids=[name for name, _ in RUN] + ["document", "document-2"]
)
def test_a_command_from_a_header_trains(command: str, tmp_path: Path, data: Path, ready: ReadyProcess) -> None:
    (tmp_path / "configs").mkdir()
    for config in CONFIGS:
        (tmp_path / "configs" / config.name).write_text(f"base: {config}\ndata_root: {data}\n" + shrunk(config))
    program, *words = shlex.split(command)
    words = arguments_for_stoker(words[1:]) if program == "python" else words
    small = [f"{key}={SHRUNK[key]}" if (key := word.partition("=")[0]) in SHRUNK else word for word in words]
    if not any(word.startswith("epochs=") for word in small):
        small.append("epochs=1")
    done = ready.run(*small, cwd=tmp_path)
    assert done.code == 0, done.err
    (run,) = (tmp_path / "runs").iterdir()
    epochs = next(int(word.partition("=")[2]) for word in small if word.startswith("epochs="))
    assert len(metrics(run, "epoch")) == epochs
    # These configs warm up for five epochs.
    assert f"warmup_epochs: 5 does not fit into epochs={epochs}: using {epochs // 2}" in done.err


def shrunk(config: Path) -> str:
    """Lines that make a training with this config small; subsets only where it has them."""
    subsets = "subset_classes" in config.read_text()
    keys = {key: value for key, value in SHRUNK.items() if subsets or not key.startswith("subset_")}
    return "".join(f"{key}: {value}\n" for key, value in keys.items())


def test_the_checks_above_can_fail() -> None:
    assert RUN, "no config has a command in its header"
    assert ("optimized_test", "stoker train configs/optimized_test.yaml epochs=2") in RUN
    with pytest.raises(BadPage):
        check_command("python train.py --config configs/optimized_test.yaml --epochs two", set())
