"""A config or a script, for some seconds, in a throw-away process under a memory and a time limit.

`trial_server` starts trials of a config, `fork_server` forks a process for each and limits it, `process` is what runs
there and when it is over, `ledger` says what it was fed; the result is an `Observed`. doctor and tune use it; the range
test of lr-find runs in the same kind of fork. Whatever a trial ends with is a result.
"""
