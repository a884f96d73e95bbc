"""What has changed since a checkpoint was saved: settings, and data.

Another value of a config key means nothing for a run that resumes, or another setting from this step on, another
schedule, or another run. Every key is in the table; the page docs/resume-and-continue.md shows it. A schedule is a
function of the step, so `--replan` needs no state but the new keys.

Which sample comes when is a function of the seed, the epoch and the position among N samples, so a file that was added,
removed or renamed moves the others. A file that was overwritten keeps its name, so the contents of a few samples are
compared too: that shows whether the whole data set was made again, but not whether a single file was.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.config import Config, config_values
from stoker.core.console import some
from stoker.core.errors import UserError
from stoker.core.files import atomic_file
from stoker.core.units import count
from stoker.train.schedule import Progress, default_resize_epochs, image_size

Kind = Literal["free", "applied", "schedule", "other"]

_NOT_COMPARABLE = "validation is not comparable with that of earlier epochs"
_REST_OF_EPOCH = "the rest of this epoch takes other samples: some come twice, some not at all"

FREE = (
    # They set where and how fast a run computes, not what: the same bits, apart from the order in which ranks add up.
    "index_dir", "cache_dir", "cache_size", "stage_to", "lookahead", "loader", "num_workers", "adjust_loader",
    "prefetch_factor", "pin_memory", "persistent_workers", "worker_start", "run_name", "runs_dir", "devices",
    "num_nodes", "strategy", "accelerator", "numa_binding", "rank_timeout", "log_every", "checkpoint_every_steps",
    "checkpoint_every", "save_top_k", "wandb", "wandb_project", "wandb_name", "tensorboard", "csv",
    "val_batch_size", "volume_cache",
    # Used only after training.
    "predict_overlap", "predict_flips", "predict_threshold", "predict_postprocess",
    # A trial run keeps no checkpoint, so it is never the one that resumes.
    "fast_dev_run",
)  # fmt: skip
"""Keys that do not change the result. `devices` and `num_nodes` change the total batch, which has its own message."""

APPLIED = {
    # Data: the classes have to be the same, and are compared by name.
    "data_root": "", "samples_csv": "", "train_csv": "", "val_csv": _NOT_COMPARABLE, "max_bad_fraction": "",
    "max_image_pixels": "", "max_decoded_bytes": "", "max_image_bytes": "", "subset_val_per_class": _NOT_COMPARABLE,
    "seed": _REST_OF_EPOCH,
    # Pixels. Every decoder gives the same ones at full size; only `draft` reduces while it decodes.
    "decoder": "the same pixels, unless decode_mode is draft", "decode_mode": "", "img_size": "", "val_img_size":
    _NOT_COMPARABLE, "crop_ratio": _NOT_COMPARABLE, "interpolation": "", "patch_size": "",
    "indivisible_patch": "", "small_volumes": "", "missing_chunks": "", "normalize": "", "foreground_patches": "",
    "limit_val_batches": _NOT_COMPARABLE,
    # Augmentation.
    "crop_scale": "", "crop_aspect": "", "horizontal_flip": "", "auto_augment": "", "randaugment_magnitude": "",
    "randaugment_magnitude_std": "", "randaugment_ops": "", "random_erasing": "", "repeated_augmentation":
    _REST_OF_EPOCH, "mixup_alpha": "", "cutmix_alpha": "", "mix_probability": "", "mix_switch_probability": "",
    "label_smoothing": "", "volume_flips": "", "volume_turns": "", "volume_rotation": "", "volume_degrees": "",
    "volume_scaling": "", "volume_scales": "", "volume_elastic": "", "volume_elastic_size": "", "volume_noise": "",
    "volume_blur": "", "volume_brightness": "", "volume_contrast": "", "volume_gamma": "",
    "volume_low_resolution": "", "volume_cutout": "",
    # How the network computes: the weights are the same, only its rounding or its noise changes.
    "compile_model": "", "compile_mode": "", "channels_last": "", "precision": "", "matmul_precision": "",
    "gradient_checkpointing": "", "drop_path": "", "dropout": "", "sync_batchnorm": "",
    # The average of a run without one begins with the weights of this step.
    "ema_decay": "", "ema_every": "", "ema_warmup": "",
    # The total batch: steps are counted anew, and with scale_lr the learning rate follows.
    "batch_size": "", "gradient_accumulation": "",
    # Loss and optimizer.
    "volume_loss": "", "surface_tolerance": _NOT_COMPARABLE,
    "loss": "", "bce_target_threshold": "", "momentum": "", "nesterov": "", "betas": "", "weight_decay": "",
    "decay_bias_and_norm": "", "clip_grad_norm": "", "max_bad_steps": "",
    "early_stopping": "", "early_stopping_min_delta": "",
}  # fmt: skip
"""Keys that apply from the checkpoint's step on, each with its effect where that may surprise a user."""

SCHEDULE = (
    "epochs", "steps_per_epoch", "limit_train_batches", "lr", "scale_lr", "lr_reference_batch", "lr_scheduler",
    "lr_update", "lr_step_epochs", "lr_step_factor", "min_lr", "warmup_epochs", "warmup_start", "start_img_size",
    "resize_epochs",
)  # fmt: skip
"""Keys of the learning rate, the length and the image sizes of the whole run: applied by `--replan` only."""

OTHER = (
    "task", "model", "num_classes", "optimizer", "weights", "subset_classes", "subset_seed", "subset_train_per_class",
    "val_fraction", "best_by", "ignore_label", "fold", "folds", "split_by", "split_margin", "deep_supervision",
)  # fmt: skip
"""Keys that make it another run: another network, other classes or training images, another optimizer."""

KINDS: dict[Kind, Iterable[str]] = {"free": FREE, "applied": APPLIED, "schedule": SCHEDULE, "other": OTHER}
ON_RESUME: dict[str, Kind] = {key: kind for kind, keys in KINDS.items() for key in keys}
"""What happens to a run that resumes with another value of a key."""

# Different on every machine (`fit_to_machine`, a missing decoder, a scheduler's temporary folder, the part of a
# batch that fits a GPU): these do not show that the user wants another result from a finished run.
_BY_MACHINE = frozenset({"decoder", "precision", "sync_batchnorm", "data_root", "batch_size", "gradient_accumulation"})
_IN_HORIZON = {
    "epochs": "epochs", "warmup_epochs": "warmup_epochs", "warmup_start": "warmup_start", "min_lr": "min_lr",
    "lr_scheduler": "scheduler", "lr_update": "update", "lr_step_epochs": "step_epochs", "lr_step_factor":
    "step_factor",
}  # fmt: skip


@dataclass(frozen=True)
class SettingChange:
    """A key that has another value than in the checkpoint."""

    key: str
    before: Any
    after: Any

    @property
    def kind(self) -> Kind:
        return ON_RESUME[self.key]

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} in the checkpoint, {_shown(self.after)} in this run"


def changes_since(state: Mapping[str, Any], ours: Mapping[str, Any]) -> list[SettingChange]:
    """Every key whose value differs between a saved run and this one, except those that do not change the result."""
    saved = used_values(state)
    found = [SettingChange(key, saved[key], ours[key]) for key in ours if _plain(saved[key]) != _plain(ours[key])]
    # The run has its weights: a file that it began with need not be there any more. Earlier versions did not record
    # which decoder `auto` had chosen.
    said_nothing = {"weights": ours["weights"] is None, "decoder": saved["decoder"] == "auto"}
    return [change for change in found if change.kind != "free" and not said_nothing.get(change.key, False)]


def used_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Every key as a saved run used it: one that its version did not know yet had its default."""
    known = config_values(Config())
    values = known | {key: value for key, value in state["config"].items() if key in known}
    # The horizon is what was really used: earlier versions recorded a changed schedule without applying it.
    values |= {key: state["horizon"][name] for key, name in _IN_HORIZON.items() if name in state["horizon"]}
    if state.get("decoder") is not None:
        values["decoder"] = state["decoder"]
    return values


def of_kind(kind: Kind, changes: Iterable[SettingChange]) -> list[SettingChange]:
    return [change for change in changes if change.kind == kind]


def by_the_user(changes: Iterable[SettingChange]) -> list[SettingChange]:
    """The changes that the user asked for, without those that the machine caused."""
    return [change for change in changes if change.key not in _BY_MACHINE]


def applied_line(change: SettingChange, step: int) -> str:
    note = f" ({APPLIED[change.key]})" if APPLIED[change.key] else ""
    return f"from step {step:,} on: {change.key} {_shown(change.after)}, was {_shown(change.before)}{note}"


def replanned_lines(
    changes: Sequence[SettingChange], before: Mapping[str, Any], after: Mapping[str, Any], progress: Progress
) -> list[str]:
    """The lines that are printed for a new schedule, apart from the learning rate."""
    listed = ", ".join(f"{change.key} {_shown(change.after)} (was {_shown(change.before)})" for change in changes)
    lines = [f"replanned from step {progress.step:,} on: {listed}"]
    if progress.epoch < after["warmup_epochs"]:
        lines.append(f"the warmup lasts until epoch {after['warmup_epochs']}; the run is in epoch {progress.epoch}")
    elif after["warmup_epochs"]:
        lines.append(f"the warmup ({count(after['warmup_epochs'], 'epoch')}) has passed, and is not repeated")
    sizes = _image_size(before, progress.epoch), _image_size(after, progress.epoch)
    if sizes[0] != sizes[1]:
        lines.append(f"images of {sizes[1]} px in epoch {progress.epoch}, instead of {sizes[0]} px")
    return lines


def _image_size(values: Mapping[str, Any], epoch: int) -> int:
    until = values["resize_epochs"] or default_resize_epochs(values["epochs"])
    return image_size(epoch, values["start_img_size"], values["img_size"], until)


def as_event(changes: Sequence[SettingChange]) -> dict[str, list[Any]]:
    """Before and after by key, for metrics.jsonl."""
    return {change.key: [change.before, change.after] for change in changes}


class ScheduleChanged(UserError):
    """A config with another schedule than the checkpoint's; names both ways to continue."""

    def __init__(self, path: Path, changes: Sequence[SettingChange], step: int, before: float, after: float) -> None:
        listed = "\n".join(f"  - {change}" for change in changes)
        super().__init__(
            "schedule-changed",
            f"{path} belongs to another schedule\n{listed}",
            why=f"at step {step:,}, where the run is, its learning rate would go from {before:.4g} to {after:.4g}",
            hint="--replan continues this run on the new schedule from this step on; "
            f"{from_hint(path)} begins a new run with its weights",
        )


def nothing_left(path: Path, changes: Sequence[SettingChange], epoch: int, epochs: int, early: str | None) -> UserError:
    """The error for settings that no step is left for; `early` is why the run stopped early, if it did."""
    listed = "\n".join(f"  - {change}" for change in changes)
    more = f"epochs={epoch + 1} --replan, or more, extends the run"
    how = more if early is None else "early_stopping=null continues it"
    return UserError(
        "run-is-finished",
        f"{path} has {count(epoch, 'epoch')} behind it, and the run is over: {early or f'epochs is {epochs}'}\n"
        f"{listed}",
        why="no step is left that would use these settings",
        hint=f"{how}; {from_hint(path)} begins a new run with its weights",
    )


def from_hint(path: Path) -> str:
    """How to begin a new run from a checkpoint."""
    return f"`stoker train CONFIG --from {path} run_name=NEW`"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    """A value as JSON returns it: a config's tuple is a list in a file. A count (1) and a share (1.0) stay distinct."""
    return list(value) if isinstance(value, list | tuple) else (type(value) is float, value)


PARTS = ("train", "val")
LOOKED_AT = 64
"""Samples of a part whose contents are compared. If one file in twenty was replaced, they include one of these with a
probability of 96 %. Times and versions would not do: those of a copy differ."""
# File names repeat each other: for ImageNet, the fastest level leaves 3.5 of 56 MB, in 0.3 s.
COMPRESSION = 1


@dataclass(frozen=True)
class Listing:
    """The samples of one part of the data, in the order that positions count."""

    name_bytes: NDArray[np.uint8]
    """All names, one after the other."""
    name_ends: NDArray[np.int64]
    marks: NDArray[np.int64]
    """What else must match for each sample: the class of an image; channels, box and labels of a volume."""

    def __len__(self) -> int:
        return len(self.name_ends)

    @property
    def digest(self) -> str:
        found = xxhash.xxh3_128()
        for array in (self.name_bytes, self.name_ends, self.marks):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def names(self, numbers: Sequence[int]) -> list[str]:
        ends = self.name_ends
        return [
            bytes(self.name_bytes[int(ends[at - 1]) if at else 0 : int(ends[at])]).decode("utf-8", "surrogateescape")
            for at in numbers
        ]

    def by_name(self) -> dict[str, int]:
        """The mark of each sample by its name."""
        text, ends = self.name_bytes.tobytes(), self.name_ends.tolist()
        names = [
            text[start:end].decode("utf-8", "surrogateescape") for start, end in zip([0, *ends], ends, strict=False)
        ]
        return dict(zip(names, self.marks.tolist(), strict=True))


def listing_of(names: Sequence[str], marks: Sequence[int]) -> Listing:
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    return Listing(np.frombuffer(b"".join(encoded), np.uint8), ends, np.array(marks, np.int64))


Listings = Mapping[str, Listing | None]
"""By part: train, and val if there is one."""


Contents = Mapping[str, dict[str, Any] | None]
"""By part, `hashes` of the samples that are compared, "" where one could not be read, and whether they were `packed`:
packing may re-encode images, and a user who resumes with the pack wants that. None if nothing was hashed."""


def looked_at(samples: int) -> list[int]:
    """The samples whose contents are compared, spread over the whole part."""
    return sorted({number * samples // LOOKED_AT for number in range(LOOKED_AT)}) if samples else []


def fingerprint(listings: Listings) -> dict[str, Any]:
    """What a checkpoint says about the data."""
    found = {part: listings.get(part) for part in PARTS}
    return {part: None if one is None else {"samples": len(one), "digest": one.digest} for part, one in found.items()}


@dataclass(frozen=True)
class Difference:
    """How the samples of one part differ from those of the checkpoint."""

    part: str
    before: int
    after: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()
    """With other labels."""
    known: bool = True
    """Whether the names of the earlier samples are known."""
    rewritten: tuple[str, ...] = ()
    """With other contents, among the samples that were compared; everything else is the same."""
    looked_at: int = 0

    def __str__(self) -> str:
        named = [
            f"{count(len(names), 'sample')} {what}: {some(list(names))}"
            for names, what in ((self.removed, "removed"), (self.added, "added"), (self.marked, "with other labels"))
            if names
        ]
        if self.rewritten:
            named = [f"{len(self.rewritten)} of {self.looked_at} that were read have other contents: "]
            named[0] += some(list(self.rewritten))
        elif not self.known:
            named = ["the names of the earlier samples were not kept"]
        elif not named:
            named = ["the same samples in another order"]
        sizes = count(self.before, "sample") + (f" before, {self.after:,} now" if self.before != self.after else "")
        return f"{self.part} ({sizes}): " + "; ".join(named)

    def as_event(self) -> dict[str, Any]:
        """For metrics.jsonl; names are a few of them."""
        kinds = {"added": self.added, "removed": self.removed, "marked": self.marked}
        kinds |= {"rewritten": self.rewritten} if self.rewritten else {}
        return {"before": self.before, "after": self.after} | {
            name: {"samples": len(names), "some": list(names[:10])} for name, names in kinds.items()
        }


def differences_since(
    state: Mapping[str, Any], now: Listings, kept: Path, contents: Contents | None = None
) -> list[Difference]:
    """The differences from a checkpoint's data; `kept` is the run's file of names. Earlier versions recorded nothing:
    then no difference is found."""
    saved = (state.get("data") or {}).get("samples")
    if saved is None:
        return []
    ours, found = fingerprint(now), []
    earlier: Listings | None = None
    for part in PARTS:
        before, after = saved.get(part), ours[part]
        # A run may be resumed with validation or without it.
        if before is None or after is None:
            continue
        if before == after:
            found += _rewritten(part, now[part], (state["data"].get("contents") or {}).get(part), contents)
            continue
        earlier = load_listings(kept) if earlier is None else earlier
        then, listing = earlier.get(part), now[part]
        assert listing is not None
        if then is None or then.digest != before["digest"]:
            found.append(Difference(part, before["samples"], after["samples"], known=False))
        else:
            found.append(_compared(part, then, listing))
    return found


def _rewritten(part: str, listing: Listing | None, then: Any, contents: Contents | None) -> list[Difference]:
    """Samples with other contents; none if their contents were not hashed, then or now."""
    now = None if contents is None else contents.get(part)
    if listing is None or not isinstance(then, dict) or now is None or then.get("packed") != now["packed"]:
        return []
    hashes = then.get("hashes")
    if not isinstance(hashes, list) or len(hashes) != len(now["hashes"]):
        return []  # written by a version that compares other samples
    numbers = [
        number
        for number, old, new in zip(looked_at(len(listing)), hashes, now["hashes"], strict=True)
        if old and new and old != new  # both could be read
    ]
    if not numbers:
        return []
    names = tuple(listing.names(numbers))
    return [Difference(part, len(listing), len(listing), rewritten=names, looked_at=len(now["hashes"]))]


def _compared(part: str, then: Listing, now: Listing) -> Difference:
    old, new = then.by_name(), now.by_name()
    return Difference(
        part, len(then), len(now),
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        marked=tuple(name for name, mark in new.items() if old.get(name, mark) != mark),
    )  # fmt: skip


def data_changed(path: Path, found: Sequence[Difference]) -> UserError:
    listed = "\n".join(f"  - {one}" for one in found)
    return UserError(
        "data-changed",
        f"the data is not what {path} was trained on\n{listed}",
        why=meaning(found),
        hint=f"--accept-changed-data continues with the data as it is now; {from_hint(path)} begins a new run",
    )


def meaning(found: Sequence[Difference]) -> str:
    parts = {one.part for one in found}
    words = []
    if any(one.part == "train" and one.rewritten for one in found):
        words.append("the steps so far were trained on other images")
    elif "train" in parts:
        words.append(
            "which sample comes when follows from the seed, the epoch and the number of samples: the rest of this "
            "epoch takes others, some twice and some not at all"
        )
    if "val" in parts:
        words.append("validation is not comparable with that of earlier epochs")
    return "; ".join(words)


def save_listings(path: Path, listings: Listings) -> None:
    """Keeps the names for the next resume, in a file that numpy opens."""
    with (
        atomic_file(path, "wb") as stream,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=COMPRESSION) as file,
    ):
        for part, one in listings.items():
            if one is None:
                continue
            # Lengths compress well because they repeat; end offsets do not.
            lengths = np.diff(one.name_ends, prepend=0).astype(np.int32)
            for name, array in (("name_bytes", one.name_bytes), ("lengths", lengths), ("marks", one.marks)):
                with file.open(f"{part}.{name}.npy", "w", force_zip64=True) as to:
                    np.lib.format.write_array(to, np.ascontiguousarray(array), allow_pickle=False)


def load_listings(path: Path) -> dict[str, Listing]:
    """What `save_listings` kept; without the parts that are missing or damaged."""
    found: dict[str, Listing] = {}
    # A damaged file makes zlib and numpy raise nearly anything.
    with suppress(Exception), np.load(path, allow_pickle=False) as file:
        for part in PARTS:
            if f"{part}.marks" in file.files:
                ends = np.cumsum(file[f"{part}.lengths"], dtype=np.int64)
                found[part] = Listing(file[f"{part}.name_bytes"], ends, file[f"{part}.marks"])
    return found
