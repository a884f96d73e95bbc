"""Attaches timers to an unmodified PyTorch script.

`running` starts the script, `inside/` runs within it, `reading` turns what it recorded into an `Observed`.
"""
