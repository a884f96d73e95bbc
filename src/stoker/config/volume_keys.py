"""The config keys of `task: segment3d`: which voxels are used, how patches are drawn and changed, what is minimised."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.config.fields import Bytes, KeyGroup, key

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Above = Annotated[float, Field(gt=0)]


class VolumeKeys(KeyGroup):
    """Volumes: patches of 3D images, for `task: segment3d`."""

    patch_size: tuple[Positive, Positive, Positive] | None = key(None, unit="voxels")
    """Depth, height and width of a patch."""

    indivisible_patch: Literal["refuse", "pad"] = key("refuse")
    """What happens if the network's downsampling does not divide the patch: `pad` adds zeros at its far end
    inside the network and crops the result."""

    ignore_label: int | None = key(None)
    """Voxels with this label are never trained on and never counted. Default: what the data's layout says (2 in the
    Vesuvius competition, `ignore` in nnU-Net's `dataset.json`)."""

    fold: Annotated[int, Field(ge=0)] | Literal["all"] = key(0)
    """The part of the data to validate on, of `folds` parts; `all` trains on everything, without validation."""

    folds: int = key(5, ge=2)
    """Number of parts that the data is divided into."""

    split_by: Literal["group", "volume", "region"] = key("group")
    """What is never divided between training and validation: groups (scrolls), volumes, or regions of a volume."""

    split_margin: int = key(0, unit="voxels", ge=0)
    """With `split_by: region`: voxels left out between training and validation."""

    small_volumes: Literal["pad", "refuse"] = key("refuse")
    """What happens to volumes smaller than the patch: padded with voxels that are never trained on, or refused."""

    foreground_patches: float = key(1 / 3, ge=0, le=1)
    """Share of the training patches that are centred on a voxel of a class other than 0; the others are centred on any
    labelled voxel."""

    volume_cache: Bytes = key(1_000_000_000, unit="bytes", ge=0)
    """Decoded chunks of compressed volumes that a node keeps in memory, for all its workers together."""

    missing_chunks: Literal["refuse", "fill"] = key("refuse")
    """Chunks that a Zarr volume does not have: `fill` takes them for the fill value, `refuse` for lost ones."""

    normalize: Literal["volume", "patch", "range"] = key("volume")
    """How voxels become the network's inputs: minus mean, divided by the standard deviation of the volume or of the
    patch; or divided by the largest value of their type."""

    volume_flips: tuple[Probability, Probability, Probability] = key((0.5, 0.5, 0.5))
    """Probability of mirroring a patch along z, y and x."""

    volume_turns: float = key(0.0, ge=0, le=1)
    """Probability of turning a patch by 90, 180 or 270 degrees about one axis."""

    volume_rotation: float = key(0.2, ge=0, le=1)
    """Probability of rotating a patch."""

    volume_degrees: tuple[float, float, float] = key((30.0, 30.0, 30.0), unit="degrees")
    """Largest angles about z, y and x, in both directions."""

    volume_scaling: float = key(0.2, ge=0, le=1)
    """Probability of scaling a patch; its shape stays the same."""

    volume_scales: tuple[Above, Above] = key((0.7, 1.4))
    """Smallest and largest number of voxels that become one."""

    volume_elastic: float = key(0.0, ge=0, le=1)
    """Probability of deforming a patch."""

    volume_elastic_size: float = key(4.0, unit="voxels", gt=0, le=64)
    """Standard deviation of the displacements of a deformed patch."""

    volume_noise: float = key(0.1, ge=0, le=1)
    """Probability of adding Gaussian noise."""

    volume_blur: float = key(0.2, ge=0, le=1)
    """Probability of blurring."""

    volume_brightness: float = key(0.15, ge=0, le=1)
    """Probability of changing the brightness."""

    volume_contrast: float = key(0.15, ge=0, le=1)
    """Probability of changing the contrast."""

    volume_gamma: float = key(0.3, ge=0, le=1)
    """Probability of a gamma correction; a third of them on the inverted image."""

    volume_low_resolution: float = key(0.25, ge=0, le=1)
    """Probability of simulating a lower resolution."""

    volume_cutout: float = key(0.0, ge=0, le=1)
    """Probability of erasing a box of the image; its labels stay."""

    volume_loss: str = key("dice + ce", min_length=1)
    """What is minimised: a weighted sum of `dice`, `ce`, `focal`, `tversky`, `cldice` and `skeleton_recall`, as in
    `dice + ce + 0.2 cldice`."""

    deep_supervision: bool = key(False)
    """Also compare the network's outputs at lower resolutions with the labels; each counts half of the next larger."""

    surface_tolerance: float = key(2.0, unit="voxels", gt=0)
    """Distance up to which two surfaces count as the same, in `val/surface_dice`."""


class PredictionKeys(KeyGroup):
    """Prediction: whole volumes in windows, for `stoker predict` and `stoker eval`; training does not use them."""

    predict_overlap: float = key(0.5, ge=0, le=0.95)
    """Share of a window that is at least shared with the next one."""

    predict_flips: str = key("", pattern=r"^[zyx]{0,3}$")
    """Axes along which windows are also predicted mirrored, and averaged: `zyx` takes eight times as long."""

    predict_threshold: float | None = key(None, ge=0, le=1)
    """With two classes: class 1 wherever it is more probable than this. Default: the most probable class."""

    predict_postprocess: str = key("")
    """Steps that clean a mask, in this order, for example `remove_small=100,fill_holes,closing=1`."""
