"""One torch thread: these batches are small, and tests run in parallel."""

import torch

import stoker.tasks.light_timm  # noqa: F401  # before timm, which would import wandb: a second

torch.set_num_threads(1)
