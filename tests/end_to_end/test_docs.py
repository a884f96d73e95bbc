"""The commands in README.md and docs/ are right: all of them are checked, and those that can run here are run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.tasks.demo import write_scrolls
from tests.support.documents import (
    PROJECT,
    BadPage,
    Step,
    check_command,
    inline_commands,
    missing_line,
    read_steps,
)
from tests.support.ready_process import ReadyProcess
from tests.support.s3_server import S3Server
from tests.support.tiny_training import write_images

DOCS = PROJECT / "docs"
PAGES = sorted([PROJECT / "README.md", *DOCS.glob("*.md")])
RUN = [page for page in PAGES if any(step.command and step.runs for step in read_steps(page.read_text()))]
# On top of the real config, so that a training takes seconds.
SMALL: dict[str, Any] = {
    "model": "test_resnet", "img_size": 32, "val_img_size": 32, "epochs": 2, "batch_size": 32, "val_batch_size": 32,
    "devices": 1, "num_workers": 1, "warmup_epochs": 0, "compile_model": "false", "precision": 32,
    "decoder": "simplejpeg",
}  # fmt: skip
SMALL_VOLUMES: dict[str, Any] = {
    "model": "small_unet", "patch_size": "[16, 16, 16]", "folds": 3, "epochs": 1, "steps_per_epoch": 2, "batch_size": 1,
    "devices": 1, "num_workers": 1,
}  # fmt: skip
NOT_TRAINED = ("plan-a-machine",)
"""Pages whose configs are not made small."""
VOLUMES = "segment-volumes"
MARKS = {
    "why-is-my-gpu-idle": pytest.mark.real_time,  # it shows a verdict, which a busy machine changes
    "plan-a-machine": pytest.mark.release,  # its networks are large; tests/commands/test_plan.py plans a small one
}


def test_there_is_a_page_for_each_job() -> None:
    jobs = (
        "train-imagenet", "bring-your-data", "verify-a-run", "why-is-my-gpu-idle", "tune", "plan-a-machine",
        "read-from-s3", "stage-data", "resume-and-continue", "segment-volumes", "results", "commands",
    )  # fmt: skip
    assert {page.stem for page in DOCS.glob("*.md")} == set(jobs)
    readme = (PROJECT / "README.md").read_text()
    assert [job for job in jobs if f"(docs/{job}.md)" not in readme] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_on_a_page_exists_with_its_options_config_and_keys(page: Path) -> None:
    text = page.read_text()
    written: set[str] = set()
    for step in read_steps(text):
        if step.file:
            written.add(step.file)
        else:
            check_command(step.command, written)
    for command in inline_commands(text):
        check_command(command, written)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = [part.split(")", 1)[0].split("#", 1)[0] for part in page.read_text().split("](")[1:]]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Where a reader would be: with the configs, and with small data and a small network on the pages that train."""
    page = request.getfixturevalue("page")
    (tmp_path / "configs").mkdir()
    for config in (PROJECT / "configs").glob("*.yaml"):
        keys = {} if page.stem in NOT_TRAINED else SMALL
        lines = [f"base: {config}", *(f"{key}: {value}" for key, value in keys.items())]
        (tmp_path / "configs" / config.name).write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=MARKS.get(page.stem, ())) for page in RUN],
    ids=lambda page: page.stem,
)
def test_the_commands_of_a_page_run_and_print_what_it_shows(
    page: Path, folder: Path, ready: ReadyProcess, request: pytest.FixtureRequest
) -> None:
    text = page.read_text()
    places = {
        "/data/imagenet": str(folder / "imagenet"),
        "/nvme": str(folder / "nvme"),
        "/data/vesuvius": str(folder / "vesuvius"),
    }
    variables = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    if page.stem == VOLUMES:
        write_scrolls(folder / "vesuvius", volumes=3, shape=(24, 24, 24), scrolls=3)
    elif page.stem not in NOT_TRAINED:
        write_images(folder / "imagenet", train=24, val=4, classes=6)
    if "s3://" in text and page.stem != VOLUMES:
        server: S3Server = request.getfixturevalue("s3_server")
        for path in sorted((folder / "imagenet").rglob("*.jpg")):
            server.put(str(path.relative_to(folder)), path.read_bytes())
        variables |= server.environment()
    for step in read_steps(text):
        if step.file and page.stem == VOLUMES:
            (folder / "theirs.yaml").write_text(step.content.replace("/data/vesuvius", places["/data/vesuvius"]))
            keys = "".join(f"{key}: {value}\n" for key, value in SMALL_VOLUMES.items())
            (folder / step.file).write_text(f"base: theirs.yaml\n{keys}")
        elif step.file:
            (folder / step.file).write_text(step.content)
        elif step.runs:
            _run(step, folder, ready, places, variables)


def _run(step: Step, folder: Path, ready: ReadyProcess, places: dict[str, str], variables: dict[str, str]) -> None:
    command = step.command
    for place, here in places.items():
        command = command.replace(place, here)
    program, *words = shlex.split(command)
    assert program == "stoker", f"line {step.line}: mark `{command}` no_run: only stoker runs here"
    ended = ready.run(*words, cwd=folder, **variables)
    printed = ended.err + ended.out
    assert ended.code == 0, f"line {step.line}: {command}\n{printed}"
    lacking = missing_line(step.shown, printed)
    assert lacking is None, f"line {step.line}: {command}\nshown but not printed: {lacking}\n{printed}"


# The checks above can fail.


@pytest.mark.parametrize(
    "command",
    [
        "stoker trian configs/demo.yaml",
        "stoker config shwo configs/demo.yaml",
        "stoker train configs/demo.yaml --frehs",
        "stoker train configs/demo.yaml learning_rate=0.1",
        "stoker train configs/demo.yaml epochs=many",
        "stoker train configs/no_such.yaml",
        "stoker train my.yaml",
        "stoker doctor -- python my.py",
        "stoker plan configs/demo.yaml --gpu",
        "make demmo",
        "python train.py --config configs/demo.yaml lrr=1",
        "rm -rf runs",
    ],
)
def test_a_misspelt_command_is_refused(command: str) -> None:
    with pytest.raises(BadPage):
        check_command(command, set())


def test_commands_are_found_in_blocks_in_tables_and_in_text() -> None:
    block = "```console\n$ stoker demo\nval/acc1 99 %\n$ stoker config keys\n```"
    text = f"a `stoker eval runs/A`\n{block}\n| `make test` |\n"
    first, second = read_steps(text)
    assert (first.command, first.shown, first.line, first.runs) == ("stoker demo", ["val/acc1 99 %"], 3, True)
    assert second.command == "stoker config keys"
    assert inline_commands(text) == ["stoker eval runs/A", "make test"]
    assert [step.runs for step in read_steps("```console no_run\n$ stoker demo\n```")] == [False]


@pytest.mark.parametrize("block", ["```console norun\n$ stoker demo\n```", "```console\nstoker demo\n```"])
def test_a_block_that_would_be_ignored_is_refused(block: str) -> None:
    with pytest.raises(BadPage):
        read_steps(block)


def test_shown_output_may_differ_in_numbers_units_bars_and_spaces_but_not_in_words() -> None:
    printed = "start\n  VRAM    14.4 GB of  23.7 GB  [####    ]  61%\n917 images/s, bound by the loader\n"
    assert missing_line(["...", "VRAM 9 MB of 80 GB [## ] 5%", "1,200 images/s, bound by the loader"], printed) is None
    assert missing_line(["...", "917 images/s, ... the loader"], printed) is None
    assert missing_line(["...", "917 images/s, bound by the storage"], printed) is not None
    assert missing_line(["VRAM 14.4 GB of 23.7 GB [####] 61%"], printed) is not None
    assert missing_line(["...", "917 images/s, ...", "...", "start"], printed) == "start"
    assert missing_line(["preview.png"], "listing: 1 of 6 (17%) 0.163/s, 00:31 left\npreview.png\n") is None
