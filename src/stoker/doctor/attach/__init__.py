"""The clock hung into somebody else's unmodified PyTorch script.

`running` starts the script, `inside/` is what runs in it, `reading` turns what it wrote into an `Observed`.
"""
