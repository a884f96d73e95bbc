"""github.com/TomBombadyl/vesuvius_challenge: what each key did in its code (src/vesuvius at commit dbddc88), which is
not always what its name says: several were never read, and several did nothing to data of this kind.

Its configs build on each other with `_base_`; keys are written with their sections, `data.sampler.max_retries`.
"""

from __future__ import annotations

from typing import Any

from stoker.config.importing.names import samples_per_epoch
from stoker.config.importing.rules import (
    Became,
    Rule,
    Table,
    Theirs,
    changed,
    lost,
    not_needed,
    number,
    only,
    renamed,
    same,
    without_effect,
)

_BASE, _MULTIPLIERS, _BLOCKS = 40, [1, 2, 2, 4, 4], 3
_HALVED = 16
"""What its network divides a patch by: four poolings."""
_LOSSES = {"weighted_bce": "ce", "soft_dice": "dice", "cldice": "cldice", "morph_skeleton": "skeleton_recall"}


def _never_read(where: str = "its code") -> Rule:
    return lambda _value, _theirs: without_effect(f"{where} never read it")


def _model(value: Any, theirs: Theirs) -> Became:
    if value == "swin_unetr":
        return changed("MONAI's SwinUNETR with its usual 48 features", model="swinunetr")
    if value != "unet3d_residual":
        return lost("stoker has residual_unet, resenc_m, dynunet and others: stoker config keys model")
    built = (theirs.get("model.base_channels"), theirs.get("model.channel_multipliers"), theirs.get(_BLOCKS_KEY))
    if built == (_BASE, _MULTIPLIERS, _BLOCKS):
        return same("the same network", model="residual_unet")
    return changed(f"nearest: {_BASE} channels, times {_MULTIPLIERS}, {_BLOCKS} blocks a level", model="residual_unet")


_BLOCKS_KEY = "model.blocks_per_stage"


def _of_the_network(expected: Any) -> Rule:
    return only(expected, because="as in residual_unet", otherwise=f"residual_unet has {expected}")


def _checkpointing(value: Any, _theirs: Theirs) -> Became:
    if not value:
        return same(gradient_checkpointing=False)
    return changed("of the bottleneck and the decoder there, of every block here", gradient_checkpointing=True)


def _precision(value: Any, _theirs: Theirs) -> Became:
    if value != "amp":
        return same("float32", precision="32")
    return changed(
        "it scaled the loss, but nothing ran under autocast: float32 there; bf16-mixed is what was meant",
        precision="32",
    )


def _components(value: Any, _theirs: Theirs) -> Became:
    terms, remarks = [], []
    for part in value:
        name, weight = str(part["name"]), float(part.get("weight", 1.0))
        if weight == 0:
            continue
        if name not in _LOSSES:
            remarks.append(f"nothing like {name} ({weight:g})")
            continue
        terms.append(f"{weight:g} {_LOSSES[name]}")
        if "pos_weight" in part:
            remarks.append(f"no weight of {part['pos_weight']} on the sheet: dice balances the classes")
        if "skeleton_kernel" in part:
            remarks.append("skeleton_kernel was never read")
        if name == "morph_skeleton":
            remarks.append("skeleton_recall is nearest to morph_skeleton")
    if not terms:
        return lost("; ".join(remarks) or "no component")
    sum_of = " + ".join(terms)
    return changed("; ".join(["only of labelled voxels", *remarks]), volume_loss=sum_of)


def _peak(value: Any, theirs: Theirs) -> Became:
    if theirs.get("scheduler.type") == "one_cycle":
        return without_effect(
            "its one-cycle schedule starts at max_lr / div_factor and ends below that, whatever lr is"
        )
    return same("used as it is", lr=value, scale_lr=False)


def _schedule(value: Any, theirs: Theirs) -> Became:
    if value == "one_cycle":
        epochs = number(theirs.get("training.max_epochs", default=100)) or 100
        warmup = round((number(theirs.get("scheduler.pct_start", default=0.3)) or 0.3) * epochs)
        rises = number(theirs.get("scheduler.div_factor", default=25.0)) or 25.0
        return changed(
            "one cycle: a rise (a cosine there, a line here) and a cosine to the end",
            lr_scheduler="cosine", warmup_epochs=warmup, warmup_start=1 / rises,
        )  # fmt: skip
    if value == "cosine":
        return changed(
            "its cosine counted steps and moved once an epoch, so the rate hardly changed; here it ends with the run",
            lr_scheduler="cosine",
        )
    return lost("stoker has cosine, step and constant")


def _only_for(kind: str, rule: Rule) -> Rule:
    """A key of one schedule."""

    def apply(value: Any, theirs: Theirs) -> Became:
        if theirs.get("scheduler.type") != kind:
            return without_effect(f"only the schedule {kind} read it")
        return rule(value, theirs)

    return apply


def _rotation(value: Any, _theirs: Theirs) -> Became:
    most = max(abs(float(edge)) for edge in value)
    return changed(
        "every patch about one of the axes there, about all three here; with volume_rotation: 0.2 less is read",
        volume_rotation=1.0, volume_degrees=[most] * 3,
    )  # fmt: skip


def _scaling(value: Any, _theirs: Theirs) -> Became:
    low, high = (float(edge) for edge in value)
    return changed(
        "the same range; there patches changed their shape, so the allocator's reserve grew; here they never do",
        volume_scaling=1.0, volume_scales=[round(1 / high, 4), round(1 / low, 4)],
    )  # fmt: skip


def _flips(value: Any, _theirs: Theirs) -> Became:
    return same(volume_flips=[0.5 if axis in value else 0.0 for axis in range(3)])


def _every_patch(key: str, what: str) -> Rule:
    return lambda _value, _theirs: changed(f"every patch there; {what}", **{key: 1.0})


def _patch(value: Any, _theirs: Theirs) -> Became:
    if all(int(edge) % _HALVED == 0 for edge in value):
        return same(patch_size=value)
    padded = [-(-int(edge) // _HALVED) * _HALVED for edge in value]
    return changed(
        f"four poolings do not divide it: there levels were resized to fit, here patches are padded to {padded}",
        patch_size=value, indivisible_patch="pad",
    )  # fmt: skip


def _normalize(value: Any, _theirs: Theirs) -> Became:
    if value == "zscore":
        return same("by mean and deviation of the volume", normalize="volume")
    return lost("stoker has volume, patch and range")


_PREDICT = not_needed("prediction: options of stoker predict")
_WORDS = not_needed("stoker always logs this, or needs no switch for it")

SCROLLS: Table = {
    "_base_": not_needed("its keys are here, each with its file"),
    "experiment.name": renamed("run_name"),
    "experiment.output_dir": not_needed("runs are in RUNS_DIR/RUN_NAME"),
    "experiment.seed": renamed("seed"),
    "experiment.precision": _precision,
    "paths.data_root": renamed("data_root"),
    "paths.train_csv": not_needed("found in data_root"),
    "paths.test_csv": not_needed("found in data_root"),
    "paths.fold_csv": _never_read(),
    "paths.checkpoint_dir": _never_read(),
    "data.train_folds": lambda *_: without_effect("train.csv names no folds, so every volume was trained on"),
    "data.val_folds": lambda *_: without_effect("train.csv names no folds: there was no validation; fold: 0 has one"),
    "data.patch_size": _patch,
    "data.patch_stride": _never_read("training"),
    "data.intensity_clip": lambda *_: without_effect("voxels are bytes, 0 to 255: nothing lay outside"),
    "data.resample_spacing": lambda *_: without_effect("train.csv names no spacing, so nothing was resampled"),
    "data.mask_unlabeled_value": lambda value, _theirs: changed(
        "unlabelled voxels were trained as background there; here they are never trained on", ignore_label=value
    ),
    "data.crop_foreground_margin": lambda *_: changed("patches are drawn around labelled voxels"),
    "data.normalize": _normalize,
    "data.denoise.enabled": only(
        False, None, because="not used",
        otherwise="a median filter over the whole volume for every patch: the largest part of its 18 s a step; "
        "stoker pack --median 3 does it once",
    ),
    "data.denoise.method": not_needed("see data.denoise.enabled"),
    "data.denoise.kernel_size": not_needed("see data.denoise.enabled"),
    "data.sampler.foreground_ratio": lambda *_: without_effect(
        "a share of the patch's voxels, which thin sheets never reach; foreground_patches is a share of the patches"
    ),
    "data.sampler.rejection_probability": lambda *_: without_effect("nearly every first draw was taken"),
    "data.sampler.max_retries": lambda *_: without_effect("nearly every first draw was taken"),
    "augmentation.spatial.rotate_deg": _rotation,
    "augmentation.spatial.scale": _scaling,
    "augmentation.spatial.flip_axes": _flips,
    "augmentation.spatial.elastic.enabled": lambda *_: without_effect(
        "noise smoothed over 8 to 12 voxels, times 0.1: less than a thousandth of a voxel"
    ),
    "augmentation.spatial.elastic.sigma": not_needed("see elastic.enabled"),
    "augmentation.spatial.elastic.magnitude": not_needed("see elastic.enabled"),
    "augmentation.spatial.anisotropy_scale": lambda *_: lost("stoker scales all axes alike"),
    "augmentation.spatial.slice_jitter_voxels": lambda *_: lost("it rolled the top of a patch to its bottom"),
    "augmentation.spatial.patch_dropout.probability": lambda value, _theirs: changed(
        "it erased the label too; here only the image", volume_cutout=value
    ),
    "augmentation.spatial.patch_dropout.min_keep_ratio": not_needed("stoker chooses the size of the box"),
    "augmentation.intensity.gamma": _every_patch("volume_gamma", "it cut off voxels below the mean first"),
    "augmentation.intensity.gamma_noise": lambda *_: lost("it multiplied each voxel by noise with a mean of 0.08"),
    "augmentation.intensity.gaussian_noise_std": _every_patch("volume_noise", "with stoker's strengths"),
    "augmentation.intensity.gaussian_blur_sigma": _every_patch("volume_blur", "with stoker's widths"),
    "augmentation.intensity.cutout.holes": _never_read("its code looks for cutout under spatial, and"),
    "augmentation.intensity.cutout.size": _never_read("its code looks for cutout under spatial, and"),
    "model.type": _model,
    "model.in_channels": not_needed("counted in the data"),
    "model.out_channels": only(1, because="one sigmoid there, two classes here", otherwise="set num_classes"),
    "model.base_channels": _of_the_network(_BASE),
    "model.channel_multipliers": _of_the_network(_MULTIPLIERS),
    _BLOCKS_KEY: _of_the_network(_BLOCKS),
    "model.norm": _of_the_network("instance"),
    "model.activation": _of_the_network("mish"),
    "model.deep_supervision": renamed("deep_supervision", off=(None,)),
    "model.dropout": renamed("dropout"),
    "model.activation_checkpointing.enabled": _checkpointing,
    "model.activation_checkpointing.apply_to": not_needed("see activation_checkpointing.enabled"),
    "model.activation_checkpointing.segments.bottleneck": not_needed("see activation_checkpointing.enabled"),
    "model.activation_checkpointing.segments.decoder": not_needed("see activation_checkpointing.enabled"),
    "loss.components": _components,
    "optimizer.type": lambda *_: same("its code always built AdamW", optimizer="adamw"),
    "optimizer.lr": _peak,
    "optimizer.weight_decay": renamed("weight_decay"),
    "optimizer.betas": renamed("betas"),
    "scheduler.type": _schedule,
    "scheduler.max_lr": _only_for("one_cycle", lambda value, _theirs: same("the peak", lr=value, scale_lr=False)),
    "scheduler.pct_start": _only_for("one_cycle", not_needed("see scheduler.type")),
    "scheduler.div_factor": _only_for("one_cycle", not_needed("see scheduler.type")),
    "scheduler.anneal_strategy": _only_for("one_cycle", not_needed("see scheduler.type")),
    "scheduler.warmup_epochs": _never_read(),
    "scheduler.t_max": _only_for("cosine", not_needed("stoker's cosine ends with the run")),
    "scheduler.min_lr": _only_for("cosine", renamed("min_lr")),
    "training.max_epochs": renamed("epochs"),
    "training.train_batch_size": renamed("batch_size"),
    "training.val_batch_size": renamed("val_batch_size"),
    "training.accumulate_steps": renamed("gradient_accumulation"),
    "training.train_iterations_per_epoch": samples_per_epoch,
    "training.gradient_clip": renamed("clip_grad_norm", off=(None, 0)),
    "training.workers": renamed("num_workers"),
    "training.val_interval": only(1, because="after every epoch", otherwise="stoker validates after every epoch"),
    "training.save_top_k": _never_read(),
    "training.ema.enabled": lambda value, theirs: same(
        ema_decay=theirs.get("training.ema.decay", default=0.999) if value else None, ema_warmup="none"
    ),
    "training.ema.decay": not_needed("see ema.enabled"),
    "training.detect_anomaly": not_needed("a step whose gradients are NaN or infinite is skipped and counted"),
    "training.log_gpu_memory": _WORDS,
    "training.log_patch_stats": _WORDS,
    "metrics.surface_dice_tolerance_mm": lambda value, _theirs: changed(
        "in units of resample_spacing there; in voxels here, as in the competition's score", surface_tolerance=value
    ),
    "metrics.voi": not_needed("stoker eval --score vesuvius-surface"),
    "metrics.topo_score": not_needed("stoker eval --score vesuvius-surface"),
    "logging.log_every_n_steps": _never_read(),
    "logging.checkpoint_frequency": _never_read(),
    "logging.wandb.enabled": _never_read(),
    "logging.tensorboard": _never_read(),
    "logging.run_dir": _never_read(),
    **{
        f"inference.{name}": _PREDICT
        for name in (
            "patch_size", "overlap", "gaussian_blend_sigma", "tta", "threshold", "min_component_voxels",
            "morph_closing_radius",
        )
    },
    **{
        f"postprocess.{name}": _PREDICT for name in ("remove_small_components_voxels", "fill_holes", "closing_radius")
    },
}  # fmt: skip


def recognises_scrolls(keys: frozenset[str]) -> bool:
    return "data.patch_size" in keys and bool(keys & {"experiment.output_dir", "training.train_iterations_per_epoch"})


def scrolls_facts(_theirs: Theirs) -> list[Became]:
    return [
        same("patches of volumes", task="segment3d"),
        same("background and sheet", num_classes=2),
        same("no validation there; fold: 0 keeps a scroll for it", fold="all"),
        same("its code always built AdamW", optimizer="adamw"),
        same("lr is used as it is there; stoker would scale it with the total batch", scale_lr=False),
        same(
            "set in its code: one batch ahead, workers anew in every epoch", prefetch_factor=1, persistent_workers=False
        ),
        same("set in its code", worker_start="spawn", pin_memory=False),
    ]
