"""What the oracle looks at, from outside: commands, run folders, documents, exit codes; each part as texts by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from tests.oracle.inside import LEDGER, STOP
from tests.support.layouts import images_of, write_tars
from tests.support.ready_process import ReadyProcess, Started
from tests.support.recorded_run import write_run
from tests.support.tiny_training import metrics, without_times, write_config, write_images
from tests.support.tiny_volumes import write_list, write_volume_config, write_volumes
from tests.support.volumes import write_scroll_config

EXPECTED = Path(__file__).parent / "expected"
FAILED = "failed"
"""Begins the text of what did not end as it should."""
WATCH, WATCH_SMALL = "tests.oracle.inside:install", "tests.oracle.inside:install_small"


@dataclass(frozen=True)
class Found:
    """What stoker does today, as text; several variants (engines, interruptions) share one expectation."""

    name: str
    text: str
    variant: str = ""


class Bench:
    """A process that runs commands, and what they are run on, made when first asked for: bench["images"]."""

    def __init__(self, folder: Path, ready: ReadyProcess, *, quick: bool = False, variants: bool = True) -> None:
        self.folder, self.ready, self.quick, self.variants = folder, ready, quick, variants
        self._places: dict[str, Path] = {}
        self._numbers = count()

    def __getitem__(self, name: str) -> Path:
        if name == "new":  # a path where nothing is yet, in a folder of its own
            return self.empty_folder() / "new"
        if name not in self._places:
            self._places[name] = PLACES[name](self)
        return self._places[name]

    def stoker(self, command: str, before: str = "", **variables: str) -> Started:
        """Runs a command in one thread; `{name}` in it is one of the places."""
        words = [word.format_map(self) for word in command.split()]  # type: ignore[arg-type]
        return self.ready.run(*words, cwd=self.folder, before=before, **variables)

    def empty_folder(self) -> Path:
        place = self.folder / f"folder{next(self._numbers)}"
        place.mkdir()
        return place


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _tars(bench: Bench) -> Path:
    place = bench.empty_folder()
    for split in ("train", "val"):
        write_tars(place / split, images_of(bench["images"], split), ["class0", "class1", "class2"])
    return place


def _packed(bench: Bench, command: str, *keys: str) -> Path:
    place = bench["new"]
    done = bench.stoker(" ".join([command, str(place), *keys]))
    assert done.code == 0, done.err
    return place


def _image_config(bench: Bench, **keys: Any) -> Path:
    folder = bench.empty_folder()
    return write_config(folder, bench["images"], decoder="pillow", runs_dir=str(folder / "runs"), **keys)


def _trained(bench: Bench, config: Path) -> Path:
    done = bench.stoker(f"train {config}")
    assert done.code == 0, done.err
    run = config.parent / "runs" / "tiny"
    _write(config.with_name("files"), _files(run))  # before other commands write there
    return run


def _busy(bench: Bench) -> Path:
    """The config of a run whose folder is in use, until the oracle ends."""
    config = _image_config(bench)
    ledger = config.with_name("ledger")
    holder = bench.ready.start(
        "train", config, cwd=config.parent, before=WATCH, **{LEDGER: str(ledger), STOP: "SIGSTOP 1"}
    )
    holder.wait_for(ledger.exists)
    return config


THEIRS = "model: resnet50\nbatch_size: 32\nopt: sgd\nlr: 0.1\nsched: cosine\nepochs: 5\nmixup: 0.2\n"
SCRIPT = """# warm
import torch
data = torch.utils.data.TensorDataset(torch.zeros(640, 8), torch.zeros(640, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in torch.utils.data.DataLoader(data, 8):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
"""
PLACES: dict[str, Callable[[Bench], Path]] = {
    "missing": lambda bench: bench.folder / "missing",
    "python": lambda _: Path(sys.executable),
    "script": lambda bench: _write(bench.folder / "script.py", SCRIPT),
    "theirs": lambda bench: _write(bench.folder / "theirs.yaml", THEIRS),
    "recorded": lambda bench: write_run(bench.empty_folder()),
    "faster": lambda bench: write_run(bench.empty_folder(), faster=2.0, lr=0.1),
    "images": lambda bench: write_images(bench.empty_folder()),
    "shards": lambda bench: _packed(bench, "pack {images}"),
    "tars": _tars,
    "scrolls": lambda bench: write_volumes(bench.empty_folder()),
    "packed": lambda bench: _packed(bench, "pack {scrolls}", "patch_size=[16,16,16]"),
    "arrays": lambda bench: write_list(bench.empty_folder()),
    "config": lambda bench: _image_config(bench, num_workers=1, csv=True, val_batch_size=4, adjust_loader=False),
    "run": lambda bench: _trained(bench, bench["config"]),
    "volume_config": lambda bench: write_scroll_config(bench.empty_folder(), adjust_loader=False),
    "volume_run": lambda bench: _trained(bench, bench["volume_config"]),
    "busy": _busy,
}


def helps(bench: Bench) -> Iterator[Found]:
    """What `--help` prints, for every command."""

    def each(words: str) -> Iterator[Found]:
        text = bench.stoker(f"{words} --help").out
        yield Found(words.replace(" ", "-") or "stoker", text)
        listed = re.search(r"^Commands:\n((?:  .*\n)+)", text, re.MULTILINE)
        for name in re.findall(r"^  (\S+)", listed[1], re.MULTILINE) if listed else ():
            yield from each(f"{words} {name}".strip())

    yield from each("")


def errors(bench: Bench) -> Iterator[Found]:
    """Exit code and error name of typical mistakes; the recording has the commands. A new line needs only a command."""
    lines = (EXPECTED / "errors" / "errors.txt").read_text().splitlines()
    for at in range(0, len(lines), 2 if bench.quick else 1):
        _, _, command = lines[at].partition("stoker ")
        done = bench.stoker(command)
        name = re.search(r"^error: (\S+)", done.err, re.MULTILINE)
        lines[at] = f"{done.code:>3} {name[1] if name else '-':<28} stoker {command}"
    yield Found("errors", "\n".join(lines) + "\n")


def documents(bench: Bench, part: str) -> Iterator[Found]:
    """Keys and types of what `--json` prints. The first line of a recording is the command; a new one needs no more."""
    for file in sorted((EXPECTED / part).glob("*.txt")):
        first = file.read_text().splitlines()[0]
        done = bench.stoker(first.removeprefix("$: stoker "))
        try:
            yield Found(file.stem, f"{first}\n{tree(json.loads(done.out))}")
        except ValueError:
            yield Found(file.stem, f"{FAILED}: no JSON, exit code {done.code}: {done.err}\n")


def files(bench: Bench) -> Iterator[Found]:
    """Files of a run folder, and the keys and types in them."""
    for kind, run in (("images", "run"), ("volumes", "volume_run")):
        yield Found(kind, (bench[run].parents[1] / "files").read_text())


def _files(run: Path) -> str:
    found: dict[str, Any] = {}
    for path in (path for path in run.rglob("*") if path.is_file()):
        name = re.sub(r"(?<==)\d[\d.]*\d|\d{8}-\d{6}", "N", str(path.relative_to(run)))
        if path.suffix == ".json" and path.stat().st_size:
            found[name] = json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            for line in map(json.loads, path.read_text().splitlines()):
                # Which lines of clock.jsonl also describe the host depends on how long a step took.
                kind = f" {line.get('event', line['kind'])}" if name == "metrics.jsonl" else ""
                found.setdefault(f"{name}{kind}", []).append(line)
        else:
            found[name] = "a file"
    return tree(found)


ANY_KEYS = (".packages", ".change", ".settings")
"""Objects whose keys are what was installed, or tried."""


def tree(document: Any) -> str:
    """A line for each path of a document, with the types of its values."""
    types: dict[str, set[str]] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict) and value and path.endswith(ANY_KEYS):
            types[f"{path}.*"] = {"any"}
        elif isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, f"{path}.{key}".removeprefix("."))
        elif isinstance(value, list) and value:
            for inner in value:
                walk(inner, f"{path}[]")
        else:
            kinds = {list: "empty list", dict: "empty object", type(None): "null", int: "number", float: "number"}
            types.setdefault(path, set()).add(kinds.get(type(value), type(value).__name__))

    walk(document, "")
    return "".join(f"{path}: {' | '.join(sorted(kinds))}\n" for path, kinds in sorted(types.items()))


IMAGES: dict[str, Any] = {"model": "oracle_net", "decoder": "pillow", "num_workers": 2, "lr": 0.1}
VOLUMES: dict[str, Any] = {"num_workers": 2}
MUCH = {
    "repeated_augmentation": 2, "mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mix_probability": 0.7, "random_erasing": 0.3,
    "auto_augment": "randaugment", "label_smoothing": 0.1, "gradient_accumulation": 2, "start_img_size": 24,
    "resize_epochs": 1, "drop_path": 0.2, "ema_decay": 0.9, "optimizer": "adamw", "warmup_epochs": 1,
    "clip_grad_norm": 1.0, "seed": 3,
}  # fmt: skip
DEFORMED = {
    "volume_rotation": 0.7, "volume_scaling": 0.7, "volume_elastic": 0.5, "volume_turns": 0.5, "volume_cutout": 0.5,
    "foreground_patches": 0.7, "ema_decay": 0.9, "seed": 3,
}  # fmt: skip
REGIONS = {
    "split_by": "region", "small_volumes": "pad", "deep_supervision": True, "normalize": "patch",
    "volume_loss": "dice + ce + 0.2 cldice",
}  # fmt: skip
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "folders": ("images", IMAGES),
    "augmented": ("images", IMAGES | MUCH),
    "shards": ("shards", IMAGES),
    "tars": ("tars", IMAGES | {"steps_per_epoch": 4, "epochs": 3}),
    "scrolls": ("scrolls", VOLUMES),
    "deformed": ("arrays", VOLUMES | DEFORMED),
    "regions": ("scrolls", VOLUMES | REGIONS),
    "packed": ("packed", VOLUMES),
}
"""Name, data and keys of each run."""
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "threads": ({"loader": "thread"}, ""),
    "processes": ({"loader": "process"}, ""),
    "pre-empted": ({"loader": "thread"}, "SIGTERM 4"),
    "killed": ({"loader": "process", "checkpoint_every_steps": 2}, "SIGKILL 5"),
}
"""How each is run: keys, and the signal that interrupts it. All must give the same bits."""
QUICK = {
    ("folders", 1, "processes"), ("augmented", 1, "pre-empted"),
    ("deformed", 1, "pre-empted"), ("packed", 2, "threads"),
}  # fmt: skip
"""Those that the suite runs."""


def runs(bench: Bench) -> Iterator[Found]:
    """Samples, keys, crops, labels and pixels of every batch, and the losses, of short trainings."""
    for name, (data, keys) in RUNS.items():
        for world in (1, 2):
            for variant, (more, stop) in VARIANTS.items() if bench.variants else [("threads", VARIANTS["threads"])]:
                # tools/attack.py kills ranks.
                if (name, world, variant) in QUICK or (not bench.quick and (world, variant) != (2, "killed")):
                    config = _config(bench.empty_folder(), bench[data], keys | more, world)
                    yield Found(f"{name}-{world}", run_text(bench, config, stop, world), variant)


def _config(folder: Path, data: Path, keys: dict[str, Any], world: int = 1) -> Path:
    """The batch of all ranks is the same for any number of them."""
    if "model" in keys:
        return write_config(folder, data, **keys | {"batch_size": 8 // world // keys.get("gradient_accumulation", 1)})
    return write_volume_config(folder, data, **keys | {"batch_size": 2 // world})


def run_text(bench: Bench, config: Path, stop: str = "", world: int = 1) -> str:
    """Trains, and once more if it was stopped; every batch and every loss, a line each."""
    codes = _train(bench, config, stop, world)
    if stop:
        codes += _train(bench, config, "", world)
    usual = {"": [0], "SIGTERM": [143, 0], "SIGKILL": [-signal.SIGKILL, 0]}[stop.split(" ")[0]]
    # A killed run repeats the steps after its last checkpoint: the same lines again.
    batches = sorted({line for path in config.parent.glob("ledger*") for line in path.read_text().splitlines()})
    as_usual = codes == [code for code in usual for _ in range(world)]
    return _text(as_usual, f"exit codes {codes}", [*batches, *losses(config.parent / "runs" / "tiny")])


def _text(good: bool, wrong: str, lines: Iterable[str]) -> str:
    return "\n".join([*([] if good else [f"{FAILED}: {wrong}"]), f"machine: {machine()}", *lines]) + "\n"


def _train(bench: Bench, config: Path, stop: str, world: int) -> list[int]:
    """Exit codes of all ranks, started as torchrun would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = []
    for rank in range(world):
        variables = {LEDGER: str(config.parent / f"ledger{rank}"), STOP: stop}
        if world > 1:
            variables |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
        started.append(bench.ready.start("train", config, cwd=config.parent, before=WATCH_SMALL, **variables))
    return [one.wait() for one in started]


def losses(run: Path) -> Iterable[str]:
    """The numbers in metrics.jsonl that do not depend on time."""
    for record in without_times(metrics(run)) if (run / "metrics.jsonl").exists() else ():
        values = " ".join(f"{name}={value!r}" for name, value in sorted(record.items()) if isinstance(value, float))
        yield f"{record['kind']} step={record['step']} {values}"


def machine() -> str:
    """What bits of losses may depend on."""
    about = dict(re.findall(r"^(model name|flags)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    vectors = [flag for flag in about.get("flags", "").split() if flag.startswith(("avx", "amx", "fma"))]
    return f"{about.get('model name', os.uname().machine)}, {' '.join(sorted(vectors))}, torch {version('torch')}"


def demos(bench: Bench) -> Iterator[Found]:
    """The demos' losses: of two epochs of digits, and of a few steps on volumes."""
    place = bench["new"]
    for name, options in (("demo", ""), ("demo_volumes", "--volumes")):
        started = {LEDGER: str(place) + "-ledger", STOP: "SIGTERM 1"}
        bench.stoker(f"demo --folder {place} {options}", before=WATCH, **started)
        short = "epochs=2 decoder=pillow" if name == "demo" else "epochs=1 steps_per_epoch=4"
        done = bench.stoker(f"train {place}/{name}.yaml {short} log_every=1 run_name={name}-short")
        yield Found(name, _text(done.code == 0, done.err, losses(place / "runs" / f"{name}-short")))


CHECKPOINTS = {"images": ("images", IMAGES | MUCH), "volumes": ("scrolls", VOLUMES | {"optimizer": "adamw"})}
KEPT = ("config.yaml", "metrics.jsonl", "samples.npz", "checkpoints/last.ckpt")


def checkpoints(bench: Bench) -> Iterator[Found]:
    """Resumes runs that were stopped when the oracle was made; `record` makes a checkpoint only where there is none."""
    for name, (data, keys) in CHECKPOINTS.items():
        folder = bench.empty_folder()
        # Its path is in the checkpoint.
        (folder / "data").symlink_to(bench[data])
        config = _config(folder, Path("data"), keys)
        kept, run = EXPECTED / "checkpoints" / name, folder / "runs" / "tiny"
        if not kept.exists():
            _train(bench, config, "SIGTERM 4", 1)
            for file in KEPT:
                (kept / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(run / file, kept / file)
            shutil.rmtree(folder / "runs")
            (folder / "ledger0").unlink()
        shutil.copytree(kept, run)
        yield Found(name, run_text(bench, config))


PARTS: dict[str, Callable[[Bench], Iterator[Found]]] = {
    "help": helps, "errors": errors, "json": partial(documents, part="json"), "files": files, "runs": runs,
    "checkpoints": checkpoints, "demos": demos, "measured": partial(documents, part="measured"),
}  # fmt: skip
