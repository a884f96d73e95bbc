"""Losses for volumes: equal to MONAI's where both mean the same, blind to unlabelled voxels, sums that add up."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stoker.core.errors import UserError
from stoker.tasks.volumes.losses import TERMS, build_volume_loss, labels_at, parse_terms
from stoker.tasks.volumes.networks import monai
from tests.support.operators import counted

IGNORE = 3
EVERYTHING = "dice + ce + 0.5 focal + 2*tversky + 0.2 cldice + 0.1 skeleton_recall"


def made(
    samples: int = 2, classes: int = 3, size: int = 8, ignored: float = 0.3, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(samples, classes, size, size, size, generator=generator)
    labels = torch.randint(classes, (samples, size, size, size), generator=generator)
    away = torch.rand(labels.shape, generator=generator) < ignored
    return logits, labels.masked_fill(away, IGNORE)


@pytest.mark.parametrize(
    ("term", "loss", "options"),
    [
        ("dice", "DiceLoss", {"softmax": True}),
        ("tversky", "TverskyLoss", {"softmax": True, "alpha": 0.3, "beta": 0.7}),
        ("focal", "FocalLoss", {"use_softmax": True, "gamma": 2.0, "reduction": "none"}),
        ("cldice", "SoftclDiceLoss", {"softmax": True, "smooth": 1e-12}),
    ],
)
def test_where_every_voxel_is_labelled_a_term_is_monai_s(term: str, loss: str, options: dict[str, Any]) -> None:
    classes = 2 if term == "cldice" else 4
    logits, labels = made(classes=classes, ignored=0)
    truth = torch.nn.functional.one_hot(labels, classes).movedim(-1, 1).float()
    theirs = getattr(monai("losses"), loss)(include_background=term == "focal", **options)(logits, truth)
    theirs = theirs.sum(dim=1).mean() if term == "focal" else theirs  # MONAI has a loss for each class
    mine = build_volume_loss(term, classes, ignore=9)(logits, labels)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_cross_entropy_is_the_mean_over_labelled_voxels_by_sample() -> None:
    logits, labels = made()
    by_sample = [
        torch.nn.functional.cross_entropy(logits[n : n + 1], labels[n : n + 1], ignore_index=IGNORE) for n in range(2)
    ]
    torch.testing.assert_close(build_volume_loss("ce", 3, IGNORE)(logits, labels), torch.stack(by_sample).mean())


def test_weights_multiply_terms() -> None:
    logits, labels = made()
    parts = {name: build_volume_loss(name, 3, IGNORE)(logits, labels) for name in TERMS}
    weights = {"dice": 1, "ce": 1, "focal": 0.5, "tversky": 2, "cldice": 0.2, "skeleton_recall": 0.1}
    expected = sum(weights[name] * parts[name] for name in TERMS)
    torch.testing.assert_close(build_volume_loss(EVERYTHING, 3, IGNORE)(logits, labels), expected)


@pytest.mark.parametrize("name", TERMS)
def test_unlabelled_voxels_neither_change_the_loss_nor_get_a_gradient(name: str) -> None:
    logits, labels = made()
    unlabelled = (labels == IGNORE).unsqueeze(1).expand_as(logits)
    loss = build_volume_loss(name, 3, IGNORE)
    logits.requires_grad_()
    value = loss(logits, labels)
    (gradient,) = torch.autograd.grad(value, logits)
    assert bool((gradient[unlabelled] == 0).all())
    assert bool((gradient[~unlabelled] != 0).any())
    other = torch.where(unlabelled, torch.randn_like(logits) * 9, logits)
    assert torch.equal(loss(other, labels), value)


def test_parts_of_a_batch_add_up_to_the_batch() -> None:
    logits, labels = made(samples=4)
    sizes = (1, 1, 2)
    labels[1] = IGNORE  # a part that has no labels at all
    loss = build_volume_loss(EVERYTHING, 3, IGNORE)
    logits.requires_grad_()
    whole = loss(logits, labels)
    parts = zip(logits.split(sizes), labels.split(sizes), sizes, strict=True)
    summed = sum(loss(some, theirs) * number / 4 for some, theirs, number in parts)
    torch.testing.assert_close(summed, whole)
    for mine, expected in zip(
        torch.autograd.grad(summed, logits), torch.autograd.grad(loss(logits, labels), logits), strict=True
    ):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("name", TERMS)
def test_a_sample_without_labels_contributes_nothing_and_background_alone_gives_finite_gradients(name: str) -> None:
    logits, labels = made(samples=1)
    empty = torch.full_like(labels, IGNORE)
    logits.requires_grad_()
    loss = build_volume_loss(name, 3, IGNORE)
    value = loss(torch.cat([logits, logits]), torch.cat([labels, empty]))
    torch.testing.assert_close(value, loss(logits, labels) / 2)
    alone = loss(logits, empty)
    (gradient,) = torch.autograd.grad(alone, logits)
    assert float(alone.detach()) == 0
    assert bool((gradient == 0).all())
    (gradient,) = torch.autograd.grad(loss(logits, labels.clamp(max=0)), logits)
    assert bool(gradient.isfinite().all())


def test_in_half_precision_only_the_logits_are_rounded() -> None:
    logits, labels = made(size=48, classes=2)  # 110,592 voxels: more than float16 can count
    rounded = logits.half()
    loss = build_volume_loss(EVERYTHING, 2, IGNORE)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(rounded, labels)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(rounded.float(), labels))


def test_lower_resolutions_count_half_each_and_compare_with_the_labels_in_the_middle() -> None:
    logits, labels = made(size=16)
    outputs = [logits, logits[:, :, ::2, ::2, ::2], logits[:, :, ::4, ::4, ::4]]
    loss = build_volume_loss("dice + ce", 3, IGNORE)
    single = [loss(output, labels_at(output, labels)) for output in outputs]
    torch.testing.assert_close(loss(outputs, labels), (4 * single[0] + 2 * single[1] + single[2]) / 7)
    labels = torch.tensor([0, 1, 1, IGNORE, IGNORE, 2, 0, 0]).view(1, 8, 1, 1).expand(1, 8, 4, 2)
    output = torch.zeros(1, 3, 4, 4, 1)
    assert labels_at(output, labels)[0, :, 0, 0].tolist() == [1, IGNORE, 2, 0]
    assert labels_at(torch.zeros(1, 3, 2, 2, 2), labels)[0, :, 0, 0].tolist() == [1, 0]
    expected = torch.nn.functional.interpolate(labels[:, None].float(), (4, 4, 1), mode="nearest-exact")
    assert torch.equal(labels_at(output, labels), expected[:, 0].long())


@pytest.mark.parametrize(("thickness", "found", "missed"), [(2, (0, 1), 0), (2, (0,), 1 / 2), (5, (1, 2, 3), 0)])
def test_the_skeleton_of_a_sheet_is_its_middle_and_a_voxel_on_each_side(
    thickness: int, found: tuple[int, ...], missed: float
) -> None:
    labels = torch.zeros(1, 16, 8, 8, dtype=torch.long)
    labels[:, 3 : 3 + thickness] = 1
    logits = torch.full((1, 16, 8, 8), -30.0)
    logits[:, [3 + plane for plane in found]] = 30
    loss = build_volume_loss("skeleton_recall", 2, IGNORE)(torch.stack([-logits, logits], dim=1), labels)
    assert float(loss) == pytest.approx(missed, abs=1e-6)


def test_the_core_of_what_is_very_thick_counts_as_its_skeleton() -> None:
    labels = torch.zeros(1, 48, 4, 4, dtype=torch.long)
    labels[:, 3:44] = 1
    logits = torch.zeros(1, 2, 48, 4, 4, requires_grad=True)
    build_volume_loss("skeleton_recall", 2, IGNORE)(logits, labels).backward()
    assert logits.grad is not None
    # 41 planes: nine erosions take nine on each side, and one is given back.
    assert (logits.grad[0, 1, :, 0, 0] != 0).nonzero().flatten().tolist() == list(range(3 + 8, 44 - 8))


def test_nothing_is_read_from_the_device() -> None:
    with FakeTensorMode():
        logits = torch.zeros(2, 3, 16, 16, 16, device="cuda", dtype=torch.bfloat16)
        labels = torch.zeros(2, 16, 16, 16, device="cuda", dtype=torch.int64)
        loss = build_volume_loss(EVERYTHING, 3, IGNORE)
        with counted() as operators:
            value = loss([logits, logits[:, :, ::2, ::2, ::2]], labels)
        assert value.device.type == "cuda"
        assert operators.blocking == []
        assert operators.copies == 0
    with FakeTensorMode():  # gradients: autograd's engine needs a real device for CUDA tensors
        fake = torch.zeros(2, 3, 16, 16, 16, requires_grad=True)
        loss(fake, torch.zeros(2, 16, 16, 16, dtype=torch.int64)).backward()
        assert fake.grad is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dice +", "not a term"),
        ("dice ce", "not a term"),
        ("dice + dyce", "did you mean dice?"),
        ("dice + dice", "twice"),
        ("0 dice", "above 0"),
        ("1e999 dice", "above 0"),
    ],
)
def test_a_bad_sum_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        build_volume_loss(text, 2, 2)
    assert reason in f"{caught.value.why} {caught.value.hint}"
    with pytest.raises(UserError, match="num_classes: 1"):
        build_volume_loss("dice", 1, 2)


names = st.lists(st.sampled_from(sorted(TERMS)), min_size=1, unique=True)
weights = st.one_of(st.none(), st.floats(1e-6, 1e3))


@settings(max_examples=30, deadline=None)
@given(names, st.lists(weights, min_size=len(TERMS), max_size=len(TERMS)), st.sampled_from([" ", "*", " * ", ""]))
def test_any_sum_that_is_written_is_read_back(chosen: list[str], factors: list[float | None], sign: str) -> None:
    pairs = list(zip(chosen, factors, strict=False))
    text = " + ".join(name if factor is None else f"{factor!r}{sign}{name}" for name, factor in pairs)
    read = parse_terms(text)
    assert [name for name, _ in read] == chosen
    assert all(math.isclose(mine, factor or 1.0) for (_, mine), (_, factor) in zip(read, pairs, strict=True))


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="dicefoal_+*. 0123-e", max_size=30))
def test_no_text_raises_anything_but_a_user_s_error(text: str) -> None:
    with suppress(UserError):
        assert all(name in TERMS and weight > 0 for name, weight in parse_terms(text))
