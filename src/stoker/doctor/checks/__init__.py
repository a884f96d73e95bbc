"""Judges what was observed of a training loop. Pure: facts in, findings out; nothing measured, nothing said.

One check, one function from a `Case` to a finding or None; `verdict.CHECKS` lists them all.
"""

from stoker.doctor.checks.verdict import judge, workers_stand_in_line

__all__ = ["judge", "workers_stand_in_line"]
