"""Checkpoints: their format, their folder, writing and restoring them."""
