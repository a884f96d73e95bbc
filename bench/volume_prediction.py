"""Memory of `stoker predict` on volumes of growing size: the peak of a fresh process for each, cleaning included.

A network that looks at single voxels, so that the time is that of reading, blending, cleaning and writing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.rounds import keep
from stoker.profile.memory import read_counters

EDGES, PATCH, CHUNK = (256, 512, 1024), 128, 128
CACHE = 64_000_000
"""`volume_cache`: decoded chunks that are kept, whatever the size of the volume. The default is a gigabyte."""
POST = "remove_small=100,fill_holes,closing=1"


def write_volume(argument: dict[str, Any]) -> dict[str, Any]:
    """Noise with bright sheets, as a Zarr array; in a process of its own, because it takes memory too."""
    import zarr

    edge, chunk = argument["edge"], min(CHUNK, argument["edge"])
    array = zarr.create_array(
        argument["path"], shape=(edge,) * 3, chunks=(chunk,) * 3, dtype="u1", compressors=None, zarr_format=3,
        config={"write_empty_chunks": True},
    )  # fmt: skip
    random = np.random.default_rng(0)
    sheets = 120 * (np.arange(edge) % 16 < 2)
    for z in range(0, edge, chunk):
        for y in range(0, edge, chunk):
            noise = random.integers(0, 100, (min(chunk, edge - z), min(chunk, edge - y), edge), np.uint8)
            array[z : z + chunk, y : y + chunk] = noise + sheets[y : y + chunk, None].astype(np.uint8)
    return {}


def predict(argument: dict[str, Any]) -> dict[str, Any]:
    """Predicts one volume, and returns what this process needed."""
    import torch
    from torch import nn

    from stoker.config import load_config
    from stoker.profile.host import fit_to_machine, read_machine
    from stoker.tasks.volumes.patches.labels import LabelRules
    from stoker.tasks.volumes.predict.output import PredictionOptions
    from stoker.tasks.volumes.predict.postprocess import parse_chain
    from stoker.tasks.volumes.predict.predict_folder import cases_to_predict, predict_folder
    from stoker.tasks.volumes.segment import TrainedVolumeModel

    patch = min(PATCH, argument["patch"])
    keys = ["task=segment3d", "model=small_unet", f"patch_size=[{patch},{patch},{patch}]", "batch_size=2",
            f"volume_cache={CACHE}B", "normalize=range"]  # fmt: skip
    config, _ = fit_to_machine(load_config(None, keys).config, read_machine())
    torch.manual_seed(0)
    model = nn.Conv3d(1, 2, 1).eval()
    trained = TrainedVolumeModel(Path(__file__), model, config, LabelRules(2), 1, False, 0, 0)
    status = Path("/proc/self/status")
    started = read_counters(status)
    began_s = time.perf_counter()
    options = PredictionOptions(post=parse_chain(POST), file_format=argument["format"])
    (found,) = predict_folder([trained], cases_to_predict([argument["path"]]), Path(argument["out"]), options).volumes
    ended = read_counters(status)
    return {
        "seconds": round(time.perf_counter() - began_s, 1),
        "windows": found.windows,
        "foreground": found.foreground,
        "before_bytes": started["VmRSS"],
        "peak_bytes": ended["VmHWM"],
    }


def in_fresh_process(part: str, argument: dict[str, Any]) -> Any:
    """What a part of this benchmark returns in a process of its own."""
    command = [sys.executable, "-m", "bench.volume_prediction", "--part", part, json.dumps(argument)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def main() -> int:
    parts = {"write": write_volume, "predict": predict}
    if sys.argv[1:2] == ["--part"]:
        print(json.dumps(parts[sys.argv[2]](json.loads(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edges", type=int, nargs="+", default=EDGES)
    parser.add_argument("--patch", type=int, default=PATCH)
    parser.add_argument("--format", choices=("tiff", "zarr"), default="tiff")
    parser.add_argument("--folder", type=Path, help="where volumes are written; 4 GB for an edge of 1,024")
    parser.add_argument("--no-keep", action="store_true", help="do not write results/")
    arguments = parser.parse_args()
    rows = []
    for edge in arguments.edges:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            place = {"edge": edge, "path": f"{folder}/volume.zarr", "out": f"{folder}/out", "patch": arguments.patch,
                     "format": arguments.format}  # fmt: skip
            in_fresh_process("write", place)
            row = {"edge": edge, **in_fresh_process("predict", place)}
        rows.append(row)
        print(
            f"{edge}^3: peak {row['peak_bytes'] / 1e6:,.0f} MB (before: {row['before_bytes'] / 1e6:,.0f} MB), "
            f"{row['windows']:,} windows in {row['seconds']:,.0f} s",
            flush=True,
        )
    growth = rows[-1]["peak_bytes"] / rows[0]["peak_bytes"]
    print(f"peak of the largest / of the smallest: {growth:.2f}, for {(rows[-1]['edge'] / rows[0]['edge']) ** 3:,.0f} "
          "times the voxels")  # fmt: skip
    if not arguments.no_keep:
        document = {"growth": round(growth, 3), "patch": arguments.patch, "overlap": 0.5, "format": arguments.format,
                    "post": POST, "volume_cache_bytes": CACHE, "sizes": rows}  # fmt: skip
        print(f"wrote {keep('volume_prediction', document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
