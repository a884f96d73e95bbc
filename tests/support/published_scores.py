"""The competition's score by the packages that define its parts, for comparing ours with."""

from __future__ import annotations

from typing import Any

import cc3d
import numpy as np
import surface_distance
from skimage.metrics import variation_of_information

from stoker.tasks.volumes.scores.topology import Topology, load_matcher, octants


def published_surface_dice(one: Any, two: Any, tolerance: float, spacing: tuple[float, float, float]) -> float:
    """surface-distance's."""
    distances = surface_distance.compute_surface_distances(one, two, spacing)
    return float(surface_distance.compute_surface_dice_at_tolerance(distances, tolerance))


def published_topology(ours: Any, theirs: Any) -> Any:
    """Betti matching over the octants: matched, predicted and labelled features by dimension."""
    found = np.zeros((3, 3), int)
    for z, y, x in octants(ours.shape):
        matching = load_matcher().compute_matching(
            (1 - ours[z, y, x]).astype(np.uint8), (1 - theirs[z, y, x]).astype(np.uint8)
        )
        for dimension in range(3):
            matched = len(matching.input1_matched_birth_coordinates[dimension])
            found[0, dimension] += matched
            found[1, dimension] += matched + len(matching.input1_unmatched_birth_coordinates[dimension])
            found[2, dimension] += matched + len(matching.input2_unmatched_birth_coordinates[dimension])
    return found


def published_score(ours: Any, theirs: Any) -> float:
    """The weighted sum of the parts for two masks of foreground."""
    parts = [cc3d.connected_components(mask, connectivity=26)[ours | theirs] for mask in (theirs, ours)]
    matched, predicted, labelled = map(tuple, published_topology(ours, theirs).tolist())
    return (
        0.30 * Topology(matched, predicted, labelled).score
        + 0.35 * published_surface_dice(ours, theirs, 2.0, (1.0, 1.0, 1.0))
        + 0.35 / (1 + 0.3 * sum(variation_of_information(*parts)))
    )
