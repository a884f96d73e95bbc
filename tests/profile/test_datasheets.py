"""Datasheets: shipped ones are complete and correct, user files are checked, devices are recognised by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from stoker.core.errors import UsageError
from stoker.profile.datasheets import GIB, datasheet_for_device, known_datasheets, load_datasheet, published_rate

WANTED = [
    "a10g", "a100-40", "a100-80", "h100", "h200", "b200", "l4", "l40s", "t4", "v100-16", "v100-32", "rtx3090",
    "rtx4090", "rtx5090",
]  # fmt: skip
MINE = {
    "title": "My card", "vram_gib": 10, "memory_gb_per_s": 500, "peak_tflops": {"fp32": 10, "fp16": 40},
    "pcie_gb_per_s": 16, "source": "its box",
}  # fmt: skip


def write(path: Path, **changes: object) -> str:
    fields = {name: value for name, value in (MINE | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(fields))
    return str(path)


def test_every_accelerator_of_the_list_has_a_datasheet_with_a_source() -> None:
    assert sorted(known_datasheets()) == sorted(WANTED)
    for sheet in known_datasheets().values():
        assert sheet.source
        assert sheet.device_names
        assert sheet.vram_bytes > 14 * GIB
        assert sheet.peak_flops["fp16"] >= 2 * sheet.peak_flops["fp32"] * 0.99, "dense, float32 accumulation"


def test_the_peak_follows_the_precision_of_the_config() -> None:
    sheet = load_datasheet("A100_80")
    assert sheet.peak("16-mixed") == sheet.peak("bf16-mixed") == 312e12
    assert sheet.peak("32", "high") == 156e12
    assert sheet.peak("32", "highest") == 19.5e12
    turing = load_datasheet("t4")
    assert turing.peak("32", "high") == 8.1e12, "no TF32 there"
    assert turing.peak("bf16-mixed") is None
    assert load_datasheet("rtx4090").peak("bf16-mixed") == 165.2e12, "with float32 accumulation"


@pytest.mark.parametrize(("typed", "meant"), [("a10", "a10g"), ("a100", "a100-40 or a100-80"), ("4090", "rtx4090")])
def test_an_unknown_name_is_answered_with_the_nearest_and_the_list(typed: str, meant: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_datasheet(typed)
    assert refused.value.name == "unknown-gpu"
    assert f"did you mean {meant}" in refused.value.seen
    assert all(name in refused.value.hint for name in WANTED)


def test_a_device_is_recognised_by_its_name_and_a_similar_one_is_not_mistaken_for_it() -> None:
    names = {
        "NVIDIA A10G": "a10g", "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA A100 80GB PCIe": "a100-80",
        "NVIDIA L4": "l4", "NVIDIA L40S": "l40s", "NVIDIA GeForce RTX 3090": "rtx3090",
        "NVIDIA GeForce RTX 3090 Ti": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA H100 PCIe": None,
        "NVIDIA A10": None,
    }  # fmt: skip
    sheets = {device: datasheet_for_device(device) for device in names}
    assert {device: sheet and sheet.name for device, sheet in sheets.items()} == names


def test_a_file_describes_a_custom_accelerator(tmp_path: Path) -> None:
    sheet = load_datasheet(write(tmp_path / "mine.yaml"))
    assert (sheet.name, sheet.title, sheet.vram_bytes) == ("mine", "My card", 10 * GIB)
    assert sheet.peak("16-mixed") == 40e12
    assert sheet.peer_bytes_per_second == 16e9, "over PCIe where nothing else is said"
    nested = tmp_path / "nested.yaml"
    nested.write_text(yaml.safe_dump({"big-one": MINE}))
    assert load_datasheet(str(nested)).name == "big-one"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"vram_gib": None}, "vram_gib is missing"),
        ({"vram_gib": "24GB"}, "vram_gib: expected a positive number, got '24GB'"),
        ({"memory_gb_per_s": -1}, "memory_gb_per_s: expected a positive number, got -1"),
        ({"memory_gb_per_s": 2.039e12}, "memory_gb_per_s: 2.039e+12 is a thousand times the largest"),
        ({"peak_tflops": {"fp16": 40}}, "peak_tflops: fp32 is missing"),
        ({"peak_tflops": {"fp32": 1, "fp64": 1}}, "peak_tflops: expected fp32, tf32, fp16, bf16, got 'fp64'"),
        ({"peak_tflops": 40}, "peak_tflops: expected a mapping"),
        ({"vram_gb": 24}, "unknown field 'vram_gb'; did you mean vram_gib?"),
        ({"device_names": "NVIDIA A10"}, "device_names: expected a list of names, got 'NVIDIA A10'"),
    ],
)
def test_a_broken_file_is_refused_with_its_field(tmp_path: Path, change: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_datasheet(write(tmp_path / "mine.yaml", **change))
    assert refused.value.name == "datasheet-invalid"
    assert told in refused.value.seen


def test_a_file_that_is_missing_or_not_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_datasheet(str(tmp_path / "none.yaml"))
    for text, told in (("a: [", "not valid YAML"), ("- 1", "not a mapping")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(UsageError, match=told):
            load_datasheet(str(tmp_path / "bad.yaml"))


def test_published_rates_come_with_the_datasheets() -> None:
    assert published_rate("A100_80").images_per_second == 2470
    with pytest.raises(UsageError) as refused:
        published_rate("l4")
    assert refused.value.name == "no-published-rate"
    assert "a100-80" in str(refused.value.hint)
