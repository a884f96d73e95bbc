"""What runs inside the watched script and its workers.

Standard library only, and nothing newer than Python 3.10: the script may live in an environment that has neither our
packages nor our Python. Nothing here may break the script: a failure is noted, and the script continues without timers.
"""
