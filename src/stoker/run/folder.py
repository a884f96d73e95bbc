"""The folder of a run: the name of every file in it, how it is created and found, and what a finished run left there.

Without torch, which takes seconds to import.

runs/<run_name>/
    config.yaml         the resolved config, every key
    environment.json    versions, host, git revision, the command
    metrics.jsonl       one line for each interval, epoch and event: what everything else is derived from
    clock.jsonl         one line for each interval: where the time of its steps and batches went
    subset.json         the chosen classes, if not all of them are used
    samples.npz         the names of all samples, to say what changed when the run resumes
    preview.jpg         what the network gets: training samples of the first steps, and validation samples
    quarantine.jsonl    samples that could not be read
    evaluation.json     scores of the validation volumes by `stoker eval`, the worst first
    worst.jpg           pictures of the worst of them: label, prediction and errors
    logs/train_*.log    what was printed on the terminal
    checkpoints/        last.ckpt and the best ones
    metrics.csv         the epochs of metrics.jsonl, for spreadsheets (csv: true)
    tensorboard/        event files for TensorBoard (tensorboard: true)
    wandb/              what Weights & Biases keeps locally (wandb: true)
    wandb_id.txt        the run's id at Weights & Biases, so that a resumed run continues it
    predictions.jsonl   what `stoker doctor` predicted, and its error if the change was tried
    report.html         written by `stoker report`
    lease.json          the process that uses the folder now
"""

from __future__ import annotations

import json
import re
import shutil
import stat
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from stoker.config import Config, config_as_yaml
from stoker.core.errors import ConfigError, StokerError, UserError
from stoker.core.files import open_regular, parse_json, write_text
from stoker.core.redact import redact_text
from stoker.core.signals import Notice
from stoker.run.environment import describe_environment
from stoker.run.lease import Lease
from stoker.run.metrics import Metric, read_checkpoint_name, read_metrics

RUNS = Path("runs")
SHOWN_RUNS = 8


class _Below:
    """A file or folder of the run."""

    def __init__(self, name: str, *, stays: bool = False) -> None:
        self.name = name
        self.stays = stays

    def __get__(self, run: RunFolder, _kind: type[RunFolder]) -> Path:
        return run.root / self.name


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run; asking for them creates nothing."""

    root: Path

    config_file = _Below("config.yaml")
    environment_file = _Below("environment.json")
    metrics_file = _Below("metrics.jsonl")
    clock_file = _Below("clock.jsonl")
    subset_file = _Below("subset.json")
    samples_file = _Below("samples.npz")
    preview_file = _Below("preview.jpg")
    quarantine_file = _Below("quarantine.jsonl")
    evaluation_file = _Below("evaluation.json")
    worst_file = _Below("worst.jpg")
    logs = _Below("logs")
    checkpoints = _Below("checkpoints")
    metrics_csv_file = _Below("metrics.csv")
    tensorboard = _Below("tensorboard")
    wandb = _Below("wandb")
    wandb_id_file = _Below("wandb_id.txt")
    predictions_file = _Below("predictions.jsonl")
    report_file = _Below("report.html")
    lease_file = _Below("lease.json", stays=True)

    @property
    def of_one_run(self) -> tuple[Path, ...]:
        """Everything that a run leaves behind and that a new run in the same folder must not continue."""
        names = [one.name for one in vars(RunFolder).values() if isinstance(one, _Below) and not one.stays]
        return tuple(self.root / name for name in names)


class OpenRun:
    """A run folder that this process holds; leaving the `with` block releases it. A new folder whose run never began,
    because of a signal or an error that the user can fix, is removed: nothing in it is worth a look."""

    def __init__(self, folder: RunFolder, lease: Lease, set_aside: Path | None, *, is_new: bool) -> None:
        self._is_new = is_new
        self.folder = folder
        self.set_aside = set_aside
        """Where the files of an earlier run went; None without any."""
        self._lease = lease

    def __enter__(self) -> RunFolder:
        return self.folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, StokerError | Notice | KeyboardInterrupt)
        unused = self._is_new and stopped and not self.folder.metrics_file.exists()
        if unused and not self.folder.checkpoints.exists():
            # While the lease is held: nobody else can have begun a run here.
            shutil.rmtree(self.folder.root, ignore_errors=True)
        self._lease.release()


def run_name_for(config: Config, config_path: Path | None) -> str:
    if config.run_name is not None:
        return config.run_name
    stem = config_path.stem if config_path is not None else ""
    return re.sub(r"[^A-Za-z0-9._=+-]", "-", stem).lstrip("._=+-") or "run"


def run_folder_for(config: Config, config_path: Path | None) -> RunFolder:
    return RunFolder(Path(config.runs_dir) / run_name_for(config, config_path))


def open_run(config: Config, config_path: Path | None, *, fresh: bool = False) -> OpenRun:
    """Creates or enters the run's folder, takes its lease, and writes config and environment. The config of a run that
    is already there stays until its checkpoint has accepted the new one (`record_config`).

    Use it as `with open_run(config, path) as folder:`. Raises before anything is written if another process holds the
    folder or if it is not writable. With `fresh`, the files of an earlier run are set aside first.
    """
    folder = run_folder_for(config, config_path)
    is_new = not folder.root.exists()
    _check_kinds(folder)
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        lease = Lease(folder.lease_file).acquire()
    except OSError as error:
        raise _not_writable(folder.root, error) from None
    try:
        aside = _set_aside(folder) if fresh else None
        if not folder.config_file.exists():
            record_config(folder, config)
        write_text(folder.environment_file, json.dumps(describe_environment(), indent=2) + "\n")
    except OSError as error:
        lease.release()
        raise _not_writable(folder.root, error) from None
    except BaseException:
        lease.release()
        raise
    return OpenRun(folder, lease, aside, is_new=is_new)


def _check_kinds(folder: RunFolder) -> None:
    """Refuses a run folder in which something else has the name of a file or a folder of the run: training would hang
    on a pipe, or fail in the middle."""
    files = (
        folder.lease_file, folder.config_file, folder.metrics_file, folder.clock_file, folder.quarantine_file,
        folder.metrics_csv_file,
    )  # fmt: skip
    for path in (*files, folder.logs, folder.checkpoints, folder.tensorboard, folder.wandb):
        try:
            mode = path.stat().st_mode
        except OSError:
            continue  # absent; if it cannot be written, whoever writes it says so
        wanted = "file" if path in files else "folder"
        if not (stat.S_ISREG(mode) if wanted == "file" else stat.S_ISDIR(mode)):
            kinds = {stat.S_IFIFO: "named pipe", stat.S_IFDIR: "folder", stat.S_IFREG: "file", stat.S_IFSOCK: "socket"}
            raise UserError(
                "run-folder-odd",
                f"{path} is a {kinds.get(stat.S_IFMT(mode), 'device')}, where a run has a {wanted}",
                why="the run could not write there",
                hint=f"mv {path} {path}.old    # or run_name=ANOTHER_NAME",
            )


def record_config(folder: RunFolder, config: Config) -> None:
    """Writes the config that the run uses from now on."""
    write_text(folder.config_file, config_text(folder, config))


def config_text(folder: RunFolder, config: Config) -> str:
    header = f"The config of run {folder.root.name}, every key as it was used."
    return redact_text(config_as_yaml(config, header))


def _set_aside(folder: RunFolder) -> Path | None:
    """Moves what an earlier run left into a folder of its own, and returns that: a typo must not cost ten days."""
    kept = [file for file in folder.of_one_run if file.exists()]
    if not kept:
        return None
    numbered = (folder.root / f"before-fresh-{number}" for number in count(1))
    aside = next(path for path in numbered if not path.exists())
    aside.mkdir()
    for file in kept:
        file.rename(aside / file.name)
    return aside


def _not_writable(root: Path, error: OSError) -> ConfigError:
    existing = root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return ConfigError(
        f"{root} cannot be written: {error.strerror or error}",
        name="run-folder-not-writable",
        why=f"a run keeps its config, metrics and checkpoints there; the closest existing folder is {existing}",
        hint="runs_dir=/path/to/a/writable/folder",
    )


def find_run(path: Path) -> Path:
    """The run folder at this path, or of this name under runs/; raises if there is none."""
    for candidate in (path, RUNS / path):
        if is_run(candidate):
            return candidate
    around = path if path.is_dir() else RUNS
    seen = "does not exist" if not path.exists() else "is not a folder" if not path.is_dir() else "contains no run"
    try:
        runs = sorted(folder for folder in around.iterdir() if is_run(folder))
    except OSError:
        runs = []
    raise UserError(
        "not-a-run-folder",
        f"{path} {seen}",
        why="a run folder contains config.yaml or metrics.jsonl; `stoker train` creates it under runs/",
        hint="  ".join(map(str, runs[-SHOWN_RUNS:])) if runs else "stoker demo    # creates one in a minute",
    )


def run_of(checkpoint: Path) -> RunFolder | None:
    """The run that a checkpoint belongs to; None for one that lies elsewhere."""
    folder = RunFolder(checkpoint.absolute().parent.parent)
    return folder if checkpoint.absolute().parent == folder.checkpoints and is_run(folder.root) else None


def is_run(folder: Path) -> bool:
    run = RunFolder(folder)
    try:
        return any(file.is_file() for file in (run.metrics_file, run.config_file, run.clock_file))
    except OSError:
        return False


LARGEST_HEADER_BYTES = 64 << 20
AT_ONCE = 1 << 22
_HASHES = ("header_xxh3_128", "tensors_xxh3_128")


def finished_progress(folder: RunFolder, config: Config) -> dict[str, Any] | None:
    """The progress of a run that is finished with exactly this config, and whose last checkpoint is whole; None
    otherwise: then the run is resumed, which says what is wrong."""
    try:
        if folder.config_file.read_text("utf-8") != config_text(folder, config):
            return None
        progress = _progress_of(folder.checkpoints / "last.ckpt")
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    best = progress.get("best")
    plain = all(type(progress.get(name)) is int for name in ("epoch", "step")) and (best is None or type(best) is float)
    return progress if plain and progress.get("finished") is True else None


def finished_lines(folder: RunFolder, metric: Metric, progress: dict[str, Any]) -> list[str]:
    """Says that the run is finished, with its best checkpoint and the next command."""
    best = "none" if progress["best"] is None else metric.text(progress["best"])
    stops = [one for one in read_metrics(folder.metrics_file, "event") if one.get("event") == "stopped_early"]
    early = [one["why"] for one in stops if isinstance(one.get("why"), str)]
    why = f"; {early[-1]}" if early else ""
    first = f"{folder.root} is finished: {progress['step']:,} steps, best {metric.key} {best}{why}"
    return [first, *next_lines(folder, metric)]


def finished_summary(folder: RunFolder, metric: Metric, progress: dict[str, Any]) -> dict[str, Any]:
    """The same for `--json`."""
    best = best_checkpoint(folder, metric)
    return {
        "run_folder": str(folder.root),
        "finished": True,
        "epochs": progress["epoch"],
        "steps": progress["step"],
        "best_by": metric.name,
        f"best_val_{metric.name}": progress["best"],
        "best_checkpoint": None if best is None else str(best),
        "checkpoints": str(folder.checkpoints),
    }


def next_lines(folder: RunFolder, metric: Metric) -> list[str]:
    best = best_checkpoint(folder, metric)
    if best is None:
        return []
    return [f"best checkpoint: {best}", f"next: stoker eval {best}    # or stoker report {folder.root}"]


def best_checkpoint(folder: RunFolder, metric: Metric) -> Path | None:
    """The best checkpoint by its name, of equal ones the newer; the last one of a run without validation."""
    try:
        files = sorted(folder.checkpoints.iterdir())
    except OSError:
        return None
    named = [(said, file) for file in files if (said := read_checkpoint_name(file.name)) is not None]
    ranked = [(metric.rank(said.value), said.epoch, file) for said, file in named if said.metric == metric]
    last = folder.checkpoints / "last.ckpt"
    return max(ranked)[2] if ranked else last if last in files else None


def _progress_of(path: Path) -> dict[str, Any]:
    """The progress in a checkpoint. Raises ValueError or KeyError if the file is not what was written."""
    with open_regular(path) as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if length > LARGEST_HEADER_BYTES:
            raise ValueError("not a header of ours")
        header = stream.read(length)
        digest = xxhash.xxh3_128()
        while data := stream.read(AT_ONCE):
            digest.update(data)
    metadata = parse_json(header)["__metadata__"]
    own, tensors = (metadata[name] for name in _HASHES)
    unsigned = start + header.replace(own.encode(), b"0" * len(own), 1)
    if xxhash.xxh3_128(unsigned).hexdigest() != own or digest.hexdigest() != tensors:
        raise ValueError("the file is damaged")
    progress = parse_json(metadata["state"])["progress"]
    if not isinstance(progress, dict):
        raise ValueError("no progress")
    return progress
