"""The loader of a split of volumes: batches of patches, on the same engines as those of images."""

from __future__ import annotations

from functools import partial

from stoker.console import Say
from stoker.data.batch import Quarantine
from stoker.data.loader import BatchLoader, LoaderOptions
from stoker.data.volumes.making import PatchBatch, PatchMaker, PatchPlan, PatchReader
from stoker.data.volumes.opening import OpenVolumes
from stoker.data.volumes.volume import ReadingOptions


class PatchLoader(BatchLoader[PatchBatch]):
    """The loader of a split of volumes."""

    def __init__(
        self, plan: PatchPlan, reading: ReadingOptions, options: LoaderOptions, say: Say = lambda _line: None
    ) -> None:
        self.plan = plan
        # One bad volume may always be set aside: of fifty, it would already be more than the usual hundredth.
        allowed = max(options.max_bad_fraction, 1 / len(plan.cases))
        quarantine = Quarantine(options.quarantine_file, allowed, len(plan.cases))
        super().__init__(plan, partial(_open_maker, plan, reading), quarantine, options, say)


def _open_maker(plan: PatchPlan, reading: ReadingOptions) -> PatchMaker:
    return PatchMaker(plan, PatchReader(OpenVolumes(reading), plan.layout.row_bytes))
