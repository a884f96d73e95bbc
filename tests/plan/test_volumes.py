"""Plans for volumes: what batches and patches cost, what is read, what a prediction takes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.config import Config, load_config
from stoker.core.errors import UserError
from stoker.plan.guard import refuse_what_cannot_fit
from stoker.plan.tracing import trace_forward, trace_step
from stoker.plan.vram import replay
from stoker.profile.host import Machine
from stoker.tasks.demo import write_scrolls
from stoker.tasks.volumes.planning import traceable_step, volume_facts, volume_findings
from tests.conftest import Run

GIB = 1 << 30
MACHINE = ("--gpu", "a100-80", "--cpus", "12", "--ram", "170GB")


def config(*words: str) -> Config:
    keys = {"task": "segment3d", "model": "small_unet", "patch_size": "[32, 32, 32]", "num_workers": "2"}
    keys |= dict(word.split("=", 1) for word in words)
    return load_config(None, [f"{key}={value}" for key, value in keys.items()]).config


@pytest.mark.parametrize(("precision", "reserved_gib"), [("32", 8.9), ("bf16-mixed", 4.8)])
def test_the_case_study_s_network_takes_what_was_traced_for_it(precision: str, reserved_gib: float) -> None:
    study = config(
        "model=residual_unet", "patch_size=[64, 128, 128]", f"precision={precision}", "batch_size=1",
        "optimizer=adamw", "volume_loss=ce",
    )  # fmt: skip
    trace = trace_step(traceable_step(study))
    assert replay(trace.events, trace.sizes).reserved_peak / GIB == pytest.approx(reserved_gib, rel=0.03)


def write(folder: Path, *lines: str) -> str:
    path = folder / "volumes.yaml"
    path.write_text("\n".join(["task: segment3d", "model: small_unet", "num_workers: 2", *lines]) + "\n")
    return str(path)


def test_a_plan_says_what_batches_patches_reading_and_prediction_take(stoker: Run, tmp_path: Path) -> None:
    path = write(
        tmp_path, "patch_size: [32, 32, 32]", "batch_size: 2", "steps_per_epoch: 40", "epochs: 3",
        "volume_rotation: 0", "volume_scaling: 0", "volume_cache: 3GB", "gradient_checkpointing: true",
    )  # fmt: skip
    found = json.loads(stoker("plan", path, *MACHINE, "--json").out)
    volumes, prediction = found["volumes"], found["volumes"]["prediction"]
    rows = {(tuple(row["patch"]), row["batch"]): row for row in volumes["rows"]}
    assert set(rows) == {((28,) * 3, 2), *(((32,) * 3, batch) for batch in (1, 2, 4)), ((36,) * 3, 2)}
    live = [rows[(32,) * 3, batch]["live_bytes"] for batch in (1, 2, 4)]
    # Activations grow with the batch, and not only the input.
    assert live[1] - live[0] > 10 * 32**3 * 4
    assert live[2] - live[1] == pytest.approx(2 * (live[1] - live[0]), rel=0.1)
    assert rows[(32,) * 3, 2]["vram_bytes"] == found["vram"]["peak_bytes"]
    assert all(row["vram_bytes"] > row["live_bytes"] and row["fits"] for row in volumes["rows"])
    assert (found["unit"], found["steps_per_epoch"]) == ("patches", 40)
    assert found["time"]["total_s"] == pytest.approx(120 * found["time"]["step_s"])
    assert any("1 channel of uint8 voxels" in line for line in found["assumptions"])
    assert "accelerator-bound" not in {finding["id"] for finding in found["findings"]}  # reading is not known
    assert volumes["patch_bytes"] == volumes["read_bytes"] == 2 * 32**3
    pace = found["time"]["rates"]["accelerator"]["images_per_second"]
    assert volumes["read_bytes_per_second"] == pytest.approx(pace * 2 * 32**3)
    assert found["ram"]["parts"]["volume cache"] == volumes["cache_bytes"] == 3_000_000_000
    assert prediction["windows"] == 19**3  # 320 voxels, windows of 32 that share half
    assert 0 < prediction["vram_bytes"] < found["vram"]["peak_bytes"]
    assert prediction["seconds"] > 0


@pytest.mark.release
def test_volumes_that_can_be_reached_are_looked_at_and_measured(stoker: Run, tmp_path: Path) -> None:
    root = tmp_path / "scrolls"
    write_scrolls(root, volumes=3, shape=(40, 48, 56))
    path = write(
        tmp_path, "patch_size: [34, 32, 32]", "indivisible_patch: pad", "batch_size: 1", f"data_root: {root}",
        "gradient_checkpointing: true",
    )  # fmt: skip
    text = stoker("plan", path, *MACHINE, "--measure").out
    assert "predicting a volume of 40 x 48 x 56:" in text
    assert "other batch and patch sizes:" in text
    assert "patches/s (measured here)" in text
    assert "images/s" not in text
    assert "patches of 34 x 32 x 32 are padded to 36 x 32 x 32: a step computes 1.06 times the voxels" in text


def test_rotated_patches_read_more_than_they_are() -> None:
    plain = volume_facts(config("volume_rotation=0", "volume_scaling=0"))
    assert plain.sample_bytes == plain.row_bytes == plain.val_row_bytes == 2 * 32**3
    turned = volume_facts(config("volume_rotation=1"))
    assert 1.2 * turned.val_row_bytes < turned.sample_bytes < turned.row_bytes


def test_a_step_that_does_not_fit_is_refused_with_one_that_does() -> None:
    here = Machine(cpus=8, ram_bytes=16_000_000_000, shm_bytes=8_000_000_000, accelerators=0)
    greedy = config("model=residual_unet", "patch_size=[160, 160, 160]", "batch_size=2", "precision=32")
    with pytest.raises(UserError) as caught:
        refuse_what_cannot_fit(greedy, None, here, force=False)
    assert "of RAM, the host has 16 GB" in caught.value.seen
    refuse_what_cannot_fit(config("batch_size=2"), None, here, force=False)


def test_a_forward_pass_keeps_nothing_for_gradients() -> None:
    step = traceable_step(config("deep_supervision=true"))
    forward, training = trace_forward(step, 2), trace_step(step, 2)
    peaks = [replay(trace.events, trace.sizes).allocated_peak for trace in (forward, training)]
    assert peaks[0] < 0.5 * peaks[1]
    assert 0 < forward.flops < 0.4 * training.flops
    assert {op.phase for op in forward.ops} == {"forward"}


@pytest.mark.parametrize(
    ("version", "precision", "found"),
    [("2.9.1+cu128", "bf16-mixed", True), ("2.9.0", "32", False), ("2.15.0", "bf16-mixed", False)],
)
def test_a_version_of_torch_with_slow_convolutions_is_named(version: str, precision: str, found: bool) -> None:
    named = [finding.name for finding in volume_findings(config(f"precision={precision}"), version)]
    assert named == (["slow-conv3d"] if found else [])
