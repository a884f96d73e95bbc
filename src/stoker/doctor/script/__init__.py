"""The doctor on anybody's script: `run_script` starts it with the timers of `attach`, `recording`
turns what they recorded into an `Observed`.
"""
