"""Which functions of which libraries belong to which stage of making a batch.

A line here is all that a further library needs. Time is counted for the innermost of nested calls: what
an augmentation pipeline spends on decoding counts as decoding.
"""

from __future__ import annotations

OTHER, FETCH, SOCKET, DECODE, READ_AND_DECODE, AUGMENT, COLLATE = range(7)
"""READ_AND_DECODE: one call does both, out of our sight. Its blocked time was reading, the rest decoding."""
STAGE_COUNT = 7

# Pillow calls `load` before every operation; once an image is decoded it has no tiles left.
NOTHING_TO_DO_WITHOUT = {"ImageFile.load": "tile"}

STAGE_TARGETS: dict[str, tuple[tuple[str, int], ...]] = {
    # Reading happens in files that `open` has opened (opened_files.py); what is left of these is decoding.
    "PIL.Image": (("open", DECODE),),
    "PIL.ImageFile": (("ImageFile.load", DECODE),),
    "PIL.TiffImagePlugin": (("TiffImageFile.load", DECODE),),
    "torchvision.io.image": (
        ("read_file", FETCH), ("decode_image", DECODE), ("decode_jpeg", DECODE), ("decode_png", DECODE),
        ("decode_webp", DECODE), ("decode_gif", DECODE), ("read_image", READ_AND_DECODE),
    ),
    "cv2": (("imread", READ_AND_DECODE), ("imdecode", DECODE)),
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
