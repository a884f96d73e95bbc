"""torch.compile is optional: a model that cannot be compiled runs uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch import nn

from stoker.config import load_config
from stoker.profile.host import fit_to_machine, read_machine
from stoker.tasks.building import RunContext
from stoker.tasks.images.classify import build_run
from stoker.tasks.images.data import open_data
from stoker.train.compute import Compiled
from stoker.train.loop import train
from stoker.train.ranks import Ranks
from tests.support.tiny_training import write_config, write_images


def test_a_model_that_cannot_be_compiled_runs_uncompiled_with_one_note() -> None:
    said: list[str] = []
    plain = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 2))
    model = Compiled(plain, "default", said.append)
    inputs = torch.randn(3, 4)
    # A machine without a C++ compiler, like many cluster nodes.
    with torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/g++",), "force_disable_caches": True}):
        for _ in range(3):
            assert torch.equal(model(inputs), plain(inputs))
        model(inputs).sum().backward()
    assert plain[0].weight.grad is not None
    assert len(said) == 1
    assert said[0].startswith("warning: compile_model: torch.compile failed (")
    assert said[0].endswith("continuing without it")
    assert "\n" not in said[0]


@pytest.mark.release
def test_a_backward_pass_that_cannot_be_compiled_is_noticed_in_the_forward_pass() -> None:
    said: list[str] = []
    plain = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 2))
    model = Compiled(plain, "default", said.append)
    graphs: list[object] = []

    def second_graph_fails(graph: object) -> None:
        graphs.append(graph)
        if len(graphs) == 2:
            raise RuntimeError("no kernel for this gradient")

    with torch._inductor.config.patch({"post_grad_custom_post_pass": second_graph_fails, "force_disable_caches": True}):
        model(torch.randn(3, 4)).sum().backward()
    assert len(graphs) == 2
    assert plain[0].weight.grad is not None
    assert len(said) == 1
    assert said[0].endswith("continuing without it")


def test_a_compiled_model_computes_and_learns_the_same() -> None:
    torch.manual_seed(0)
    said: list[str] = []
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    model = Compiled(plain, "default", said.append)
    inputs = torch.randn(6, 4)
    torch.testing.assert_close(model(inputs), plain(inputs))
    model(inputs).pow(2).sum().backward()
    ours = [parameter.grad.clone() for parameter in plain.parameters() if parameter.grad is not None]
    plain.zero_grad()
    plain(inputs).pow(2).sum().backward()
    for grad, parameter in zip(ours, plain.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)
    assert all(line.startswith("compiled for training in ") for line in said)
    assert isinstance(model, Compiled)
    assert [name.removeprefix("plain.") for name in model.state_dict()] == list(plain.state_dict())


def test_each_image_size_is_compiled_once_and_the_last_validation_batch_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[bool, tuple[int, ...]]] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        images = next(value for value in inputs if value.ndim == 4 and value.shape[1] == 3 and not value.requires_grad)
        compiled.append((torch.is_grad_enabled(), tuple(images.shape)))
        return graph.forward

    def compile_with_a_counter(model: nn.Module, *, mode: str | None, dynamic: bool) -> object:
        assert mode is None
        return torch_compile(model, backend=count, dynamic=dynamic)

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_with_a_counter)
    torch._dynamo.reset()
    images = write_images(tmp_path / "images", train=8, val=7)  # 21 for validation: 8, 8 and 5
    keys = {"start_img_size": 32, "img_size": 64, "epochs": 2, "resize_epochs": 1, "compile_model": True}
    config = load_config(write_config(tmp_path, images, **keys), []).config
    fitted, _ = fit_to_machine(config, read_machine())
    run = build_run(fitted, open_data(fitted, lambda _text: None), RunContext(Ranks(), torch.device("cpu")))
    assert isinstance(run.step.model, Compiled)
    train(run)
    run.input.close()
    training = [shape for training, shape in compiled if training]
    assert [shape[-1] for shape in training] == [32, 64]
    assert [shape for training, shape in compiled if not training] == [(8, 3, 64, 64)]
