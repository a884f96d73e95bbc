"""What is known about the cases of a pack before they are packed: their shapes, and the bytes that they will take."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from stoker.core.console import Advance
from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.cases.cases import Case, Part
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.packed import stored_shape
from stoker.tasks.volumes.formats.volume import ReadingOptions, Shape
from stoker.tasks.volumes.pack.preprocessing import VoxelChanges, new_shape
from stoker.tasks.volumes.pack.write_volume import Layout
from stoker.tasks.volumes.patches.labels import LabelRules

# Opening a volume is mostly waiting, for a network file system or an object store.
THREADS = 8


@dataclass(frozen=True)
class Looked:
    """What is known about a case before it is packed."""

    shape: Shape = (0, 0, 0)
    """Shape after packing."""
    image_bytes: int = 0
    """Bytes of one voxel, in all channels."""
    label_bytes: int = 0
    decoded_bytes: int = 0
    """Decoded size of its largest file, if that can only be decoded whole."""
    reason: str = ""
    """Why it cannot be opened, or prepared as asked."""

    @property
    def voxels(self) -> int:
        return int(np.prod(self.shape, dtype=object))

    def packed_bytes(self, layout: Layout) -> int:
        """Size of its files, before compression."""
        stored = stored_shape(self.shape, layout.block if layout.kind == "blocks" else 0)
        return int(np.prod(stored, dtype=object)) * (self.image_bytes + self.label_bytes)


def look(
    cases: Sequence[tuple[Part, Case]],
    rules: LabelRules | None,
    preparation: VoxelChanges,
    reading: ReadingOptions,
    progress: Advance | None = None,
) -> list[Looked]:
    """Opens every case, reading no voxels; one that cannot be opened is empty here, and reported when it is packed."""
    volumes = OpenVolumes(reading)

    def work(case: Case) -> Looked:
        try:
            sources = [volumes.get(ref) for ref in case.images]
            label = None if case.label is None else volumes.get(case.label)
            shape = new_shape(sources[0], preparation)
        except ReadFailure as failure:
            return Looked(reason=str(failure))
        kinds = [np.dtype(np.uint8) if preparation.dtype == "uint8" else source.dtype for source in sources]
        label_bytes = 0 if label is None else (label.dtype if rules is None else rules.dtype).itemsize
        voxels = int(np.prod(sources[0].shape, dtype=object))
        zipped = [one for one in sources if one.name.lower().endswith(".gz")]
        decoded = max((voxels * one.dtype.itemsize for one in zipped), default=0)
        return Looked(shape, sum(min(kind.itemsize, 4) for kind in kinds), label_bytes, decoded)

    with ThreadPoolExecutor(THREADS) as pool:
        found = []
        for one in pool.map(lambda pair: work(pair[1]), cases):
            found.append(one)
            if progress is not None:
                progress(len(found), len(cases))
    return found
