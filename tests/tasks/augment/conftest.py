"""One torch thread: these batches are small, and tests run in parallel."""

import torch

torch.set_num_threads(1)
