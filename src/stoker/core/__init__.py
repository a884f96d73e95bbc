"""What every part stands on: errors, the console, files, child processes, signals, limits of containers."""
