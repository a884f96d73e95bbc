"""What `stoker bench data` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerRate:
    """The loader's speed with one number of workers, and a consumer that takes no time."""

    workers: int
    images_per_second: float
    first_batch_s: float
    """Until the first batch was there, workers started."""
    seconds_per_image: dict[str, float | None]
    """By stage (fetch, decode, augment, collate), and of the whole: on-CPU, run-queue, blocked."""


@dataclass(frozen=True)
class DataBench:
    """What `stoker bench data` found."""

    source: str
    samples: int
    batch_size: int
    img_size: int
    engine: str
    decoder: str
    decoder_us: dict[str, float] | None
    """What the calibration measured for each decoder; None where none was needed."""
    rates: tuple[WorkerRate, ...]
    decode_limit_images_per_second: float | None
    """Whole-image decoding by bare libjpeg-turbo with as many threads as the fastest rate had workers."""
    gpu: str | None = None
    gpu_images_per_second: float | None = None
    gpu_source: str | None = None

    @property
    def best(self) -> WorkerRate:
        return max(self.rates, key=lambda rate: rate.images_per_second)

    @property
    def share_of_gpu(self) -> float | None:
        """How much of the accelerator's appetite this host satisfies."""
        if self.gpu_images_per_second is None:
            return None
        return self.best.images_per_second / self.gpu_images_per_second

    def as_dict(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {
            "images_per_second": self.best.images_per_second,
            "by_workers": {str(rate.workers): rate.images_per_second for rate in self.rates},
            "stages": self.best.seconds_per_image,
            "decode_limit_images_per_second": self.decode_limit_images_per_second,
            "workers": self.best.workers,
            "first_batch_s": self.best.first_batch_s,
            "source": self.source,
            "samples": self.samples,
            "batch_size": self.batch_size,
            "img_size": self.img_size,
            "engine": self.engine,
            "decoder": self.decoder,
            "decoder_us": self.decoder_us,
            "gpu": self.gpu,
            "gpu_images_per_second": self.gpu_images_per_second,
            "gpu_source": self.gpu_source,
            "share_of_gpu": self.share_of_gpu,
        }
