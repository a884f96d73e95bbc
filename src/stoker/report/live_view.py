"""Follows a run, or a search of `stoker tune`, while it works: in the terminal on a screen that is redrawn, or as plain
lines if stdout is not one; or on a page for browsers on this machine only.

The page's server has two addresses, / and /data.json; no path is ever turned into a file name. The Host header must
name this machine: a web page whose own name resolves to our address (DNS rebinding) is refused and cannot read a run.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stoker.core.console import print_result, say
from stoker.core.errors import UserError
from stoker.core.units import clock, count, number_text, rate_text, size_text
from stoker.report.document import Document
from stoker.report.page import report_document, report_page
from stoker.report.tune_document import is_tune

REFRESH_S = 1.0
LINE_EVERY_S = 10.0
PAUSE_FACTOR = 10
"""Times as long as reading took: watching must not take more than a tenth of a core from the training."""
SHOWN_FINDINGS = 3
BAR = 40
PARTS = {
    "wait": ("waiting for data", "█", "red"),
    "transfer": ("transfer", "▓", "magenta"),
    "compute": ("computing", "▒", "blue"),
    "rest": ("computing and other", "▒", "blue"),
    "other": ("other", "░", "white"),
}
"""Each part has its own fill: the screen is readable without colours."""

TUNE_BAR = 30
SHOWN_STEPS = 20
"""The newest steps of a search; the screen should not scroll."""
DECISION_STYLES = {"kept": "green", "confirmed": "green", "baseline": "blue"}

ReadDocument = Callable[[], Document]


def watch_in_terminal(read: ReadDocument) -> None:
    """Shows the run until it ends or Ctrl-C; the terminal is restored either way."""
    try:
        if sys.stdout.isatty():
            _watch_screen(read)
        else:
            _watch_lines(read)
    except KeyboardInterrupt:
        say("stopped watching; the run is not affected")


def print_frame(document: Document) -> None:
    print_result("\n".join(text for text, _ in frame_lines(document)))


def frame_lines(run: Document) -> list[tuple[str, str]]:
    if is_tune(run):
        return _tune_lines(run)
    figures = run["figures"]
    lines = [(f"{run['name']}  {run['state']}{_ending(run)}", "bold"), (_verdict(run), ""), ("", "")]
    share = _share_done(figures)
    if share is not None:
        left = "" if figures["left_s"] is None else f", {clock(figures['left_s'])} left"
        done = f"{figures['epochs_done']} of {figures['epochs_total']} epochs, step {figures['step']:,}{left}"
        lines.append((f"{'progress':<12}[{'#' * round(BAR * share):<{BAR}}] {share:4.0%}  {done}", ""))
    else:
        lines.append((f"{'progress':<12}{figures['epochs_done']} epochs, step {figures['step']:,}", ""))
    speeds = (_rate(figures), _with(figures["step_ms"], "{:,.1f} ms per step"))
    rows = {
        "speed": "   ".join(text for text in speeds if text),
        "loss": _with(figures["last_loss"], "{:.4g}"),
        "best": _best(figures),
        "memory": _memory(run["memory"]),
    }
    lines += [(f"{name:<12}{text}", "") for name, text in rows.items() if text]
    lines += _parts_of_a_step(run)
    if run["findings"]:
        lines += [("", ""), ("what to do", "bold")]
        for number, finding in enumerate(run["findings"][:SHOWN_FINDINGS], 1):
            gain = finding["speedup"]
            lines.append((f"{number}. {finding['message']}" + (f"  ({gain['expected']:.1f}×)" if gain else ""), ""))
            if finding["fix"]:
                lines += [(f"   {part}", "cyan") for part in finding["fix"].splitlines()]
    if run["quarantine"]["count"]:
        lines += [("", ""), (f"{run['quarantine']['count']:,} samples could not be read", "yellow")]
    return [(_printable(text), style) for text, style in lines]


def status_line(run: Document) -> str:
    if is_tune(run):
        last = run["steps"][-1] if run["steps"] else None
        newest = "" if last is None else f", last: {_what(last)} {last['decision']}"
        return _printable(f"{run['name']} {run['state']}: {_summary(run)}{newest}")
    figures = run["figures"]
    of = "" if figures["epochs_total"] is None else f" of {figures['epochs_total']}"
    parts = [
        f"epoch {figures['epochs_done']}{of}",
        f"step {figures['step']:,}",
        _rate(figures),
        _with(figures["wait_share"], "wait {:.0%}"),
        _with(figures["last_loss"], "train/loss {:.4g}"),
        _with(_best(figures), "best {}"),
        None if figures["left_s"] is None else f"{clock(figures['left_s'])} left",
    ]
    return f"{run['name']} {run['state']}: " + ", ".join(part for part in parts if part)


def _documents(read: ReadDocument, pause_s: float) -> Iterator[Document]:
    while True:
        began_s = time.monotonic()
        document = read()
        yield document
        if document["state"] != "running":
            return
        took_s = time.monotonic() - began_s
        time.sleep(max(pause_s, PAUSE_FACTOR * took_s))


def _watch_screen(read: ReadDocument) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for document in _documents(read, REFRESH_S):
            # Text objects, not markup: a run's name may contain brackets.
            live.update(Group(*(Text(text, style=style) for text, style in frame_lines(document))), refresh=True)


def _watch_lines(read: ReadDocument) -> None:
    shown, due_s = "", 0.0
    for document in _documents(read, REFRESH_S):
        line, now_s = status_line(document), time.monotonic()
        if line != shown and (now_s >= due_s or document["state"] != "running"):
            print_result(line)
            shown, due_s = line, now_s + LINE_EVERY_S


def _printable(text: str) -> str:
    """Names and output of scripts come from outside: they must not move the cursor or change colours."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _verdict(run: Document) -> str:
    if run["verdict"] is not None:
        return str(run["verdict"]["line"])
    share = run["figures"]["wait_share"]
    return "nothing has been measured yet" if share is None else f"{share:.1%} of step time is spent waiting for data"


def _ending(run: Document) -> str:
    return "" if run["ending"] is None else f" ({run['ending']})"


def _share_done(figures: dict[str, Any]) -> float | None:
    if not figures["epochs_total"]:
        return None
    done = float(figures["epochs_done"]) + float(figures["epoch_share"] or 0.0)
    return min(1.0, done / float(figures["epochs_total"]))


def _parts_of_a_step(run: Document) -> list[tuple[str, str]]:
    whole = sum(seconds or 0.0 for seconds in run["parts"].values())
    if not whole:
        return []
    lines = [("", ""), ("where a step's time goes", "bold")]
    for name, seconds in run["parts"].items():
        label, letter, colour = PARTS[name]
        share = (seconds or 0.0) / whole
        lines.append((f"  {label:<24}{share:6.1%}  {letter * round(BAR * share)}".rstrip(), colour))
    return lines


def _memory(columns: dict[str, Any]) -> str:
    names = {
        "process_bytes": "process",
        "device_bytes": "device",
        "shm_used_bytes": "shared",
        "available_bytes": "available",
    }
    newest = {name: next((v for v in reversed(columns.get(name, [])) if v is not None), None) for name in names}
    return "   ".join(f"{names[name]} {size_text(value)}" for name, value in newest.items() if value is not None)


def _rate(figures: dict[str, Any]) -> str | None:
    rate = figures["images_per_second"]
    return None if rate is None else rate_text(rate, figures["unit"])


def _best(figures: dict[str, Any]) -> str | None:
    return None if figures["best"] is None else f"{figures['metric']} {figures['best_text']}"


def _with(value: float | str | None, template: str) -> str | None:
    return None if value is None else template.format(value)


def _tune_lines(tune: Document) -> list[tuple[str, str]]:
    lines = [(f"{tune['name']}  {tune['state']}{_ending(tune)}", "bold"), (_summary(tune), ""), ("", "")]
    unit, steps = tune["figures"]["unit"], tune["steps"]
    left_out = max(0, len(steps) - SHOWN_STEPS)
    if left_out:
        lines.append((f"… {left_out} earlier", ""))
    most = max([step["rate"] or 0.0 for step in steps] + [tune["figures"]["ceiling"] or 0.0], default=0.0)
    for step in steps[left_out:]:
        speed = "" if step["rate"] is None else rate_text(step["rate"], unit)
        filled = "█" * round(TUNE_BAR * step["rate"] / most) if step["rate"] and most else ""
        shown = f"{_what(step):<34.34}{filled:<{TUNE_BAR}} {speed:>16}  {step['decision']}"
        lines.append((shown, DECISION_STYLES.get(step["decision"], "red" if step["failed"] else "")))
        details = step["reason"]
        if step["result"]:
            last = next((line for line in reversed(step["detail"].splitlines()) if line.strip()), "")
            details = f"{step['result']}: {last}"
        if details and step["decision"] != "baseline":
            lines.append((f"    {details}", ""))
    for source in tune["sources"]:
        factor = "" if source["factor"] is None else f"{source['factor']:.2f}×"
        spread = "" if source["spread"] is None else f"± {source['spread']:.0%}"
        lines.append((f"{source['label']:<34.34}{factor:>8} {spread:<8} {source['verdict']}".rstrip(), ""))
    if tune["changes"]:
        lines += [("", ""), ("the best so far" if tune["state"] == "running" else "what to change", "bold")]
        lines += [(f"  {c['key']}: {c['from']} -> {c['to']}  {c['reason']}".rstrip(), "cyan") for c in tune["changes"]]
    if tune["command"]:
        lines.append((f"  {tune['command']}", "cyan"))
    return [(_printable(text), style) for text, style in lines]


def _summary(tune: Document) -> str:
    figures = tune["figures"]
    trials = count(figures["trials"], "trial")
    took = "" if figures["took_s"] is None else f" in {clock(figures['took_s'])}"
    if figures["before"] is None:
        return f"{trials}{took}; nothing has been measured yet" if not tune["sources"] else f"{trials}{took}"
    if figures["after"] is None:
        return f"{trials}{took}; {rate_text(figures['before'], figures['unit'])} as given"
    rates = f"{number_text(figures['before'])} -> {rate_text(figures['after'], figures['unit'])}"
    return f"{trials}{took}; {rates}, {figures['speedup']:.2f}×"


def _what(step: dict[str, Any]) -> str:
    return ", ".join(f"{pair['key']} {pair['value']}" for pair in step["change"]) or (
        "as given" if step["decision"] == "baseline" else "all changes together"
    )


# For browsers.

ADDRESS = "127.0.0.1"
HOSTS = frozenset({"127.0.0.1", "localhost"})
WEB_REFRESH_S = 0.5
SLOWEST_CLIENT_S = 20.0


class WatchServer(ThreadingHTTPServer):
    """Serves one run; bound to the loopback address only."""

    daemon_threads = True

    def __init__(self, read: ReadDocument, port: int = 0) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._document: Document | None = None
        self._due_s = 0.0
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def document(self) -> Document:
        """The data of the page now; read again at most every half second, however many tabs ask."""
        with self._lock:
            began_s = time.monotonic()
            if self._document is None or began_s >= self._due_s:
                self._document = report_document([self._read()])
                ended_s = time.monotonic()
                self._due_s = ended_s + max(WEB_REFRESH_S, PAUSE_FACTOR * (ended_s - began_s))
            return self._document


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = SLOWEST_CLIENT_S
    server_version, sys_version = "stoker", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        host, _, port = self.headers.get("Host", "").rpartition(":")
        if host not in HOSTS or port != str(self.server.server_address[1]):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"only available to browsers on this machine\n", with_body)
        elif self.path == "/":
            page = report_page(self.server.document(), live=True)
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode(), with_body)
        elif self.path == "/data.json":
            data = json.dumps(self.server.document(), allow_nan=False, separators=(",", ":")).encode()
            self._send(HTTPStatus.OK, "application/json", data, with_body)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is only / and /data.json\n", with_body)

    def _send(self, status: HTTPStatus, kind: str, body: bytes, with_body: bool) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Connection": "close",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent: a line every second about a successful request helps nobody."""


def watch_in_browser(read: ReadDocument, port: int) -> None:
    """Prints the address, then serves until Ctrl-C."""
    try:
        server = WatchServer(read, port)
    except OSError as error:
        raise UserError(
            "port-taken",
            f"cannot listen on {ADDRESS}:{port}: {error.strerror or error}",
            hint="stoker watch RUN --web    # picks a free port",
        ) from None
    with server:
        print_result(server.url)
        say("open it in a browser on this machine (from another one: ssh -L); Ctrl-C stops the page, not the run")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped watching; the run is not affected")
