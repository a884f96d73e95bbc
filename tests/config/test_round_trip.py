"""A resolved config is unchanged after being written and loaded again."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stoker.config import Config, config_as_yaml, load_config
from stoker.config.fields import format_bytes_exactly, format_seconds_exactly, parse_bytes, parse_seconds
from stoker.config.pairs import RULES
from tests.conftest import PROJECT

CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))
SHIPPED = {
    "demo", "demo_volumes", "single_gpu_full", "optimized_test", "resnet_strikes_back", "rsb_a1", "rsb_a2", "rsb_a3",
    "torchvision_v2",
    "exp001_full", "exp001_option_a", "exp001_option_b", "exp001_option_c", "vesuvius_surface",
    "tier_conservative", "tier_balanced", "tier_aggressive",
}  # fmt: skip


def reload(config: Config) -> Config:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(config_as_yaml(config, "two\nlines"))
        return load_config(path).config


def test_all_promised_configs_ship() -> None:
    assert {path.stem for path in CONFIGS} == SHIPPED


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load_and_survive_a_round_trip(path: Path) -> None:
    config = load_config(path).config
    assert reload(config) == config


odd_text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=30)
finite = st.floats(allow_nan=False, allow_infinity=False)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "lr": finite, "weight_decay": finite, "momentum": finite, "mixup_alpha": finite, "crop_ratio": finite,
    "data_root": odd_text | st.sampled_from(["null", "true", "1e3", "0x1f", "1:30", "~", "- a", "a: b", "#x", "'"]),
    "model": odd_text, "wandb_name": odd_text | st.none(), "cache_dir": odd_text,
    "batch_size": st.integers(1, 10**9), "seed": st.integers(0, 2**63 - 1),
    "num_workers": st.integers(0, 4096) | st.just("auto"),
    "lookahead": st.integers(10**6, 2**62).map(lambda size: f"{size}B"),
    "rank_timeout": st.floats(0.001, 1e9).map(lambda seconds: f"{seconds:.9f}s"),
    "crop_aspect": st.tuples(finite, finite).map(list), "pin_memory": st.booleans(),
    "precision": st.sampled_from(["32", "16-mixed", "bf16-mixed"]), "ema_decay": st.none() | finite,
}  # fmt: skip


@settings(max_examples=37)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_any_valid_config_survives_a_round_trip(values: dict[str, Any]) -> None:
    try:
        config = Config.model_validate(values)
    except ValidationError:
        return
    if any(rule.forbids and rule.check(config) for rule in RULES):
        return
    assert reload(config) == config


@given(st.integers(0, 2**63), st.floats(1e-6, 1e12), st.integers(0, 10**9))
def test_sizes_and_times_read_back_exactly(size: int, seconds: float, whole_seconds: int) -> None:
    assert parse_bytes(format_bytes_exactly(size)) == size
    assert parse_seconds(format_seconds_exactly(seconds)) == seconds
    assert parse_seconds(format_seconds_exactly(float(whole_seconds))) == whole_seconds


def test_sizes_and_times_as_people_write_them() -> None:
    sizes = {"62GB": 62 * 10**9, "62 gb": 62 * 10**9, "512MiB": 2**29, "1.5KiB": 1536, "0": 0, "7b": 7, " 1TB ": 10**12}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    times = {"18 h": 64800, "90s": 90, "1h30m": 5400, "2 days": 172800, "250ms": 0.25, "0.5min": 30}
    assert {text: parse_seconds(text) for text in times} == times


@pytest.mark.parametrize("text", ["", "GB", "1 2GB", "-1GB", "1XB", "1e999GB", "62", "h", "1:30", "-5s", "5 parsecs"])
def test_what_is_neither_a_size_nor_a_time_is_refused(text: str) -> None:
    for parse in (parse_bytes, parse_seconds):
        with pytest.raises(ValueError):
            parse(text)
