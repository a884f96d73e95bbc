"""Sliding windows give what the network gives on the whole volume, whatever the slabs, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stoker.core.errors import UserError
from stoker.tasks.volumes.augment import VolumePrepare
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.cases.survey import CaseFacts, Survey, statistics_of
from stoker.tasks.volumes.data import PatchRule, plan_validation
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.volume import ArrayVolume, Region, Shape
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patch_collate import PatchMaker, PatchReader
from stoker.tasks.volumes.predict.segmenter import Carried, Segmenter, decided, predict_volume, predicted_mask, scaled
from stoker.tasks.volumes.predict.windows import SlidingWindow, WindowGrid, prediction_size
from stoker.train.compute import Precision

CPU = torch.device("cpu")
PATCH = (12, 16, 8)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Pointwise(nn.Module):
    """Looks at no neighbours: windows cannot matter."""

    def __init__(self, channels: int = 1, classes: int = 2) -> None:
        super().__init__()
        torch.manual_seed(classes)
        self.layers = nn.Sequential(nn.Conv3d(channels, 4, 1), nn.Tanh(), nn.Conv3d(4, classes, 1, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return found


def convolution(seed: int = 0, classes: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv3d(3, classes, 3, padding=1))


def segmenter(*models: nn.Module, **changes: Any) -> Segmenter:
    facts = {
        "device": CPU, "precision": Precision("32", CPU), "patch": PATCH, "channels": 1, "classes": 2,
        "normalize": "range", "batch": 3,
    }  # fmt: skip
    return Segmenter(models=tuple(model.eval() for model in models), **(facts | changes))


def volume(shape: Shape, seed: int = 0, dtype: Any = np.uint8) -> ArrayVolume:
    values = np.random.default_rng(seed).integers(0, 256, shape)
    return ArrayVolume(f"volume {seed}", values.astype(dtype), identity=f"{seed} {shape}")


def probabilities_of(found: Segmenter, images: Sequence[Any], **options: Any) -> np.ndarray:
    """The whole result; fails if a voxel is given twice or not at all."""
    result = np.full((found.classes - 1, *images[0].shape), np.nan, np.float32)

    def take(region: Region, probabilities: Tensor) -> None:
        place = result[:, *region.slices]
        assert np.isnan(place).all(), "a voxel that was given already"
        place[...] = probabilities.numpy()

    predict_volume(found, images, take, **options)
    assert not np.isnan(result).any()
    return result


@torch.inference_mode()
def whole(model: nn.Module, array: np.ndarray, divisor: float = 255.0) -> np.ndarray:
    return model(torch.from_numpy(array).float()[None, None] / divisor).softmax(1)[0, 1:].numpy()


@pytest.mark.parametrize(
    ("shape", "overlap"),
    [((30, 41, 23), 0.5), ((12, 16, 8), 0.5), ((5, 40, 3), 0.0), ((13, 9, 50), 0.8), ((1, 1, 1), 0.5)],
)
def test_a_pointwise_network_gives_the_same_in_windows_as_on_the_whole(shape: Shape, overlap: float) -> None:
    model, image = Pointwise(), volume(shape)
    found = probabilities_of(segmenter(model), [image], sliding=SlidingWindow(overlap))
    # A sum of up to a thousand windows rounds a thousand times.
    assert np.abs(found - whole(model, image.array)).max() < 3e-6


def test_a_window_counts_most_in_its_middle() -> None:
    middle = WindowGrid((64, 16, 8), (16, 16, 8), 0.5).axes[0].weights[3]
    assert middle[7] == pytest.approx(middle[8])
    assert middle[0] < 0.01 < 0.8 < middle[7]
    assert (np.diff(middle[:8]) > 0).all()


def blended_by_hand(model: nn.Module, array: np.ndarray, sliding: SlidingWindow) -> np.ndarray:
    """The same sums over accumulators of the whole volume, window by window."""
    grid = WindowGrid(array.shape, PATCH, sliding.overlap)
    sums = torch.zeros(1, *array.shape)
    for layer in range(grid.layers):
        for window in grid.layer(layer):
            region = grid.region(window)
            z, y, x = (torch.from_numpy(axis.weights[n]) for axis, n in zip(grid.axes, window, strict=True))
            inputs = torch.from_numpy(array[region.slices]).float()[None, None] * (1 / 255)
            with torch.inference_mode():
                probabilities = model(inputs).softmax(1)[0, 1:]
            weights = z[:, None, None] * (y[:, None] * x[None, :])
            sums[:, *region.slices].addcmul_(probabilities, weights)
    return sums.numpy()


def test_row_by_row_is_the_same_to_the_bit_as_with_sums_of_the_whole_volume() -> None:
    model, image = convolution(), volume((40, 50, 30))
    for overlap in (0.0, 0.4, 0.7):
        sliding = SlidingWindow(overlap)
        found = probabilities_of(segmenter(model, batch=1), [image], sliding=sliding)
        assert np.array_equal(found, blended_by_hand(model, image.array, sliding))


def test_flips_and_checkpoints_are_averaged() -> None:
    models, image = (convolution(1), convolution(2)), volume(PATCH)
    found = probabilities_of(segmenter(*models), [image], sliding=SlidingWindow(flips="zx"))
    by_hand = []
    for model, (z, x) in itertools.product(models, itertools.product((1, -1), (1, -1))):
        by_hand.append(whole(model, image.array[::z, :, ::x].copy())[:, ::z, :, ::x])
    assert np.abs(found - np.mean(by_hand, axis=0)).max() < 1e-6
    assert np.abs(found - by_hand[0]).max() > 1e-3
    assert len(SlidingWindow(flips="zyx").mirrored) == 8
    with pytest.raises(UserError, match="'zz'"):
        SlidingWindow(flips="zz")


class EveryLayer(Carried):
    """Forgets no layer, so a prediction can resume at any of them."""

    def layer_done(self, layer: int) -> None:
        pass


def test_a_prediction_that_resumes_at_any_layer_has_the_same_bits() -> None:
    found, image, sliding = segmenter(convolution(), batch=4), volume((50, 40, 20)), SlidingWindow(0.6)
    grid = WindowGrid(image.shape, PATCH, sliding.overlap)
    carried = EveryLayer(grid, 2)
    wanted = probabilities_of(found, [image], sliding=sliding, carried=carried)
    assert grid.layers > 4
    for carried.first_layer in range(1, grid.layers):
        result = np.full_like(wanted, np.nan)

        def take(region: Region, probabilities: Tensor, result: np.ndarray = result) -> None:
            result[:, *region.slices] = probabilities.numpy()

        predict_volume(found, [image], take, sliding=sliding, carried=carried)
        first = grid.axes[0].starts[carried.first_layer]
        assert np.array_equal(result[:, first:], wanted[:, first:])


@pytest.mark.parametrize(
    ("normalize", "shape"), [("volume", (20, 20, 20)), ("patch", (9, 20, 20)), ("range", (20, 20, 20))]
)
def test_the_network_sees_what_it_sees_in_validation(normalize: str, shape: Shape) -> None:
    seen: list[Tensor] = []

    class Recording(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.extend(inputs.clone())
            return torch.zeros(len(inputs), 2, *inputs.shape[2:])

    image = volume(shape, dtype=np.uint16)
    predicted_mask(
        segmenter(Recording(), normalize=normalize, patch=(12, 12, 12)), [image], sliding=SlidingWindow(overlap=0)
    )
    case, volumes = Case("a", "a", (VolumeRef("a"),), VolumeRef("label")), OpenVolumes()
    survey = Survey((case,), {"a": CaseFacts(shape, "uint16")}, {}, volumes)
    plan = plan_validation([case], survey, LabelRules(1), PatchRule((12, 12, 12), small="pad"))
    plan = replace(plan, steps=replace(plan.steps, batch_size=8))
    volumes._open.get(case.images[0], lambda: image)
    volumes._open.get(VolumeRef("label"), lambda: ArrayVolume("label", np.zeros(shape, np.uint8)))
    maker = PatchMaker(plan, PatchReader(volumes, plan.layout.row_bytes))
    means, stds = statistics_of([case], volumes, normalize)
    prepare = VolumePrepare(normalize, means, stds)
    batch = maker.make(0, 0, 0, lambda size: np.zeros(size, np.uint8))
    batch.images = torch.from_numpy(batch.images)
    inputs, _ = prepare.prepare(batch, lambda row: row)
    assert len(inputs) == len(seen) == (8 if shape[0] == 20 else 4)
    assert torch.equal(inputs, torch.stack(seen))


def test_several_classes_and_channels() -> None:
    model = Pointwise(channels=2, classes=4)
    images = [volume((20, 20, 20), 1), volume((20, 20, 20), 2, np.float64)]
    found = segmenter(model, channels=2, classes=4)
    statistics = np.float32([100, 130]), np.float32([50, 90])
    channels = [
        (torch.from_numpy(one.array.astype(np.float32)) - mean) / std
        for one, mean, std in zip(images, *statistics, strict=True)
    ]
    inputs = torch.stack(channels)[None]
    with torch.inference_mode():
        wanted = model(inputs).softmax(1)[0, 1:].numpy()
    given = probabilities_of(found, images, statistics=statistics)
    assert np.abs(given - wanted).max() < 1e-6


def test_a_threshold_decides_between_two_classes() -> None:
    probabilities = torch.tensor([0.2, 0.26, 0.27, 0.5, 0.51]).view(1, 1, 1, 5)
    assert decided(probabilities, 0.26).flatten().tolist() == [0, 0, 1, 1, 1]
    assert decided(probabilities, None).flatten().tolist() == [0, 0, 0, 0, 1]
    assert scaled(probabilities, "uint8").flatten().tolist() == [51, 66, 69, 128, 130]
    assert scaled(probabilities, "float16").dtype == torch.float16


def test_a_batch_that_does_not_fit_is_halved_until_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    inner = Pointwise()

    class Greedy(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            if len(inputs) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return inner(inputs)

    image = volume((30, 41, 23))
    found = probabilities_of(segmenter(Greedy(), batch=7), [image])
    assert np.abs(found - whole(inner, image.array)).max() < 1e-6
    said = "out of device memory: now {} window(s) at once\n"
    assert capsys.readouterr().err == said.format(4) + said.format(2)

    class Full(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UserError, match="one window"):
        probabilities_of(segmenter(Full()), [image])


def test_outputs_that_are_not_finite_are_refused() -> None:
    class Overflow(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.full((len(inputs), 2, *inputs.shape[2:]), float("nan"))

    with pytest.raises(UserError) as error:
        probabilities_of(segmenter(Overflow()), [volume(PATCH)])
    assert error.value.name == "prediction-not-finite"


def test_memory_depends_on_one_axis_only() -> None:
    sliding = SlidingWindow(0.5, flips="x")
    small = prediction_size((256, 256, 256), (128, 128, 128), sliding, classes=2)
    large = prediction_size((1024, 1024, 256), (128, 128, 128), sliding, classes=2)
    assert small.sums_bytes == large.sums_bytes == 128 * 128 * 256 * 4
    assert (small.windows, small.layers, small.passes) == (27, 3, 54)
    assert large.windows == 15 * 15 * 3
    assert large.carried_bytes == 2 * 64 * 1024 * 256 * 4
    assert large.result_bytes == 1024 * 1024 * 256
    assert large.disk_bytes == large.carried_bytes + 2 * large.result_bytes
