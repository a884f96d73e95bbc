"""`stoker tune CONFIG --ablate`: from a config to the table of what each optimisation contributes."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from stoker.config import config_values
from stoker.config.reading import load_for_command
from stoker.console import format_table, say
from stoker.data.store.stores import is_url
from stoker.errors import UsageError
from stoker.tune.ablate import TOGETHER, Ablation, Contribution, ablate, sources_of
from stoker.tune.running import TuneOptions, begin_journal, open_config
from stoker.tune.text import rate_text, settings_text
from stoker.units import count

NAME = "ablate.jsonl"


def ablate_config(path: Path, overrides: Sequence[str], options: TuneOptions) -> tuple[Ablation, str, Path]:
    """The table, what a sample is called, and where the journal is."""
    if options.also or options.write is not None:
        raise UsageError("usage", "--ablate writes no config", hint=f"stoker tune {path} --ablate")
    resolved = load_for_command(path, overrides)
    began_s = time.monotonic()
    opened = open_config(resolved, path, overrides, options)
    config, live = opened.config, opened.live
    live.trial_s = options.trial_s
    remote = config.data_root is not None and is_url(config.data_root)
    on_gpu, paced = bool(opened.machine.accelerators), opened.pace_s is not None
    sources = sources_of(config, on_gpu=on_gpu, remote=remote, paced=paced)
    facts = {
        "time": time.time(), "what": "ablation", "config": str(path), "overrides": list(overrides),
        "unit": live.unit, "trial_s": options.trial_s, "budget_s": options.budget_s, "pace": options.pace,
        "same": {
            "config": config_values(config),
            "host": [socket.gethostname(), opened.machine.cpus, opened.machine.accelerators],
            "options": [options.pace, options.trial_s, options.ram_bytes],
        },
    }  # fmt: skip
    journal = begin_journal(path.with_name(NAME), facts, fresh=options.fresh)
    try:
        found = ablate(
            opened.trier, config, sources, trial_s=options.trial_s, journal=journal, tell=live.begin,
            has_time=lambda: time.monotonic() - began_s < options.budget_s / 2, told=_say_row,
        )  # fmt: skip
        journal.note("end", stopped=f"{count(found.rounds, 'round')}", before=found.rate, trials=found.trials)
    finally:
        live.close()
        opened.trier.close()
        journal.close()
    assert journal.path is not None
    return found, live.unit, journal.path


def ablation_text(ablation: Ablation, unit: str) -> str:
    """The table for people."""
    whole = "" if ablation.rate is None else f"; with all of them: {rate_text(ablation.rate, unit)}"
    lines = [f"speed-up by source, each measured by switching it off{whole}", ""]
    lines.append(format_table([_cells(row) for row in ablation.rows], ("optimisation", "without it", "speed-up", "")))
    lines += [
        "",
        f"{count(ablation.trials, 'trial')} in {count(ablation.rounds, 'round')}, each beside the whole config",
    ]
    return "\n".join([*lines, *ablation.notes])


def _say_row(row: Contribution) -> None:
    say("  ".join(cell for cell in _cells(row) if cell))


def _cells(row: Contribution) -> tuple[str, str, str, str]:
    speed = "" if row.factor is None else f"{row.factor:.2f}x ± {row.spread or 0:.0%}".replace("%", " %")
    remarks = "; ".join(text for text in (row.verdict, row.source.note) if text)
    without = "" if row.source.label == TOGETHER else settings_text(row.source.without) if row.source.without else ""
    return row.source.label, without, speed, remarks
