"""A real scan: the MRI `ch2` (Colin Holmes' brain) with the labels of the `aal` atlas, from Debian's mricron-data.

Downloaded where apt works, and unpacked into a folder of the tests: nothing is installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.loader.loader import LoaderOptions
from stoker.tasks.volumes.augment import VolumePrepare
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.cases.survey import survey
from stoker.tasks.volumes.data import PatchLoader, PatchRule, plan_training
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.volume import ReadingOptions
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patches import training_steps
from stoker.tasks.volumes.scores.whole import foreground, score_surface
from tests.conftest import Run
from tests.support.published_scores import published_score
from tests.support.volumes import needs_matcher

pytestmark = pytest.mark.release  # it downloads 20 MB
PACKAGE, CLASSES = "mricron-data", 117


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the package's scans."""
    folder = tmp_path_factory.mktemp("mricron")
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            pytest.skip(f"no real scan: there is no {tool} here to get Debian's {PACKAGE} with")
    got = subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, text=True, timeout=120)
    found = list(folder.glob(f"{PACKAGE}_*.deb"))
    if not found:
        reason = (got.stderr.strip() or "no reason given").splitlines()[-1]
        pytest.skip(f"no real scan: apt-get download {PACKAGE} failed: {reason}")
    subprocess.run(["dpkg", "-x", found[0], folder / "unpacked"], check=True)
    return folder / "unpacked/usr/share/mricron/templates"


def voxels_of(path: Path) -> NDArray[np.uint8]:
    """The voxels of a NIfTI file as nibabel has them, z first."""
    stored: NDArray[np.uint8] = np.asanyarray(nibabel.load(path).dataobj)  # type: ignore[attr-defined]
    return stored.T


def test_patches_of_a_real_scan_are_slices_of_its_voxels(templates: Path, tmp_path: Path) -> None:
    cases_file = tmp_path / "cases.yaml"
    cases_file.write_text(
        json.dumps([{"image": str(templates / "ch2.nii.gz"), "label": str(templates / "aal.nii.gz")}])
    )
    cases = open_cases(cases_file).cases
    rules, patch = LabelRules(CLASSES), (40, 48, 56)
    steps = training_steps(6, 2)
    plan = plan_training(cases, survey(cases, OpenVolumes()), rules, PatchRule(patch, seed=3), steps)
    image, label = voxels_of(templates / "ch2.nii.gz"), voxels_of(templates / "aal.nii.gz")
    assert image.shape == label.shape == (181, 217, 181)
    prepare = VolumePrepare("range", np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32))
    loader = PatchLoader(plan, ReadingOptions(), LoaderOptions(workers=2))
    seen: set[int] = set()
    try:
        for batch in loader.epoch(0):
            inputs, labels = prepare.prepare(batch, lambda rows: rows)
            assert labels is not None
            for slot, start in enumerate(batch.starts):
                box = tuple(slice(a, a + size) for a, size in zip(start, patch, strict=True))
                np.testing.assert_array_equal(inputs[slot, 0].numpy(), image[box])
                np.testing.assert_array_equal(labels[slot].numpy(), label[box])
                seen |= set(np.unique(label[box]).tolist())
    finally:
        loader.close()
    assert len(seen) > 30, "patches are drawn for classes of every size"


@needs_matcher
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # surface-distance uses old names of scipy
def test_scores_of_real_masks_are_those_of_the_packages_that_define_them(templates: Path) -> None:
    # A part of the brain: where the atlas has regions, and where the scan is as bright as grey matter.
    part = np.s_[70:110, 90:130, 60:100]
    label = (voxels_of(templates / "aal.nii.gz")[part] > 0).astype(np.uint8)
    scan = voxels_of(templates / "ch2.nii.gz")[part]
    prediction = (scan > 60) & (scan < 110)
    label[:6] = 2  # unlabelled, as in the competition
    found = score_surface(prediction, label, 2)
    ours, theirs = foreground(prediction, label, 2)
    assert found.score == pytest.approx(published_score(ours, theirs))
    assert 0.05 < found.score < 0.95, "neither trivially right nor trivially wrong"


def test_a_few_steps_on_a_real_scan_learn_where_the_atlas_has_regions(
    stoker: Run, templates: Path, tmp_path: Path
) -> None:
    # At half the resolution and with all regions as one class, for a test of seconds. One scan: a part is held out.
    np.save(tmp_path / "image.npy", voxels_of(templates / "ch2.nii.gz")[::2, ::2, ::2])
    np.save(tmp_path / "label.npy", (voxels_of(templates / "aal.nii.gz")[::2, ::2, ::2] > 0).astype(np.uint8))
    (tmp_path / "cases.yaml").write_text(json.dumps([{"image": "image.npy", "label": "label.npy"}]))
    (tmp_path / "ch2.yaml").write_text(
        "task: segment3d\nmodel: small_unet\npatch_size: [24, 20, 24]\nnum_classes: 2\nsplit_by: region\nfold: 2\n"
        "epochs: 3\nsteps_per_epoch: 20\nbatch_size: 2\nnum_workers: 0\nprecision: 32\noptimizer: adamw\nlr: 0.02\n"
        "scale_lr: false\nlr_scheduler: cosine\nwarmup_epochs: 0\ncompile_model: false\n"
    )
    places = [f"data_root={tmp_path / 'cases.yaml'}", f"runs_dir={tmp_path / 'runs'}"]
    ended = stoker("train", tmp_path / "ch2.yaml", *places)
    assert ended.code == 0, ended.err
    lines = (tmp_path / "runs/ch2/metrics.jsonl").read_text().splitlines()
    dice = [record["val/dice"] for record in map(json.loads, lines) if record["kind"] == "epoch"]
    assert len(dice) == 3
    # Calling everything a region would give 47 %: it is 30 % of what is held out.
    assert dice[-1] > max(dice[0], 58), dice
