"""Checks of the model: it builds, learns from a step, and resumes from its checkpoint. They judge what a trial saw."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stoker.core.errors import UserError
from stoker.core.finding import Finding
from stoker.core.units import size_text
from stoker.tasks.base import task_for
from stoker.tasks.checks import Check, Subject, failed, passed

if TYPE_CHECKING:
    from stoker.verify.trial import GroupFacts, Trial

# The loss of an untrained network is close to that of a uniform guess: ten timm networks at their initial weights, from
# ResNet-50 to ViT-S, had 0.99 to 1.06 times ln 1000. With few classes a few samples scatter more, hence the constant.
HIGHEST_START, SCATTER = 1.3, 1.0
LOWEST_START = 0.5
# Below, a few samples can be guessed right by chance.
LEAST_CLASSES = 10
SHOWN = 3


def trial_of(subject: Subject) -> Trial:
    """What a few real steps and a resumed checkpoint showed."""
    from stoker.verify.trial import try_run

    return subject.once("trial", try_run)


def check_builds(subject: Subject) -> Finding:
    """Fails if the network cannot be built or cannot compute the config's samples."""
    try:
        trial = trial_of(subject)
    except UserError as error:
        if error.name == "trial-too-large":
            raise
        return failed(error.seen, error.hint or "another model= or img_size=", reason=error.name)
    return passed(
        f"{subject.config.model}: {trial.parameters:,} parameters, {trial.outputs:,} classes, on {trial.device}",
        parameters=trial.parameters,
        classes=trial.outputs,
    )


def check_first_loss(subject: Subject) -> Finding | None:
    """The loss of an untrained network is that of a guess: anything else is a mistake in inputs, labels or loss."""
    config, task = subject.config, task_for(subject.config)
    if not task.classifies:
        return None
    trial = trial_of(subject)
    among = 2 if config.loss == "bce" else trial.outputs
    loss, guess = trial.first_loss, math.log(among)
    facts = {"loss": loss, "guess": guess, "samples": trial.samples, "random_images": trial.random_because is not None}
    seen = f"{loss:.3f} for {_samples(subject, trial)}; a guess has ln {among} = {guess:.3f}"
    if not math.isfinite(loss):
        fix = (
            "precision=bf16-mixed or precision=32" if config.precision == "16-mixed" else "check weights= and the data"
        )
        return failed(f"the loss of the first step is {loss} for {_samples(subject, trial)}", fix, **facts)
    if loss > HIGHEST_START * guess + SCATTER:
        fix = "other weights=, or none" if config.weights else "another model=: its initial weights are far too large"
        return failed(f"{seen}: the network is more certain of wrong classes than a guess", fix, **facts)
    if loss < LOWEST_START * guess and config.weights is None and trial.outputs >= LEAST_CLASSES:
        return failed(
            f"{seen}: an untrained network cannot know the classes",
            f"look at the labels: do all {task.unit} have one?",
            **facts,
        )
    return passed(seen, **facts)


def check_update(subject: Subject) -> Finding:
    """Every trained parameter has a gradient and changes."""
    trial = trial_of(subject)
    facts = {"without_gradient": list(trial.without_gradient), "unchanged": list(trial.unchanged)}
    if trial.skipped:
        return failed(
            "a gradient of the first step was NaN or infinite, so the update was skipped",
            "a lower lr=, clip_grad_norm=1.0, or precision=bf16-mixed",
            **facts,
        )
    if trial.without_gradient:
        return failed(
            f"{_named(trial.without_gradient)} got no gradient: never trained, and DDP refuses that on several GPUs",
            "another model=, or freeze these parameters in it",
            **facts,
        )
    if trial.unchanged:
        return failed(
            f"{_named(trial.unchanged)} did not change in the update, despite a gradient",
            "a higher lr=, or precision=32: the change is lost in rounding",
            **facts,
        )
    return passed(f"forward, backward and update of {_samples(subject, trial)}: every parameter changed", **facts)


def check_optimizer_groups(subject: Subject) -> Finding:
    """Each parameter is in one group, with the weight decay that the config asks for."""
    config, trial = subject.config, trial_of(subject)
    groups = trial.groups
    facts = {
        "with_decay": sum(group.parameters for group in groups if group.weight_decay > 0),
        "without_decay": sum(group.parameters for group in groups if group.weight_decay == 0),
    }
    for names, what in ((trial.in_no_group, "in no group: never trained"), (trial.in_two_groups, "in two groups")):
        if names:
            return failed(f"{_named(names)}: {what}", "an optimizer with each parameter once (optimizer=sgd)", **facts)
    wrong = _wrong_decay(groups, config.weight_decay, config.decay_bias_and_norm)
    if wrong is not None:
        return failed(wrong, f"weight_decay={config.weight_decay:g} decay_bias_and_norm=false", **facts)
    decayed = [group for group in groups if group.weight_decay > 0]
    others = [group for group in groups if group.weight_decay == 0]
    return passed(f"{_counted(decayed)} with weight decay {config.weight_decay:g}, {_counted(others)} without", **facts)


def check_checkpoint(subject: Subject) -> Finding:
    """A checkpoint that is written, read and resumed gives the same next step."""
    trial = trial_of(subject)
    size = f"{size_text(trial.checkpoint_bytes)} in {trial.save_s:.1f} s"
    facts = {
        "bytes": trial.checkpoint_bytes, "save_s": trial.save_s, "next_loss": trial.next_loss,
        "resumed_loss": trial.resumed_loss, "differing_weights": trial.differing_weights,
    }  # fmt: skip
    same = trial.next_loss == trial.resumed_loss or (math.isnan(trial.next_loss) and math.isnan(trial.resumed_loss))
    if same and not trial.differing_weights:
        return passed(f"{size}; resumed, the next step has the same loss, {trial.next_loss:.6f}", **facts)
    if trial.device != "cpu" and math.isclose(trial.next_loss, trial.resumed_loss, rel_tol=1e-3):
        return passed(f"{size}; resumed, the loss differs by the rounding of the device's kernels", **facts)
    return failed(
        f"{size}; resumed, the next step has the loss {trial.resumed_loss:.6f} instead of {trial.next_loss:.6f}, and "
        f"{trial.differing_weights} tensors of the model differ",
        "do not rely on resuming this model: a layer keeps state outside of its state_dict",
        **facts,
    )


def check_whole_batch(subject: Subject) -> Finding:
    """The config's own batch fits into the device's memory in one piece."""
    from stoker.verify.trial import try_whole_batch

    config, unit = subject.config, task_for(subject.config).unit
    step = try_whole_batch(subject)
    facts = {"micro_batch": step.micro_batch, "step_s": step.step_s, "loss": step.loss}
    if not math.isfinite(step.loss):
        return failed(f"the loss of the second step is {step.loss}", "a lower lr=, or precision=bf16-mixed", **facts)
    if step.micro_batch < config.batch_size:
        return failed(
            f"{config.batch_size} {unit} do not fit into the device's memory; {step.micro_batch} do",
            f"batch_size={step.micro_batch} gradient_accumulation="
            f"{-(-config.batch_size // step.micro_batch) * config.gradient_accumulation}",
            **facts,
        )
    rate = config.batch_size / step.step_s
    return passed(f"{config.batch_size} {unit} in {step.step_s:.2f} s on one device: {rate:,.3g} {unit}/s", **facts)


def _wrong_decay(groups: tuple[GroupFacts, ...], weight_decay: float, everywhere: bool) -> str | None:
    for group in groups:
        if group.matrices and not math.isclose(group.weight_decay, weight_decay):
            return f"{group.matrices} weights have weight decay {group.weight_decay:g} instead of {weight_decay:g}"
        small = group.tensors - group.matrices
        wanted = weight_decay if everywhere else 0.0
        if small and not math.isclose(group.weight_decay, wanted):
            return f"{small} biases and norms have weight decay {group.weight_decay:g} instead of {wanted:g}"
    return None


def _counted(groups: list[GroupFacts]) -> str:
    parameters = sum(group.parameters for group in groups)
    return f"{parameters:,} parameters in {sum(group.tensors for group in groups)} tensors" if groups else "none"


def _samples(subject: Subject, trial: Trial) -> str:
    unit = task_for(subject.config).unit
    if trial.random_because is None:
        return f"{trial.samples} training {unit}"
    return f"{trial.samples} random {unit} ({trial.random_because})"


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


CHECKS = (
    Check("model-builds", "model", "the network is built and computes what the config gives it", check_builds),
    Check("first-loss", "model", "the loss of the untrained network", check_first_loss),
    Check("update", "model", "one real forward, backward and update", check_update),
    Check("optimizer-groups", "model", "parameters with and without weight decay", check_optimizer_groups),
    Check("checkpoint", "model", "a checkpoint that is written, read and resumed", check_checkpoint),
    Check("whole-batch", "model", "a step with the config's own batch", check_whole_batch, deep=True),
)
