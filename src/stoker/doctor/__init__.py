"""Where the time of a training loop goes, what limits it, and the speed-up from each fix."""
