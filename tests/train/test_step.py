"""One update: in pieces that fit into memory, skipping NaN or infinite losses, identical after a resume."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.core.errors import UserError
from stoker.train.compute import Precision
from stoker.train.ranks import Ranks
from stoker.train.step import Pending, Prepared, TrainStep

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


def ready(batch: Prepared) -> Pending:
    return Pending(len(batch.labels), lambda: batch)


def batch(samples: int = 16, seed: int = 1) -> Pending:
    return ready(prepared(samples, seed))


def prepared(samples: int = 16, seed: int = 1) -> Prepared:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    return Prepared(torch.randn(samples, 6, generator=generator), labels, labels, mixed=False)


def step_for(model: nn.Module, said: list[str] | None = None, **options: Any) -> TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
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
        assert (other.samples, other.judged) == (16, 16)
        assert torch.equal(other.hits, one.hits)
    torch.testing.assert_close(weights(pieces), weights(whole), rtol=1e-5, atol=1e-6)
    assert step_in_pieces.micro_batch <= most
    halvings = {1: 4, 3: 3, 8: 1, 15: 1}[most]
    assert len(said) == halvings, "said when it happens, and never again"
    assert all(line.startswith("out of device memory: each batch is now computed in pieces of ") for line in said)


def test_pieces_of_several_accumulated_batches_make_one_update() -> None:
    whole, pieces = network(), Hungry(network(), 4)
    three = [prepared(seed=number).tensors for number in range(3)]
    together = Prepared(*(torch.cat(parts) for parts in zip(*three, strict=True)), mixed=False)
    step_for(whole, micro_batch=48)([ready(together)], 0)
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


class Remembering(nn.Module):
    """A model that checks, at each forward pass, that nothing of the one before is still alive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.passes = 0
        self._last: weakref.ref[Tensor] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        assert self._last is None or self._last() is None, "a CUDA graph would overwrite it now"
        outputs: Tensor = self.model(inputs)
        self._last = weakref.ref(outputs)
        self.passes += 1
        return outputs


@pytest.mark.parametrize("micro_batch", [4, 16])
def test_nothing_of_a_forward_pass_is_alive_when_the_next_one_begins(micro_batch: int) -> None:
    model = Remembering(network(norm=True))
    step = step_for(model, micro_batch=micro_batch)
    for number in range(3):
        result = step([batch(seed=number), batch(seed=number + 10)], number)
        assert result.judged == 32
    assert model.passes == 3 * 2 * 16 // micro_batch


def test_pieces_add_to_gradients_that_exist_before_the_first_one() -> None:
    model = network()
    places: list[set[int]] = []

    def look(*_: Any) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        places.append({gradient.data_ptr() for gradient in gradients if gradient is not None})

    model.register_forward_pre_hook(look)
    step_for(model, micro_batch=4)([batch()], 0)
    assert len(places) == 4
    assert all(len(found) == len(list(model.parameters())) for found in places)
    assert len({frozenset(found) for found in places}) == 1


class InfiniteGradient(torch.autograd.Function):
    """Passes its input on, and an infinite gradient back."""

    @staticmethod
    def forward(_context: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("inf")


class InfiniteLoss(torch.autograd.Function):
    """Passes an infinity on, and the gradient back as it is."""

    @staticmethod
    def forward(_context: Any, inputs: Tensor) -> Tensor:
        return torch.full_like(inputs, float("inf"))

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Nan:
    """NaN, with a gradient that is NaN too."""

    @staticmethod
    def apply(inputs: Tensor) -> Tensor:
        return inputs * float("nan")


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", ["32", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(("function", "bad_loss"), [(InfiniteGradient, 0), (InfiniteLoss, 1), (Nan, 1)])
def test_an_update_is_skipped_if_the_loss_or_its_gradient_or_both_are_not_finite(
    function: Any, bad_loss: int, name: str, clip: float | None
) -> None:
    spoil = False

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        good = functional.cross_entropy(logits.float(), targets)
        return function.apply(good) if spoil else good  # type: ignore[no-untyped-call]

    model = network(norm=True)
    step = step_for(model, loss=loss, clip_grad_norm=clip, precision=Precision(name, CPU))
    step([batch()], 0)
    before = deepcopy(model.state_dict()), str(step.optimizer.state_dict())
    spoil = True
    result = step([batch(seed=2)], 1)
    assert result.report.tolist()[:2] == [1, bad_loss]
    assert all(torch.equal(value, before[0][key]) for key, value in model.state_dict().items())
    assert str(step.optimizer.state_dict()) == before[1]
    spoil = False
    assert step([batch(seed=3)], 2).report.tolist()[:2] == [0, 0]
    assert torch.isfinite(weights(model)).all()


def test_an_optimizer_that_cannot_decide_on_the_device_skips_bad_updates_too() -> None:
    model = network()
    step = step_for(model)
    step.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=False, foreach=False)
    before = weights(model)
    step([ready(prepared()._replace(inputs=torch.full((16, 6), float("nan"))))], 0)
    assert torch.equal(weights(model), before)
    step([batch()], 1)
    assert not torch.equal(weights(model), before)
