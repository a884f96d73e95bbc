"""Tests see the same signals, variables, home, umask, locale and time zone, whoever starts them and how."""

from __future__ import annotations

import atexit
import locale
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress

KEPT = {
    "PATH", "TMPDIR", "USER", "LOGNAME", "SHELL",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH",  # torch.compile
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES",  # on a shared host it says which GPUs are ours to use
    "PYTHONDONTWRITEBYTECODE",
}  # fmt: skip
"""Variables that say where things are on this host. Every other one is somebody's setting: a key for a store, a
rank, a proxy, a number of threads."""
KEPT_PREFIXES = ("PYTEST_", "COVERAGE_", "COV_CORE_", "NIX_")
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def isolate() -> None:
    """Makes this process, and so all that it starts, independent of whoever started it.

    To be called before torch is imported, which reads its variables then.
    """
    _handle_ignored_signals()
    for name in list(os.environ):
        if name not in KEPT and not name.startswith(KEPT_PREFIXES):
            del os.environ[name]
    home = tempfile.mkdtemp(prefix="stoker-home-")
    atexit.register(_remove, home, os.getpid())
    os.environ |= {"HOME": home, "LANG": "C.UTF-8", "TZ": "UTC"}
    time.tzset()
    with suppress(locale.Error):  # an old glibc has no C.UTF-8; Python itself takes UTF-8 then
        locale.setlocale(locale.LC_ALL, "")
    os.umask(0o022)


def _handle_ignored_signals() -> None:
    """A process whose parent ignored a signal ignores it too, and so do its children: Ctrl-C then stops none of them.
    So it is with everything that `nohup` or a script's `&` starts."""
    for number in signal.valid_signals() - IGNORED_BY_PYTHON:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, _HANDLERS.get(number, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _survive(_number: int, _frame: object) -> None:
    """`nohup make test` goes on without its terminal; what the tests start has the default again, as for a user."""


_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: _survive}


def _remove(home: str, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it that ends
        shutil.rmtree(home, ignore_errors=True)
