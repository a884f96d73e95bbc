"""The plan before a run: refuses a config that does not fit this machine, unless forced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stoker.config import Config
from stoker.core.console import say
from stoker.core.errors import UserError
from stoker.loader.loader_memory import STATED
from stoker.plan.budget import MeasuredHere, PlannedRun, StepNeeds, make_plan, trace_needs
from stoker.plan.planning import WantedMachine, hardware_for
from stoker.plan.records import Plan, VramBudget
from stoker.plan.tracing import build_without_memory
from stoker.profile.host import Machine
from stoker.profile.memory import used_by_others_bytes
from stoker.tasks.base import task_for

# If the most activations that networks keep stay below a tenth of the memory, the step need not be traced, which takes
# seconds.
WORTH_A_TRACE = 0.1


def refuse_what_cannot_fit(config: Config, path: Path | None, machine: Machine, *, force: bool) -> None:
    """Raises if RAM, /dev/shm, disk, open files or VRAM would run out; with `force` it only warns."""
    plan = quick_plan(config, path, machine)
    if not plan.refused:
        return
    if force:
        for finding in plan.refused:
            say(f"warning: {finding.seen}; starting anyway because of --force")
        return
    first, *others = plan.refused
    more = "".join(f"\nalso: {finding.seen} ({finding.fix})" for finding in others)
    raise UserError(
        "does-not-fit",
        f"{first.seen}{more}",
        why="the run would be killed later, when there is more to lose",
        hint=f"{first.fix}; `stoker plan` shows every part, --force starts anyway",
    )


def quick_plan(config: Config, path: Path | None, machine: Machine) -> Plan:
    """What the config needs and this machine has; takes less than a second unless the step has to be traced."""
    hardware = hardware_for(config, path, WantedMachine(), machine, for_start=True)
    # The data is not opened: more classes or channels would hardly change what a network keeps, and the number and size
    # of the samples would only be assumed.
    task = task_for(config)
    facts = replace(task.plan_facts(config.model_copy(update={"data_root": None})), samples=None, sample_bytes=None)
    job = PlannedRun(config, hardware, facts, MeasuredHere(STATED, None, used_by_others_bytes()))
    taken = task.step_input(config)
    most_bytes = config.batch_size * taken.values * 4 * taken.activations
    heavy = most_bytes > WORTH_A_TRACE * (hardware.ram_bytes or 0)
    if not heavy and hardware.on_cpu:
        return make_plan(job, _weights_only(job), scaling=False)
    return make_plan(job, trace_needs(job, search=False), scaling=False)


def _weights_only(job: PlannedRun) -> StepNeeds:
    """What is known without a trace: the sizes of model, optimizer state and moving average."""
    optimizer = job.config.optimizer
    model = build_without_memory(job.step.build_model)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    parts = {
        "parameters": weights,
        "gradients": weights,
        "optimizer": weights if optimizer == "sgd" else 2 * weights,
        "ema": weights if job.config.ema_decay is not None else 0,
        "temporary": weights if optimizer == "lamb" else 0,  # its scratch buffer
    }
    return StepNeeds(VramBudget(sum(parts.values()), parts), None)
