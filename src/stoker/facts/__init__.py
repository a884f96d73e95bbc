"""Plain records that pass between what measures, what judges and what prints.

None always means 'not measured', never zero.
"""

from stoker.facts.data_bench import DataBench, WorkerRate
from stoker.facts.finding import Finding, Interval
from stoker.facts.machine import Machine

__all__ = ["DataBench", "Finding", "Interval", "Machine", "WorkerRate"]
