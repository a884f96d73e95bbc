"""What other steps would cost on the machine of a plan: for the part of it that only its task has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker.config import Config
from stoker.plan.allocator import replay
from stoker.plan.budget import PlannedRun, StepNeeds, host_shape, step_s_of
from stoker.plan.records import Plan
from stoker.plan.roofline import step_seconds
from stoker.plan.tracing import CannotTrace, trace_forward, trace_step
from stoker.plan.vram import outside_bytes, parts_at_peak, usage_under
from stoker.tasks.plan_facts import ForwardCost, StepCost


def with_part(plan: Plan, job: PlannedRun, needs: StepNeeds) -> Plan:
    """The plan with what its task adds to it."""
    pace = plan.time.rates.get("accelerator")
    costs = _JobCosts(job, needs, None if pace is None else pace.images_per_second)
    part = job.task.plan_part(job.config, job.data, costs)
    return plan if part is None else replace(plan, part=part, findings=(*plan.findings, *part.findings))


@dataclass(frozen=True)
class _JobCosts:
    """`tasks.plan_facts.StepCosts` of a planned run."""

    job: PlannedRun
    needs: StepNeeds
    samples_per_second: float | None

    @property
    def worker_bytes(self) -> int:
        loader, memory = host_shape(self.job, self.needs).loader, self.job.measured.loader_memory
        each = memory.worker if loader.engine == "process" else memory.thread
        return each + self.job.prefetch * loader.batch_bytes

    def step(self, config: Config) -> StepCost | None:
        job = replace(self.job, config=config)
        if job.hardware.on_cpu:
            return None
        try:
            own = self.needs.trace if config == self.job.config else None
            trace = own or trace_step(job.step)
        except CannotTrace:
            return None
        limit = job.hardware.vram_bytes
        outside = outside_bytes(trace, compiled=config.compile_model, gpus=job.hardware.world)
        usage = usage_under(trace, limit, outside)
        peak = sum(parts_at_peak(trace, usage, outside).values())
        step_s = step_s_of(job, trace)
        return StepCost(
            usage.allocated_peak, peak, None if limit is None else peak <= limit,
            None if step_s is None else job.total_batch / step_s,
        )  # fmt: skip

    def forward(self, batch: int) -> ForwardCost | None:
        config, hardware = self.job.config, self.job.hardware
        try:
            trace = trace_forward(self.job.step, batch)
        except CannotTrace:
            return None
        vram = seconds = None
        if not hardware.on_cpu:
            outside = outside_bytes(trace, compiled=False, gpus=1)
            vram = replay(trace.events, trace.sizes).reserved_peak + sum(outside.values())
        if hardware.sheet is not None:
            tf32 = config.matmul_precision != "highest"
            seconds = step_seconds(trace.ops, hardware.sheet, channels_last=config.channels_last, tf32=tf32).total_s
        return ForwardCost(seconds, vram)
