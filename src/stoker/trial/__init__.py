"""A config or a script, for some seconds, in a throw-away process under a memory and a time limit.

`running` starts a trial of a config, `fork_server` forks it under `limits`, `process` is what runs in it, `measuring`
says how fast it is and when that is known; the result is an `Observed`. doctor and tune use it; the range test of
lr-find runs in the same kind of fork. Whatever a trial ends with is a result.
"""
