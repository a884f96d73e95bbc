"""What happens to a training sample, and to a batch on the device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.config.field import KeyGroup, key


class AugmentationKeys(KeyGroup):
    """Augmentation: what happens to a training sample, and to a batch on the device."""

    crop_scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = key((0.08, 1.0))
    """Smallest and largest share of the image's area that a random crop takes."""

    crop_aspect: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = key((3 / 4, 4 / 3))
    """Smallest and largest width / height of a random crop."""

    horizontal_flip: float = key(0.5, ge=0, le=1)
    """Probability that a training image is mirrored."""

    auto_augment: Literal["none", "randaugment", "trivialaugment"] = key("none")
    """Policy of further augmentations; RandAugment takes `randaugment_magnitude` and `randaugment_ops`."""

    randaugment_magnitude: float = key(7, ge=0, le=10)
    """Strength of RandAugment's operations, 0 to 10."""

    randaugment_magnitude_std: float = key(0.5, ge=0)
    """Standard deviation of that strength from operation to operation."""

    randaugment_ops: int = key(2, ge=1, le=16)
    """Operations of RandAugment that are drawn for each image; each is carried out with probability 0.5, as in timm."""

    random_erasing: float = key(0.0, ge=0, le=1)
    """Probability that a rectangle of a training image is erased."""

    repeated_augmentation: int = key(1, ge=1, le=64)
    """How often each drawn image appears in an epoch, differently augmented; the epoch keeps its length."""

    mixup_alpha: float = key(0.0, ge=0)
    """Mixup: parameter of the Beta distribution; 0 is off."""

    cutmix_alpha: float = key(0.0, ge=0)
    """CutMix: parameter of the Beta distribution; 0 is off."""

    mix_probability: float = key(1.0, ge=0, le=1)
    """Probability that a batch is mixed at all, where mixup or CutMix is on."""

    mix_switch_probability: float = key(0.5, ge=0, le=1)
    """Probability that a mixed batch takes CutMix, where both are on."""

    label_smoothing: float = key(0.0, ge=0, lt=1)
    """Share of the target that is spread over all classes."""

    start_img_size: int | None = key(None, unit="px", ge=8, le=8192)
    """Progressive resizing: side of the images in the first epoch; grows to `img_size`."""

    resize_epochs: int | None = key(None, unit="epochs", ge=1)
    """Progressive resizing: epochs until `img_size` is reached; 80 % of the run when not given."""
