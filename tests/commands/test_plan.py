"""`stoker plan`: memory, time and cost of a config, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.config import load_config
from tests.conftest import PROJECT, Ended, Run

CONFIG = PROJECT / "configs" / "single_gpu_full.yaml"
# A small network: its trace takes a second.
SMALL = ("model=resnet10t", "num_workers=4", "data_root=/absent/imagenet")
MACHINE = ("--gpu", "a10g", "--cpus", "16", "--ram", "62GB")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], traced_once: None) -> Run:
    """Runs the command in this process."""

    def plan(*words: str) -> Ended:
        code = main(["plan", str(CONFIG), *SMALL, *words])
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    return plan


def plan(run: Run, *words: str) -> dict[str, Any]:
    document: dict[str, Any] = run("batch_size=32", *words, "--json").json
    return document


def test_a_plan_is_one_document_with_everything_that_can_run_out(run: Run) -> None:
    words = (*MACHINE, "--price", "1.21", "--storage", "gp3", "--disk", "500GB")
    found = plan(run, *words)
    vram, ram, time = found["vram"], found["ram"], found["time"]
    assert sum(vram["parts"].values()) == vram["peak_bytes"] < vram["limit_bytes"]
    assert vram["fits"] is True
    assert vram["largest_batch"] > 32
    assert sum(ram["parts"].values()) == ram["total_bytes"] > ram["loader_bytes"] > 0
    assert (ram["limit_bytes"], ram["fits"]) == (62_000_000_000, True)
    assert found["shm"]["fits"] is found["disk"]["fits"] is True
    # ImageNet's figures: the data is not here.
    assert found["steps_per_epoch"] == 1_281_167 // 32
    assert time["bound_by"] == "storage"  # 125 MB/s
    assert time["images_per_second"] == pytest.approx(125e6 / 114_660)
    assert time["cost"] == pytest.approx(time["total_s"] / 3600 * 1.21)
    assert [row["gpus"] for row in found["scaling"]] == [1, 2, 4, 8]
    rates = [row["images_per_second"] for row in found["scaling"]]
    assert rates == sorted(rates)
    assert found["scaling"][3]["lr"] == pytest.approx(8 * found["lr"])
    assert {finding["id"] for finding in found["findings"]} >= {"storage-bound"}
    # A cloud's CPUs are hyper-threads; four workers have a core each.
    assert (found["cpus"], found["cores"]) == (16, 8)
    assert any("16 vCPUs are the threads of 8 cores" in line for line in found["assumptions"])
    assert 0 < time["torch_loader"]["images_per_second"] < time["rates"]["loader"]["images_per_second"]
    assert all(set(finding) >= {"id", "message", "fix", "speedup"} for finding in found["findings"])
    # Epochs that end before the data does.
    short = plan(run, *words, "steps_per_epoch=100")
    assert short["steps_per_epoch"] == 100
    assert short["time"]["epoch_s"] == pytest.approx(100 * short["time"]["step_s"])
    assert short["time"]["total_s"] < time["total_s"]


def test_a_config_that_does_not_fit_is_refused_with_settings_that_would(run: Run, tmp_path: Path) -> None:
    sheet = tmp_path / "tiny.yaml"
    sheet.write_text(
        "title: a small card\nvram_gib: 1.0\nmemory_gb_per_s: 100\npeak_tflops: {fp32: 5, fp16: 10}\n"
        "pcie_gb_per_s: 12\nsource: made up\n"
    )
    words = ("--gpu", str(sheet), "--cpus", "4", "--ram", "1GB", "batch_size=1024", "loader=process", "--shm", "64MB")
    done = run(*words, "--json")
    found = done.json
    assert done.code == 1
    refusing = {finding["id"]: finding["fix"] for finding in found["findings"] if finding["refuses"]}
    assert set(refusing) == {"vram-exceeded", "ram-exceeded", "shm-exceeded"}
    largest = found["vram"]["largest_batch"]
    assert 0 < largest < 1024
    assert "gradient_accumulation=" in refusing["vram-exceeded"]
    batch = int(refusing["vram-exceeded"].split("batch_size=")[1].split()[0])
    assert batch <= largest


def test_the_text_begins_with_the_verdict_and_shows_every_budget(run: Run) -> None:
    done = run(*MACHINE, "--cores", "16")
    assert done.out.startswith("single_gpu_full.yaml: fits; ")
    assert "for 1 x a10g, 16 cores, 62 GB of RAM" in done.out
    assert "vCPU" not in done.out
    assert "torch's DataLoader with PIL on the same cores: " in done.out
    for word in ("VRAM", "RAM", "/dev/shm", "largest batch that fits", "activations", "with more accelerators"):
        assert word in done.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpu", "a10"), "a10g"),
        (("--gpu", "a100"), "a100-40"),
        (("--ram", "62"), "has no unit"),
        (("--cpus", "0"), "leaves nothing"),
        (("--storage", "fxs"), "fsx"),
        (("task=segment3d", "patch_size=[8,8,8]"), "only task: classify uses it"),
    ],
)
def test_bad_input_gets_a_clear_error(words: tuple[str, ...], told: str, run: Run) -> None:
    done = run(*words)
    assert done.code in (1, 2)
    assert told in done.err
    assert "Traceback" not in done.err


def test_a_batch_larger_than_the_data_is_refused(run: Run) -> None:
    done = run(*MACHINE, "--samples", "20", "--json")
    assert done.code == 1
    assert "batch-larger-than-data" in {finding["id"] for finding in done.json["findings"]}


def test_without_options_the_plan_is_for_this_machine(run: Run) -> None:
    found = plan(run)
    assert found["hardware"].endswith("(this machine)")
    assert found["ram"]["limit_bytes"] is not None
    if found["vram"] is None:  # no accelerator: the step uses host memory
        assert found["ram"]["parts"]["training step"] > 0


def test_tiers_are_configs_that_load_and_grow(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "budget.png"
    words = ("--write-tiers", str(tmp_path / "tiers"), "--plot", str(picture))
    assert run(*MACHINE, *words).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    loaded = [
        load_config(tmp_path / "tiers" / f"single_gpu_full_{tier}.yaml", []).config
        for tier in ("conservative", "balanced", "aggressive")
    ]
    assert {config.model for config in loaded} == {"resnet10t"}, "what the command line set is in them too"
    batches = [config.batch_size for config in loaded]
    assert batches == sorted(batches)
    assert batches[0] < batches[2]
    assert [config.num_workers for config in loaded] == [8, 12, 16]
    assert [config.compile_model for config in loaded] == [False, True, True]
