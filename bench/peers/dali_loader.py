"""DALI on the CPU: decodes only the cropped region, in C++ threads."""

from __future__ import annotations

from collections.abc import Iterator

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

from bench.peers.serving import BATCH, MEAN, SIZE, STD, Job, endless, serve


def open_stream(job: Job) -> Iterator[int]:
    @pipeline_def(batch_size=BATCH, num_threads=job.workers, device_id=None)  # type: ignore[untyped-decorator]
    def pipeline() -> tuple[object, object]:
        files, labels = fn.readers.file(file_root=str(job.images), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            files, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[0.75, 4 / 3]
        )
        images = fn.resize(images, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.crop_mirror_normalize(
            images,
            mirror=fn.random.coin_flip(),
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
        )
        return images, labels

    built = pipeline()
    built.build()
    iterator = DALIGenericIterator(
        [built], ["image", "label"], reader_name="reader", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
    )
    return endless(lambda: (len(batch[0]["label"]) for batch in iterator))


if __name__ == "__main__":
    serve(open_stream)
