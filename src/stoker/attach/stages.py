"""Which functions of which library belong to which stage of preparing a batch, and their timing.

To support another library, add a line to `STAGE_TARGETS`.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
from collections.abc import Callable
from typing import Any

from stoker.attach.stage_clock import (
    AUGMENT,
    DECODE,
    FETCH,
    PREPROCESS,
    READ_AND_DECODE,
    SOCKET,
    StageClock,
    here,
)

# Pillow calls `load` before every operation; once an image is decoded it has no tiles left.
NOTHING_TO_DO_WITHOUT = {"ImageFile.load": "tile"}

STAGE_TARGETS: dict[str, tuple[tuple[str, int], ...]] = {
    # Reading happens in files that `open_timed` has opened; the rest of these calls is decoding.
    "PIL.Image": (("open", DECODE),),
    "PIL.ImageFile": (("ImageFile.load", DECODE),),
    "PIL.TiffImagePlugin": (("TiffImageFile.load", DECODE),),
    "torchvision.io.image": (
        ("read_file", FETCH), ("decode_image", DECODE), ("decode_jpeg", DECODE), ("decode_png", DECODE),
        ("decode_webp", DECODE), ("decode_gif", DECODE), ("read_image", READ_AND_DECODE),
    ),
    "cv2": (
        ("imread", READ_AND_DECODE), ("imdecode", DECODE), ("GaussianBlur", PREPROCESS), ("medianBlur", PREPROCESS),
        ("bilateralFilter", PREPROCESS), ("fastNlMeansDenoising", PREPROCESS), ("filter2D", PREPROCESS),
        ("morphologyEx", PREPROCESS), ("resize", PREPROCESS), ("warpAffine", PREPROCESS), ("remap", PREPROCESS),
    ),
    "tifffile.tifffile": (
        ("imread", READ_AND_DECODE), ("TiffFile.asarray", READ_AND_DECODE), ("TiffPageSeries.asarray", READ_AND_DECODE),
        ("TiffPage.asarray", READ_AND_DECODE),
    ),
    "nibabel.loadsave": (("load", READ_AND_DECODE),),
    "nibabel.arrayproxy": (
        ("ArrayProxy.__array__", READ_AND_DECODE), ("ArrayProxy.__getitem__", READ_AND_DECODE),
        ("ArrayProxy.get_unscaled", READ_AND_DECODE),
    ),
    "nibabel.dataobj_images": (("DataobjImage.get_fdata", READ_AND_DECODE),),
    # The modules that scipy.ndimage takes its functions from: wrapped before it does.
    "scipy.ndimage._filters": tuple((name, PREPROCESS) for name in (
        "median_filter", "rank_filter", "percentile_filter", "minimum_filter", "maximum_filter", "uniform_filter",
        "gaussian_filter", "gaussian_laplace", "gaussian_gradient_magnitude", "laplace", "sobel", "prewitt",
        "convolve", "correlate", "generic_filter",
    )),
    "scipy.ndimage._interpolation": tuple((name, PREPROCESS) for name in (
        "zoom", "rotate", "shift", "affine_transform", "map_coordinates", "geometric_transform", "spline_filter",
    )),
    "scipy.ndimage._morphology": tuple((name, PREPROCESS) for name in (
        "distance_transform_edt", "binary_dilation", "binary_erosion", "binary_opening", "binary_closing",
        "binary_fill_holes", "grey_dilation", "grey_erosion", "grey_opening", "grey_closing",
    )),
    "scipy.ndimage._measurements": (("label", PREPROCESS),),
    "simplejpeg": (("decode_jpeg", DECODE),),
    "turbojpeg": (("TurboJPEG.decode", DECODE),),
    "torchvision.transforms.transforms": (("Compose.__call__", AUGMENT),),
    "torchvision.transforms.v2._container": (("Compose.forward", AUGMENT),),
    "monai.transforms.compose": (("Compose.__call__", AUGMENT),),
    "monai.transforms.io.array": (("LoadImage.__call__", DECODE),),
    "albumentations.core.composition": (("Compose.__call__", AUGMENT),),
    "numpy.lib._npyio_impl": (("load", READ_AND_DECODE),),
    "numpy.lib.npyio": (("load", READ_AND_DECODE),),
    "numpy": (("load", READ_AND_DECODE),),
    "h5py._hl.dataset": (("Dataset.__getitem__", READ_AND_DECODE),),
    "zarr.core.array": (("Array.__getitem__", READ_AND_DECODE),),
    "zarr.core": (("Array.__getitem__", READ_AND_DECODE),),
    "pydicom.filereader": (("dcmread", READ_AND_DECODE),),
    "torchaudio": (("load", READ_AND_DECODE),),
    # Async file systems read in a thread of their own, for which the caller waits in `sync`.
    "fsspec.asyn": (("sync", SOCKET),),
    "fsspec.spec": (("AbstractBufferedFile.read", FETCH),),
    "socket": (("socket.recv_into", SOCKET), ("socket.recv", SOCKET)),
    "ssl": (("SSLSocket.read", SOCKET),),
}  # fmt: skip

WRAPPED = "_stoker_wrapped"


def timed(function: Callable[..., Any], stage: int, only_with: str | None = None) -> Callable[..., Any]:
    """The same function; while a batch is prepared, its time counts for the stage. `only_with` names an attribute
    without which a method has nothing to do and need not be timed."""

    name = known_as(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        clock = here.clock
        if clock is None or (only_with is not None and not getattr(args[0], only_with, True)):
            return function(*args, **kwargs)
        outer = clock.calling
        clock.calling = name
        clock.enter(stage)
        try:
            return function(*args, **kwargs)
        finally:
            clock.leave()
            clock.calling = outer

    @functools.wraps(function)
    def receive(*args: Any, **kwargs: Any) -> Any:
        got = call(*args, **kwargs)
        clock = here.clock
        if clock is not None:
            # recv_into and SSLSocket.read into a buffer return a count, the others what they received.
            size = len(got) if isinstance(got, (bytes, bytearray)) else got
            clock.socket_bytes += size if type(size) is int else 0
        return got

    @functools.wraps(function)
    def preprocess(*args: Any, **kwargs: Any) -> Any:
        clock = here.clock
        # One filter calls another: the outer one is what the user called.
        if clock is None or clock.stage == PREPROCESS:
            return function(*args, **kwargs)
        outer, clock.calling = clock.calling, name
        clock.enter(AUGMENT if clock.stage == AUGMENT else PREPROCESS)
        try:
            got = function(*args, **kwargs)
        finally:
            clock.leave()
            clock.calling = outer
        if args:
            counts = clock.worked.setdefault(name, [0, 0])
            counts[0] += 1
            counts[1] += int(getattr(args[0], "size", 0))
        return got

    chosen = {SOCKET: receive, PREPROCESS: preprocess}.get(stage, call)
    setattr(chosen, WRAPPED, True)
    # TorchScript compiles a function from its source: point it to the original (torchvision.io's are scripted).
    chosen.__dict__.update({"__script_if_tracing_wrapper": True, "__original_fn": function})
    return chosen


def known_as(function: Any) -> str:
    """scipy.ndimage.median_filter for one that is defined in scipy.ndimage._filters."""
    name = getattr(function, "__qualname__", getattr(function, "__name__", ""))
    parts = [part for part in str(getattr(function, "__module__", "") or "").split(".") if not part.startswith("_")]
    # tifffile.tifffile.imread: users know it as tifffile.imread.
    return ".".join([part for place, part in enumerate(parts) if part not in parts[:place]] + [name])


def patch_stages(module: Any, targets: tuple[tuple[str, int], ...]) -> None:
    """Wraps the named functions and methods of a module; those that this version lacks are skipped."""
    for qualified, stage in targets:
        *classes, name = qualified.split(".")
        owner = module
        for part in classes:
            owner = getattr(owner, part, None)
        # A class is asked for its own methods only: an inherited one is wrapped where it is defined. A
        # class written in C may still have it overridden in its Python subclass (socket.recv_into).
        function = getattr(owner, name, None)
        if function is None or getattr(function, WRAPPED, False):
            continue
        setattr(owner, name, timed(function, stage, NOTHING_TO_DO_WITHOUT.get(qualified)))


_open = builtins.open
BINARY_READING = ("rb", "br")


class TimedFile(io.FileIO):
    """The raw file of `open(path, "rb")`, with its real reads timed; its path names the sample.

    Under the buffer, not in place of it: Pillow reads a JPEG's header in 40 small pieces, most of which come from the
    buffer; timing each of them took 0.2 ms a sample."""

    def readinto(self, buffer: Any, /) -> int | None:
        clock = here.clock
        if clock is None:
            return super().readinto(buffer)
        clock.enter(FETCH)
        try:
            return super().readinto(buffer)
        finally:
            clock.leave()

    def readall(self) -> bytes | None:  # type: ignore[override]
        clock = here.clock
        if clock is None:
            return super().readall()
        clock.enter(FETCH)
        try:
            return super().readall()
        finally:
            clock.leave()


def _note_opened(clock: StageClock, path: Any) -> None:
    clock.opened = path
    if clock.on_open is not None:
        clock.on_open(path)


def open_timed(*args: Any, **kwargs: Any) -> Any:
    """`open`, unchanged; while a batch is prepared, opening and reading count as fetching."""
    clock = here.clock
    if clock is None:
        return _open(*args, **kwargs)
    clock.enter(FETCH)
    try:
        # Only the plain case is ours: a path, for reading bytes, with the default buffer.
        if len(args) == 2 and not kwargs and args[1] in BINARY_READING and isinstance(args[0], (str, os.PathLike)):
            _note_opened(clock, args[0])
            raw = TimedFile(args[0], "rb")
            size = getattr(raw, "_blksize", 0)  # as Python's own `open` chooses it
            return io.BufferedReader(raw, size if size > 1 else io.DEFAULT_BUFFER_SIZE)
        if args and isinstance(args[0], (str, os.PathLike)):
            _note_opened(clock, args[0])
        return _open(*args, **kwargs)
    finally:
        clock.leave()


def take_over_open() -> None:
    """Replaces Python's `open` by ours, in a process that prepares batches."""
    if builtins.open is _open:
        for name in ("__module__", "__qualname__", "__name__", "__doc__", "__text_signature__"):
            if hasattr(_open, name):
                setattr(open_timed, name, getattr(_open, name))
        builtins.open = open_timed
        io.open = open_timed
