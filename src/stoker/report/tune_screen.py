"""A search of `stoker tune` in the terminal: the lines that `stoker watch` shows of it."""

from __future__ import annotations

from typing import Any

from stoker.console import clock
from stoker.report.tune_document import Document

BAR = 30
SHOWN_STEPS = 20
"""The newest; the screen should not scroll."""
STYLES = {"kept": "green", "confirmed": "green", "baseline": "blue"}


def tune_lines(tune: Document) -> list[tuple[str, str]]:
    """The lines of the screen, each with its style."""
    lines = [(f"{tune['name']}  {tune['state']}{_ending(tune)}", "bold"), (_summary(tune), ""), ("", "")]
    unit, steps = tune["figures"]["unit"], tune["steps"]
    left_out = max(0, len(steps) - SHOWN_STEPS)
    if left_out:
        lines.append((f"… {left_out} earlier", ""))
    most = max([step["rate"] or 0.0 for step in steps] + [tune["figures"]["ceiling"] or 0.0], default=0.0)
    for step in steps[left_out:]:
        speed = "" if step["rate"] is None else f"{_number(step['rate'])} {unit}/s"
        filled = "█" * round(BAR * step["rate"] / most) if step["rate"] and most else ""
        shown = f"{_what(step):<34.34}{filled:<{BAR}} {speed:>16}  {step['decision']}"
        lines.append((shown, STYLES.get(step["decision"], "red" if step["failed"] else "")))
        details = step["result"] or step["reason"]
        if details and step["decision"] != "baseline":
            lines.append(
                (f"    {step['result']}: {_last_line(step['detail'])}" if step["result"] else f"    {details}", "")
            )
    for source in tune["sources"]:
        factor = "" if source["factor"] is None else f"{source['factor']:.2f}×"
        spread = "" if source["spread"] is None else f"± {source['spread']:.0%}"
        lines.append((f"{source['label']:<34.34}{factor:>8} {spread:<8} {source['verdict']}".rstrip(), ""))
    if tune["changes"]:
        lines += [("", ""), ("the best so far" if tune["state"] == "running" else "what to change", "bold")]
        lines += [(f"  {c['key']}: {c['from']} -> {c['to']}  {c['reason']}".rstrip(), "cyan") for c in tune["changes"]]
    if tune["command"]:
        lines.append((f"  {tune['command']}", "cyan"))
    # Names and output of scripts come from outside: they must not move the cursor or change colours.
    return [("".join(letter if letter.isprintable() else "?" for letter in text), style) for text, style in lines]


def tune_line(tune: Document) -> str:
    """The search in one line, for logs."""
    last = tune["steps"][-1] if tune["steps"] else None
    newest = "" if last is None else f", last: {_what(last)} {last['decision']}"
    line = f"{tune['name']} {tune['state']}: {_summary(tune)}{newest}"
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _summary(tune: Document) -> str:
    figures = tune["figures"]
    trials = f"{figures['trials']} trial{'' if figures['trials'] == 1 else 's'}"
    took = "" if figures["took_s"] is None else f" in {clock(figures['took_s'])}"
    if figures["before"] is None:
        return f"{trials}{took}; nothing has been measured yet" if not tune["sources"] else f"{trials}{took}"
    if figures["after"] is None:
        return f"{trials}{took}; {_number(figures['before'])} {figures['unit']}/s as given"
    gain = f"{figures['speedup']:.2f}×"
    rates = f"{_number(figures['before'])} -> {_number(figures['after'])} {figures['unit']}/s"
    return f"{trials}{took}; {rates}, {gain}"


def _what(step: dict[str, Any]) -> str:
    return ", ".join(f"{pair['key']} {pair['value']}" for pair in step["change"]) or (
        "as given" if step["decision"] == "baseline" else "all changes together"
    )


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _ending(tune: Document) -> str:
    return "" if tune["ending"] is None else f" ({tune['ending']})"
