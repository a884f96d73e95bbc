"""A training run: loop, step, schedule, optimizers, checkpoints, ranks."""
