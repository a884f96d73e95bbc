"""Every config key: type, default, unit, meaning. The reference and the schema are generated from here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from stoker.config.fields import Bytes, KeyGroup, Seconds, key

# Where the samples are and which of them count.


class DataKeys(KeyGroup):
    """Data: where the samples are, and which of them count."""

    task: Literal["classify", "segment3d"] = key("classify")
    """Kind of work: `classify` images in class folders, or `segment3d` patches of volumes."""

    data_root: str | None = key(None, min_length=1)
    """Folder or URL (`s3://bucket/prefix`, also `gs://`, `az://`) that holds `train/` and `val/`,
    as class folders or as packed shards."""

    num_classes: int | None = key(None, ge=1)
    """Number of classes; taken from the data when not given."""

    subset_classes: int | None = key(None, ge=1)
    """Use only so many classes, chosen by `subset_seed`."""

    subset_seed: int = key(42, ge=0)
    """Chooses the classes and images of a subset; the same seed chooses the same ones everywhere."""

    subset_train_per_class: int | None = key(None, ge=1)
    """Use at most so many training images of each class."""

    subset_val_per_class: int | None = key(None, ge=1)
    """Use at most so many validation images of each class."""

    index_dir: str | None = key(None, min_length=1)
    """Folder for the index of the data; beside the data when not given, or in the user's cache folder
    where the data is read-only."""

    cache_dir: str | None = key(None, min_length=1)
    """Local folder that keeps what was read from `data_root`, so that it is fetched only once."""

    cache_size: Bytes | None = key(None, unit="bytes", ge=0)
    """Most that `cache_dir` may hold; what no longer fits is read from the source each time.
    Without it the cache grows up to 90 % of the free disk."""

    lookahead: Bytes = key(256_000_000, unit="bytes", ge=1_000_000)
    """How many bytes of coming samples may be fetched ahead of their turn, for each rank."""

    max_bad_fraction: float = key(0.01, ge=0, le=1)
    """Share of unreadable samples above which the run stops; below it each is replaced and named."""

    max_image_pixels: int = key(178_956_970, unit="pixels", ge=1)
    """Largest image that is decoded; a larger one counts as unreadable (a decompression bomb)."""

    max_image_bytes: Bytes = key(256_000_000, unit="bytes", ge=1)
    """Largest image file that is read; a larger one counts as unreadable."""


# How batches are made and handed over.


class LoaderKeys(KeyGroup):
    """Loader: how batches are made and handed over."""

    loader: Literal["auto", "process", "thread"] = key("auto")
    """Workers as processes or as threads; `auto` takes threads for up to six workers, processes for more."""

    num_workers: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = key("auto")
    """Workers that make batches, for each GPU; `auto` takes the cores this process may use; 0 makes
    the batches in the training process."""

    prefetch_factor: int | None = key(None, unit="batches", ge=1, le=1024)
    """Batches that each worker has in flight; 2 when not given. Needs workers."""

    pin_memory: bool = key(True)
    """Hand batches over in page-locked memory, from which a GPU copies without the CPU."""

    persistent_workers: bool = key(True)
    """Keep the workers from one epoch to the next. Has no meaning without workers."""

    worker_start: Literal["auto", "fork", "spawn", "forkserver"] = key("auto")
    """How worker processes start; `auto` is forkserver where available."""

    decoder: Literal["auto", "turbojpeg", "simplejpeg", "nvimgcodec", "opencv", "pillow"] = key("auto")
    """Library that decodes JPEGs; `auto` measures them on the data's own files and remembers.
    `turbojpeg` needs libturbojpeg 3 (`pip install stoker[fast]`, or conda's)."""

    decode_mode: Literal["fast", "faithful"] = key("fast")
    """Training images: `fast` decodes only what the crop needs; `faithful` decodes and resizes as
    torchvision does. Validation is always faithful."""

    seed: int = key(0, ge=0, lt=2**63)
    """Fixes the order of the samples, every augmentation and the initial weights."""


# What happens to a training sample, and to a batch on the device.


class AugmentationKeys(KeyGroup):
    """Augmentation: what happens to a training sample, and to a batch on the device."""

    crop_scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = key((0.08, 1.0))
    """Smallest and largest share of the image's area that a random crop takes."""

    crop_aspect: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = key((3 / 4, 4 / 3))
    """Smallest and largest width / height of a random crop."""

    horizontal_flip: float = key(0.5, ge=0, le=1)
    """Probability that a training image is mirrored."""

    auto_augment: Literal["none", "randaugment", "trivialaugment"] = key("none")
    """Policy of further augmentations; RandAugment takes `randaugment_magnitude` and `randaugment_ops`."""

    randaugment_magnitude: float = key(7, ge=0, le=10)
    """Strength of RandAugment's operations, 0 to 10."""

    randaugment_magnitude_std: float = key(0.5, ge=0)
    """Standard deviation of that strength from operation to operation."""

    randaugment_ops: int = key(2, ge=1, le=16)
    """Operations of RandAugment that are drawn for each image; each is carried out with probability 0.5, as in timm."""

    random_erasing: float = key(0.0, ge=0, le=1)
    """Probability that a rectangle of a training image is erased."""

    repeated_augmentation: int = key(1, ge=1, le=64)
    """How often each drawn image appears in an epoch, differently augmented; the epoch keeps its length."""

    mixup_alpha: float = key(0.0, ge=0)
    """Mixup: parameter of the Beta distribution; 0 is off."""

    cutmix_alpha: float = key(0.0, ge=0)
    """CutMix: parameter of the Beta distribution; 0 is off."""

    mix_probability: float = key(1.0, ge=0, le=1)
    """Probability that a batch is mixed at all, where mixup or CutMix is on."""

    mix_switch_probability: float = key(0.5, ge=0, le=1)
    """Probability that a mixed batch takes CutMix, where both are on."""

    label_smoothing: float = key(0.0, ge=0, lt=1)
    """Share of the target that is spread over all classes."""

    start_img_size: int | None = key(None, unit="px", ge=8, le=8192)
    """Progressive resizing: side of the images in the first epoch; grows to `img_size`."""

    resize_epochs: int | None = key(None, unit="epochs", ge=1)
    """Progressive resizing: epochs until `img_size` is reached; 80 % of the run when not given."""


# What is trained, and how it runs on the device.


def _number_to_name(value: Any) -> Any:
    """YAML reads `precision: 32` as a number; the names of the precisions are text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Positive = Annotated[int, Field(ge=1)]


class ModelKeys(KeyGroup):
    """Model: what is trained, and how it runs on the device."""

    model: str = key("resnet50", min_length=1)
    """Any name of the timm zoo for `classify`; a MONAI network (`dynunet`, `unet`, `segresnet`) for
    `segment3d`."""

    weights: str | None = key(None, min_length=1)
    """Local file to start from (safetensors, or a timm checkpoint); random weights when not given."""

    img_size: int = key(224, unit="px", ge=8, le=8192)
    """Side of the training images."""

    val_img_size: int | None = key(None, unit="px", ge=8, le=8192)
    """Side of the validation images; `img_size` when not given."""

    crop_ratio: float = key(0.875, gt=0, le=1)
    """Validation: share of the resized image's shorter side that the centre crop keeps."""

    interpolation: Literal["bilinear", "bicubic"] = key("bicubic")
    """How validation images (and training images in `faithful` mode) are resized, with antialiasing."""

    patch_size: tuple[Positive, Positive, Positive] | None = key(None, unit="voxels")
    """Depth, height and width of a patch, for `segment3d`."""

    compile_model: bool = key(False)
    """Compile the model with torch.compile; the first steps take longer."""

    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = key("default")
    """Mode of torch.compile; `max-autotune` tries more kernels and takes longer to start."""

    channels_last: bool = key(True)
    """Keep tensors in NHWC layout, which tensor cores prefer."""

    precision: Annotated[Literal["32", "16-mixed", "bf16-mixed"], BeforeValidator(_number_to_name)] = key("32")
    """Number format of the computation; `16-mixed` uses a loss scaler."""

    matmul_precision: Literal["highest", "high", "medium"] = key("high")
    """Precision of float32 products; `high` and `medium` allow TF32 on tensor cores."""

    gradient_checkpointing: bool = key(False)
    """Recompute activations in the backward pass: less memory, about a third more work."""

    drop_path: float = key(0.0, ge=0, lt=1)
    """Stochastic depth: probability that a residual block is skipped."""

    dropout: float = key(0.0, ge=0, lt=1)
    """Probability that an input of the classifier is dropped."""

    ema_decay: float | None = key(None, gt=0, lt=1)
    """Keep a moving average of the weights with this decay for each step, and validate it."""


# How the weights move.

Fraction = Annotated[float, Field(ge=0, lt=1)]


class OptimizationKeys(KeyGroup):
    """Optimization: how the weights move."""

    epochs: int = key(90, unit="epochs", ge=1)
    """Passes over the training data."""

    steps_per_epoch: int | None = key(None, unit="steps", ge=1)
    """Steps that count as one epoch, where an epoch is not one pass over the data (random patches)."""

    batch_size: int = key(256, unit="samples", ge=1)
    """Samples of one step on each GPU."""

    val_batch_size: int | None = key(None, unit="samples", ge=1)
    """Samples of one validation step on each GPU; `batch_size` when not given."""

    gradient_accumulation: int = key(1, unit="steps", ge=1)
    """Batches whose gradients are added up for one update."""

    loss: Literal["cross_entropy", "bce"] = key("cross_entropy")
    """Cross-entropy over the classes, or binary cross-entropy for each class."""

    bce_target_threshold: float | None = key(None, gt=0, lt=1)
    """With `bce`: targets above it count as 1, others as 0; off when not given. It is applied after label
    smoothing and cancels it."""

    optimizer: Literal["sgd", "adamw", "lamb"] = key("sgd")
    """Optimizer."""

    lr: float = key(0.1, gt=0)
    """Learning rate for a total batch of `lr_reference_batch` samples."""

    scale_lr: bool = key(True)
    """Scale `lr` with the total batch: lr × total batch / `lr_reference_batch`."""

    lr_reference_batch: int = key(256, unit="samples", ge=1)
    """Total batch for which `lr` is meant."""

    lr_scheduler: Literal["cosine", "step", "constant"] = key("cosine")
    """Course of the learning rate after the warmup."""

    lr_update: Literal["step", "epoch"] = key("step")
    """Whether the learning rate changes with every step, or stays for a whole epoch."""

    lr_step_epochs: int = key(30, unit="epochs", ge=1)
    """With `step`: epochs between two reductions."""

    lr_step_factor: float = key(0.1, gt=0, lt=1)
    """With `step`: what each reduction multiplies by."""

    min_lr: float = key(0.0, ge=0)
    """Where the cosine ends."""

    warmup_epochs: int = key(0, unit="epochs", ge=0)
    """Epochs over which the learning rate rises linearly."""

    warmup_start: float = key(0.01, gt=0, le=1)
    """Share of the learning rate with which the warmup begins."""

    momentum: float = key(0.9, ge=0, lt=1)
    """Momentum of SGD."""

    nesterov: bool = key(False)
    """Nesterov's form of momentum."""

    betas: tuple[Fraction, Fraction] = key((0.9, 0.999))
    """Decay of the two moments, for AdamW and LAMB."""

    weight_decay: float = key(1e-4, ge=0)
    """Weight decay."""

    decay_bias_and_norm: bool = key(True)
    """Whether biases and normalisation weights decay too."""

    clip_grad_norm: float | None = key(None, gt=0)
    """Largest norm of the gradient; off when not given."""

    max_bad_steps: int = key(10, unit="steps", ge=0)
    """Steps in a row with a loss that is no number before the run stops; each one is skipped."""


# Where a run happens, what it writes and who is told.


class RunKeys(KeyGroup):
    """Run: where it happens, what it writes, who is told."""

    run_name: str | None = key(None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$")
    """Name of the run's folder; the config file's name when not given."""

    runs_dir: str = key("runs", min_length=1)
    """Folder that holds the run folders."""

    devices: Annotated[int, Field(ge=1)] | Literal["auto"] = key("auto")
    """GPUs on each node; `auto` takes all there are. On a machine without one: processes on the CPU, 1."""

    accelerator: str | None = key(None, min_length=1)
    """Datasheet of the device, by name (`a100-80`) or as a YAML file: its peak is what `mfu` in the metrics is a share
    of. Recognised by the device's name when not given; without a known one there is no `mfu`."""

    num_nodes: int = key(1, unit="nodes", ge=1)
    """Machines that train together."""

    strategy: Literal["auto", "single", "ddp"] = key("auto")
    """One process, or one for each GPU with averaged gradients; `auto` looks at the number of devices."""

    sync_batchnorm: bool = key(False)
    """Batch norm statistics over all GPUs."""

    rank_timeout: Seconds = key(600.0, unit="seconds", gt=0)
    """How long the ranks wait for one of them before the run is given up and started again."""

    log_every: int = key(50, unit="steps", ge=1)
    """Steps between two lines in `metrics.jsonl`."""

    checkpoint_every_steps: int | None = key(None, unit="steps", ge=1)
    """Steps between two checkpoints within an epoch."""

    checkpoint_every: Seconds | None = key(1800.0, unit="seconds", gt=0)
    """Time between two checkpoints within an epoch."""

    save_top_k: int = key(5, unit="checkpoints", ge=0)
    """How many of the best checkpoints by `val/acc1` are kept, besides the last."""

    wandb: bool = key(False)
    """Report to Weights & Biases; offline where there is no network or key."""

    wandb_project: str | None = key(None, min_length=1)
    """Project at Weights & Biases; naming one switches the report on."""

    wandb_name: str | None = key(None, min_length=1)
    """Name of the run at Weights & Biases; `run_name` when not given."""

    tensorboard: bool = key(False)
    """Write TensorBoard events into the run folder."""

    csv: bool = key(False)
    """Write the metrics of each epoch as `metrics.csv` too."""
