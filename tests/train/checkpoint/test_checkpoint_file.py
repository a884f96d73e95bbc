"""The checkpoint file: a state is read back bit by bit, and any safetensors reader can open it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from stoker.core.errors import UserError
from stoker.train.checkpoint.format import flatten, read_checkpoint, rebuild, write_checkpoint
from stoker.train.checkpoint.restore import CheckpointOther, weight_differences
from tests.support.training_state import bits, same, training_state


def round_trip(folder: Path, state: dict[Any, Any]) -> dict[Any, Any]:
    write_checkpoint(folder / "last.ckpt", state)
    return read_checkpoint(folder / "last.ckpt")


def test_a_training_state_comes_back_with_every_bit(tmp_path: Path) -> None:
    state = training_state(1)
    back = round_trip(tmp_path, state)
    assert same(dict(state, model=dict(state["model"])), back)
    assert list(back["optimizer"]["state"]) == [0, 1, 2, 3, 4, 5]
    np.random.RandomState(0).set_state(back["rng"]["numpy"])
    torch.set_rng_state(back["rng"]["torch"])


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32,
     torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (7,), (2, 3, 5)])
def test_every_type_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    odd = torch.ones(3, dtype=torch.uint8)
    assert same(round_trip(tmp_path, {"odd": odd, "x": tensor}), {"odd": odd, "x": tensor})


def test_tied_weights_come_back_as_one_tensor_and_are_stored_once(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(100, 100))
    state = {"model": {"embed.weight": weight, "head.weight": weight}, "list": [weight]}
    back = round_trip(tmp_path, state)
    assert back["model"]["embed.weight"] is back["model"]["head.weight"] is back["list"][0]
    assert bits(back["list"][0]) == bits(weight)
    assert (tmp_path / "last.ckpt").stat().st_size < 1.1 * weight.nbytes


def test_views_of_one_storage_come_back_each_with_its_own_values(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {
        "base": base,
        "even": base[::2],
        "tail": base[6:],
        "row": base.reshape(3, 4)[1],
        "wide": base[:1].expand(3),
    }
    back = round_trip(tmp_path, state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (4, 3, 1, 1), (4, 1, 3, 3)])
def test_channels_last_stays_channels_last(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(memory_format=torch.channels_last)
    state = {"a": tensor, "tied": tensor, "turned": torch.randn(3, 5).t()}
    back = round_trip(tmp_path, state)
    assert same(state, back)
    assert back["a"] is back["tied"]


def test_other_readers_of_safetensors_see_the_same_tensors(tmp_path: Path) -> None:
    state = training_state(2)
    write_checkpoint(tmp_path / "last.ckpt", state)
    with safe_open(tmp_path / "last.ckpt", framework="pt") as file:
        assert file.metadata()["format"] == "stoker checkpoint 1"
        for name, tensor in state["model"].items():
            assert torch.equal(file.get_tensor(f"model.{name}"), tensor)
        assert torch.equal(file.get_tensor("rng.torch"), state["rng"]["torch"])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(st.integers() | st.none() | st.sampled_from(["$tensor", "$", "0"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), plain, max_size=4))
def test_plain_data_of_any_shape_comes_back_with_its_types(state: dict[str, Any]) -> None:
    flat = flatten(state)
    assert same(rebuild(flat.text, flat.tensors), state)


def test_paths_that_look_alike_do_not_collide(tmp_path: Path) -> None:
    state = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2), "$b": torch.tensor(3)},
        "__metadata__": torch.tensor(4),
    }
    assert same(round_trip(tmp_path, state), state)


def test_what_is_not_plain_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"optimizer\.hook is a .*Path"):
        write_checkpoint(tmp_path / "last.ckpt", {"optimizer": {"hook": tmp_path}})
    with pytest.raises(TypeError, match=r"x is a tensor of layout torch\.sparse"):
        write_checkpoint(tmp_path / "last.ckpt", {"x": torch.eye(3).to_sparse()})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there_is_the_users_to_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.ckpt cannot be read: No such file") as caught:
        read_checkpoint(tmp_path / "none.ckpt")
    assert caught.value.name == "checkpoint-unreadable"


def test_differences_are_named_in_words() -> None:
    saved = {"old": torch.zeros(1), "fc": torch.zeros(1000, 2048), "same": torch.zeros(3)}
    ours = {"fc": torch.zeros(100, 512), "same": torch.ones(3), "new": torch.zeros(1)}
    assert weight_differences(saved, ours) == [
        "model.old: only in the checkpoint",
        "model.fc: 1000×2048 float32 in the checkpoint, 100×512 float32 in this run",
        "model.new: only in this run",
    ]


def test_a_checkpoint_of_another_model_says_what_differs_and_what_to_type() -> None:
    error = CheckpointOther(Path("last.ckpt"), [f"layer{number}: only in this run" for number in range(20)])
    assert "layer0: only in this run" in error.seen
    assert "and 12 more" in error.seen
    assert error.hint is not None
    assert "--fresh" in error.hint
