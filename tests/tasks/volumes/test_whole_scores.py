"""Exact scores of whole volumes, compared with the packages that define them."""

from __future__ import annotations

import os
import signal
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import cc3d
import numpy as np
import pytest
from scipy import ndimage
from skimage.metrics import variation_of_information as published_variation

from stoker.core.errors import UserError
from stoker.tasks.demo import scroll_volume
from stoker.tasks.volumes.scores import topology
from stoker.tasks.volumes.scores import whole as surfaces
from stoker.tasks.volumes.scores.topology import Topology, compare_topology, load_matcher, octants
from stoker.tasks.volumes.scores.whole import (
    areas_by_code,
    foreground,
    score_surface,
    score_volume,
    surface_dice,
    variation_of_information,
)
from tests.support.published_scores import published_score, published_surface_dice, published_topology
from tests.support.volumes import needs_matcher

# surface-distance uses names of scipy that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def blobs(shape: tuple[int, int, int], seed: int, level: float = 0.05) -> Any:
    return ndimage.gaussian_filter(np.random.default_rng(seed).standard_normal(shape), 1.5) > level


def sheets(shape: tuple[int, int, int] = (40, 37, 42), seed: int = 3) -> tuple[Any, Any]:
    """A prediction as a weak network makes it, and the label of the same scroll."""
    image, label = scroll_volume(shape, seed)
    return ndimage.gaussian_filter(image.astype(np.float32), 1) > 105, label


def test_areas_of_all_neighbourhoods_are_deepminds_for_any_spacing() -> None:
    from surface_distance import lookup_tables

    kernel = lookup_tables.ENCODE_NEIGHBOURHOOD_3D_KERNEL
    bits = [int(kernel[corner]) for corner in surfaces._CORNERS]
    theirs = [sum(bit for place, bit in enumerate(bits) if code >> place & 1) for code in range(256)]
    for spacing in ((1.0, 1.0, 1.0), (2.0, 0.5, 0.7)):
        expected = lookup_tables.create_table_neighbour_code_to_surface_area(spacing)[theirs]
        np.testing.assert_allclose(areas_by_code(spacing), expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("tolerance", "spacing"),
    [(2.0, (1.0, 1.0, 1.0)), (1.3, (2.0, 0.5, 0.7)), (0.3, (0.1, 0.1, 0.1)), (0.4, (1.0, 1.0, 1.0))],
)
def test_surface_dice_is_deepminds_however_thin_the_slabs(
    tolerance: float, spacing: tuple[float, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction, label = sheets()
    ours, theirs = foreground(prediction, label, 2)
    pairs = [(blobs((20, 23, 31), 1), blobs((20, 23, 31), 2)), (ours, theirs)]
    for one, two in pairs:
        expected = published_surface_dice(one, two, tolerance, spacing)
        for slab in (1, 7, 1000):
            monkeypatch.setattr(surfaces, "SLAB", slab)
            assert surface_dice(one, two, tolerance, spacing) == pytest.approx(expected, abs=1e-12)


def test_variation_of_information_is_that_of_scikit_image() -> None:
    prediction, label = sheets()
    pairs = [foreground(prediction, label, 2), (blobs((20, 23, 31), 1, 0.15), blobs((20, 23, 31), 2, 0.15))]
    for ours, theirs in pairs:
        union = ours | theirs
        parts = [cc3d.connected_components(mask, connectivity=26)[union] for mask in (ours, theirs)]
        assert parts[0].max() > 1
        # scikit-image: the second given the first, then the first given the second.
        splits, merges = published_variation(parts[1], parts[0])
        found = variation_of_information(ours, theirs)
        assert found.splits == pytest.approx(splits)
        assert found.merges == pytest.approx(merges)
    # The test can tell them apart.
    assert splits != pytest.approx(merges)


@needs_matcher
def test_topology_is_that_of_betti_matching_over_the_octants() -> None:
    prediction, label = sheets()
    pairs = [foreground(prediction, label, 2), (blobs((15, 16, 17), 1, 0.1), blobs((15, 16, 17), 2, 0.1))]
    for ours, theirs in pairs:
        expected = published_topology(ours, theirs)
        found = compare_topology(ours, theirs, processes=2)
        assert [list(found.matched), list(found.predicted), list(found.labelled)] == expected.tolist()
        assert 0 < found.matched[0] < found.predicted[0]


def test_topo_score_weighs_the_dimensions_that_have_features() -> None:
    assert Topology((1, 0, 0), (2, 0, 0), (2, 0, 0)).score == 0.5
    both = Topology((1, 3, 0), (2, 3, 0), (2, 3, 0))
    assert both.f1 == (0.5, 1.0, None)
    assert both.score == pytest.approx((0.34 * 0.5 + 0.33 * 1.0) / 0.67)
    # The competition's pseudocount for features that the label does not have at all.
    assert Topology((0, 0, 0), (0, 0, 3), (0, 0, 0)).score == pytest.approx(0.5 / 3.5)
    assert Topology((0, 0, 0), (0, 0, 0), (0, 0, 0)).score == 1.0


def test_octants_cover_a_volume_once_and_have_the_odd_voxel_first() -> None:
    assert [part.stop - part.start for part in octants((5, 4, 1))[0]] == [3, 2, 1]
    seen = np.zeros((5, 4, 1), int)
    for part in octants(seen.shape):
        seen[part] += 1
    assert (seen == 1).all()


@needs_matcher
def test_the_competitions_score_is_the_weighted_sum_of_its_parts() -> None:
    prediction, label = sheets()
    ours, theirs = foreground(prediction, label, 2)
    found = score_surface(prediction, label, 2)
    assert found.score == pytest.approx(published_score(ours, theirs))
    # What is predicted where nothing is labelled changes nothing.
    assert score_surface(prediction | (label == 2), label, 2).as_dict() == found.as_dict()
    assert score_surface(prediction, label, None).score != pytest.approx(found.score)


@needs_matcher
def test_edge_cases_of_the_competitions_score() -> None:
    _, label = sheets()
    truth, empty = label == 1, np.zeros_like(label)
    for right in ((truth, label), (empty, empty), (empty + 1, empty + 1)):
        assert score_surface(*right, 2).score == pytest.approx(1.0)
    missed = score_surface(empty, label, 2)
    assert missed.surface_dice == missed.topology.score == missed.variation.splits == 0.0
    assert 0 < missed.variation.score < 1  # one part against many: nothing is split, all is merged
    made_up = score_surface(truth, empty, 2)
    assert made_up.surface_dice == 0.0
    assert 0 < made_up.topology.score < 0.1


def test_scores_of_a_volume_leave_unlabelled_voxels_out() -> None:
    prediction, label = sheets()
    found = score_volume("a", prediction.astype(np.uint8), label, classes=2, ignore=2)
    ours, theirs = foreground(prediction, label, 2)
    both = (ours & theirs).sum()
    assert found.mean.dice == pytest.approx(2 * both / (ours.sum() + theirs.sum()))
    assert found.mean.iou == pytest.approx(both / (ours | theirs).sum())
    assert found.mean.surface_dice == surface_dice(ours, theirs, 2.0)
    assert found.labelled == pytest.approx((label != 2).mean())


def test_the_mean_is_over_the_classes_that_occur() -> None:
    label = np.zeros((6, 6, 6), np.uint8)
    label[1:3, 1:3, 1:3] = 1
    prediction = label.copy()
    prediction[4, 4, 4] = 3
    found = score_volume("a", prediction, label, classes=4, ignore=None)
    assert [one.dice for one in found.classes] == [1.0, None, 0.0]
    assert found.mean.dice == 0.5
    blank = score_volume("b", np.zeros_like(label), np.zeros_like(label), classes=4, ignore=None)
    assert blank.mean == (None, None, None)
    assert sorted([blank, found], key=lambda one: one.rank)[0] is found


@needs_matcher
def test_an_octant_that_runs_out_of_memory_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "match_octants", die)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # for the child to find `die`
    with pytest.raises(UserError, match="SIGKILL") as caught:
        compare_topology(blobs((8, 8, 8), 1), blobs((8, 8, 8), 2))
    assert "it needs about 83.2 kB at once" in str(caught.value.why)


def die(_argument: Any, parent: Any) -> None:
    next(iter(parent.messages()))
    os.kill(os.getpid(), signal.SIGKILL)


def test_without_the_compiled_matcher_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(topology, "distribution", missing)
    with pytest.raises(UserError, match="Betti-Matching-3D") as caught:
        load_matcher.__wrapped__()
    assert caught.value.hint == "pip install --no-deps topolosses"
