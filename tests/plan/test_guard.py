"""The plan before a run: a config that does not fit is refused, with settings that would."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.config import Config, load_config
from stoker.core.errors import UserError
from stoker.plan.guard import quick_plan, refuse_what_cannot_fit
from stoker.profile.host import Machine
from tests.conftest import Run
from tests.support.tiny_training import write_config, write_images

HERE = Machine(cpus=8, ram_bytes=16_000_000_000, shm_bytes=8_000_000_000, accelerators=0)


def config(*words: str) -> Config:
    small = ("model=test_resnet", "img_size=64", "batch_size=16", "num_workers=2", "data_root=/data", "precision=32")
    given = {word.partition("=")[0] for word in words}
    return load_config(None, [*(word for word in small if word.partition("=")[0] not in given), *words]).config


def test_workers_that_need_more_memory_than_there_is_are_refused_with_numbers_that_fit() -> None:
    greedy = config("num_workers=64", "prefetch_factor=16", "batch_size=1024", "loader=process", "img_size=224")
    with pytest.raises(UserError) as caught:
        refuse_what_cannot_fit(greedy, None, HERE, force=False)
    assert caught.value.name == "does-not-fit"
    assert "of RAM, the host has 16 GB" in caught.value.seen
    assert "/dev/shm has 8 GB" in caught.value.seen
    assert "--force" in caught.value.hint
    greedy = config("num_workers=64", "prefetch_factor=16", "batch_size=256", "loader=process", "img_size=224")
    plan = quick_plan(greedy, None, HERE)
    (fix,) = [finding.fix for finding in plan.refused if finding.name == "ram-exceeded"]
    words = fix.split()
    cured = quick_plan(config(*words, "batch_size=256", "loader=process", "img_size=224"), None, HERE)
    assert "ram-exceeded" not in {finding.name for finding in cured.refused}


def test_a_config_that_fits_starts_silently_and_force_says_what_was_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    refuse_what_cannot_fit(config(), None, HERE, force=False)
    assert capsys.readouterr() == ("", "")
    tiny = Machine(cpus=2, ram_bytes=1_000_000_000, shm_bytes=64_000_000, accelerators=0)
    refuse_what_cannot_fit(config(), None, tiny, force=True)
    assert "warning: " in capsys.readouterr().err


def test_a_step_that_is_larger_than_the_memory_is_traced_and_refused() -> None:
    with pytest.raises(UserError, match="of RAM"):
        refuse_what_cannot_fit(config("model=resnet18", "img_size=224", "batch_size=2048"), None, HERE, force=False)


def test_train_refuses_before_it_touches_the_run_folder(stoker: Run, tmp_path: Path) -> None:
    path = write_config(tmp_path, write_images(tmp_path / "data"), num_workers=4000, loader="process")
    done = stoker("train", path)
    assert done.code == 1
    assert "error: does-not-fit" in done.err
    assert not (tmp_path / "runs").exists()


def test_batches_of_an_accumulated_update_are_planned_for_training_and_not_for_validation() -> None:
    words = ("loader=process", "num_workers=2", "batch_size=16", "img_size=64")
    batch_bytes = 16 * 64 * 64 * 3
    plans = [quick_plan(config(*words, f"gradient_accumulation={number}"), None, HERE) for number in (1, 4)]
    shared = [plan.shm.parts for plan in plans]
    assert shared[1]["training batches"] - shared[0]["training batches"] == 3 * batch_bytes
    assert shared[1]["validation batches"] == shared[0]["validation batches"]
    parts = [plan.ram.parts["batches in flight"] for plan in plans]
    assert parts[1] - parts[0] == 3 * batch_bytes
