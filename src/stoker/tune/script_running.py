"""`stoker tune -- python train.py -j {num_workers}`: from a command with places to a search, and to the fastest one."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.core.console import say_notes
from stoker.core.errors import UsageError
from stoker.profile.host import read_machine
from stoker.tune.objective import Objective
from stoker.tune.placeholders import CHANGES_TRAINING, read_template
from stoker.tune.records import Measured, Outcome
from stoker.tune.running import Live, TuneOptions, begin_journal
from stoker.tune.script import ScriptTrier, refuse_broken
from stoker.tune.script_space import proposals
from stoker.tune.search import search
from stoker.tune.text import outcome_text

JOURNAL = Path("tune.jsonl")
"""In the current folder: a script has no config to put it beside."""
MOST_FILE_BYTES = 10_000_000


@dataclass(frozen=True)
class TunedScript:
    """The end of a search, and the command that it found."""

    outcome: Outcome
    command: list[str]
    """With the best values."""
    notes: list[str]
    journal: Path


def tune_script(words: Sequence[str], options: TuneOptions) -> TunedScript:
    """Searches; raises UserError if the command does not train as it is given."""
    template = read_template(words)
    if options.goal == "cost":
        raise UsageError(
            "usage", "--for cost needs a config: nobody knows how many epochs a script has", hint="--for epoch-time"
        )
    say_notes(template.notes())
    machine = read_machine()
    live = Live("samples", options.trial_s)
    trier = ScriptTrier(template, memory_limit_bytes=options.ram_bytes, report=live.report)
    facts = {
        "command": shlex.join(template.words), "original": template.start, "goal": options.goal,
        "budget_s": options.budget_s, "trial_s": options.trial_s,
    }  # fmt: skip
    same = {
        "command": list(template.words), "folder": str(Path.cwd()), "script": _digest_of_files(template.words),
        "options": [options.goal, options.trial_s, options.ram_bytes],
    }  # fmt: skip
    journal = begin_journal(JOURNAL, facts, same, machine, fresh=options.fresh)
    try:
        outcome = search(
            trier, template.start, proposals(template, machine.cpus), budget_s=options.budget_s,
            trial_s=options.trial_s, journal=journal, tell=live, objective=Objective(options.goal),
            # Nobody knows how long the whole run of a script takes.
            facts={"unit": live.unit, "subject": "the script", "hours_before": None, "hours_after": None},
        )  # fmt: skip
        notes = result_notes(outcome)
        journal.note("command", line=template.line(outcome.best), notes=notes)
    finally:
        live.close()
        journal.close()
    if outcome.before is None and outcome.after is None and outcome.stopped != "interrupted":
        failed = next((run for step in outcome.steps for run in step.measured), Measured("crashed", detail="not run"))
        refuse_broken(template.line(template.start), failed)
    return TunedScript(outcome, template.filled(outcome.best), notes, JOURNAL)


def script_text(tuned: TunedScript) -> str:
    """The result for people, and the command to type."""
    notes = ["", *tuned.notes] if tuned.notes else []
    return "\n".join([outcome_text(tuned.outcome, None), *notes, "", shlex.join(tuned.command)])


def result_notes(outcome: Outcome) -> list[str]:
    """What a user must know about these values."""
    changed = sorted(name for name in CHANGES_TRAINING if outcome.best.get(name) != outcome.original.get(name))
    return [
        f"{name} {outcome.original[name]} -> {outcome.best[name]} changes the training: its learning rate has to be "
        "chosen anew, and its result may differ"
        for name in changed
    ]


def _digest_of_files(words: Sequence[str]) -> str:
    """Hash of the files that the command names: an edited script is another one."""
    found = hashlib.sha256()
    for word in words:
        path = Path(word)
        if path.suffix in (".py", ".sh", ".yaml", ".yml", ".json", ".toml") and path.is_file():
            with path.open("rb") as stream:
                found.update(stream.read(MOST_FILE_BYTES))
    return found.hexdigest()
