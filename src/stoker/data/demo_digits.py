"""The demo's data: 1,797 handwritten digits, as JPEGs in class folders like any other data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stoker.errors import UserError

SIDE = 32
QUALITY = 95
# Every fifth digit is for validation; the collection is in the order in which people wrote.
VALIDATION_EVERY = 5


def write_digits(root: Path) -> Path:
    """Writes the digits below `root`, once; the folder that a config's data_root names."""
    done = root / ".complete"
    if done.exists():
        return root
    import cv2
    import simplejpeg

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "digits-missing",
            "scikit-learn is not installed",
            why="the demo's handwritten digits come with it",
            hint="pip install 'stoker[demo]'",
        ) from None
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if number % VALIDATION_EVERY == 0 else "train"
        folder = root / split / f"digit{label}"
        folder.mkdir(parents=True, exist_ok=True)
        grey = (pixels * (255 / 16)).astype(np.uint8)
        large = cv2.resize(grey, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
        colour = np.ascontiguousarray(np.repeat(large[:, :, None], 3, axis=2))
        (folder / f"{number:04d}.jpg").write_bytes(simplejpeg.encode_jpeg(colour, quality=QUALITY))
    done.touch()
    return root
