"""One update: in pieces that fit into memory, skipping NaN or infinite losses, identical after a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.errors import UserError
from stoker.train.compute import Precision
from stoker.train.ranks import Ranks
from stoker.train.step import Prepared, TrainStep

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Hungry(nn.Module):
    """A model that runs out of memory above a number of samples."""

    def __init__(self, model: nn.Module, most: int) -> None:
        super().__init__()
        self.model = model
        self.most = most
        self.seen: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(len(inputs))
        outputs: Tensor = self.model(inputs)
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("planted")
        return outputs


def network(*, norm: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *between, nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


def batch(samples: int = 16, seed: int = 1) -> Prepared:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    return Prepared(torch.randn(samples, 6, generator=generator), labels, labels, mixed=False)


def step_for(model: nn.Module, said: list[str] | None = None, **options: Any) -> TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    say: Callable[[str], None] = (said if said is not None else []).append
    keys: dict[str, Any] = {"micro_batch": 16, "clip_grad_norm": None, "seed": 0, "say": say} | options
    precision = keys.pop("precision", Precision("32", CPU))
    loss = keys.pop("loss", functional.cross_entropy)
    return TrainStep(model, optimizer, loss, precision, Ranks(), **keys)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("most", [1, 3, 8, 15])
def test_a_batch_that_does_not_fit_is_split_with_the_same_update(most: int) -> None:
    said: list[str] = []
    whole, pieces = network(), Hungry(network(), most)
    step, step_in_pieces = step_for(whole), step_for(pieces, said)
    for number in range(3):
        one = step([batch(seed=number)], number)
        other = step_in_pieces([batch(seed=number)], number)
        assert float(other.loss) == pytest.approx(float(one.loss), rel=1e-5)
        assert sum(len(logits) for logits, _ in other.outputs) == 16
    torch.testing.assert_close(weights(pieces), weights(whole), rtol=1e-5, atol=1e-6)
    assert step_in_pieces.micro_batch <= most
    halvings = {1: 4, 3: 3, 8: 1, 15: 1}[most]
    assert len(said) == halvings, "said when it happens, and never again"
    assert all(line.startswith("out of device memory: each batch is now computed in pieces of ") for line in said)


def test_pieces_of_several_accumulated_batches_make_one_update() -> None:
    whole, pieces = network(), Hungry(network(), 4)
    step_for(whole, micro_batch=48)([Prepared(*(torch.cat(parts) for parts in zip(*(batch(seed=n)[:3] for n in range(3)), strict=True)), False)], 0)  # fmt: skip # noqa: E501
    step_for(pieces)([batch(seed=number) for number in range(3)], 0)
    torch.testing.assert_close(weights(pieces), weights(whole), rtol=1e-5, atol=1e-6)


def test_an_attempt_that_ran_out_of_memory_leaves_no_trace_in_batch_norm() -> None:
    fits, hungry = network(norm=True), Hungry(network(norm=True), 8)
    step_for(fits, micro_batch=8)([batch()], 0)
    step_for(hungry)([batch()], 0)
    assert hungry.seen == [16, 8, 8]
    for ours, theirs in zip(hungry.buffers(), fits.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_one_sample_that_does_not_fit_ends_the_run_with_an_error() -> None:
    with pytest.raises(UserError, match="not have enough memory for 1 samples") as caught:
        step_for(Hungry(network(), 0))([batch()], 0)
    assert caught.value.name == "out-of-device-memory"


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", ["32", "bf16-mixed", "16-mixed"])
def test_a_nan_loss_changes_nothing(name: str, clip: float | None) -> None:
    model = network(norm=True)
    step = step_for(model, clip_grad_norm=clip, precision=Precision(name, CPU))
    assert not step([batch()], 0).skipped
    before = deepcopy(model.state_dict()), deepcopy(step.optimizer.state_dict())
    good = batch()
    spoiled = good._replace(inputs=torch.where(torch.arange(16)[:, None] == 5, float("inf"), good.inputs))
    result = step([spoiled], 1)
    assert result.skipped
    assert result.bad_here
    for name_, value in model.state_dict().items():
        assert torch.equal(value, before[0][name_]), name_
    assert str(step.optimizer.state_dict()) == str(before[1])
    # The next batch is learnt from as if nothing had happened.
    assert not step([batch(seed=2)], 2).skipped
    assert torch.isfinite(weights(model)).all()
    assert not torch.equal(weights(model), torch.cat([v.reshape(-1) for k, v in before[0].items() if k in dict(model.named_parameters())]))  # fmt: skip # noqa: E501


def test_dropout_depends_on_the_step_and_on_nothing_that_ran_before() -> None:
    results = []
    for draws in (0, 100):
        model = network(dropout=0.5)
        torch.rand(draws)
        results.append((float(step_for(model)([batch()], 7).loss), weights(model)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    other = network(dropout=0.5)
    assert float(step_for(other)([batch()], 8).loss) != results[0][0]
