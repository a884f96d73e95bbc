"""What a run runs on (versions, host, git revision), and the crash log. Imports none of the packages it lists."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from stoker import __version__
from stoker.core.redact import redact, redact_text

# Variables that change how torch, its workers or its network behave; all others stay private.
_RECORDED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE",
    "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
    "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "WANDB_MODE",
)  # fmt: skip


def describe_environment() -> dict[str, Any]:
    """Everything needed to tell later how a result was produced, without secrets."""
    record = {
        "stoker": __version__,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "host": describe_host(),
        "git": describe_git(Path.cwd()),
        "variables": {name: os.environ[name] for name in _RECORDED_VARIABLES if name in os.environ},
        "packages": installed_packages(),
    }
    redacted: dict[str, Any] = redact(record)
    return redacted


def describe_host() -> dict[str, Any]:
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def describe_git(folder: Path) -> dict[str, Any] | None:
    """The folder's git revision, and whether there are uncommitted changes; None outside a checkout."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "changed": None if changes is None else bool(changes)}


@cache
def installed_packages() -> dict[str, str]:
    # Each is parsed once: every use of `metadata` or `version` would do it again, in a quarter of a second for all.
    about = [dist.metadata for dist in metadata.distributions()]
    found = {one["Name"]: one["Version"] for one in about if one["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        # On a shared file system git status can take long; the run must not wait for it.
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def write_crash_log(error: BaseException) -> Path | None:
    """Writes traceback, environment and config, without secrets, to the first writable folder; None if none is."""
    text = redact_text(_log_text(error))
    state = os.environ.get("XDG_STATE_HOME")
    home = Path(state) if state else Path("~/.local/state").expanduser()
    for folder in (home / "stoker", Path(tempfile.gettempdir()) / "stoker"):
        path = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError:
            continue
        return path
    return None


def _log_text(error: BaseException) -> str:
    parts = ["".join(traceback.format_exception(error)), json.dumps(describe_environment(), indent=2)]
    loading = sys.modules.get("stoker.config.reading")  # imported only where a command has read a config
    config = None if loading is None else loading.config_in_use()
    if config is not None:
        from stoker.config import config_as_yaml

        parts.append(config_as_yaml(config, "the resolved config"))
    return "\n".join(parts)
