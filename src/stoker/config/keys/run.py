"""Where a run happens, what it writes and who is told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.config.field import KeyGroup, key
from stoker.config.units import Seconds


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
