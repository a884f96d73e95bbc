"""Traces compared with numbers that are published or worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from stoker.plan.autocast import cuda_autocast_rules
from stoker.plan.tracing import CannotTrace, Trace, trace_step
from stoker.plan.vram import largest_that_fits, replay, trace_batches
from stoker.tasks.images.models import build_model, cross_entropy
from stoker.train.step import TraceableStep, plain_batch
from tests.support.optimizers import build_optimizer

RESNET50_PARAMETERS = 25_557_032
# Published as 4.09 GMAC; counted here from the shapes of its layers.
RESNET50_FORWARD_FLOPS = 2 * 4_089_184_256


class Tiny(nn.Module):
    """Two layers whose memory is easy to work out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.second(torch.tanh(self.first(values)))))))


def tiny_step(**changes: object) -> TraceableStep:
    step = TraceableStep(
        build_model=Tiny,
        build_optimizer=lambda model: build_optimizer(model, "sgd", 0.1),
        loss=cross_entropy,
        make_batch=plain_batch((64,)),
        batch_size=32,
    )
    return dataclasses.replace(step, **changes)  # type: ignore[arg-type]


def by_category(trace: Trace) -> dict[str, int]:
    """Peak bytes of each category."""
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    for event in trace.events:
        number = max(event, ~event)
        name = trace.categories[number]
        now[name] = now.get(name, 0) + (trace.sizes[number] if event >= 0 else -trace.sizes[number])
        most[name] = max(most.get(name, 0), now[name])
    return most


def test_resnet50_has_its_parameters_and_its_flops() -> None:
    resnet50 = trace_step(
        tiny_step(
            build_model=lambda: build_model("resnet50", 1000, channels_last=True),
            make_batch=plain_batch((3, 224, 224), memory_format=torch.channels_last),
            precision="16-mixed",
        ),
        16,
    )
    assert resnet50.parameters == RESNET50_PARAMETERS
    assert resnet50.trained_bytes == 4 * RESNET50_PARAMETERS
    forward = sum(op.flops for op in resnet50.ops if op.phase == "forward")
    assert forward == 16 * RESNET50_FORWARD_FLOPS
    first_layer = 2 * 64 * 3 * 7 * 7 * 112 * 112
    # Backward is twice forward, less the gradient of the images, which is not needed.
    assert resnet50.flops == 16 * (3 * RESNET50_FORWARD_FLOPS - first_layer)
    # Products run in half precision, sums of gradients in float32.
    assert {op.dtype for op in resnet50.ops if op.name == "convolution"} == {"float16"}
    assert {op.dtype for op in resnet50.ops if op.name == "_fused_sgd_"} == {"float32"}
    assert {op.phase for op in resnet50.ops if op.name == "_fused_sgd_"} == {"update"}
    assert {op.phase for op in resnet50.ops if op.name == "convolution_backward"} == {"backward"}
    assert sum(op.name == "convolution" for op in resnet50.ops) == 53


def test_the_memory_of_a_tiny_network_by_hand_and_the_random_state_as_it_was() -> None:
    before = torch.get_rng_state()
    most = by_category(trace_step(tiny_step()))
    assert torch.equal(before, torch.get_rng_state())
    parameters = 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 8 + 8)
    assert most["parameters"] == parameters
    assert most["gradients"] == parameters
    assert most["optimizer"] == parameters
    # Three outputs of tanh; logits, log-softmax, and the loss with the weight of its mean.
    hidden = 3 * 32 * 256 * 4
    assert hidden < most["activations"] <= hidden + 3 * 32 * 8 * 4 + 64
    # float32 inputs and int64 labels: this step's and the previous one's, which the loop still holds.
    assert most["batch"] == 2 * (32 * 64 * 4 + 32 * 8)


def test_views_cost_nothing_and_are_not_operators() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 8)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.layer(values.view(-1, 8, 8).transpose(1, 2).transpose(1, 2).reshape(-1, 64))

    class Plain(Views):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.layer(values)

    views, plain = (trace_step(tiny_step(build_model=kind)) for kind in (Views, Plain))
    assert replay(views.events, views.sizes).allocated_peak == replay(plain.events, plain.sizes).allocated_peak
    assert [op.name for op in views.ops] == [op.name for op in plain.ops]


def test_the_state_of_each_optimizer_and_an_average_with_its_own_copy() -> None:
    sgd, adamw, lamb = (
        by_category(
            trace_step(tiny_step(build_optimizer=lambda m, name=name: build_optimizer(m, name, 0.1), ema_decay=0.99))
        )
        for name in ("sgd", "adamw", "lamb")
    )
    # AdamW also stores a step count for each of the six tensors.
    assert adamw["optimizer"] == 2 * sgd["optimizer"] + 6 * 4
    assert sgd["ema"] == sgd["parameters"]
    # The scratch of LAMB is not state. Each of the six tensors begins in a new row of 256 numbers.
    state, more = (lamb[part] - adamw[part] for part in ("optimizer", "temporary"))
    rounding = 6 * 256 * 4
    assert abs(state) < 2 * rounding
    assert adamw["parameters"] <= more < adamw["parameters"] + rounding + 4096


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_every_optimizer_works_with_the_loss_scaler(name: str) -> None:
    step = tiny_step(build_optimizer=lambda m: build_optimizer(m, name, 0.1), precision="16-mixed", clip_grad_norm=1.0)
    assert any(op.phase == "update" for op in trace_step(step).ops)


def test_accumulated_batches_are_computed_one_by_one_while_the_next_one_is_on_the_device() -> None:
    one, four = (by_category(trace_step(tiny_step(accumulation=count))) for count in (1, 4))
    assert four["batch"] == one["batch"]
    assert four["activations"] == one["activations"]

    ahead, after = (by_category(trace_step(tiny_step(ahead=ahead))) for ahead in (True, False))
    assert ahead["batch"] == 2 * after["batch"]


def test_any_batch_follows_from_two() -> None:
    traces = trace_batches(tiny_step(precision="16-mixed", clip_grad_norm=1.0), 32)
    assert traces.second is not None
    said, traced = traces.at(100), trace_step(traces.step, 100)
    assert (said.events, said.sizes) == (traced.events, traced.sizes)


def test_checkpointing_keeps_less_and_computes_more() -> None:
    plain, checkpointed = (
        trace_step(
            tiny_step(
                build_model=lambda on=on: build_model("resnet18", 10, gradient_checkpointing=on),
                make_batch=plain_batch((3, 64, 64)),
            ),
            8,
        )
        for on in (False, True)
    )
    assert checkpointed.flops > plain.flops
    assert by_category(checkpointed)["activations"] < 0.8 * by_category(plain)["activations"]


@pytest.mark.parametrize(
    ("reads_values", "operator"),
    [(lambda x: x[x > 0].sum() * x, "aten.nonzero.default"), (lambda x: x * x.max().item(), "_local_scalar_dense")],
)
def test_an_operator_that_needs_data_is_named(reads_values: object, operator: str) -> None:
    class Reads(Tiny):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(reads_values(values))  # type: ignore[operator]

    with pytest.raises(CannotTrace) as caught:
        trace_step(tiny_step(build_model=Reads))
    assert operator in caught.value.operator
    assert operator in caught.value.seen


def test_autocast_follows_cuda_while_a_step_is_traced_and_the_cpu_afterwards() -> None:
    norm, values = nn.LayerNorm(8), torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        before = norm(values).dtype
        with cuda_autocast_rules():
            inside = norm(values).dtype, values.sum().dtype, torch.ones(2, 2).mm(torch.ones(2, 2)).dtype
        after = norm(values).dtype
    assert inside == (torch.float32, torch.float32, torch.bfloat16)
    assert before == after == torch.bfloat16


def test_a_model_that_reads_values_while_it_is_built_is_built_for_real() -> None:
    class Reading(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.linspace(0, 1, 3)[1].item()

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            assert self.scale == 0.5
            return super().forward(values)

    assert trace_step(tiny_step(build_model=Reading)).flops == trace_step(tiny_step()).flops


def test_the_search_ends_at_the_last_batch_that_fits() -> None:
    for limit in (0, 1, 7, 64, 100):
        assert largest_that_fits(lambda batch, limit=limit: batch <= limit, 8) == limit
