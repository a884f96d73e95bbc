"""One thread for torch: these batches are small, and the tests run beside each other."""

import torch

torch.set_num_threads(1)
