"""Progressive resizing: small images first, the full size for the rest of the run."""

from __future__ import annotations

# Where `resize_epochs` is not given.
SHARE_OF_RUN = 0.8


def image_size(epoch: int, start: int | None, final: int, epochs_until: int, multiple: int = 32) -> int:
    """The side of the training images in an epoch: `start` in epoch 0, `final` from epoch `epochs_until` on.

    Between them it grows linearly, rounded to multiples of `multiple`: every size costs a compilation, and strides
    of a network like to divide it. `start` and `final` are taken as they are.
    """
    assert epochs_until >= 1
    assert multiple >= 1
    if start is None or epoch >= epochs_until:
        return final
    assert start <= final
    # In whole numbers: the same on every machine. x / epochs_until is the size; halves are rounded up.
    x = start * epochs_until + (final - start) * max(epoch, 0)
    rounded = (2 * x + multiple * epochs_until) // (2 * multiple * epochs_until) * multiple
    return min(max(rounded, start), final) if epoch > 0 else start


def default_resize_epochs(epochs: int) -> int:
    """Epochs until the full size where the config does not say."""
    return max(1, round(SHARE_OF_RUN * epochs))


def all_sizes(start: int | None, final: int, epochs_until: int, multiple: int = 32) -> list[int]:
    """Every size of a run, smallest first: what the model and the memory have to bear."""
    return sorted({image_size(epoch, start, final, epochs_until, multiple) for epoch in range(epochs_until + 1)})
