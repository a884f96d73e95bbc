"""The plan before a run: refuses a config that does not fit this machine, unless forced."""

from __future__ import annotations

import math
from pathlib import Path

from stoker.config import Config
from stoker.core.console import say
from stoker.core.errors import UserError
from stoker.loader.loader_memory import STATED
from stoker.plan.budget import MeasuredHere, PlannedRun, StepNeeds, make_plan, trace_needs
from stoker.plan.planning import WantedMachine, hardware_for, step_of
from stoker.plan.records import Plan, VramBudget
from stoker.plan.tracing import build_without_memory
from stoker.profile.host import Machine
from stoker.profile.memory import used_by_others_bytes
from stoker.tasks.images.data import DataFacts
from stoker.tasks.volumes.planning import volume_facts
from stoker.train.step import TraceableStep

UNKNOWN_CLASSES = 1000
# Bytes of activations per byte of float input: 30 for the smallest timm networks, 150 for ResNet-50. If the input times
# this stays below a tenth of the memory, the step need not be traced, which takes seconds.
MOST_ACTIVATIONS_PER_INPUT = 200
# The same for networks of volumes: 1,900 for the case study's in float32, with its padding 3,000.
MOST_ACTIVATIONS_PER_VOXEL_INPUT = 4000
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
    measured = MeasuredHere(STATED, None, used_by_others_bytes())
    if config.task == "classify":
        job = PlannedRun(config, hardware, DataFacts(config.num_classes or UNKNOWN_CLASSES), measured)
        most_bytes = config.batch_size * 3 * config.img_size**2 * 4 * MOST_ACTIVATIONS_PER_INPUT
    else:
        # Without opening the data: a second channel would hardly change what a network keeps.
        facts = volume_facts(config.model_copy(update={"data_root": None}))
        job = PlannedRun(config, hardware, DataFacts(facts.rules.classes), measured, facts)
        most_bytes = config.batch_size * math.prod(config.patch_size or ()) * 4 * MOST_ACTIVATIONS_PER_VOXEL_INPUT
    step = step_of(job)
    heavy = most_bytes > WORTH_A_TRACE * (hardware.ram_bytes or 0)
    if not heavy and hardware.on_cpu:
        return make_plan(job, _weights_only(config, step), scaling=False)
    return make_plan(job, trace_needs(job, step, search=False), scaling=False)


def _weights_only(config: Config, step: TraceableStep) -> StepNeeds:
    """What is known without a trace: the sizes of model, optimizer state and moving average."""
    model = build_without_memory(step.build_model)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    parts = {
        "parameters": weights,
        "gradients": weights,
        "optimizer": weights if config.optimizer == "sgd" else 2 * weights,
        "ema": weights if step.ema_decay is not None else 0,
        "temporary": weights if config.optimizer == "lamb" else 0,  # its scratch buffer
    }
    return StepNeeds(VramBudget(sum(parts.values()), parts), None)
