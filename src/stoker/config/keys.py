"""Every config key: type, default, unit, meaning. The reference and the schema are generated from here."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from stoker.config.fields import Bytes, KeyGroup, Seconds, key

BUILT_IN_TASKS = {"classify": "stoker.tasks.images.task:Classify", "segment3d": "stoker.tasks.volumes.task:Segment3d"}


def place_of_task(name: str) -> str | None:
    """Module and class of a task, built in or of another package; None for an unknown name."""
    if name in BUILT_IN_TASKS:
        return BUILT_IN_TASKS[name]
    return next((entry.value for entry in entry_points(group="stoker.tasks", name=name)), None)


def task_names() -> list[str]:
    """The built-in tasks, and those of other packages."""
    return [*BUILT_IN_TASKS, *sorted({entry.name for entry in entry_points(group="stoker.tasks")})]


def _check_task(name: str) -> str:
    if place_of_task(name) is None:
        raise ValueError(f"{name!r} is not one of {', '.join(task_names())}")
    return name


TaskName = Annotated[str, AfterValidator(_check_task), WithJsonSchema({"type": "string", "enum": list(BUILT_IN_TASKS)})]
"""A built-in task, or the name of an entry point in the group `stoker.tasks`."""


class DataKeys(KeyGroup):
    """Data: where the samples are, and which of them to use."""

    task: TaskName = key("classify")
    """What to train: `classify` images in class folders, or `segment3d` patches of volumes."""

    data_root: str | None = key(None, min_length=1)
    """Folder or URL (`s3://bucket/prefix`, also `gs://`, `az://`) that holds `train/` and `val/` (or `valid/`,
    `validation/`, `test/`): class folders, packed shards, or another layout of docs/bring-your-data.md."""

    val_fraction: float | None = key(None, gt=0, lt=1)
    """For data without a validation split: the share of each class that is set aside for it, chosen by `subset_seed`
    and the names of the images."""

    samples_csv: str | None = key(None, min_length=1)
    """List of images and labels: columns `path,label` and optionally `split`; paths are relative to `data_root`. A file
    in `data_root` or the current folder, or a URL."""

    train_csv: str | None = key(None, min_length=1)
    """The same for the training images alone."""

    val_csv: str | None = key(None, min_length=1)
    """The same for the validation images alone."""

    num_classes: int | None = key(None, ge=1)
    """Number of classes; taken from the data by default."""

    subset_classes: int | None = key(None, ge=1)
    """Use only this many classes, chosen by `subset_seed`."""

    subset_seed: int = key(42, ge=0)
    """Seed for choosing the classes and images of a subset, and those of `val_fraction`; the same seed gives the same
    choice everywhere."""

    subset_train_per_class: int | None = key(None, ge=1)
    """Use at most this many training images per class."""

    subset_val_per_class: int | None = key(None, ge=1)
    """Use at most this many validation images per class."""

    index_dir: str | None = key(None, min_length=1)
    """Folder for the index of the data. Default: the user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`). Nothing
    is written into the data."""

    cache_dir: str | None = key(None, min_length=1)
    """Local folder that caches what is read from `data_root`, so that each file is fetched only once."""

    cache_size: Bytes | None = key(None, unit="bytes", ge=0)
    """Size limit of `cache_dir`; what does not fit is read from the source every time.
    Default: up to 90 % of the free disk space."""

    stage_to: str | None = key(None, min_length=1)
    """Local folder that `stoker train` fills with a copy of the data while it trains from `data_root`: each file is
    fetched only once, and what is there is read from there. A complete copy can be used as `data_root`; the same as
    that of `stoker stage`."""

    lookahead: Bytes = key(256_000_000, unit="bytes", ge=1_000_000)
    """How many bytes of upcoming samples each rank may fetch ahead of time."""

    max_bad_fraction: float = key(0.01, ge=0, le=1)
    """Stop the run if more than this share of the samples is unreadable; below it, each one is replaced and
    listed in `quarantine.jsonl`. Of a small data set, as many as of 1,000 samples may be, up to a tenth of it."""

    max_image_pixels: int = key(178_956_970, unit="pixels", ge=1)
    """Largest image to decode; anything larger counts as unreadable (a decompression bomb)."""

    max_decoded_bytes: Bytes = key(1_000_000_000, unit="bytes", ge=1)
    """Memory that decoding one image may take, as far as its headers tell; anything larger counts as unreadable."""

    max_image_bytes: Bytes = key(256_000_000, unit="bytes", ge=1)
    """Largest image file to read; anything larger counts as unreadable."""


class LoaderKeys(KeyGroup):
    """Loader: how batches are made."""

    loader: Literal["auto", "process", "thread"] = key("auto")
    """Run workers as threads or processes; `auto` uses threads for volumes and for up to six workers, processes for
    more."""

    num_workers: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = key("auto")
    """Workers per GPU; `auto` uses the cores available to each rank, less one for the thread that launches the
    GPU's work; 0 makes batches in the training process."""

    adjust_loader: bool = key(True)
    """While training, change the number of workers, their batches in flight and the look-ahead, one at a time, keep
    what makes it faster and undo the rest. Only with `num_workers: auto`, and where workers are threads; never what
    you set yourself. Samples and their order do not change."""

    prefetch_factor: int | None = key(None, unit="batches", ge=1, le=1024)
    """Batches in flight per worker; default 2. Needs workers."""

    pin_memory: bool = key(True)
    """Put batches in page-locked memory, so that copies to the GPU are asynchronous."""

    persistent_workers: bool = key(True)
    """Keep the workers alive between epochs. Has no effect without workers."""

    worker_start: Literal["auto", "fork", "spawn", "forkserver"] = key("auto")
    """Start method of worker processes; `auto` is forkserver where available."""

    decoder: Literal["auto", "turbojpeg", "simplejpeg", "nvimgcodec", "opencv", "pillow"] = key("auto")
    """JPEG decoder; `auto` times them on your own files and remembers the fastest.
    `turbojpeg` needs libturbojpeg 3 (`pip install stoker[fast]`, or conda's)."""

    decode_mode: Literal["fast", "faithful", "draft"] = key("fast")
    """Training images: `fast` decodes only what the crop needs, and resizes it with antialiasing, within
    0.1 grey levels of torchvision; `faithful` gives exactly torchvision's pixels; `draft` decodes large images at
    reduced size and does not antialias below that: about a tenth faster, but aliased, with 1.5 times the
    high-frequency energy. Validation is always resized faithfully. With `faithful`, images are taken as they are
    stored, as torchvision does; otherwise they are turned as their EXIF orientation says, for validation, too."""

    seed: int = key(0, ge=0, lt=2**63)
    """Seed of the sample order, the augmentation and the initial weights."""


class AugmentationKeys(KeyGroup):
    """Augmentation: what happens to a training sample, and to a batch on the device."""

    crop_scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = key((0.08, 1.0))
    """Smallest and largest share of the image area in a random crop."""

    crop_aspect: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = key((3 / 4, 4 / 3))
    """Smallest and largest aspect ratio (width / height) of a random crop."""

    horizontal_flip: float = key(0.5, ge=0, le=1)
    """Probability of mirroring a training image."""

    auto_augment: Literal["none", "randaugment", "trivialaugment"] = key("none")
    """Augmentation policy; RandAugment also uses `randaugment_magnitude` and `randaugment_ops`."""

    randaugment_magnitude: float = key(7, ge=0, le=10)
    """Magnitude of RandAugment's operations, 0 to 10."""

    randaugment_magnitude_std: float = key(0.5, ge=0)
    """Standard deviation of that magnitude between operations."""

    randaugment_ops: int = key(2, ge=1, le=16)
    """RandAugment operations drawn per image; each is applied with probability 0.5, as in timm."""

    random_erasing: float = key(0.0, ge=0, le=1)
    """Probability of erasing a rectangle of a training image."""

    repeated_augmentation: int = key(1, ge=1, le=64)
    """How often each drawn image appears in an epoch, with different augmentation; the epoch keeps its length."""

    mixup_alpha: float = key(0.0, ge=0)
    """Mixup: parameter of the Beta distribution; 0 turns it off."""

    cutmix_alpha: float = key(0.0, ge=0)
    """CutMix: parameter of the Beta distribution; 0 turns it off."""

    mix_probability: float = key(1.0, ge=0, le=1)
    """Probability of mixing a batch at all, if mixup or CutMix is on."""

    mix_switch_probability: float = key(0.5, ge=0, le=1)
    """Probability of CutMix instead of mixup, if both are on."""

    label_smoothing: float = key(0.0, ge=0, lt=1)
    """Share of the target spread over all classes."""

    start_img_size: int | None = key(None, unit="px", ge=8, le=8192)
    """Progressive resizing: image size in the first epoch; grows to `img_size`."""

    resize_epochs: int | None = key(None, unit="epochs", ge=1)
    """Progressive resizing: epochs until `img_size` is reached; default 80 % of the run."""


def _number_to_name(value: Any) -> Any:
    """YAML reads `precision: 32` as a number, but precisions are names."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Positive = Annotated[int, Field(ge=1)]


class ModelKeys(KeyGroup):
    """Model: the network, and how it runs on the device."""

    model: str = key("resnet50", min_length=1)
    """For `classify`, any timm model. For `segment3d`: MONAI's `dynunet`, `segresnet`, `segresnet_ds`, `unet` and
    `swinunetr`, nnU-Net's `resenc_m`, `resenc_l` and `resenc_xl`, or our `residual_unet` and `small_unet`."""

    weights: str | None = key(None, min_length=1)
    """Local file with weights to start from: a checkpoint or run folder of ours, safetensors, or a file of Lightning,
    timm or torchvision; its average (EMA) if it has one. Default: random weights."""

    img_size: int = key(224, unit="px", ge=8, le=8192)
    """Height and width of the training images."""

    val_img_size: int | None = key(None, unit="px", ge=8, le=8192)
    """Height and width of the validation images; default `img_size`."""

    crop_ratio: float = key(0.875, gt=0, le=1)
    """Validation: share of the resized image's shorter side kept by the centre crop."""

    interpolation: Literal["bilinear", "bicubic"] | None = key(None)
    """Interpolation, with antialiasing. Default: bilinear for training images, bicubic for validation images.
    `draft` images are always bilinear."""

    compile_model: bool = key(False)
    """Compile the model with torch.compile; slows down the first steps."""

    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = key("default")
    """torch.compile mode; `max-autotune` tries more kernels and starts more slowly."""

    channels_last: bool = key(True)
    """Use the NHWC memory layout, which suits tensor cores."""

    precision: Annotated[Literal["32", "16-mixed", "bf16-mixed"], BeforeValidator(_number_to_name)] = key("32")
    """Numerical precision; `16-mixed` uses a loss scaler."""

    matmul_precision: Literal["highest", "high", "medium"] = key("high")
    """Precision of float32 matrix products; `high` and `medium` allow TF32 on tensor cores."""

    gradient_checkpointing: bool = key(False)
    """Recompute activations in the backward pass: less memory, about a third more compute."""

    drop_path: float = key(0.0, ge=0, lt=1)
    """Stochastic depth: probability of skipping a residual block."""

    dropout: float = key(0.0, ge=0, lt=1)
    """Dropout probability before the classifier."""

    ema_decay: float | None = key(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights with this decay per update, and validate that."""

    ema_every: int = key(1, unit="steps", ge=1)
    """Update the average at the first step of an epoch and every this many steps after it."""

    ema_warmup: Literal["ramp", "copy", "none"] = key("ramp")
    """How the average begins: `ramp` lets the decay rise from 0 to `ema_decay`; `copy` copies the weights during
    `warmup_epochs`, as torchvision does; `none` starts from the initial weights with the full decay."""


Fraction = Annotated[float, Field(ge=0, lt=1)]


def _whole_or_share(value: Any) -> Any:
    if isinstance(value, float) and not 0 <= value <= 1:
        raise ValueError(f"{value} is neither a whole number of batches nor a share of them up to 1.0")
    return value


Limit = Annotated[Positive | Annotated[float, Field(gt=0, le=1)], BeforeValidator(_whole_or_share)]
"""A number of batches, or a share of all of them."""


class OptimizationKeys(KeyGroup):
    """Optimization: loss, optimizer, learning rate."""

    epochs: int = key(90, unit="epochs", ge=1)
    """Passes over the training data."""

    steps_per_epoch: int | None = key(None, unit="steps", ge=1)
    """Updates per epoch, if an epoch is not one pass over the data. Images: at most as many as the data has; the next
    epoch continues with a new order of all images. Random patches: any number."""

    limit_train_batches: Limit | None = key(None)
    """Train on part of each epoch: an integer is a number of batches per GPU, a float up to 1.0 a share of them. Each
    epoch draws from all images. The whole batches of an update count: with `gradient_accumulation`, the limit is
    rounded down to a multiple of it, and is at least one update."""

    limit_val_batches: Limit | Literal[0] | None = key(None)
    """Validate on part of the validation images, the same ones in every epoch, drawn from all classes by
    `subset_seed`: an integer is a number of batches per GPU, a float up to 1.0 a share of them, and 0 turns
    validation off. `stoker eval` always takes all images."""

    best_by: Literal["auto", "acc1", "acc5", "dice", "iou", "surface_dice", "loss"] = key("auto")
    """The validation metric that the best checkpoints are chosen by, and that `early_stopping` watches. `auto` is
    `acc1` for images and `dice` for volumes. A smaller `loss` is better."""

    early_stopping: int | None = key(None, unit="epochs", ge=1)
    """End the run once the metric of `best_by` has not improved for this many epochs in a row; off by default."""

    early_stopping_min_delta: float = key(0.0, unit="percentage points", ge=0)
    """With `early_stopping`: an improvement of that metric up to this does not count."""

    batch_size: int = key(256, unit="samples", ge=1)
    """Samples per step and GPU."""

    val_batch_size: int | None = key(None, unit="samples", ge=1)
    """Samples per validation step and GPU; default `batch_size`."""

    gradient_accumulation: int = key(1, unit="steps", ge=1)
    """Batches whose gradients are accumulated for one update."""

    loss: Literal["cross_entropy", "bce"] = key("cross_entropy")
    """Cross-entropy over the classes, or binary cross-entropy per class."""

    bce_target_threshold: float | None = key(None, gt=0, lt=1)
    """With `bce`: targets above this become 1, others 0; off by default. Applied after label smoothing, so it
    cancels the smoothing."""

    optimizer: Literal["sgd", "adamw", "lamb"] = key("sgd")
    """Optimizer."""

    lr: float = key(0.1, gt=0)
    """Learning rate for a total batch of `lr_reference_batch` samples."""

    scale_lr: bool = key(True)
    """Scale `lr` with the total batch: lr × total batch / `lr_reference_batch`."""

    lr_reference_batch: int = key(256, unit="samples", ge=1)
    """Total batch that `lr` is meant for."""

    lr_scheduler: Literal["cosine", "step", "constant"] = key("cosine")
    """Learning rate schedule after the warmup."""

    lr_update: Literal["step", "epoch"] = key("step")
    """Whether the learning rate changes every step or every epoch."""

    lr_step_epochs: int = key(30, unit="epochs", ge=1)
    """With `step`: epochs between reductions."""

    lr_step_factor: float = key(0.1, gt=0, lt=1)
    """With `step`: factor of each reduction."""

    min_lr: float = key(0.0, ge=0)
    """Final learning rate of the cosine."""

    warmup_epochs: int = key(0, unit="epochs", ge=0)
    """Epochs of linear warmup. By step, the peak is reached with the first step after them; by epoch, in the last of
    them."""

    warmup_start: float = key(0.01, gt=0, le=1)
    """Share of the learning rate at which the warmup starts."""

    momentum: float = key(0.9, ge=0, lt=1)
    """Momentum of SGD."""

    nesterov: bool = key(False)
    """Use Nesterov momentum."""

    betas: tuple[Fraction, Fraction] = key((0.9, 0.999))
    """Decay rates of the two moments, for AdamW and LAMB."""

    weight_decay: float = key(1e-4, ge=0)
    """Weight decay."""

    decay_bias_and_norm: bool = key(True)
    """Also apply weight decay to biases and normalisation weights."""

    clip_grad_norm: float | None = key(None, gt=0)
    """Clip the gradient norm to this value; off by default."""

    max_bad_steps: int = key(10, unit="steps", ge=0)
    """Stop the run after this many steps in a row with a NaN or infinite loss; each such step is skipped."""


class RunKeys(KeyGroup):
    """Run: devices, run folder, checkpoints, trackers."""

    run_name: str | None = key(None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$")
    """Name of the run folder; default: the name of the config file."""

    runs_dir: str = key("runs", min_length=1)
    """Parent folder of the run folders."""

    fast_dev_run: bool | Positive = key(False)
    """Try out a config: one epoch of a single update and a single validation batch, or of this many, at the learning
    rate of the first step. No checkpoints, trackers or run folder: nothing is left behind, and nothing is resumed."""

    devices: Annotated[int, Field(ge=1)] | Literal["auto"] = key("auto")
    """GPUs per node; `auto` uses all of them. Without a GPU: processes on the CPU, default 1."""

    accelerator: str | None = key(None, min_length=1)
    """Datasheet of the device, by name (`a100-80`) or as a YAML file; `mfu` in the metrics is a share of its peak.
    Default: recognised by the device name; no `mfu` if the device is unknown."""

    numa_binding: Literal["auto", "off"] = key("auto")
    """On hosts with several NUMA nodes: run each rank and its workers on the cores next to its GPU. `auto` leaves a
    rank where it is if a launcher has bound it already, or if it would have fewer cores than its share."""

    num_nodes: int = key(1, unit="nodes", ge=1)
    """Number of nodes."""

    strategy: Literal["auto", "single", "ddp"] = key("auto")
    """One process, or one per GPU with averaged gradients (DDP); `auto` decides by the number of devices."""

    sync_batchnorm: bool = key(False)
    """Compute batch norm statistics over all GPUs."""

    rank_timeout: Seconds = key(600.0, unit="seconds", gt=0)
    """How long ranks wait for a missing one before the run is aborted and restarted."""

    log_every: int = key(50, unit="steps", ge=1)
    """Steps between lines in `metrics.jsonl`."""

    checkpoint_every_steps: int | None = key(None, unit="steps", ge=1)
    """Steps between checkpoints within an epoch."""

    checkpoint_every: Seconds | None = key(1800.0, unit="seconds", gt=0)
    """Time between checkpoints within an epoch."""

    save_top_k: int = key(5, unit="checkpoints", ge=0)
    """How many of the best checkpoints by `best_by` to keep, in addition to the last."""

    wandb: bool = key(False)
    """Log to Weights & Biases; offline if there is no network or API key."""

    wandb_project: str | None = key(None, min_length=1)
    """Weights & Biases project; setting it turns `wandb` on."""

    wandb_name: str | None = key(None, min_length=1)
    """Weights & Biases run name; default `run_name`."""

    tensorboard: bool = key(False)
    """Write TensorBoard events to the run folder."""

    csv: bool = key(False)
    """Also write the metrics of each epoch to `metrics.csv`."""
