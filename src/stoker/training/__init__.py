"""The loop, and everything that a step needs."""
